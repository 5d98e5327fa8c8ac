"""Weights and arrays on disk: arrays (`store`), our own checkpoints of weights (`native`), those of Hugging Face
(`huggingface`) and GGUF (`gguf`), and the addresses of all on a command line (`address`).
"""
