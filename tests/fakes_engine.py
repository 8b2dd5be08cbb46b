"""The engine's core without its thread: a loop that a test turns by hand, on a fake clock and a fake device."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.batch import Batch, Bucket, Kind, StepOutput
from serving.config import EngineConfig
from serving.engine.buckets import BucketSet
from serving.engine.costs import StepCosts
from serving.engine.kv_pool import KvPool
from serving.engine.kv_tiers import KvTiers
from serving.engine.loop import Loop
from serving.engine.ring import Ring
from serving.engine.scheduler import Events, Scheduler
from serving.engine.sequence import Sequence, make_sequences
from serving.engine.stats import EngineStats
from serving.errors import Cancelled
from serving.types import Job, Prepared, Priority, SamplingParams, Update
from tests.fakes import FakeClock, FakePending, FakeRunner, ToyModel, default_buckets

SMALL = EngineConfig(max_slots=4, page_size=4, hard_size=4, soft_size=2, prefill_chunk=8, max_context=64)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Drawn tokens."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(1, 300, length))


def generate_row(prompt: tuple[int, ...], max_tokens: int, **params: object) -> Prepared:
    """Greedy unless `params` says otherwise."""
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return Prepared(token_ids=prompt, sampling=sampling)


class TimedRunner:
    """A FakeRunner whose steps take time on the fake clock: `ms_per_step`, and `ms_per_token` of the bucket."""

    def __init__(self, runner: FakeRunner, clock: FakeClock, ms_per_token: float, ms_per_step: float = 0.0) -> None:
        self._runner, self._clock = runner, clock
        self._ms_per_token, self._ms_per_step = ms_per_token, ms_per_step
        self.early = False  # steps are done before anyone asks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, batch: Batch) -> "TimedPending":
        seconds = (self._ms_per_step + batch.bucket.rows * batch.bucket.tokens * self._ms_per_token) / 1000
        return TimedPending(self._runner.submit(batch), self._clock, 0.0 if self.early else seconds)


@dataclass(frozen=True)
class TimedPending:
    pending: FakePending
    clock: FakeClock
    seconds: float

    def done(self) -> bool:
        return self.seconds == 0.0

    def result(self) -> StepOutput:
        self.clock.advance(self.seconds)
        return self.pending.result()


class TurnedEngine:
    """Submit rows, turn, and look at what each row got. `chunks`: more lengths of a prompt's."""

    def __init__(
        self,
        config: EngineConfig = SMALL,
        *,
        model: ToyModel | None = None,
        num_pages: int = 33,
        max_context: int = 64,
        max_score_tokens: int = 64,
        ms_per_token: float = 0.0,
        ms_per_step: float = 0.0,
        make_tiers: Callable[[FakeRunner], KvTiers] | None = None,
        speculate_rows: int = 0,
        ring: Ring | None = None,
        chunks: tuple[int, ...] = (),
        **faults: object,
    ) -> None:
        buckets = [
            b
            for b in default_buckets(config.page_size, max_context, speculate_rows)
            if b.kind is not Kind.SCORE or b.tokens <= max_score_tokens
        ]
        buckets += [Bucket(Kind.EXTEND, 1, tokens, -(-max_context // config.page_size)) for tokens in chunks]
        self.clock = FakeClock()
        self.runner = FakeRunner(
            model,
            page_size=config.page_size,
            num_pages=num_pages,
            max_slots=config.max_slots,
            buckets=buckets,
            **faults,  # type: ignore[arg-type]
        )
        self.model = self.runner.model
        self.pool = KvPool(num_pages, config.page_size, ring)
        self.costs = StepCosts()
        self.tiers = KvTiers.off() if make_tiers is None else make_tiers(self.runner)
        self.scheduler = Scheduler(config, BucketSet(buckets), self.pool, max_context, self.costs, tiers=self.tiers)
        self.timed = TimedRunner(self.runner, self.clock, ms_per_token, ms_per_step)
        self.stats = EngineStats()
        self.loop = Loop(
            self.timed if ms_per_token else self.runner,
            self.scheduler,
            self._record,
            clock=self.clock,
            stats=self.stats,
            costs=self.costs,
        )
        self.updates: dict[Sequence, list[Update]] = defaultdict(list)
        self.times_s: dict[Sequence, list[float]] = defaultdict(list)  # of each row's updates

    def _record(self, events: Events) -> None:
        for row, update in events:
            assert not self.ended(row), "a row got news after its end"
            self.updates[row].append(update)
            self.times_s[row].append(self.clock())

    def submit(
        self,
        *rows: Prepared,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
        tenant: str = "t",
        profile: str | None = None,
    ) -> list[Sequence]:
        job = Job("job", tenant, rows, priority, deadline_s=deadline_s, profile_id=profile)
        sequences = make_sequences(self, job)
        for row in sequences:
            self.scheduler.check(row)
            self.scheduler.submit(row, self.clock())
        return list(sequences)

    def cancel(self, row: Sequence) -> None:
        self.loop.emit(self.scheduler.cancel(row, Cancelled("cancelled")))

    def run(self, max_turns: int = 10_000) -> None:
        """Turn until nothing is left."""
        for _ in range(max_turns):
            if self.loop.idle:
                return
            self.loop.turn()
        raise AssertionError(f"not done after {max_turns} turns")

    def ended(self, row: Sequence) -> bool:
        return bool(self.updates[row]) and _final(self.updates[row][-1])

    def last(self, row: Sequence) -> Update:
        assert self.ended(row), "the row has not ended"
        return self.updates[row][-1]

    def tokens(self, row: Sequence) -> list[int]:
        return [t.token_id for u in self.updates[row] for t in u.tokens]


def _final(update: Update) -> bool:
    return update.finish is not None or update.error is not None
