"""The engine thread: start, submit from anywhere, cancel, close, and what it does when something breaks."""

import queue
import threading
from collections import defaultdict

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from serving.batch import Batch, Bucket, Kind, Progress, StepTimes
from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.page_keys import chain
from serving.errors import (
    BadRequest,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    NotReady,
    Overloaded,
)
from serving.types import Finish, Job, Prepared, SamplingParams, Update
from tests.fakes import FakeClock, FakePending, FakeRunner, ToyModel

CONFIG = EngineConfig(max_slots=4, page_size=16, hard_size=4, soft_size=2, max_context=512, max_queue_rows=8)
WAIT_S = 20.0


class Answers:
    """A listener that a test can wait on."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[Update, ...]] = queue.Queue()
        self.by_row: dict[int, list[Update]] = defaultdict(list)
        self.threads: set[str] = set()

    def __call__(self, updates: tuple[Update, ...]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.put(updates)

    def wait(self, num_rows: int = 1) -> dict[int, list[Update]]:
        """Until that many rows have ended."""
        while sum(_final(news[-1]) for news in self.by_row.values()) < num_rows:
            for update in self.calls.get(timeout=WAIT_S):
                self.by_row[update.row].append(update)
        return self.by_row

    def tokens(self, row: int = 0) -> list[int]:
        return [t.token_id for u in self.by_row[row] for t in u.tokens]


def _final(update: Update) -> bool:
    return update.finish is not None or update.error is not None


def job(*rows: Prepared, deadline_s: float | None = None) -> Job:
    return Job(id="j", tenant="t", rows=rows, deadline_s=deadline_s)


def generate(prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 4) -> Prepared:
    return Prepared(prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0))


def started(runner: FakeRunner, config: EngineConfig = CONFIG, clock: FakeClock | None = None) -> Engine:
    engine = Engine(runner, config, max_context=512, clock=clock or FakeClock())
    engine.start()
    assert engine.wait_ready(WAIT_S)
    return engine


def test_a_job_is_answered_on_the_engine_thread() -> None:
    engine = started(FakeRunner(max_slots=4))
    answers = Answers()
    engine.submit(job(generate(), Prepared((1, 2), targets=(3,))), answers)
    answers.wait(2)
    assert answers.tokens(0) == ToyModel().generate((5, 6, 7), 4)
    assert answers.by_row[1][-1].finish is Finish.SCORED
    assert answers.threads == {"tidegate-engine"}
    engine.close()


def test_the_gauges_tell_the_pages_before_anyone_came() -> None:
    engine = started(FakeRunner(max_slots=4, num_pages=33))
    assert (engine.stats.pages_total, engine.stats.pages_used) == (32, 0)
    engine.close()


def test_all_rows_of_a_step_come_in_one_call() -> None:
    engine = started(FakeRunner(max_slots=4))
    answers = Answers()
    engine.submit(job(*[Prepared((1, i + 1), targets=(3,)) for i in range(4)]), answers)
    assert len(answers.calls.get(timeout=WAIT_S)) == 4
    engine.close()


def test_pages_that_nobody_holds_are_found_when_it_is_idle() -> None:
    engine = Engine(FakeRunner(max_slots=4), CONFIG, max_context=512)
    engine._pool.take("a bug", 2)
    engine.start()
    assert engine.wait_ready(WAIT_S)
    answers = Answers()
    engine.submit(job(generate()), answers)
    answers.wait(1)
    engine.close()
    assert engine.stats.pages_leaked == 2


def test_jobs_from_many_threads_are_each_answered_once() -> None:
    engine = started(FakeRunner(max_slots=4), EngineConfig(max_slots=4, max_context=512))
    answers = [Answers() for _ in range(8)]

    def client(mine: Answers) -> None:
        for i in range(10):
            engine.submit(job(generate((i + 1, 2), 3)), mine)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for mine in answers:
        finals = 0
        while finals < 10:
            finals += sum(_final(u) for u in mine.calls.get(timeout=WAIT_S))
    engine.close()
    assert engine.stats.finished_rows == 80
    assert engine.stats.pages_used == 0


class Timed(FakeRunner):
    """Its warm-up measured a second a token."""

    @property
    def step_s(self) -> dict[Bucket, StepTimes]:
        return {b: StepTimes(b.rows * b.tokens) for b in self.buckets if b.kind is not Kind.SCORE}


def test_what_steps_took_in_the_warm_up_limits_the_first_prompt_beside_a_stream() -> None:
    """A token takes 1 s for each row of a decode step of 4 rows, so a chunk of 64 tokens would stretch it too far."""
    config = msgspec.structs.replace(CONFIG, token_gap_ms=1.0, prefill_chunk=256)
    buckets = (Bucket(Kind.EXTEND, 1, 4, 32), Bucket(Kind.EXTEND, 1, 64, 32), Bucket(Kind.DECODE, 4, 1, 32))
    runner = Timed(max_slots=4, buckets=buckets)
    engine = started(runner, config)
    answers = Answers()
    engine.submit(job(generate(max_tokens=100), generate(tuple(range(2, 62)), 1)), answers)
    answers.wait(2)
    engine.close()
    kinds = [(batch.bucket.kind, batch.bucket.tokens) for batch in runner.batches]
    first = kinds.index((Kind.DECODE, 1))
    assert (Kind.EXTEND, 4) in kinds[first:]
    assert (Kind.EXTEND, 64) not in kinds[first:]


class SlowWarmup(FakeRunner):
    """Stops at each bucket until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(max_slots=4)
        self.go = threading.Semaphore(0)
        self.reached: queue.Queue[int] = queue.Queue()

    def warmup(self, progress: Progress) -> None:
        for done in range(len(self.buckets) + 1):
            progress(done, len(self.buckets))
            self.reached.put(done)
            assert self.go.acquire(timeout=WAIT_S)


def test_before_ready_it_says_how_far_it_is() -> None:
    runner = SlowWarmup()
    engine = Engine(runner, CONFIG, max_context=512, clock=FakeClock())
    engine.start()
    assert runner.reached.get(timeout=WAIT_S) == 0
    runner.go.release()
    assert runner.reached.get(timeout=WAIT_S) == 1
    assert engine.progress == (1, len(runner.buckets))
    assert not engine.ready
    with pytest.raises(NotReady, match=f"1 of {len(runner.buckets)}") as refused:
        engine.submit(job(generate()), Answers())
    assert refused.value.retry_after_s
    runner.go.release(len(runner.buckets))
    assert engine.wait_ready(WAIT_S)
    assert engine.ready
    engine.close()


def test_close_during_warmup_ends_it() -> None:
    runner = SlowWarmup()
    engine = Engine(runner, CONFIG, max_context=512, clock=FakeClock())
    engine.start()
    runner.reached.get(timeout=WAIT_S)
    closer = threading.Thread(target=engine.close)
    closer.start()
    runner.go.release(2)
    closer.join(WAIT_S)
    assert runner.closed
    assert not engine.ready
    assert engine.failure is None


class BrokenWarmup(FakeRunner):
    def warmup(self, progress: Progress) -> None:
        raise RuntimeError("no such device")


def test_a_warmup_that_fails_is_told() -> None:
    engine = Engine(BrokenWarmup(max_slots=4), CONFIG, max_context=512, clock=FakeClock())
    engine.start()
    assert engine.wait_ready(WAIT_S)
    engine.close()
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(NotReady, match="failed"):
        engine.submit(job(generate()), Answers())


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = started(FakeRunner(max_slots=4))
    for rows, error in [
        ((), BadRequest),
        ((Prepared(()),), BadRequest),
        ((Prepared((1,), targets=tuple(range(17))),), BadRequest),
        ((Prepared((1,), prompt_logprobs=21),), BadRequest),
        ((generate(max_tokens=-1),), BadRequest),
        ((Prepared((1,), SamplingParams(top_k=2**31)),), BadRequest),  # numbers that no int32 array holds
        ((Prepared((2**31,)),), BadRequest),
        ((Prepared((1,), targets=(2**31,)),), BadRequest),
        ((Prepared((1,) * 513),), ContextLengthExceeded),
        ((generate((1,) * 500, 13),), ContextLengthExceeded),
        (tuple(Prepared((1,)) for _ in range(9)), BadRequest),  # larger than the whole queue
    ]:
        with pytest.raises(error):
            engine.submit(job(*rows), Answers())
    with pytest.raises(DeadlineExceeded):
        engine.submit(job(generate(), deadline_s=0.0), Answers())
    engine.close()
    assert engine.stats.finished_rows == 0


def test_a_full_queue_refuses_with_a_time() -> None:
    runner = FakeRunner(max_slots=4, held=True)
    engine = started(runner)
    first = Answers()
    engine.submit(job(*[generate((i + 1,)) for i in range(8)]), first)  # four at most are on the device, held
    with pytest.raises(Overloaded, match="wait already") as refused:
        engine.submit(job(*[Prepared((1, 2))] * 8), Answers())
    assert refused.value.retry_after_s == 1.0
    assert engine.stats.refused_jobs == 1
    runner.release(100)
    first.wait(8)
    engine.close()


def test_cancel_one_row_then_all_then_again() -> None:
    runner = FakeRunner(max_slots=4, held=True)
    engine = started(runner)
    answers = Answers()
    ticket = engine.submit(job(generate(max_tokens=200), generate((9,), 200), generate((8,), 200)), answers)
    ticket.cancel(1)
    runner.release(4)
    answers.wait(1)
    assert isinstance(answers.by_row[1][-1].error, Cancelled)
    ticket.cancel()
    ticket.cancel(0)
    ticket.cancel()
    runner.release(4)
    answers.wait(3)
    assert all(isinstance(answers.by_row[r][-1].error, Cancelled) for r in range(3))
    engine.close()
    assert engine.stats.cancelled_rows == 3
    assert engine.stats.pages_used == 0


def test_a_late_cancel_changes_nothing() -> None:
    engine = started(FakeRunner(max_slots=4))
    answers = Answers()
    ticket = engine.submit(job(generate()), answers)
    answers.wait()
    for _ in range(1000):
        ticket.cancel()
    again = Answers()
    engine.submit(job(generate()), again)
    assert again.wait()[0][-1].finish is Finish.LENGTH
    engine.close()
    assert engine.stats.cancelled_rows == 0


def test_close_lets_rows_finish_within_its_time() -> None:
    engine = started(FakeRunner(max_slots=4))
    answers = Answers()
    engine.submit(job(generate(max_tokens=50)), answers)
    engine.close(timeout_s=1.0)  # on the fake clock: as long as it takes
    assert answers.wait()[0][-1].finish is Finish.LENGTH
    with pytest.raises(NotReady, match="stopping"):
        engine.submit(job(generate()), Answers())


def test_close_without_time_answers_everyone() -> None:
    runner = FakeRunner(max_slots=4, held=True)
    engine = started(runner)
    answers = Answers()
    engine.submit(job(*[generate((i + 1,), 100) for i in range(6)]), answers)
    closer = threading.Thread(target=engine.close)
    closer.start()
    runner.release(1000)
    answers.wait(6)
    closer.join(WAIT_S)
    assert all(isinstance(news[-1].error, NotReady) for news in answers.by_row.values())
    assert runner.closed
    assert engine.stats.pages_used == 0


def test_close_of_an_engine_that_never_started() -> None:
    runner = FakeRunner(max_slots=4)
    Engine(runner, CONFIG, max_context=512, clock=FakeClock()).close()
    assert runner.closed


def test_a_listener_that_raises_harms_nobody_else() -> None:
    def broken(updates: tuple[Update, ...]) -> None:
        raise ValueError("a caller's fault")

    engine = started(FakeRunner(max_slots=4))
    answers = Answers()
    engine.submit(job(generate()), broken)
    engine.submit(job(generate()), answers)
    assert answers.wait()[0][-1].finish is Finish.LENGTH
    assert engine.failure is None
    engine.close()


def test_a_failed_step_is_answered_and_the_next_request_is_served() -> None:
    engine = started(FakeRunner(max_slots=4, fail_result=[1]))
    answers, again = Answers(), Answers()
    engine.submit(job(generate()), answers)
    assert answers.wait()[0][-1].error is not None
    engine.submit(job(generate()), again)
    again.wait()
    assert again.tokens() == ToyModel().generate((5, 6, 7), 4)
    engine.close()
    assert engine.stats.failed_steps == 1


class BrokenReset(FakeRunner):
    def reset(self) -> None:
        if getattr(self, "_kv", None) is not None:
            raise RuntimeError("the device is gone")
        super().reset()


def test_when_the_loop_itself_breaks_everyone_is_answered() -> None:
    runner = BrokenReset(max_slots=4, fail_result=[2], held=True)
    engine = started(runner)
    answers = [Answers() for _ in range(3)]
    for i, mine in enumerate(answers):
        engine.submit(job(*[generate((i + 1, 2), 30)] * 2), mine)
    runner.release(100)
    for mine in answers:
        assert all(news[-1].error is not None for news in mine.wait(2).values())
    engine.close()
    assert isinstance(engine.failure, RuntimeError)
    assert not engine.ready
    with pytest.raises(NotReady):
        engine.submit(job(generate()), Answers())


class Strange(FakeRunner):
    """Returns what no StepOutput is: a bug of ours, not a failed step."""

    def submit(self, batch: Batch) -> FakePending:
        super().submit(batch)
        return FakePending("nonsense", None, None)  # type: ignore[arg-type]


def test_a_bug_in_the_loop_answers_with_an_internal_error() -> None:
    engine = started(Strange(max_slots=4))
    answers = Answers()
    engine.submit(job(generate(), generate()), answers)
    assert all(isinstance(news[-1].error, InternalError) for news in answers.wait(2).values())
    engine.close()
    assert isinstance(engine.failure, AttributeError)


def test_buckets_that_do_not_hold_the_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="context 1024"):
        Engine(FakeRunner(max_slots=4), CONFIG, max_context=1024)
    with pytest.raises(ValueError, match="128 slots"):
        Engine(FakeRunner(), EngineConfig(max_slots=128), max_context=512)


def test_choices_of_one_prompt_are_hashed_once_and_share_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a thousand of them, on the thread that serves every connection."""
    hashed: list[int] = []

    def counted(tenant: str, tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
        hashed.append(len(tokens))
        return chain(tenant, tokens, page_size)

    monkeypatch.setattr("serving.engine.scheduler.chain", counted)
    engine, answers = started(FakeRunner(max_slots=4)), Answers()
    prompts = [tuple(range(1, 41)), tuple(range(2, 30))]
    ticket = engine.submit(job(*(generate(p, n) for p in prompts for n in (2, 3, 4))), answers)
    answers.wait(6)
    engine.close()
    assert hashed == [40, 28]
    assert len({id(row.prompt) for row in ticket.rows}) == 2
    for i, p in enumerate(p for p in prompts for _ in range(3)):
        assert answers.tokens(i) == ToyModel().generate(p, 2 + i % 3)
