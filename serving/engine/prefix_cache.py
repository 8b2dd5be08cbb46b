"""KV pages that outlive their rows, so that a prompt which starts as an earlier one did skips that part of its prefill.

Stands between the scheduler and the pool: rows take, share and release pages here. A page is registered under its key
(see `page_keys`) once the step that filled it was read and was finite; when no row uses it any more it stays, cached,
until its room is needed, and goes by LRU-K, the tail of a chain before its head; what may be wanted again is told to
`evicted` first. Two rows that compute the same page at the same time each keep their own; the first one's is shared
later. Invariant: a registered page never changes.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Keys

from .kv_pool import KvPool
from .lru_k import LruK

_USES_WORTH_A_COPY = 2  # one-offs, nearly all pages of a scan, are not


class PrefixCache:
    """`enabled` False: nothing is registered, so nothing is shared. `evicted`: gets keys and pages that go."""

    def __init__(
        self,
        pool: KvPool,
        lru: LruK[bytes],
        *,
        enabled: bool = True,
        evicted: Callable[[bytes, int], None] = lambda key, page: None,
    ) -> None:
        self._pool, self._lru, self.enabled, self._evicted = pool, lru, enabled, evicted
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, tuple[bytes, int]] = {}  # page -> key, place in its chain
        self._prized: set[bytes] = set()  # registered, and worth a copy when they go
        self.num_evicted = 0

    @property
    def available(self) -> int:
        """Pages that `take` could give: the free ones and those that only the cache wants."""
        return self._pool.free + self._pool.cached

    @property
    def pages(self) -> Iterable[int]:
        """Those that are registered, whether rows use them or not."""
        return self._name_of.keys()

    @property
    def num_stuck(self) -> int:
        """Cached pages that `take` could not evict: none, as long as each was offered when its last row went."""
        return self._pool.cached - len(self._lru)

    def match(self, keys: Keys[bytes]) -> list[int]:
        """The pages of the longest known prefix of a chain of keys."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Keys[int]) -> int:
        """How many of these registered pages no row uses: sharing them takes so many from `available`."""
        return sum(not self._pool.is_used(page) for page in pages)

    def share(self, owner: object, keys: Keys[bytes], now_s: float) -> list[int]:
        """`owner` holds the pages of `keys`, all of which `match` found."""
        pages = [self._page_of[key] for key in keys]
        self._pool.share(owner, pages)
        for key in keys:
            self._lru.reference(key, now_s)
            self._lru.withdraw(key)
        return pages

    def take(self, owner: object, count: int) -> list[int]:
        """`count` fresh pages, cached ones evicted for them; ask `available` first."""
        while self._pool.free < count:
            key = self._lru.victim()
            if key is None:
                break  # the pool says what is wrong
            if key in self._prized or self._lru.num_uses(key) >= _USES_WORTH_A_COPY:
                self._evicted(key, self._page_of[key])
            self._forget(key)
            self.num_evicted += 1
        return self._pool.take(owner, count)

    def register(self, key: bytes, place: int, page: int, now_s: float) -> None:
        """`page`, held by a row, is whole; `place` is its number in the row."""
        if not self.enabled or key in self._page_of:
            return
        self._pool.keep(page)
        self._page_of[key], self._name_of[page] = page, (key, place)
        self._lru.reference(key, now_s)

    def prize(self, keys: Iterable[bytes]) -> None:
        """Those of `keys` that are registered are worth a copy when they are evicted, however seldom they were used."""
        self._prized.update(key for key in keys if key in self._page_of)

    def release(self, owner: object) -> None:
        """Give back all that `owner` holds."""
        for page in self._pool.release(owner):
            key, place = self._name_of[page]
            self._lru.offer(key, place)

    def clear(self) -> None:
        """The cache's content is lost or not to be used again; pages that rows hold stay theirs."""
        for key in list(self._page_of):
            self._lru.forget(key)
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        page = self._page_of.pop(key)
        self._prized.discard(key)
        del self._name_of[page]
        self._pool.discard(page)
