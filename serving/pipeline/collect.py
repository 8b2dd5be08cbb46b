"""Gathers the updates of a job that only scores: one a row, complete when every row has its own."""

from collections.abc import Iterable, Sequence

from serving.types import Update


class Collected:
    """Used by one thread at a time: whoever receives the updates calls `add`, and reads `rows` once it says True."""

    def __init__(self, num_rows: int) -> None:
        self._rows: list[Update | None] = [None] * num_rows
        self._num_open = num_rows

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def rows(self) -> Sequence[Update]:
        """Each row's only update, in order; needs every row to have ended."""
        assert self.done
        return self._rows  # type: ignore[return-value]

    def add(self, updates: Iterable[Update]) -> bool:
        """Take news in; True when every row has ended."""
        for update in updates:
            assert self._rows[update.row] is None, f"row {update.row} got an update after its last one"
            assert update.finish is not None or update.error is not None, "a scored row has one update, its last"
            self._rows[update.row] = update
            self._num_open -= 1
        return self._num_open == 0
