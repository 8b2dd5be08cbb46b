"""The KV pages: who holds which, which are kept for reuse, and how many are left.

Pure bookkeeping of page numbers; the pages themselves live in the runner. Page 0 is reserved (padding writes there) and
is never given out. A page is *used* while an owner holds it, *cached* when nobody does but its content is kept, else
*free*. Invariant: used + cached + free == total, and taking what is not there or giving back what is not held is a bug
that raises PoolError.
"""

from collections.abc import Iterable

from .ring import Ring


class PoolError(RuntimeError):
    """The caller broke the pool's rules: our bug, never a client's."""


class KvPool:
    """`num_pages` counts the reserved page 0; `page_size` is in tokens. Owners are any hashable ids. `ring`: rows keep
    no more than that."""

    def __init__(self, num_pages: int, page_size: int, ring: Ring | None = None) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs two pages of one token at least, got {num_pages} pages of {page_size}")
        self.page_size, self.ring = page_size, ring
        self.total = num_pages - 1
        self.high_water = 0
        self.num_given = 0  # pages given to an owner, ever
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the last page given back is the next one given out
        self._refs = [0] * num_pages
        self._kept: set[int] = set()
        self._num_cached = 0  # pages of `_kept` that nobody holds
        self._held: dict[object, set[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._num_cached

    @property
    def used(self) -> int:
        return self.total - len(self._free) - self._num_cached

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a row of `num_tokens` tokens holds."""
        pages = -(-num_tokens // self.page_size)
        return pages if self.ring is None else min(pages, self.ring.size)

    def turns(self, num_tokens: int) -> bool:
        """Whether a row of `num_tokens` tokens uses its pages more than once: nobody can share them."""
        return self.ring is not None and num_tokens > self.ring.size * self.page_size

    def is_used(self, page: int) -> bool:
        return self._refs[page] > 0

    def num_owners(self, page: int) -> int:
        return self._refs[page]

    def held_by(self, owner: object) -> frozenset[int]:
        return frozenset(self._held.get(owner, ()))

    def num_leaked(self, held: Iterable[int], kept: Iterable[int]) -> int:
        """Pages that are neither free nor accounted for, where rows have the pages `held` and the prefix cache those
        `kept`, of which it answers for what no owner holds. Looks at every page."""
        idle = {page for page in kept if self._refs[page] == 0}
        return self.total - len({*self._free, *held, *idle})

    def take(self, owner: object, count: int) -> list[int]:
        """`count` fresh pages for `owner`. PoolError where fewer are free: ask `free` first."""
        if count > len(self._free):
            raise PoolError(f"{owner!r} takes {count} pages, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self._hold(owner, pages)
        return pages

    def share(self, owner: object, pages: Iterable[int]) -> None:
        """`owner` holds pages that are used or cached, together with those who have them."""
        held = self._held.get(owner, ())
        pages = list(pages)
        for page in pages:
            if page in held or (self._refs[page] == 0 and page not in self._kept):
                raise PoolError(f"{owner!r} cannot share page {page}: held already, or in nobody's use")
            self._num_cached -= self._refs[page] == 0
            self._refs[page] += 1
        self._hold(owner, pages)

    def keep(self, page: int) -> None:
        """When its last owner lets go, `page` is cached, not free. PoolError if nobody holds it."""
        if self._refs[page] == 0:
            raise PoolError(f"page {page} is in nobody's use: there is nothing to keep")
        self._kept.add(page)

    def discard(self, page: int) -> None:
        """The content of a kept page is no longer wanted: a cached one becomes free. PoolError if it is not kept."""
        if page not in self._kept:
            raise PoolError(f"page {page} is not kept: discarded twice?")
        self._kept.remove(page)
        if self._refs[page] == 0:
            self._num_cached -= 1
            self._free.append(page)

    def release(self, owner: object) -> list[int]:
        """Give back all that `owner` holds; the pages that are cached from now on. PoolError if it holds nothing."""
        if owner not in self._held:
            raise PoolError(f"{owner!r} holds no pages: released twice?")
        idle = [page for page in self._held.pop(owner) if self._drop(page)]
        cached = [page for page in idle if page in self._kept]
        self._num_cached += len(cached)
        self._free.extend(page for page in idle if page not in self._kept)
        return cached

    def _hold(self, owner: object, pages: list[int]) -> None:
        self._held.setdefault(owner, set()).update(pages)
        self.high_water = max(self.high_water, self.used)
        self.num_given += len(pages)

    def _drop(self, page: int) -> bool:
        """One owner less; whether it was the last."""
        if self._refs[page] < 1:
            raise PoolError(f"page {page} is free already")
        self._refs[page] -= 1
        return self._refs[page] == 0
