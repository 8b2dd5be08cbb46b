"""How much prefill may come between two tokens of running streams.

A chunk of a long prompt stretches a token's time by `token_gap_ratio` at most, of what it takes with all beside it that
wait for their prefill. Short prompts, which go whole, may take longer than that; they owe the streams as much time as
they took: each decode step pays what may follow it by that ratio, and until the debt is paid no short prompt goes but
an urgent one. Steps that no prompt follows pay ahead, for one batch at most; and whoever finds no stream owes nothing.
"""

from serving.batch import Bucket, Kind
from serving.config import EngineConfig

from .costs import StepCosts

_MARGIN = 0.5  # step times vary: the slowest of a thousand takes up to twice the usual


class TokenGap:
    """`batch`: the EXTEND bucket of most rows. Times are seconds."""

    def __init__(self, config: EngineConfig, batch: Bucket, costs: StepCosts) -> None:
        self.batch, self._costs = batch, costs
        self._ratio, self._least_s = config.token_gap_ratio, config.token_gap_ms / 1000
        self._paid_s = 0.0  # ahead of what prompts took; negative: owed

    def allows(self, chunk_s: float, step: Bucket, num_rows: int) -> bool:
        """Whether a chunk that takes so long may come after a decode `step`, while so many rows run or wait for their
        prefill."""
        return chunk_s <= max(_MARGIN * self._share_s(step, num_rows), self._least_s)

    @property
    def allows_whole(self) -> bool:
        """Whether prompts may go whole."""
        return self._paid_s >= 0

    def decoded(self, step: Bucket, num_rows: int) -> None:
        """The streams had a step."""
        self._paid_s = min(self._paid_s + max(self._share_s(step, num_rows), self._least_s), self._most_s)

    def extended(self, step_s: float) -> None:
        """Prompts had one, beside streams."""
        self._paid_s = max(self._paid_s - step_s, -self._most_s)

    def no_streams(self) -> None:
        self._paid_s = self._most_s

    @property
    def _most_s(self) -> float:
        return self._costs.seconds(self.batch)

    def _share_s(self, step: Bucket, num_rows: int) -> float:
        """Prefill after a decode step that stretches its time by the ratio."""
        step_s = max(self._costs.seconds(step), self._costs.between_s(Kind.DECODE, num_rows))
        return (self._ratio - 1) * step_s
