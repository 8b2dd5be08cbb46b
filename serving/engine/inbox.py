"""What callers have handed over and the engine thread has not seen yet: the one lock between them.

The lock is held for a few list operations, never while a step is formed or a listener called. Invariant: a ticket that
`put` accepted is in the inbox until `take` has put it into the scheduler, so its rows always count as waiting.
"""

import threading
from collections.abc import Callable

from .ticket import Ticket

Cancel = tuple[Ticket, int | None]


class Inbox:
    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._tickets: list[Ticket] = []
        self._cancels: list[Cancel] = []
        self._num_rows = self._num_tokens = 0
        self._close_at_s: float | None = None

    @property
    def close_at_s(self) -> float | None:
        """When rows that still run are ended; None: nobody has asked to close."""
        return self._close_at_s

    def put(self, ticket: Ticket, check: Callable[[int, int], None]) -> None:
        """Add a ticket unless `check(rows, tokens in the inbox)` raises."""
        with self._wake:
            check(self._num_rows, self._num_tokens)
            self._tickets.append(ticket)
            self._num_rows += len(ticket.rows)
            self._num_tokens += ticket.num_tokens
            self._wake.notify()

    def cancel(self, ticket: Ticket, row: int | None) -> None:
        with self._wake:
            self._cancels.append((ticket, row))
            self._wake.notify()

    def close(self, at_s: float) -> None:
        with self._wake:
            if self._close_at_s is None:
                self._close_at_s = at_s
            self._wake.notify()

    def take(self, accept: Callable[[Ticket], None], *, wait: bool) -> list[Cancel]:
        """Give every ticket to `accept`, in order; return the cancels. `wait`: until there is a ticket, or a close."""
        with self._wake:
            while wait and not self._tickets and self._close_at_s is None:
                self._cancels.clear()  # the engine is idle: they mean rows that have ended
                self._wake.wait()
            for ticket in self._tickets:
                accept(ticket)
            cancels, self._cancels = self._cancels, []
            self._tickets, self._num_rows, self._num_tokens = [], 0, 0
            return cancels
