"""Random events against the whole engine core: submit, turn, cancel, deadlines and faults in any order.

Checked after every event: pages used + cached + free = total, and rows that hold the same page are of one tenant and
have the same tokens up to its end; after the end: every row ended once (`TurnedEngine._record` refuses more),
everything is given back, and rows that ended well have the reference's tokens, however often they made room.
"""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.batch import Kind
from serving.config import EngineConfig
from serving.engine.gauges import Gauges
from serving.engine.host_tier import HostTier
from serving.engine.kv_tiers import KvTiers
from serving.engine.profile_disk import ProfileDisk, Work
from serving.engine.profiles import Profiles
from serving.engine.ring import Ring
from serving.engine.sequence import Sequence
from serving.types import Prepared, Priority
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_engine import TurnedEngine, generate_row

AGEING_S = 1.0
PAGE_BYTES = 16
CONFIG = EngineConfig(
    max_slots=4, page_size=4, hard_size=4, soft_size=2, prefill_chunk=8, max_context=64, ageing_s=AGEING_S
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(17, 28),
        host_pages=st.integers(0, 40),
        quota_pages=st.integers(10, 20),
        speculate_rows=st.sampled_from([0, 2, 4]),
        draft_rate=st.sampled_from([0.3, 0.7, 1.0]),
        window=st.sampled_from([None, None, (6, 2)]),
    )
    def start(
        self,
        num_pages: int,
        host_pages: int,
        quota_pages: int,
        speculate_rows: int,
        draft_rate: float,
        window: tuple[int, int] | None,
    ) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.disk_work: list[Work] = []
        self.host_bytes, self.quota_bytes = host_pages * PAGE_BYTES, quota_pages * PAGE_BYTES
        self.engine = TurnedEngine(
            CONFIG,
            model=ToyModel(window=window),
            ring=None if window is None else Ring.of(*window, CONFIG.page_size, CONFIG.prefill_chunk),
            num_pages=num_pages,
            make_tiers=self.make_tiers,
            speculate_rows=speculate_rows,
            draft_rate=draft_rate,
        )
        self.rows: list[tuple[Sequence, tuple[int, ...]]] = []  # with the prompt

    def make_tiers(self, runner: FakeRunner) -> KvTiers:
        disk = ProfileDisk(Path(self.directory.name), "model", PAGE_BYTES, self.disk_work.append)
        return KvTiers(HostTier(self.host_bytes), Profiles(PAGE_BYTES, self.quota_bytes), disk, page_size=4)

    @rule(
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 24),
        count=st.integers(1, 6),
        priority=st.sampled_from(Priority),
        timeout_s=st.one_of(st.none(), st.floats(0.1, 3.0)),
        stop=st.booleans(),
        family=st.integers(0, 2),
        tenant=st.sampled_from(["a", "b"]),
        profile=st.sampled_from([None, "p", "q"]),
    )
    def submit(
        self,
        length: int,
        max_tokens: int,
        count: int,
        priority: Priority,
        timeout_s: float | None,
        stop: bool,
        family: int,
        tenant: str,
        profile: str | None,
    ) -> None:
        """Prompts of one family start the same; those of family 0 are all different."""
        deadline_s = None if timeout_s is None else self.engine.clock() + timeout_s
        for _ in range(count):
            p = _prompt(length, 1000 + family if family else len(self.rows))
            stops = tuple(range(0, 320, 7)) if stop else ()
            prepared = generate_row(p, max_tokens, stop_token_ids=stops) if max_tokens else Prepared(p, targets=(3,))
            if profile is not None and length // 4 * PAGE_BYTES > min(self.host_bytes or 10**6, self.quota_bytes):
                profile = None  # refused
            if self.engine.pool.turns(length + max(0, max_tokens - 1)):
                profile = None
            (row,) = self.engine.submit(
                prepared, priority=priority, deadline_s=deadline_s, tenant=tenant, profile=profile
            )
            self.rows.append((row, p))

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.loop.turn()

    @rule(seconds=st.floats(0.0005, 1.5))
    def wait(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row, _ = data.draw(st.sampled_from(self.rows))
        self.engine.cancel(row)

    @rule(ahead=st.integers(0, 3), at_submit=st.booleans())
    def fault(self, ahead: int, at_submit: bool) -> None:
        steps = self.engine.runner.fail_submit if at_submit else self.engine.runner.fail_result
        steps.add(len(self.engine.runner.batches) + ahead)

    @rule(done=st.booleans())
    def reads(self, done: bool) -> None:
        """Whether copies to the host are done before anyone waits."""
        self.engine.runner.reads_done = done

    @precondition(lambda self: self.disk_work)
    @rule()
    def disk(self) -> None:
        self.disk_work.pop(0)()

    @rule()
    def crowd_out(self) -> None:
        """Others take all that they may of host memory."""
        tiers = self.engine.tiers
        tiers.host.discard([key for tenant in ("a", "b") for p in tiers.profiles.of(tenant) for key in p.keys])

    @rule(number=st.integers(1, 2), turns=st.integers(10, 60))
    def return_later(self, number: int, turns: int) -> None:
        """A standing context comes back after others have been through, and everything has settled."""
        for length, profile in ((40, None), (24, "p")):
            p = _prompt(length, 1000 + number if profile else 5000 + len(self.rows))
            fits = min(self.host_bytes, self.quota_bytes) >= 6 * PAGE_BYTES and not self.engine.pool.turns(29)
            (row,) = self.engine.submit(generate_row(p, 6), tenant="a", profile=profile if fits else None)
            self.rows.append((row, p))
            self.engine.clock.advance(2.0)
            self.turn(turns)
            while self.disk_work:
                self.disk()

    @rule(tenant=st.sampled_from(["a", "b"]), profile=st.sampled_from(["p", "q"]))
    def delete(self, tenant: str, profile: str) -> None:
        known = [p.id for p in self.engine.tiers.profiles.of(tenant)]
        assert self.engine.tiers.delete((tenant, profile)) == (profile in known)

    @invariant()
    def tiers_keep_to_their_bounds(self) -> None:
        tiers = self.engine.tiers
        assert 0 <= tiers.host.num_bytes <= self.host_bytes
        for tenant in ("a", "b"):
            assert sum(len(p.keys) for p in tiers.profiles.of(tenant)) * PAGE_BYTES <= self.quota_bytes

    @invariant()
    def pages_add_up(self) -> None:
        pool, holders = self.engine.pool, dict[int, tuple[str, list[int]]]()
        for row, _ in self.rows:
            assert pool.held_by(row) == frozenset(row.pages)
            for place, page in enumerate(row.pages):
                stop = (place + 1) * pool.page_size
                content = (row.tenant, row.tokens(0, min(stop, row.num_asked + row.generated)).tolist())
                if page in holders:
                    assert holders[page] == content
                    assert len(content[1]) == stop, "a page that is still written is shared"
                holders[page] = content
        assert 0 not in holders
        assert pool.used == len(holders)
        assert pool.used + pool.cached + pool.free == pool.total
        assert pool.num_leaked(holders, self.engine.scheduler.cache.pages) == 0
        assert self.engine.scheduler.cache.num_stuck == 0

    @invariant()
    def a_row_never_has_more_on_the_way_than_it_may(self) -> None:
        running = self.engine.scheduler._running
        for row in (row for row in running.decode if row.max_new):
            assert 0 <= row.generated <= row.planned <= row.max_new
            assert running.slots.position[row.slot] == row.num_asked + row.planned - 1
            assert len(row.pages) >= self.engine.pool.pages_for(row.num_asked + row.planned - 1)

    @invariant()
    def what_has_ended_holds_nothing(self) -> None:
        for row, _ in self.rows:
            if self.engine.ended(row):
                assert row.slot == 0
                assert not row.pages

    @invariant()
    def an_idle_engine_has_answered_everyone(self) -> None:
        if self.engine.loop.idle:
            assert all(self.engine.ended(row) for row, _ in self.rows)

    def teardown(self) -> None:
        self.engine.runner.fail_submit.clear()
        self.engine.runner.fail_result.clear()
        while not self.engine.loop.idle or self.engine.tiers.awaits_disk:  # for rows that have gone meanwhile, too
            self.engine.loop.turn()
            while self.disk_work:
                self.disk_work.pop(0)()
        self.directory.cleanup()
        for row, p in self.rows:
            assert self.engine.ended(row)
            if self.engine.last(row).error is None and row.max_new:
                assert self.engine.tokens(row) == self.engine.model.generate(p, row.max_new, stop=row.stops)
        assert self.engine.pool.used == 0
        gauges = Gauges(self.engine.stats, self.engine.scheduler, self.engine.pool)
        gauges.read(1.0)
        gauges.audit()
        stats = self.engine.stats
        assert (stats.pages_leaked, stats.internal_fragmentation, stats.external_fragmentation) == (0, 0.0, 0.0)
        assert not self.engine.tiers.busy
        assert not self.engine.tiers.awaits_disk
        assert self.engine.scheduler.num_running == self.engine.scheduler.num_waiting == 0


def _prompt(length: int, number: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(number).integers(1, 300, length))


TestEngineMachine = EngineMachine.TestCase
# No shrinking: that of a long history takes minutes and gives one that is as long.
TestEngineMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, phases=[Phase.reuse, Phase.generate]
)


@pytest.mark.parametrize("max_new", [0, 1])
def test_nobody_waits_beyond_the_ageing_bound(max_new: int) -> None:
    """An endless stream of urgent rows at more than the capacity; a low row starts before all that came 2 s later."""
    engine = TurnedEngine(CONFIG)
    low_prompt = (299, 298, 297)
    row = generate_row(low_prompt, max_new) if max_new else Prepared(low_prompt, targets=(1,))
    waited_s = None
    for i in range(400):
        if i == 50:
            (low,) = engine.submit(row, priority=Priority.LOW)
        p = _prompt(3, i)
        # one urgent row more than a step takes, each turn
        rows = [generate_row(p, 1)] * 5 if max_new else [Prepared(p)] * 65
        engine.submit(*rows, priority=Priority.URGENT)
        engine.clock.advance(0.05)
        engine.loop.turn()
        if i >= 50 and waited_s is None and engine.ended(low):
            waited_s = (i - 50) * 0.05
    backlog_s = 400 * 0.05  # urgent rows that were there first keep their places
    assert waited_s is not None
    assert 2 * AGEING_S <= waited_s < backlog_s
    dispatched = [tuple(t[:3]) for b in engine.runner.batches if b.bucket.kind is not Kind.DECODE for t in b.tokens]
    position = dispatched.index(low_prompt)
    later = [_prompt(3, i) for i in range(50 + int(2 * AGEING_S / 0.05) + 1, 400)]
    assert not set(dispatched[:position]) & set(later)
