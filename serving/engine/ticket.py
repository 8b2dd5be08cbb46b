"""A job inside the engine, and the caller's handle to it.

`unanswered` are the rows whose last update has not been given to the listener; only the engine thread touches it.
"""

from collections.abc import Callable

from serving.types import Job, Update

from .sequence import make_sequences

Listener = Callable[[tuple[Update, ...]], None]


class Ticket:
    """`listener` gets updates on the engine thread. `cancel` is how to tell the engine. BadRequest: see `sequence`."""

    def __init__(self, job: Job, listener: Listener, cancel: Callable[["Ticket", int | None], None]) -> None:
        self.job, self.listener = job, listener
        self.rows = make_sequences(self, job)
        self.num_tokens = sum(row.num_prompt for row in self.rows)
        self.unanswered = set(range(len(self.rows)))
        self._cancel = cancel

    def __repr__(self) -> str:
        return f"Ticket({self.job.id!r}, {len(self.rows)} rows)"

    def cancel(self, row: int | None = None) -> None:
        """End one row, or all of them, with Cancelled. Any thread, any time, any number of times."""
        self._cancel(self, row)

    def deliver(self, updates: list[Update]) -> None:
        """One call of the listener; it may raise, the rows count as answered all the same."""
        self.unanswered.difference_update(u.row for u in updates if u.finish is not None or u.error is not None)
        self.listener(tuple(updates))
