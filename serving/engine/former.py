"""When a batch that could still grow is dispatched: the dual threshold.

Rows go at the hard size, at the soft size when an urgent one is among those that wait, when their tokens fill a step,
when the oldest has waited long enough, or when the device would idle. Then all that wait are due, the one that tipped
the scale included, even where they take more than one step. It is asked at every turn of the engine, not at arrivals,
so rows that nobody follows go too.
"""

from serving.config import EngineConfig


class BatchFormer:
    """For one queue of rows."""

    def __init__(self, config: EngineConfig) -> None:
        self._hard, self._soft = config.hard_size, config.soft_size
        self._min_tokens, self._max_wait_s = config.min_tokens, config.max_wait_ms / 1000
        self._due_below = 0  # rows that arrived before this one are due

    def ready(
        self, *, rows: int, tokens: int, urgent: bool, waited_s: float, idle: bool, oldest: int, arrived: int
    ) -> bool:
        """Whether to dispatch now. `tokens`: of the `rows` that wait. `waited_s`: the oldest. `idle`: nothing else is
        there to run. `oldest`: the number of the oldest row; `arrived`: how many rows have ever arrived."""
        if rows == 0:
            return False
        if oldest < self._due_below:
            return True
        full = rows >= self._hard or tokens >= self._min_tokens or (urgent and rows >= self._soft)
        if full or idle or waited_s >= self._max_wait_s:
            self._due_below = arrived
            return True
        return False
