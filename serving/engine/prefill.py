"""Steps of prompts: which of them, how much of each, and when.

A prompt's first chunk waits for company as a score does (`former`); beside running streams chunks are as short as
`token_gap` says, and a bucket full of prompts that it brings through waits until there is time for it.
"""

from collections.abc import Callable

from serving.batch import Bucket
from serving.config import EngineConfig
from serving.types import Priority

from .buckets import BucketSet
from .former import BatchFormer
from .packing import pack_extend
from .running import Running
from .step import Step, extend_step
from .token_gap import TokenGap


class Prefill:
    """`page_size`: tokens in a KV page."""

    def __init__(
        self, config: EngineConfig, running: Running, buckets: BucketSet, page_size: int, gap: TokenGap
    ) -> None:
        self._config, self._running, self._buckets = config, running, buckets
        self._page_size, self._gap, self._former = page_size, gap, BatchFormer(config)

    def ready(self, now_s: float, num_arrived: int, *, idle: bool, beside: bool) -> bool:
        """`num_arrived`: rows, ever. `beside`: there are streams to go on with meanwhile."""
        prompts = self._running.extendable()
        if beside and self._fills_batch():
            return self._gap.allows_batch
        if any(row.prefilled > row.num_shared for row in prompts):  # its next chunk
            return True
        oldest = min(prompts, key=lambda row: row.order, default=None)
        return oldest is not None and self._former.ready(
            rows=len(prompts),
            tokens=sum(row.num_prompt - row.prefilled for row in prompts),
            urgent=any(row.priority is Priority.URGENT for row in prompts),
            waited_s=now_s - oldest.arrived_s,
            idle=idle,
            oldest=oldest.order,
            arrived=num_arrived,
        )

    def decoded(self, step: Bucket, num_streams: int) -> None:
        """The streams had a step."""
        self._gap.decoded(step, num_streams + len(self._running.prefill))

    def form(self, beside: Bucket | None, num_streams: int) -> Step:
        """`beside`: the next step of the streams, None where there are none."""
        packing = pack_extend(
            self._running.extendable(),
            self._buckets,
            max_chunk=self._config.prefill_chunk,
            page_size=self._page_size,
            step_tokens=self._config.step_tokens,
            allowed=self._allowed(beside, num_streams),
        )
        if beside is None:
            self._gap.no_streams()
        else:
            self._gap.extended(packing.bucket)
        step = extend_step(packing.bucket, packing.rows, packing.chunks, self._running.slots)
        for row, chunk in zip(packing.rows, packing.chunks, strict=True):
            row.prefilled += chunk
            if row.prefilled == row.num_prompt:
                self._running.prefilled(row)
        return step

    def _allowed(self, beside: Bucket | None, num_streams: int) -> Callable[[Bucket], bool]:
        """Buckets that let running streams have their next token in time."""
        if beside is None:
            return lambda _: True
        if self._fills_batch():
            return lambda bucket: bucket == self._gap.batch
        num_rows = num_streams + len(self._running.prefill)
        return lambda bucket: self._gap.allows(bucket, beside, num_rows)

    def _fills_batch(self) -> bool:
        """Whether the prompts that go first fill a batch which brings all of them through."""
        batch = self._gap.batch
        first = self._running.extendable()[: batch.rows]
        return len(first) == batch.rows > 1 and all(row.num_prompt - row.prefilled <= batch.tokens for row in first)
