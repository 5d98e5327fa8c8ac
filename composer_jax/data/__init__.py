"""Text and files -> token ids -> rows of a fixed shape: tokenizers, chat formats, corpora, packing, pipelines.

All arrays are NumPy's; nothing here uses a device.
"""
