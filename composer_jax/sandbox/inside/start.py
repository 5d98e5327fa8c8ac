"""Starts the zygote: `python start.py`, run as a plain file in a folder of which only this package is mounted."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from inside import zygote

    del sys.path[0]  # the path of programs is their own folder and the standard library
    zygote.main()
