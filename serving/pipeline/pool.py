"""A few threads for rendering and tokenising, beside the event loop: the tokenizers release the GIL.

The queue in front of them is bounded; work beyond it is refused at once, never parked.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serving.errors import Overloaded

T = TypeVar("T")


class EncodePool:
    """Used from one event loop."""

    def __init__(self, num_threads: int, *, max_waiting: int = 4096) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._max_waiting = max_waiting
        self.num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises Overloaded when too much is waiting."""
        if self.num_waiting >= self._max_waiting:
            raise Overloaded("too many requests wait to be tokenised; send it again later", retry_after_s=1.0)
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self.num_waiting -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
