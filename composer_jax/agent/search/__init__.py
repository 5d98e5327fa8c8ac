"""Semantic search over the text of a workspace: chunks, words and BM25."""
