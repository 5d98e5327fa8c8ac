"""Text and files -> token ids -> rows of a fixed shape: tokenizer, chat format, corpora, packing, pipelines.

Knows nothing of devices: everything here is numpy.
"""
