"""What outlives a process: run folders (`workdir`) and arrays on disk (`store`).

This file imports nothing, so that a floor without JAX can use `workdir` and stay without JAX.
"""
