import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from serving.errors import DeadlineExceeded, InternalError, NotReady, Overloaded, ServingError, StepFailed
from serving.pipeline.generation import GenerationRequest
from serving.pipeline.labels import LabelText
from serving.pipeline.pool import EncodePool
from serving.service import Call, Listener, Service
from serving.types import Delta, Finish, Job, LatencyClass, Priority, ProfileInfo, TextInput, TokenLogprob, Update
from tests.fakes import FakeClock
from tests.fakes_text import byte_language


@dataclass
class FakeTicket:
    cancelled: list[int | None] = field(default_factory=list)

    def cancel(self, row: int | None = None) -> None:
        self.cancelled.append(row)


@dataclass
class FakeEngine:
    """Keeps what was submitted; the test answers."""

    ready: bool = True
    progress: tuple[int, int] = (3, 9)
    failure: Exception | None = None
    refusal: ServingError | None = None
    jobs: list[Job] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)
    tickets: list[FakeTicket] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, job: Job, listener: Listener) -> FakeTicket:
        if self.refusal is not None:
            raise self.refusal
        self.jobs.append(job)
        self.listeners.append(listener)
        self.tickets.append(FakeTicket())
        self.submitted.set()
        return self.tickets[-1]

    def profiles(self, tenant: str) -> list[ProfileInfo]:
        return []

    def delete_profile(self, tenant: str, profile_id: str) -> bool:
        return False


@dataclass
class World:
    engine: FakeEngine = field(default_factory=FakeEngine)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.pool = EncodePool(1)
        self.service = Service(byte_language(), self.engine, self.pool, clock=self.clock, stream_behind_tokens=4)

    def call(self, **fields: object) -> Call:
        return Call(id="i", tenant="t", arrived_s=self.clock.now_s, **fields)  # type: ignore[arg-type]


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await scenario(world)
        world.pool.close()

    asyncio.run(main())


REQUEST = GenerationRequest(prompts=(TextInput("ab"),), stop=("X",))


def tokens(row: int, text: str, finish: Finish | None = None) -> Update:
    return Update(row, tuple(TokenLogprob(token, -1.0) for token in text.encode()), finish=finish)


def test_a_score_is_one_job_with_all_rows_and_what_the_call_says() -> None:
    async def scenario(world: World) -> None:
        call = world.call(priority=Priority.LOW, latency_class=LatencyClass.SCORE, deadline_s=5.0, profile_id="p")
        inputs = [TextInput("a"), TextInput("bc")]
        task = asyncio.create_task(world.service.score(inputs, labels=None, template=None, call=call))
        await world.engine.submitted.wait()
        (job,) = world.engine.jobs
        assert (job.id, job.tenant, job.priority, job.latency_class) == ("i", "t", Priority.LOW, LatencyClass.SCORE)
        assert (job.deadline_s, job.profile_id, len(job.rows)) == (5.0, "p", 2)
        world.clock.advance(0.25)
        world.engine.listeners[0](
            tuple(Update(row, target_logprobs=(-1.0, -2.0), finish=Finish.SCORED) for row in range(2))
        )
        answer = await task
        assert [score.label for score in answer.scores] == ["good", "good"]
        assert answer.usage.prompt_tokens == 3
        assert answer.timing.total_s == pytest.approx(0.25)
        assert world.engine.tickets[0].cancelled == []

    run(scenario)


def test_a_request_of_bad_inputs_alone_never_reaches_the_engine() -> None:
    async def scenario(world: World) -> None:
        inputs = [StepFailed("x")]
        answer = await world.service.score(inputs, labels=None, template=None, call=world.call())
        assert answer.scores[0].error is inputs[0]
        assert world.engine.jobs == []

    run(scenario)


def test_a_caller_that_leaves_while_scoring_cancels_the_job() -> None:
    async def scenario(world: World) -> None:
        labels = [LabelText("a"), LabelText("b")]
        task = asyncio.create_task(
            world.service.score([TextInput("a")], labels=labels, template=None, call=world.call())
        )
        await world.engine.submitted.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.engine.tickets[0].cancelled == [None]

    run(scenario)


def test_a_generation_gives_deltas_and_ends() -> None:
    async def scenario(world: World) -> None:
        generation = await world.service.generate(REQUEST, stream=True, call=world.call())
        world.engine.listeners[0]((tokens(0, "hi"),))
        assert await generation.take() == [Delta(0, "hi")]
        assert not generation.ended
        world.engine.listeners[0]((tokens(0, "!", Finish.LENGTH),))
        assert await generation.take() == [Delta(0, "!", finish=Finish.LENGTH)]
        assert generation.ended
        assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (2, 3)
        generation.close()
        assert world.engine.tickets[0].cancelled == []

    run(scenario)


def test_a_stop_string_cancels_its_row_and_later_news_of_it_is_dropped() -> None:
    async def scenario(world: World) -> None:
        request = GenerationRequest(prompts=(TextInput("ab"),), num_choices=2, stop=("X",))
        generation = await world.service.generate(request, stream=True, call=world.call())
        world.engine.listeners[0]((tokens(0, "a"), tokens(1, "bX")))
        assert await generation.take() == [Delta(0, "a"), Delta(1, "b", finish=Finish.STOP)]
        assert world.engine.tickets[0].cancelled == [1]
        world.engine.listeners[0](
            (tokens(1, "late"), Update(1, error=StepFailed("late")), tokens(0, "", Finish.LENGTH))
        )
        assert await generation.take() == [Delta(0, finish=Finish.LENGTH)]
        assert generation.ended

    run(scenario)


def test_closing_early_cancels_everything_once() -> None:
    async def scenario(world: World) -> None:
        generation = await world.service.generate(REQUEST, stream=True, call=world.call())
        generation.close()
        generation.close()
        assert world.engine.tickets[0].cancelled == [None]

    run(scenario)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_stream_that_nobody_reads_is_cut_and_its_pages_are_freed_at_once(num_choices: int) -> None:
    async def scenario(world: World) -> None:
        request = GenerationRequest(prompts=(TextInput("ab"),), num_choices=num_choices)
        generation = await world.service.generate(request, stream=True, call=world.call())
        for _ in range(4):  # up to the limit of 4 tokens a choice
            world.engine.listeners[0](tuple(tokens(row, "x") for row in range(num_choices)))
        await asyncio.sleep(0)
        assert world.engine.tickets[0].cancelled == []
        world.engine.listeners[0]((tokens(0, "y"),))
        await asyncio.sleep(0)
        assert world.engine.tickets[0].cancelled == [None]
        with pytest.raises(Overloaded):
            await generation.take()

    run(scenario)


def test_an_answer_that_is_gathered_may_be_any_length_behind() -> None:
    async def scenario(world: World) -> None:
        generation = await world.service.generate(REQUEST, stream=False, call=world.call())
        world.engine.listeners[0]((tokens(0, "12345", Finish.LENGTH),))
        assert len(await generation.take()) == 1

    run(scenario)


def test_what_is_refused_costs_no_work() -> None:
    async def scenario(world: World) -> None:
        world.engine.ready = False
        with pytest.raises(NotReady, match="3 of 9") as caught:
            await world.service.generate(REQUEST, stream=False, call=world.call())
        assert caught.value.retry_after_s
        world.engine.failure = RuntimeError("secret")
        with pytest.raises(InternalError) as failed:
            await world.service.score([TextInput("a")], labels=None, template=None, call=world.call())
        assert "secret" not in failed.value.message

    run(scenario)


def test_a_deadline_that_has_passed_never_reaches_the_engine() -> None:
    async def scenario(world: World) -> None:
        call = world.call(deadline_s=1.0)
        world.clock.advance(1.0)
        with pytest.raises(DeadlineExceeded):
            await world.service.generate(REQUEST, stream=False, call=call)
        assert world.engine.jobs == []

    run(scenario)


def test_a_deadline_that_passes_while_tokenising_never_reaches_the_engine() -> None:
    async def scenario(world: World) -> None:
        call = world.call(deadline_s=1.0)
        with pytest.raises(DeadlineExceeded):
            await world.service.encode(lambda: world.clock.advance(2.0), call.deadline_s)

    run(scenario)


def test_the_engines_refusal_is_the_answer() -> None:
    async def scenario(world: World) -> None:
        world.engine.refusal = Overloaded("full", retry_after_s=3.0)
        with pytest.raises(Overloaded):
            await world.service.generate(REQUEST, stream=True, call=world.call())

    run(scenario)
