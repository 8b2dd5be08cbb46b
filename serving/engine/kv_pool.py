"""The KV pages: who holds which, and how many are left.

Pure bookkeeping of page numbers; the pages themselves live in the runner. Page 0 is reserved (padding writes there) and
is never given out. Invariant: used + free == total, a page is used while at least one owner holds it, and taking what
is not there or giving back what is not held is a bug that raises PoolError.
"""

from collections.abc import Iterable


class PoolError(RuntimeError):
    """The caller broke the pool's rules: our bug, never a client's."""


class KvPool:
    """`num_pages` counts the reserved page 0; `page_size` is in tokens. Owners are any hashable ids."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs two pages of one token at least, got {num_pages} pages of {page_size}")
        self.page_size = page_size
        self.total = num_pages - 1
        self.high_water = 0
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the last page given back is the next one given out
        self._refs = [0] * num_pages
        self._held: dict[object, set[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def held_by(self, owner: object) -> frozenset[int]:
        return frozenset(self._held.get(owner, ()))

    def take(self, owner: object, count: int) -> list[int]:
        """`count` fresh pages for `owner`. PoolError where fewer are free: ask `free` first."""
        if count > len(self._free):
            raise PoolError(f"{owner!r} takes {count} pages, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self._held.setdefault(owner, set()).update(pages)
        self.high_water = max(self.high_water, self.used)
        return pages

    def share(self, owner: object, pages: Iterable[int]) -> None:
        """`owner` holds pages that are in use already, together with those who have them."""
        held = self._held.setdefault(owner, set())
        for page in pages:
            if page in held or self._refs[page] == 0:
                raise PoolError(f"{owner!r} cannot share page {page}: held already, or in nobody's use")
            self._refs[page] += 1
            held.add(page)

    def release(self, owner: object) -> int:
        """Give back all that `owner` holds; the number of pages that became free. PoolError if it holds nothing."""
        if owner not in self._held:
            raise PoolError(f"{owner!r} holds no pages: released twice?")
        before = len(self._free)
        for page in self._held.pop(owner):
            self._drop(page)
        return len(self._free) - before

    def _drop(self, page: int) -> None:
        if self._refs[page] < 1:
            raise PoolError(f"page {page} is free already")
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
