"""Short scripts and configs, one extension or task each: `python -m examples.NAME` runs a script. Tests run all.

Read rl_loop.py first: it has reinforcement learning on one screen.
"""
