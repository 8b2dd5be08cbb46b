"""Rows that hold a slot and KV pages: prompts on their way in, and rows that generate.

A row comes in with pages for its whole prompt, those of its beginning shared from the prefix cache or filled from the
tiers below it where they are known, and takes one more page whenever what it generates fills the last. Who comes, who
makes room and when is decided elsewhere (`room`). Invariant: a row is in `prefill` or in `decode` exactly while it has
a slot, and its pages hold every position that has been dispatched.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator

import numpy as np

from .kv_pool import KvPool
from .kv_tiers import KvTiers
from .prefix_cache import PrefixCache
from .sequence import Sequence, Stage
from .slots import Slots


class Running:
    def __init__(self, slots: Slots, pool: KvPool, cache: PrefixCache, tiers: KvTiers) -> None:
        self.slots, self._pool, self._cache, self._tiers = slots, pool, cache, tiers
        self.prefill: list[Sequence] = []  # by rank
        self.decode: dict[Sequence, None] = {}  # by the time of their first token
        self._filling: dict[bytes, Sequence] = {}  # pages that a row in `prefill` will register

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefill
        yield from self.decode

    def decodable(self) -> list[Sequence]:
        """Rows with a token to generate that is not dispatched yet."""
        return [row for row in self.decode if row.planned < row.max_new and row.may_sample]

    def extendable(self) -> list[Sequence]:
        """Prompts, by rank; one that comes back may have to wait for its mask."""
        return [row for row in self.prefill if row.may_sample]

    def worst(self) -> Sequence:
        """The one that makes room first: the youngest of the lowest priority, as ageing has it."""
        return max(self, key=lambda row: row.rank)

    # Coming

    def arrive(self, row: Sequence) -> None:
        """It is queued: what it will need from the disk may be fetched meanwhile."""
        reusable = self._reusable(row)
        self._tiers.arrive(row, reusable, len(self._cache.match(reusable)))

    def waits_for_pages(self, row: Sequence) -> bool:
        """Its profile is being loaded, or another prompt is computing the page that it needs next: soon it is there."""
        if self._tiers.is_loading(row):
            return True
        reusable = self._reusable(row)
        known = len(self._cache.match(reusable))
        twin = self._filling.get(reusable[known]) if known < len(reusable) else None
        if twin is None:
            return False
        dispatched = twin.prefilled >= (known + 1) * self._pool.page_size
        return dispatched or _first(twin, row) is twin  # else the others that go before the twin would go before it

    def pages_needed(self, row: Sequence) -> int:
        """By how much `available` falls when the row comes in."""
        known = self._cache.match(self._reusable(row))
        return self._pool.pages_for(row.num_prompt) - len(known) + self._cache.num_idle(known)

    def pages_gained(self, rows: list[Sequence], row: Sequence) -> int:
        """By how much `available` would rise beside `pages_needed(row)` if all of `rows` were stopped."""
        known = set(self._cache.match(self._reusable(row)))
        holders = Counter(page for other in rows for page in other.pages)
        return sum(page not in known and self._pool.num_owners(page) == count for page, count in holders.items())

    @property
    def available(self) -> int:
        return self._cache.available

    def start(self, row: Sequence, now_s: float) -> None:
        """Take a slot and the pages of the prompt, which `available` and `slots.free` must have."""
        reusable = self._reusable(row)
        known = len(self._cache.match(reusable))
        row.pages = self._cache.share(row, reusable[:known], now_s)
        row.pages += self._cache.take(row, self._pool.pages_for(row.num_prompt) - known)
        known += self._promote(row, reusable, known, now_s)
        row.num_registered = known
        row.prefilled = row.num_shared = known * self._pool.page_size
        if row.run == 0:
            row.num_cached = row.num_shared
        row.slot = self.slots.assign(row, row.pages)
        row.stage = Stage.PREFILL
        insort(self.prefill, row, key=lambda other: other.rank)
        for key in reusable[known:]:
            self._filling[key] = _first(row, self._filling.get(key, row))

    def _promote(self, row: Sequence, keys: list[bytes], known: int, now_s: float) -> int:
        """Fill the row's pages after the first `known` from the tiers, as far as they have them; how many."""
        contents = self._tiers.find(keys[known:])
        end = known + len(contents)
        self._tiers.promote(keys[known:end], row.pages[known:end], contents)
        for place in range(known, end):
            self._cache.register(keys[place], place, row.pages[place], now_s)
        return len(contents)

    def _reusable(self, row: Sequence) -> list[bytes]:
        """Keys of the pages that may be shared: at least one token of the prompt is computed, for its logits."""
        return row.keys[: (row.num_prompt - 1) // self._pool.page_size] if row.may_reuse else []

    # Running

    def prefilled(self, row: Sequence) -> None:
        """The last chunk of the prompt is dispatched."""
        self.prefill.remove(row)
        self.decode[row] = None
        row.stage = Stage.DECODE
        row.planned = min(row.planned + 1, row.max_new)

    def lacking_page(self, rows: list[Sequence], most: int) -> list[Sequence]:
        """Rows whose next step, of `most` tokens a row, needs a page that they do not have."""
        slots = np.array([row.slot for row in rows])
        ends = self.slots.position[slots] + (1 if most == 1 else [row.next_chunk(most) for row in rows])
        return [rows[i] for i in np.flatnonzero(ends > self.slots.num_pages[slots] * self._pool.page_size)]

    def lacks_page(self, row: Sequence, most: int) -> bool:
        end = self.slots.position[row.slot] + row.next_chunk(most)
        return bool(end > self.slots.num_pages[row.slot] * self._pool.page_size)

    def grow(self, row: Sequence) -> None:
        """One more page, which `available` must have."""
        (page,) = self._cache.take(row, 1)
        row.pages.append(page)
        self.slots.add_page(row.slot, page)

    def read(self, row: Sequence, end: int, now_s: float) -> None:
        """Positions below `end` are in the row's pages for good: whole ones go to the cache."""
        page_size = self._pool.page_size
        while self._cache.enabled and not row.turns and (row.num_registered + 1) * page_size <= end:
            place = row.num_registered
            key = self._key(row, place)
            self._cache.register(key, place, row.pages[place], now_s)
            self._stop_filling(key, row)
            row.num_registered += 1
        if row.profile is not None and self._cache.enabled and end >= row.num_asked:
            self._cache.prize(self._tiers.keep(row))

    # Going

    def stop(self, row: Sequence, *, resumes: bool = False) -> None:
        """Slot and pages go back. `resumes`: what was computed will be wanted again."""
        if row.stage is Stage.PREFILL:
            self.prefill.remove(row)
        else:
            del self.decode[row]
        for key in row.keys[row.num_registered :]:
            self._stop_filling(key, row)
        if resumes:
            self._cache.prize(row.keys[: row.num_registered])
        self._cache.release(row)
        self.slots.release(row.slot)
        row.slot, row.pages = 0, []

    def lose_cache(self) -> None:
        """The device's pages are gone: nothing of them is shared again."""
        self._cache.clear()
        self._tiers.lose_device()

    def _key(self, row: Sequence, place: int) -> bytes:
        if place == len(row.keys):
            size = self._pool.page_size
            row.add_key(row.tokens(place * size, (place + 1) * size))
        return row.keys[place]

    def _stop_filling(self, key: bytes, row: Sequence) -> None:
        if self._filling.get(key) is row:
            del self._filling[key]


def _first(a: Sequence, b: Sequence) -> Sequence:
    """The one whose prompt is computed first."""
    return min(a, b, key=lambda row: row.rank)
