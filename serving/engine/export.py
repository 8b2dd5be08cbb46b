"""EngineStats as the readings that a metrics endpoint shows."""

from collections.abc import Iterator

from serving.batch import Kind
from serving.metrics import Reading

from .stats import EngineStats


def engine_readings(stats: EngineStats, *, num_compiles: int) -> Iterator[Reading]:
    """num_compiles: programs that the runner has built."""
    yield _counter("tidegate_jit_compiles_total", "Programs compiled; stands still after ready.", num_compiles)
    yield _by_kind("tidegate_engine_steps_total", "Device steps.", stats.steps)
    yield _by_kind("tidegate_engine_rows_total", "Rows of those steps.", stats.rows)
    yield _by_kind("tidegate_engine_tokens_total", "Tokens of those steps.", stats.tokens)
    yield _by_kind("tidegate_engine_padding_tokens_total", "Tokens computed for nobody.", stats.padding)
    yield _counter("tidegate_engine_generated_tokens_total", "Tokens generated.", stats.generated_tokens)
    yield _counter("tidegate_speculative_drafted_total", "Draft tokens checked.", stats.drafted_tokens)
    yield _counter("tidegate_speculative_accepted_total", "Draft tokens that were right.", stats.accepted_tokens)
    yield _counter("tidegate_engine_finished_rows_total", "Rows that ended with an answer.", stats.finished_rows)
    yield _counter("tidegate_engine_cancelled_rows_total", "Rows cancelled.", stats.cancelled_rows)
    yield _counter("tidegate_engine_expired_rows_total", "Rows whose deadline passed.", stats.expired_rows)
    yield _counter("tidegate_engine_failed_rows_total", "Rows that ended with a failed step.", stats.failed_rows)
    yield _counter("tidegate_engine_failed_steps_total", "Steps that raised.", stats.failed_steps)
    yield _counter("tidegate_engine_refused_jobs_total", "Jobs refused for want of room.", stats.refused_jobs)
    yield _counter("tidegate_engine_preemptions_total", "Rows stopped to make room, to start again.", stats.preemptions)
    yield _counter("tidegate_kv_cached_tokens_total", "Prompt tokens found in the prefix cache.", stats.cached_tokens)
    yield _counter("tidegate_kv_evicted_pages_total", "Cached pages given up for fresh ones.", stats.evicted_pages)
    yield _counter("tidegate_kv_host_hits_tokens_total", "Prompt tokens from host memory.", stats.host_hit_tokens)
    yield _counter("tidegate_kv_disk_hits_tokens_total", "Those of them from the disk.", stats.disk_hit_tokens)
    yield _counter("tidegate_kv_profile_files_bad_total", "Profile files not usable.", stats.bad_profile_files)
    yield _counter("tidegate_engine_device_idle_seconds_total", "Time without work.", stats.device_idle_s)
    yield _counter(
        "tidegate_engine_device_stall_seconds_total",
        "Time in which the device waited for the host.",
        stats.device_stall_s,
    )
    yield _gauge("tidegate_engine_stall_ratio", "Share of busy time in which the device waited.", stats.stall_ratio)
    yield _gauge("tidegate_engine_waiting_rows", "Rows in the queues.", stats.waiting_rows)
    yield _gauge("tidegate_engine_waiting_tokens", "Tokens of those rows.", stats.waiting_tokens)
    yield _gauge("tidegate_engine_running_rows", "Rows that hold a slot or a step.", stats.running_rows)
    yield _gauge("tidegate_kv_pages", "KV pages in all.", stats.pages_total)
    yield _gauge("tidegate_kv_pages_used", "KV pages that rows hold.", stats.pages_used)
    yield _gauge("tidegate_kv_pages_cached", "KV pages kept for prompts that start the same.", stats.pages_cached)
    yield _gauge("tidegate_kv_host_bytes", "KV pages in host memory.", stats.host_bytes)
    yield _gauge("tidegate_kv_pages_high_water", "Most KV pages ever in use.", stats.pages_high_water)
    yield _gauge(
        "tidegate_kv_pages_leaked",
        "KV pages neither free nor cached nor a live row's, by an audit of all pages when the engine becomes idle.",
        stats.pages_leaked,
    )
    yield _gauge(
        "tidegate_kv_internal_fragmentation_ratio",
        "Of the token room in used KV pages, the share beyond their rows' prompts and output.",
        stats.internal_fragmentation,
    )
    yield _gauge(
        "tidegate_kv_external_fragmentation_ratio",
        "Of the KV pages in nobody's use, the share that no row could get: cached ones that cannot be evicted.",
        stats.external_fragmentation,
    )


def _counter(name: str, text: str, value: float) -> Reading:
    return Reading(name, text, (((), value),), counter=True)


def _gauge(name: str, text: str, value: float) -> Reading:
    return Reading(name, text, (((), value),))


def _by_kind(name: str, text: str, values: dict[Kind, int]) -> Reading:
    return Reading(name, text, tuple(((kind.value,), values[kind]) for kind in Kind), ("kind",), counter=True)
