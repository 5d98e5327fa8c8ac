"""What outlives a process: run folders (`workdir`), arrays on disk (`store`), weights that say what network they are of
(`own`), those of other people (`huggingface`), and how both are named on a command line (`address`).

This file imports nothing, so that a floor without JAX can use `workdir` and stay without JAX.
"""
