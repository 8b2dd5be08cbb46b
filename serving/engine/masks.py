"""Constraints are pushed here, on threads of their own: finding the next mask takes its time, and other rows go on.

A constrained row has its mask when all that it generated has been read and pushed; only then is it given a step, so it
is never dispatched ahead. `start` and `collect` are the engine thread's; `run` is how work gets to a thread.
"""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from serving.errors import InternalError, ServingError
from serving.types import Constraint, Finish, Update

from .sequence import Sequence

Work = Callable[[], None]


class Masks:
    """`run` may call the work at once: tests do."""

    def __init__(self, run: Callable[[Work], object]) -> None:
        self._run = run
        self._wake = threading.Condition()
        self._done: list[tuple[Sequence, Exception | None]] = []
        self.num_out = 0  # pushed and not collected

    def start(self, row: Sequence, token_id: int) -> None:
        """The row has no mask until its constraint has taken the token."""
        assert row.constraint is not None
        row.mask = None
        self.num_out += 1
        self._run(partial(self._push, row, row.constraint, token_id))

    def wait(self, timeout_s: float) -> None:
        """Until all are done, or the time is up."""
        with self._wake:
            self._wake.wait_for(lambda: len(self._done) == self.num_out, timeout_s)

    def collect(self) -> list[tuple[Sequence, Update]]:
        """Give rows the masks that have been found since; the updates of those that end by it. A row may have ended."""
        if not self.num_out:
            return []
        with self._wake:
            done, self._done = self._done, []
        self.num_out -= len(done)
        updates = [(row, _outcome(row, error)) for row, error in done]
        return [(row, update) for row, update in updates if update is not None]

    def _push(self, row: Sequence, constraint: Constraint, token_id: int) -> None:
        error: Exception | None = None
        try:
            constraint.push(token_id)
        except Exception as exc:  # border: whatever a grammar's library raises ends this row alone
            error = exc
        with self._wake:
            self._done.append((row, error))
            self._wake.notify_all()


def as_words(mask: bytes) -> NDArray[np.uint32]:
    """[words] of a Constraint's mask."""
    return np.frombuffer(mask, "<u4")


def _outcome(row: Sequence, error: Exception | None) -> Update | None:
    """None: it goes on, with its mask."""
    assert row.constraint is not None
    if error is not None:
        return Update(row.row, error=_answer(error))
    mask = row.constraint.mask
    if mask is None:
        return Update(row.row, finish=Finish.STOP)
    row.mask = as_words(mask)
    return None


def _answer(error: Exception) -> ServingError:
    if isinstance(error, ServingError):
        return error
    answer = InternalError("the form that the answer must have could not be followed")
    answer.__cause__ = error
    return answer
