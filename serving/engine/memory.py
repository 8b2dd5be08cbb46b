"""How many KV pages there is room for.

All slots at full context are enough; where that does not fit, a share of what the device has free. An accelerator
says how much that is; on a CPU it is the machine's free memory, of which a server takes little unasked.
"""

import os

import jax

DEVICE_SHARE = 0.7  # the rest is for the activations of the largest bucket
HOST_SHARE = 0.25
MAX_HOST_BYTES = 2 << 30


def free_bytes(device: jax.Device) -> int:
    """Bytes that the KV cache may take on `device`."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * DEVICE_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MAX_HOST_BYTES, int(free * HOST_SHARE))


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
