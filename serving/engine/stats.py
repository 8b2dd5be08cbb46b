"""What the engine counts: plain numbers, written by the engine thread, read by anyone.

Counters only grow; gauges say how it is after the last step. A reader may see one field a step older than another.
"""

from dataclasses import dataclass, field

from serving.batch import Kind


def _by_kind() -> dict[Kind, int]:
    return dict.fromkeys(Kind, 0)


@dataclass(slots=True)
class EngineStats:
    # counters
    steps: dict[Kind, int] = field(default_factory=_by_kind)
    rows: dict[Kind, int] = field(default_factory=_by_kind)  # valid rows of those steps
    tokens: dict[Kind, int] = field(default_factory=_by_kind)  # valid tokens of those steps
    padding: dict[Kind, int] = field(default_factory=_by_kind)  # tokens computed for nobody
    generated_tokens: int = 0
    finished_rows: int = 0
    cancelled_rows: int = 0
    expired_rows: int = 0
    failed_rows: int = 0
    failed_steps: int = 0
    refused_jobs: int = 0
    drafted_tokens: int = 0  # drafts that a step checked
    accepted_tokens: int = 0  # those that were right
    preemptions: int = 0  # rows that made room and started again
    cached_tokens: int = 0  # prompt tokens whose prefill the prefix cache saved
    evicted_pages: int = 0
    host_hit_tokens: int = 0  # prompt tokens whose KV came from host memory, those loaded from the disk included
    disk_hit_tokens: int = 0
    bad_profile_files: int = 0
    device_idle_s: float = 0.0  # no step on the device and no work
    device_stall_s: float = 0.0  # work was there and no step on the device: it waited for the host
    # gauges
    stall_ratio: float = 0.0  # of the time in which work was there, what the device waited for the host
    waiting_rows: int = 0
    waiting_tokens: int = 0
    running_rows: int = 0
    pages_total: int = 0
    pages_used: int = 0  # held by rows
    pages_cached: int = 0  # held by nobody, kept for prompts that start the same
    pages_high_water: int = 0
    pages_leaked: int = 0  # neither free nor anybody's, when the engine was last idle
    internal_fragmentation: float = 0.0  # of the room in used pages, what lies beyond the rows' tokens
    external_fragmentation: float = 0.0  # of the pages that nobody uses, those that no row could get
    host_bytes: int = 0  # KV pages in host memory
