"""PagePool: which pages of the cache are free. Integers only, no JAX."""

from collections.abc import Iterable


class PagePool:
    """The free pages of one device's cache. Whoever takes a page owns it until giving it back."""

    def __init__(self, n_pages: int) -> None:
        self._free = list(range(n_pages - 1, -1, -1))  # the lowest number is taken first
        self._is_free = [True] * n_pages

    @property
    def n_pages(self) -> int:
        """All pages, free or taken."""
        return len(self._is_free)

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
