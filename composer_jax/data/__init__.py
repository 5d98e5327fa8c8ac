"""Text and files -> token ids -> rows of a fixed shape: tokenizers, chat formats, corpora, packing, pipelines.

Knows nothing of devices: everything here is numpy.
"""
