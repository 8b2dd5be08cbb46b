"""From the engine thread to the event loop: one call_soon_threadsafe for all of a job's updates of one step.

Bounded: a reader that is more than `max_behind_tokens` behind gets Overloaded instead of the rest, so a slow socket
costs neither memory nor the engine's time.
"""

import asyncio
from collections.abc import Callable, Sequence

from serving.errors import Overloaded
from serving.types import Update


class Inbox:
    """One job's updates. `listener` is called on the engine thread, `take` on the loop by one task."""

    def __init__(self, max_behind_tokens: int | None = None) -> None:
        self.on_overflow: Callable[[], None] | None = None  # called once, on the loop
        self._loop = asyncio.get_running_loop()
        self._max_behind = max_behind_tokens
        self._updates: list[Update] = []
        self._num_tokens = 0
        self._overflowed = False
        self._waiter: asyncio.Future[None] | None = None

    def listener(self, updates: tuple[Update, ...]) -> None:
        """For Engine.submit."""
        try:
            self._loop.call_soon_threadsafe(self._put, updates)
        except RuntimeError:  # the loop is closed: nobody is left to read
            return

    async def take(self) -> Sequence[Update]:
        """All news since the last call, at least one; raises Overloaded once too much was left waiting."""
        while not self._updates and not self._overflowed:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._overflowed:
            raise Overloaded("the reader of this stream is too slow")
        updates, self._updates, self._num_tokens = self._updates, [], 0
        return updates

    def _put(self, updates: tuple[Update, ...]) -> None:
        if not self._overflowed:
            self._updates.extend(updates)
            if self._is_behind(updates):
                self._overflowed = True
                self._updates.clear()
                if self.on_overflow is not None:
                    self.on_overflow()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_behind(self, updates: tuple[Update, ...]) -> bool:
        """With these, the reader is too far behind."""
        if self._max_behind is None:
            return False
        self._num_tokens += sum(len(update.tokens) for update in updates)
        return self._num_tokens > self._max_behind
