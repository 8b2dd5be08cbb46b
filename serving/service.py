"""Where policies meet the engine: a request that transport has parsed goes through the pipeline to the engine and back.

Knows asyncio, not HTTP. `_admit` is the one gate that every request passes before it costs anything: limiter,
experiment arm, ladder and breaker get their place there. Invariant: whatever ends a call (an answer, an error, the
client's leave), the job's ticket is cancelled or finished when the call returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from .errors import DeadlineExceeded, InternalError, NotReady, ServingError
from .pipeline.collect import Collected
from .pipeline.generation import GenerationPlan, GenerationRequest, prepare_generation
from .pipeline.inbox import Inbox
from .pipeline.labels import LabelText
from .pipeline.language import Language
from .pipeline.pool import EncodePool
from .pipeline.scoring import ScorePlan, prepare_scores
from .types import Delta, Input, Job, LatencyClass, Prepared, Priority, ProfileInfo, Score, Update, Usage

T = TypeVar("T")
Listener = Callable[[tuple[Update, ...]], None]


class Ticket(Protocol):
    def cancel(self, row: int | None = None) -> None: ...


class Submitter(Protocol):
    """The part of Engine that a request meets."""

    @property
    def ready(self) -> bool: ...

    @property
    def progress(self) -> tuple[int, int]: ...

    @property
    def failure(self) -> Exception | None: ...

    def submit(self, job: Job, listener: Listener) -> Ticket: ...

    def profiles(self, tenant: str) -> list[ProfileInfo]: ...

    def delete_profile(self, tenant: str, profile_id: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is the same for every kind of request. `id` is ours and unique; times are on the service's clock."""

    id: str
    tenant: str
    arrived_s: float
    deadline_s: float | None = None
    priority: Priority = Priority.NORMAL
    latency_class: LatencyClass = LatencyClass.INTERACTIVE
    profile_id: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    encode_s: float
    engine_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    scores: tuple[Score, ...]
    usage: Usage
    timing: Timing


class Service:
    """One served model."""

    def __init__(
        self,
        language: Language,
        engine: Submitter,
        pool: EncodePool,
        *,
        clock: Callable[[], float],
        stream_behind_tokens: int = 4096,
    ) -> None:
        """clock: seconds, the engine's own."""
        self.language = language
        self.engine = engine
        self.clock = clock
        self._pool = pool
        self._stream_behind_tokens = stream_behind_tokens

    async def score(
        self,
        inputs: Sequence[Input | ServingError],
        *,
        labels: Sequence[LabelText] | None,
        template: str | None,
        call: Call,
    ) -> ScoreAnswer:
        """One Score per input, in order; what is wrong with one input is in its Score."""
        self._admit(call)

        def prepare() -> ScorePlan:
            return prepare_scores(self.language, inputs, labels=labels, template=template)

        plan = await self.encode(prepare, call.deadline_s)
        encoded_s = self.clock()
        collected = Collected(len(plan.rows))
        if plan.rows:
            await self._collect(self._job(call, plan.rows), collected)
        done_s = self.clock()
        timing = Timing(encoded_s - call.arrived_s, done_s - encoded_s, done_s - call.arrived_s)
        usage = Usage(plan.num_prompt_tokens, cached_tokens=plan.num_cached(collected))
        return ScoreAnswer(plan.fold(collected), usage, timing)

    async def generate(self, request: GenerationRequest, *, stream: bool, call: Call) -> "Generation":
        """Submitted, nothing awaited of it yet. The caller must `close` it, whatever happens."""
        self._admit(call)
        plan = await self.encode(lambda: prepare_generation(self.language, request), call.deadline_s)
        inbox = Inbox(self._stream_behind_tokens * len(plan.rows) if stream else None)
        ticket = self.engine.submit(self._job(call, plan.rows), inbox.listener)
        inbox.on_overflow = ticket.cancel  # at once: the reader's task may be stuck in a write
        return Generation(plan, ticket, inbox)

    async def encode(self, work: Callable[[], T], deadline_s: float | None = None) -> T:
        """Run pipeline work on the pool, unless the deadline has passed before or after."""

        def in_time() -> T:
            self._check_deadline(deadline_s)
            return work()

        result = await self._pool.run(in_time)
        self._check_deadline(deadline_s)
        return result

    def _admit(self, call: Call) -> None:
        """Raises what refuses the request before any work is done for it."""
        if self.engine.failure is not None:
            raise InternalError("the engine has stopped; see the server's log")
        if not self.engine.ready:
            done, total = self.engine.progress
            raise NotReady(f"the model is warming up ({done} of {total} programs compiled)", retry_after_s=5.0)
        self._check_deadline(call.deadline_s)

    def _check_deadline(self, deadline_s: float | None) -> None:
        if deadline_s is not None and self.clock() >= deadline_s:
            raise DeadlineExceeded("the deadline passed before the model saw the request")

    def _job(self, call: Call, rows: tuple[Prepared, ...]) -> Job:
        return Job(call.id, call.tenant, rows, call.priority, call.latency_class, call.deadline_s, call.profile_id)

    async def _collect(self, job: Job, collected: Collected) -> None:
        inbox = Inbox()
        ticket = self.engine.submit(job, inbox.listener)
        try:
            while not collected.done:
                collected.add(await inbox.take())
        finally:
            if not collected.done:
                ticket.cancel()


class Generation:
    """A job that generates. `take` until `ended`, then (or earlier) `close`."""

    def __init__(self, plan: GenerationPlan, ticket: Ticket, inbox: Inbox) -> None:
        self._plan = plan
        self._ticket = ticket
        self._inbox = inbox
        self._num_open = len(plan.choices)
        self._num_cached = [0] * len(plan.choices)

    @property
    def ended(self) -> bool:
        return self._num_open == 0

    @property
    def num_choices(self) -> int:
        return len(self._plan.choices)

    @property
    def usage(self) -> Usage:
        """Of the choices of one prompt the first says what was cached: the others find what it computed."""
        cached = sum(self._num_cached[:: self._plan.num_rows_per_prompt])
        return Usage(self._plan.num_prompt_tokens, self._plan.num_completion_tokens, cached)

    async def take(self) -> list[Delta]:
        """The next pieces, in order per choice. May be empty (text is held back). Raises ServingError."""
        deltas: list[Delta] = []
        for update in await self._inbox.take():
            deltas += self._push(update)
        return deltas

    def close(self) -> None:
        """Frees what the engine still holds for it."""
        if not self.ended:
            self._num_open = 0
            self._ticket.cancel()

    def _push(self, update: Update) -> list[Delta]:
        choice = self._plan.choices[update.row]
        self._num_cached[update.row] += update.num_cached
        if choice.ended:  # cut by a stop string while a step was on its way
            return []
        deltas = choice.push(update)
        if choice.cut:
            self._ticket.cancel(update.row)
        self._num_open -= choice.ended
        return deltas
