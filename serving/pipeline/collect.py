"""Gathers the Updates of a job that only scores: one result per engine row, complete when each row has ended."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from serving.types import TokenLogprob, Update


@dataclass(slots=True)
class RowResult:
    """What the engine said of one row so far."""

    target_logprobs: tuple[float, ...] = ()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: Exception | None = None
    ended: bool = False


class Collected:
    """Used by one thread at a time: whoever receives the updates calls `add`, and reads `rows` once it says True."""

    def __init__(self, num_rows: int) -> None:
        self.rows = [RowResult() for _ in range(num_rows)]
        self._open = num_rows

    @property
    def done(self) -> bool:
        return self._open == 0

    def add(self, updates: Iterable[Update]) -> bool:
        """Take news in; True when every row has ended."""
        for update in updates:
            self._add_one(update)
        return self._open == 0

    def _add_one(self, update: Update) -> None:
        row = self.rows[update.row]
        assert not row.ended, f"row {update.row} got an update after its last one"
        if update.target_logprobs:
            row.target_logprobs = update.target_logprobs
        if update.prompt_logprobs:
            row.prompt_logprobs.extend(update.prompt_logprobs)
        row.error = update.error
        if update.error is not None or update.finish is not None:
            row.ended = True
            self._open -= 1
