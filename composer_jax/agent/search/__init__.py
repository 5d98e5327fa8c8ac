"""Semantic search over the text of a workspace: chunks, words, BM25, and vectors where there is an embedder."""

from composer_jax.agent.search.index import Embedder, Hit, SearchIndex, search

__all__ = ["Embedder", "Hit", "SearchIndex", "search"]
