"""PagePool: which pages of the cache are free, and which a sliding window has left. Integers only, no JAX."""

from collections.abc import Iterable


class PagePool:
    """The free pages of one device's cache. Whoever takes a page owns it until giving it back."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        """All pages, free or taken."""
        self._free = list(range(n_pages - 1, -1, -1))  # the lowest number is taken first
        self._is_free = [True] * n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Returns n free pages, which the caller now owns; there must be that many."""
        assert 0 <= n <= len(self._free), f"{n} pages are needed and {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Frees pages of their only owner."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = True
            self._free.append(page)


def n_skipped_pages(computed: int, page_size: int, window: int | None) -> int:
    """Returns how many leading pages of a context no later token attends to.

    Args:
      computed: tokens of the context whose entries are in the cache; the next token has this position.
      window: tokens that a token attends to, itself included, in every layer; None: all tokens before, in some layer.
    """
    return 0 if window is None else max(0, computed - window + 1) // page_size
