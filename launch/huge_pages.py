"""Huge pages for everything that malloc gives out, which only the environment of a starting process can ask for."""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb"


def restart_with_huge_pages() -> None:
    """Starts this process anew, once, with GLIBC_TUNABLES asking for transparent huge pages; same process id.

    XLA's CPU client allocates and frees every temporary anew, and the kernel hands the memory back out in pages of
    4 KiB: a quarter of the processor time of pretraining went into that. Huge pages brought it from 2.6 to 3.2 steps
    per second on two cores, to the same bits (see the progress lines of `launch.pretrain --config=configs/tiny.py` with
    GLIBC_TUNABLES=glibc.malloc.hugetlb=0, which turns this off, and without). Does nothing outside Linux, or where
    GLIBC_TUNABLES already decides; a C library that does not know the tunable ignores it.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or TUNABLE in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{TUNABLE}=1")))
    # orig_argv has the interpreter's own options too; its first element may be a bare name that PATH finds elsewhere.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
