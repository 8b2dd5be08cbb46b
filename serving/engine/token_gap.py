"""How much prefill may come between two tokens of running streams.

A chunk stretches a token's time by `token_gap_ratio` at most, of what it takes with all beside it that wait for their
prefill. A batch that brings a bucket full of short prompts through at once takes longer than that, and less than their
chunks one by one: it may go once the streams had as much time to themselves. Each decode step saves what a chunk after
it would have been allowed, up to one such batch; and whoever finds no stream need not wait.
"""

from serving.batch import Bucket, Kind
from serving.config import EngineConfig

from .costs import StepCosts

_MARGIN = 0.8  # step times vary


class TokenGap:
    """`batch`: the EXTEND bucket of most rows. Times are seconds."""

    def __init__(self, config: EngineConfig, batch: Bucket, costs: StepCosts) -> None:
        self.batch, self._costs = batch, costs
        self._ratio, self._least_s = config.token_gap_ratio, config.token_gap_ms / 1000
        self._saved_s = 0.0

    def allows(self, chunk: Bucket, step: Bucket, num_rows: int) -> bool:
        """Whether the chunk may come after a decode `step`, while so many rows run or wait for their prefill."""
        return self._costs.seconds(chunk) <= self._limit_s(step, num_rows)

    @property
    def allows_batch(self) -> bool:
        return self._saved_s >= self._costs.seconds(self.batch)

    def decoded(self, step: Bucket, num_rows: int) -> None:
        """The streams had a step."""
        self._saved_s = min(self._saved_s + self._limit_s(step, num_rows), self._costs.seconds(self.batch))

    def extended(self, bucket: Bucket) -> None:
        """Prompts had one, beside streams."""
        self._saved_s = max(0.0, self._saved_s - self._costs.seconds(bucket))

    def no_streams(self) -> None:
        self._saved_s = self._costs.seconds(self.batch)

    def _limit_s(self, step: Bucket, num_rows: int) -> float:
        step_s = max(self._costs.seconds(step), self._costs.between_s(Kind.DECODE, num_rows))
        return max((self._ratio - 1) * step_s * _MARGIN, self._least_s)
