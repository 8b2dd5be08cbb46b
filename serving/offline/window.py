"""Jobs in flight, in order and bounded: memory stays flat however long the file is.

`put` hands a chunk of inputs to the engine and gives back whatever is finished at the front; when the window is full it
waits for the oldest. A chunk that the engine refuses, for one of its inputs or for its size, is sent again one
input at a time.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from serving.engine.engine import Engine
from serving.engine.ticket import Ticket
from serving.errors import BadRequest, Overloaded, ServingError
from serving.pipeline.collect import Collected
from serving.pipeline.scoring import ScorePlan
from serving.types import Input, Job, LatencyClass, Priority, Score, Update

T = TypeVar("T")


class Running:
    """One job and what has come of it."""

    def __init__(self, plan: ScorePlan) -> None:
        self.plan = plan
        self.collected = Collected(len(plan.rows))
        self.done = threading.Event()
        self.ticket: Ticket | None = None
        if not plan.rows:
            self.done.set()

    def listen(self, updates: tuple[Update, ...]) -> None:
        """On the engine thread."""
        if self.collected.add(updates):
            self.done.set()


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """`items` are the caller's, one an input; `jobs` cover them in order."""

    items: Sequence[T]
    jobs: Sequence[Running | ServingError]

    def finished(self) -> bool:
        return all(isinstance(job, ServingError) or job.done.is_set() for job in self.jobs)

    def scores(self) -> Iterator[tuple[T, Score]]:
        """Waits for what is not finished."""
        items = iter(self.items)
        for job in self.jobs:
            if isinstance(job, ServingError):
                yield next(items), Score(0, error=job)
                continue
            job.done.wait()
            for score in job.plan.fold(job.collected):
                yield next(items), score


class Window(Generic[T]):
    """`prepare` makes a plan of inputs; `num_chunks` may be in flight."""

    def __init__(
        self, engine: Engine, prepare: Callable[[Sequence[Input | ServingError]], ScorePlan], *, num_chunks: int
    ) -> None:
        self._engine, self._prepare, self._num_chunks = engine, prepare, num_chunks
        self._chunks: deque[Chunk[T]] = deque()
        self._running: deque[Running] = deque()  # what has not ended, and perhaps some that have; oldest first
        self._num_jobs = 0

    def put(self, items: Sequence[T], inputs: Sequence[Input | ServingError]) -> Iterator[tuple[T, Score]]:
        """Submit, and give what is finished in order."""
        self._chunks.append(Chunk(items, self._submit(inputs)))
        while len(self._chunks) > self._num_chunks or (self._chunks and self._chunks[0].finished()):
            yield from self._pop()

    def drain(self) -> Iterator[tuple[T, Score]]:
        while self._chunks:
            yield from self._pop()

    def cancel(self) -> None:
        """End everything that still runs; nobody will read it."""
        for job in self._running:
            if job.ticket is not None:
                job.ticket.cancel()
        self._chunks.clear()

    def _pop(self) -> Iterator[tuple[T, Score]]:
        return self._chunks.popleft().scores()

    def _submit(self, inputs: Sequence[Input | ServingError]) -> Sequence[Running | ServingError]:
        try:
            return [self._start(inputs)]
        except BadRequest as error:
            return [error] if len(inputs) == 1 else [self._start_one(item) for item in inputs]

    def _start_one(self, item: Input | ServingError) -> Running | ServingError:
        try:
            return self._start([item])
        except BadRequest as error:
            return error

    def _start(self, inputs: Sequence[Input | ServingError]) -> Running:
        """Waits while the engine has no room. BadRequest where it never will."""
        running = Running(self._prepare(inputs))
        if not running.plan.rows:
            return running
        self._num_jobs += 1
        rows = running.plan.rows
        job = Job(f"offline-{self._num_jobs}", "offline", rows, Priority.LOW, LatencyClass.BATCH)
        while running.ticket is None:
            self._forget_ended()
            try:
                running.ticket = self._engine.submit(job, running.listen)
            except Overloaded:
                if not self._running:
                    raise
                self._running[0].done.wait()
        self._running.append(running)
        return running

    def _forget_ended(self) -> None:
        while self._running and self._running[0].done.is_set():
            self._running.popleft()
