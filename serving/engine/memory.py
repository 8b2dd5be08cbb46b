"""How many KV pages there is room for.

All slots at full context are enough; where that does not fit, what the device has free beside the measured peak of the
largest buckets. An accelerator says how much that is; on a CPU it is what the machine, or the container's limit,
leaves, and a server takes little of it unasked.
"""

import os
import re
from pathlib import Path

import jax

DEVICE_SHARE = 0.95  # the rest is for what the allocator loses and the runtime takes
HOST_SHARE = 0.25
MAX_HOST_BYTES = 2 << 30


def free_bytes(device: jax.Device) -> int:
    """Bytes that the KV cache may take on `device`."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * DEVICE_SHARE)
    return min(MAX_HOST_BYTES, int(host_bytes(Path("/")) * HOST_SHARE))


def is_tight(asked: int, wanted_bytes: int, free: int) -> bool:
    """Whether it matters what the steps need beside the cache, and is worth measuring."""
    return asked == 0 and 2 * wanted_bytes > free


def host_bytes(root: Path) -> int:
    """Bytes of memory that this process could still take, as the files under `root` tell; else all that there is."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
        available = int(re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)[0]) * 1024
    except (OSError, IndexError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit, used = (int((root / "sys/fs/cgroup" / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return available
    return min(available, max(0, limit - used))


def num_pages(*, asked: int, pages_per_row: int, max_slots: int, page_bytes: int, free: int) -> int:
    """Pages of the cache, the reserved one included. ValueError where not even one row of full length fits."""
    if asked == 1:
        raise ValueError("num_pages is 1: page 0 is reserved, so two are the least; 0 takes what memory allows")
    if asked:
        return asked
    fitting = free // page_bytes
    if fitting < pages_per_row + 1:
        raise ValueError(
            f"the KV cache of one row needs {pages_per_row + 1} pages of {page_bytes} bytes; {free} bytes are free: "
            "lower max_context, or set num_pages"
        )
    return min(fitting, pages_per_row * max_slots + 1)
