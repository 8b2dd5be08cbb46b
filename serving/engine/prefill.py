"""Steps of prompts: which of them, how much of each, and when.

A prompt's first chunk waits for company as a score does (`former`). Short prompts go whole, as many at once as takes
least for each. Beside running streams `token_gap` says when they may, and how short the chunks of a long prompt are.
"""

from itertools import takewhile

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.types import Priority

from .buckets import BucketSet
from .costs import StepCosts
from .former import BatchFormer
from .packing import Packing, pack_extend, pack_whole
from .running import Running
from .sequence import Sequence
from .step import Step, extend_step
from .token_gap import TokenGap


class Prefill:
    """`page_size`: tokens in a KV page."""

    def __init__(
        self, config: EngineConfig, running: Running, buckets: BucketSet, page_size: int, costs: StepCosts
    ) -> None:
        self._config, self._running, self._buckets = config, running, buckets
        self._page_size, self._costs, self._former = page_size, costs, BatchFormer(config)
        self._gap = TokenGap(config, buckets.most_rows(Kind.EXTEND), costs)

    def ready(self, now_s: float, num_arrived: int, *, idle: bool, beside: bool) -> bool:
        """`num_arrived`: rows, ever. `beside`: there are streams to go on with meanwhile."""
        prompts = self._running.extendable()
        urgent = any(row.priority is Priority.URGENT for row in prompts)
        if beside and not urgent and not self._gap.allows_whole and self._whole():
            return False
        if any(row.prefilled > row.num_shared for row in prompts):  # its next chunk
            return True
        oldest = min(prompts, key=lambda row: row.order, default=None)
        return oldest is not None and self._former.ready(
            rows=len(prompts),
            tokens=sum(row.num_prompt - row.prefilled for row in prompts),
            urgent=urgent,
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
        packing = self._pack(beside, num_streams)
        if beside is None:
            self._gap.no_streams()
        else:
            self._gap.extended(self._seconds(packing))
        step = extend_step(packing.bucket, packing.rows, packing.chunks, self._running.slots)
        for row, chunk in zip(packing.rows, packing.chunks, strict=True):
            row.prefilled += chunk
            if row.prefilled == row.num_prompt:
                self._running.prefilled(row)
        return step

    def _pack(self, beside: Bucket | None, num_streams: int) -> Packing:
        whole = self._whole()
        if whole:
            return pack_whole(whole, self._buckets, page_size=self._page_size, seconds=self._seconds)
        num_rows = num_streams + len(self._running.prefill)
        return pack_extend(
            self._running.extendable(),
            self._buckets,
            max_chunk=self._config.prefill_chunk,
            page_size=self._page_size,
            step_tokens=self._config.step_tokens,
            allowed=lambda packing: beside is None or self._gap.allows(self._seconds(packing), beside, num_rows),
        )

    def _seconds(self, packing: Packing) -> float:
        return self._costs.seconds(packing.bucket, max(row.prefilled for row in packing.rows))

    def _whole(self) -> list[Sequence]:
        """The prompts that go first, as far as one batch brings them through."""
        batch = self._gap.batch
        most = min(batch.tokens, self._config.prefill_chunk)
        first = self._running.extendable()[: batch.rows]
        return list(takewhile(lambda row: row.num_shared == row.prefilled >= row.num_prompt - most, first))
