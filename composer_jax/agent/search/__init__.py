"""Semantic search over the text of a workspace: chunks, words and BM25."""

from composer_jax.agent.search.index import Hit, SearchIndex, search

__all__ = ["Hit", "SearchIndex", "search"]
