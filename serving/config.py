"""The configuration: one frozen struct per component, read from one TOML file with flags over it."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Batching and memory. Sizes are rows and tokens; times say their unit."""

    max_slots: int = 64  # sequences that generate at the same time
    page_size: int = 16  # tokens per KV page
    num_pages: int = 0  # 0: from free memory
    hard_size: int = 16  # dispatch a score batch at this many rows at once
    soft_size: int = 8  # or at this many when an urgent one waits
    max_wait_ms: float = 2.0  # or when the oldest has waited this long
    max_context: int = 4096  # prompt + generated tokens; the model's own limit if that is smaller
    prefill_chunk: int = 256  # tokens of one prompt per step
    max_queue_rows: int = 16384
    max_queue_tokens: int = 4_194_304
