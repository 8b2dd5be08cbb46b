"""What the engine's parts say about themselves after a turn, and what an audit finds when nothing runs.

Everything but the audit costs the same however many pages and rows there are. The audit looks at every page: it is for
an engine that has just become idle, and runs where pages were given out since the last one.
"""

import logging

from .kv_pool import KvPool
from .scheduler import Scheduler
from .stats import EngineStats

_log = logging.getLogger("tidegate.engine")


class Gauges:
    """Writes `stats`; the engine thread owns it."""

    def __init__(self, stats: EngineStats, scheduler: Scheduler, pool: KvPool) -> None:
        self._stats, self._scheduler, self._pool = stats, scheduler, pool
        self._audited = 0  # pages given out before the last audit

    def read(self, busy_s: float) -> None:
        """`busy_s`: how long work has been there, ever."""
        stats, scheduler = self._stats, self._scheduler
        stats.stall_ratio = stats.device_stall_s / busy_s if busy_s > 0 else 0.0
        stats.waiting_rows, stats.waiting_tokens = scheduler.num_waiting, scheduler.num_waiting_tokens
        stats.running_rows = scheduler.num_running
        stats.preemptions, stats.cached_tokens = scheduler.num_preempted, scheduler.num_cached_tokens
        stats.drafted_tokens = scheduler.generation.num_drafted
        stats.accepted_tokens = scheduler.generation.num_accepted
        self._read_pages()
        tiers = scheduler.tiers
        stats.host_hit_tokens, stats.disk_hit_tokens = tiers.num_host_tokens, tiers.num_disk_tokens
        stats.host_bytes, stats.bad_profile_files = tiers.host.num_bytes, tiers.num_bad_files

    def audit(self) -> None:
        """Count the pages that nobody answers for. A page that is on its way between tiers is a row's, or was given
        back before its copy was queued: the moves hold none."""
        if self._audited == self._pool.num_given:
            return
        self._audited = self._pool.num_given
        rows = self._scheduler.running
        leaked = self._pool.num_leaked([page for row in rows for page in row.pages], self._scheduler.cache.pages)
        if leaked > self._stats.pages_leaked:
            _log.error("%d KV pages are in use and nobody holds them: a bug of the engine", leaked)
        self._stats.pages_leaked = leaked

    def _read_pages(self) -> None:
        stats, pool, cache = self._stats, self._pool, self._scheduler.cache
        stats.pages_total, stats.pages_used = pool.total, pool.used
        stats.pages_cached, stats.pages_high_water = pool.cached, pool.high_water
        stats.evicted_pages = cache.num_evicted
        unfilled = self._scheduler.running.slots.unfilled(pool.page_size) if pool.used else 0
        stats.internal_fragmentation = _share(unfilled, pool.used * pool.page_size)
        stats.external_fragmentation = _share(cache.num_stuck, pool.free + pool.cached)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
