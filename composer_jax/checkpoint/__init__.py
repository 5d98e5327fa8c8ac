"""State on disk: run folders (`workdir`), arrays (`store`), our own checkpoints of weights (`native`), those of Hugging
Face (`huggingface`), and the addresses of both on a command line (`address`).

This file imports nothing, so that packages without JAX can import `workdir`.
"""
