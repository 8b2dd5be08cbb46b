"""Policy and results of the scheduler, turned by hand against the toy model."""

import numpy as np
import pytest
from msgspec.structs import replace

from serving.batch import Kind
from serving.errors import Cancelled, ContextLengthExceeded, DeadlineExceeded, StepFailed
from serving.types import Finish, Prepared, Priority, SamplingParams
from tests.fakes import ToyModel
from tests.fakes_engine import SMALL, TurnedEngine, generate_row, prompt


def kinds(engine: TurnedEngine) -> list[Kind]:
    return [b.bucket.kind for b in engine.runner.batches]


# Results


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17, 40])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_generation_equals_the_reference(length: int, max_tokens: int) -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(generate_row(prompt(length), max_tokens))
    engine.run()
    assert engine.tokens(row) == engine.model.generate(prompt(length), max_tokens)
    assert engine.last(row).finish is Finish.LENGTH
    assert engine.pool.used == 0


def test_many_rows_together_get_what_each_gets_alone() -> None:
    engine = TurnedEngine()
    asked = [(prompt(1 + 5 * i % 37, i), 1 + i % 9) for i in range(23)]
    rows = [engine.submit(generate_row(p, n))[0] for p, n in asked]
    engine.run()
    for row, (p, n) in zip(rows, asked, strict=True):
        assert engine.tokens(row) == engine.model.generate(p, n)


def test_sampling_depends_on_the_seed_alone() -> None:
    engine = TurnedEngine()
    seeds = [1, 2, 2**40 + 1, 2**63]
    for extra in range(3):  # other neighbours, other slots
        engine.submit(*(generate_row(prompt(5, 90 + i), 4) for i in range(extra)))
        rows = engine.submit(*(generate_row(prompt(6), 5, temperature=1.0, seed=s) for s in seeds))
        engine.run()
        for row, seed in zip(rows, seeds, strict=True):
            assert engine.tokens(row) == engine.model.generate(prompt(6), 5, temperature=1.0, seed=seed)


def test_stop_token_ends_the_row_and_is_its_last_token() -> None:
    p = prompt(6)
    engine = TurnedEngine(model=ToyModel(scripts={p: [11, 12, 13, 14, 15]}))
    (row,) = engine.submit(generate_row(p, 5, stop_token_ids=(13,)))
    engine.run()
    assert engine.tokens(row) == [11, 12, 13]
    assert engine.last(row).finish is Finish.STOP


def test_the_next_step_is_dispatched_before_the_last_one_is_read() -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(generate_row(prompt(3), 8))
    engine.loop.turn()
    assert len(engine.runner.batches) == 1
    assert engine.updates[row] == []
    engine.loop.turn()
    assert len(engine.runner.batches) == 2
    assert len(engine.tokens(row)) == 1


def test_tops_and_logprobs_are_those_of_the_model() -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(generate_row(prompt(5), 3, top_logprobs=4))
    engine.run()
    context = list(prompt(5))
    for entry in (t for u in engine.updates[row] for t in u.tokens):
        logprobs = engine.model.logprobs(context)
        best = np.argsort(-logprobs, kind="stable")[:4]
        assert [i for i, _ in entry.top] == best.tolist()
        assert [p for _, p in entry.top] == pytest.approx(logprobs[best].tolist())
        assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]))
        context.append(entry.token_id)


@pytest.mark.parametrize("length", [1, 2, 8, 31, 64])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("alternatives", [0, 3])
def test_prompt_logprobs_are_exact_whole_and_in_chunks(length: int, chunked: bool, alternatives: int) -> None:
    engine = TurnedEngine()
    p = prompt(length)
    sampling = SamplingParams(max_tokens=1, temperature=0.0) if chunked else None
    if chunked and length == 64:
        p = p[:63]
    (row,) = engine.submit(Prepared(p, sampling=sampling, targets=(5, 6), prompt_logprobs=alternatives))
    engine.run()
    last = engine.last(row)
    assert kinds(engine)[0] is (Kind.EXTEND if chunked else Kind.SCORE)
    assert [e.token_id for e in last.prompt_logprobs] == list(p[1:])
    for i, entry in enumerate(last.prompt_logprobs):
        logprobs = engine.model.logprobs(p[: i + 1])
        assert entry.logprob == pytest.approx(float(logprobs[p[i + 1]]))
        assert len(entry.top) == alternatives
        assert all(q == pytest.approx(float(logprobs[t])) for t, q in entry.top)
    assert last.target_logprobs == pytest.approx(engine.model.logprobs(p)[[5, 6]].tolist())


def test_a_scored_row_longer_than_the_score_buckets_goes_through_chunks() -> None:
    engine = TurnedEngine(max_score_tokens=32)
    (row,) = engine.submit(Prepared(prompt(50), targets=(7,), prompt_logprobs=0))
    engine.run()
    assert set(kinds(engine)) == {Kind.EXTEND}
    assert engine.last(row).finish is Finish.SCORED
    assert engine.last(row).target_logprobs == pytest.approx([float(engine.model.logprobs(prompt(50))[7])])
    assert len(engine.last(row).prompt_logprobs) == 49
    assert engine.pool.used == 0


def test_max_tokens_zero_ends_as_length_without_a_token() -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(Prepared(prompt(9), sampling=SamplingParams(max_tokens=0), prompt_logprobs=0))
    engine.run()
    assert engine.last(row).finish is Finish.LENGTH
    assert engine.tokens(row) == []
    assert len(engine.last(row).prompt_logprobs) == 8


# Thresholds of the score batch


def busy(engine: TurnedEngine) -> None:
    """A stream on the device, so that it is never idle."""
    engine.submit(generate_row(prompt(3, 77), 40))
    engine.loop.turn()


def score(n: int = 1) -> list[Prepared]:
    return [Prepared(prompt(4, i), targets=(1,)) for i in range(n)]


def test_an_idle_device_never_waits() -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(*score())
    engine.run()
    assert engine.last(row).finish is Finish.SCORED
    assert engine.clock() == 0.0


def test_below_the_thresholds_a_busy_device_lets_rows_gather_until_max_wait() -> None:
    engine = TurnedEngine()
    busy(engine)
    engine.submit(*score(3))
    for _ in range(4):
        engine.loop.turn()
    assert Kind.SCORE not in kinds(engine)
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    engine.loop.turn()
    assert kinds(engine)[-1] is Kind.SCORE
    assert int((engine.runner.batches[-1].length > 0).sum()) == 3


def test_hard_size_dispatches_at_once() -> None:
    engine = TurnedEngine()
    busy(engine)
    engine.submit(*score(4))
    engine.loop.turn()
    engine.loop.turn()  # the first turn may be the stream's
    assert Kind.SCORE in kinds(engine)


def test_soft_size_dispatches_with_an_urgent_row_which_is_part_of_the_batch() -> None:
    engine = TurnedEngine()
    busy(engine)
    engine.submit(*score(1))
    for _ in range(3):
        engine.loop.turn()
    assert Kind.SCORE not in kinds(engine)
    (urgent,) = engine.submit(Prepared(prompt(7), targets=(1,)), priority=Priority.URGENT)
    engine.loop.turn()
    assert kinds(engine)[-1] is Kind.SCORE
    assert engine.runner.batches[-1].length[:2].tolist() == [7, 4]  # urgent first
    engine.run()
    assert engine.ended(urgent)


def test_two_hundred_short_rows_are_all_answered() -> None:
    engine = TurnedEngine()
    rows = engine.submit(*score(200))
    engine.run()
    assert all(engine.last(row).finish is Finish.SCORED for row in rows)


# Turns, priorities, ageing


def test_scoring_prompts_and_generation_take_turns() -> None:
    engine = TurnedEngine()
    engine.submit(generate_row(prompt(3), 50))
    engine.loop.turn()
    engine.submit(generate_row(prompt(40), 1))
    engine.submit(*score(200))
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    for _ in range(9):
        engine.loop.turn()
    assert sorted(set(kinds(engine)[1:10])) == [Kind.DECODE, Kind.EXTEND, Kind.SCORE]
    for i in range(1, 4):
        assert len(set(kinds(engine)[i : i + 3])) == 3


def test_a_long_prompt_does_not_stop_a_stream() -> None:
    engine = TurnedEngine()
    (stream,) = engine.submit(generate_row(prompt(3), 20))
    engine.loop.turn()
    engine.submit(generate_row(prompt(60), 1))
    engine.run()
    between = np.diff(np.flatnonzero([k is Kind.DECODE for k in kinds(engine)]))
    assert between.max() <= 2
    assert len(engine.tokens(stream)) == 20


def test_urgent_before_normal_before_low_and_ageing_beats_priority() -> None:
    engine = TurnedEngine()
    row = generate_row(prompt(4), 1)
    engine.submit(*[generate_row(prompt(4, i), 9) for i in range(4)])  # every slot
    engine.loop.turn()
    (low,) = engine.submit(row, priority=Priority.LOW)
    (normal,) = engine.submit(row)
    (urgent,) = engine.submit(row, priority=Priority.URGENT)
    engine.clock.advance(2 * SMALL.ageing_s + 0.001)
    (late,) = engine.submit(row, priority=Priority.URGENT)
    engine.run()
    order = list(engine.updates)
    assert order.index(urgent) < order.index(normal) < order.index(low) < order.index(late)


# Deadlines


def test_a_row_that_times_out_in_a_queue_never_touches_the_device() -> None:
    engine = TurnedEngine()
    engine.submit(*[generate_row(prompt(4, i), 9) for i in range(4)])
    engine.loop.turn()
    rows = engine.submit(*[generate_row((250, 251, 252 + i), 2) for i in range(20)], deadline_s=1.0)
    engine.clock.advance(1.0)
    engine.loop.turn()
    assert all(isinstance(engine.last(row).error, DeadlineExceeded) for row in rows)
    engine.run()
    prompts = [b.tokens[:, :2] for b in engine.runner.batches if b.bucket.tokens > 1]
    assert not any((tokens == (250, 251)).all(axis=1).any() for tokens in prompts)


def test_a_running_row_ends_at_its_deadline() -> None:
    engine = TurnedEngine()
    (row,) = engine.submit(generate_row(prompt(4), 30), deadline_s=1.0)
    for _ in range(5):
        engine.loop.turn()
    engine.clock.advance(1.0)
    engine.loop.turn()
    assert isinstance(engine.last(row).error, DeadlineExceeded)
    assert engine.pool.used == 0


# Memory


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = TurnedEngine(num_pages=9)  # 8 pages of 4
    with pytest.raises(ContextLengthExceeded, match=r"60 tokens and 5.*65 together.*64"):
        engine.submit(generate_row(prompt(60), 5))
    with pytest.raises(ContextLengthExceeded, match=r"34 tokens need 9 KV pages of 4; the cache has 8"):
        engine.submit(generate_row(prompt(30), 4))
    (row,) = engine.submit(generate_row(prompt(30), 3))  # the last token is never fed back
    engine.run()
    assert engine.last(row).finish is Finish.LENGTH


def test_rows_wait_for_pages_and_none_overtakes() -> None:
    engine = TurnedEngine(num_pages=9)
    (first,) = engine.submit(generate_row(prompt(24), 8))  # 6 pages, and 2 more as it grows
    engine.loop.turn()
    (large,) = engine.submit(generate_row(prompt(24, 1), 2))  # 6 pages: waits
    (small,) = engine.submit(generate_row(prompt(3, 2), 2))  # would fit at once
    engine.run()
    order = list(engine.updates)
    assert order.index(first) < order.index(large) < order.index(small)
    assert engine.pool.high_water <= 8


def test_rows_grow_page_by_page_and_the_youngest_makes_room() -> None:
    """Two rows of 6 pages each at their end in a cache of 8: the younger one is stopped, and loses nothing."""
    engine = TurnedEngine(num_pages=9)
    asked = [(prompt(8, i), 16) for i in range(2)]
    rows = engine.submit(*(generate_row(p, n) for p, n in asked))
    engine.loop.turn()
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    engine.run()
    assert engine.scheduler.num_preempted > 0
    assert rows[0].run == 0
    for row, (p, n) in zip(rows, asked, strict=True):
        assert engine.tokens(row) == engine.model.generate(p, n)
    assert list(engine.updates) == rows


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stopped_row_starts_again_in_its_place_with_its_tokens(logprobs: bool) -> None:
    engine = TurnedEngine()
    lows = engine.submit(*[generate_row(prompt(9, i), 12, temperature=1.0, seed=i) for i in range(4)])
    lows += engine.submit(generate_row(prompt(3, 8), 1))
    for row in lows:
        assert row.priority is Priority.NORMAL
    for _ in range(6):
        engine.loop.turn()
    asked = Prepared(
        prompt(5, 20), SamplingParams(max_tokens=2, temperature=0.0), prompt_logprobs=0 if logprobs else -1
    )
    (urgent,) = engine.submit(asked, priority=Priority.URGENT)
    engine.run()
    assert [row.run for row in lows] == [0, 0, 0, 1, 0]  # the youngest of the four that ran
    assert engine.tokens(urgent) == engine.model.generate(prompt(5, 20), 2)
    for i, row in enumerate(lows[:4]):
        assert engine.tokens(row) == engine.model.generate(prompt(9, i), 12, temperature=1.0, seed=i)
    ends = [row for row in engine.updates if engine.ended(row)]
    assert ends.index(lows[3]) < ends.index(lows[4])


def test_the_slot_limit_gives_way_to_a_higher_class_only() -> None:
    engine = TurnedEngine()
    running = engine.submit(*[generate_row(prompt(4, i), 30) for i in range(4)], priority=Priority.LOW)
    for _ in range(5):
        engine.loop.turn()
    (same,) = engine.submit(generate_row(prompt(4, 9), 1), priority=Priority.LOW)
    for _ in range(3):
        engine.loop.turn()
    assert not engine.updates[same]
    (urgent,) = engine.submit(generate_row(prompt(4, 10), 1), priority=Priority.URGENT)
    engine.clock.advance(SMALL.max_wait_ms / 1000)
    for _ in range(4):
        engine.loop.turn()
    assert engine.ended(urgent)
    assert not engine.updates[same]
    engine.run()
    for i, row in enumerate(running):
        assert engine.tokens(row) == engine.model.generate(prompt(4, i), 30)


def test_a_row_that_has_waited_for_its_bound_is_not_stopped_again() -> None:
    engine = TurnedEngine()
    first = engine.submit(*[generate_row(prompt(4, i), 9) for i in range(4)])
    engine.loop.turn()
    (low,) = engine.submit(generate_row(prompt(4, 8), 30), priority=Priority.LOW)
    engine.clock.advance(2 * SMALL.ageing_s + 0.001)
    while not engine.updates[low]:
        engine.loop.turn()
    assert all(engine.ended(row) for row in first)
    urgent = engine.submit(*[generate_row(prompt(4, 20 + i), 9) for i in range(20)], priority=Priority.URGENT)
    engine.run()
    assert low.run == 0
    assert engine.tokens(low) == engine.model.generate(prompt(4, 8), 30)
    assert all(engine.ended(row) for row in urgent)


def test_a_stopped_row_does_not_hold_up_the_class_that_stopped_it() -> None:
    """It came first, but its ageing counts what it waited: urgent rows still go before it, until its bound."""
    engine = TurnedEngine()
    lows = engine.submit(*[generate_row(prompt(4, i), 40) for i in range(4)], priority=Priority.LOW)
    for _ in range(3):
        engine.loop.turn()
    engine.clock.advance(100.0)
    for i in range(6):
        (urgent,) = engine.submit(generate_row(prompt(4, 20 + i), 2), priority=Priority.URGENT)
        engine.clock.advance(0.01)
        for _ in range(6):
            engine.loop.turn()
        assert engine.ended(urgent)
    engine.run()
    for i, row in enumerate(lows):
        assert engine.tokens(row) == engine.model.generate(prompt(4, i), 40)


# The prefix cache


def extended(engine: TurnedEngine) -> int:
    """Tokens that went through EXTEND steps."""
    return sum(int(b.length.sum()) for b in engine.runner.batches if b.bucket.kind is Kind.EXTEND)


def test_a_prompt_that_starts_as_an_earlier_one_skips_the_whole_pages_they_share() -> None:
    engine = TurnedEngine()
    shared = prompt(18)
    engine.submit(generate_row((*shared, 7, 8), 3))
    engine.run()
    before = extended(engine)
    (row,) = engine.submit(generate_row((*shared, 9, 10, 11), 3))
    engine.run()
    assert extended(engine) - before == 21 - 16  # four pages of four
    assert engine.last(row).num_cached == 0  # told with the first news
    assert engine.updates[row][0].num_cached == 16
    assert engine.tokens(row) == engine.model.generate((*shared, 9, 10, 11), 3)


def test_what_was_generated_is_reused_by_the_next_turn_of_a_conversation() -> None:
    engine = TurnedEngine()
    (first,) = engine.submit(generate_row(prompt(6), 12))
    engine.run()
    said = (*prompt(6), *engine.tokens(first))
    (second,) = engine.submit(generate_row((*said, 5, 6), 2))
    engine.run()
    assert engine.updates[second][0].num_cached == 16  # of 18: the last generated token was never fed


def test_the_last_token_is_computed_even_if_all_is_known() -> None:
    engine = TurnedEngine()
    for _ in range(2):
        (row,) = engine.submit(generate_row(prompt(16), 2))
        engine.run()
    assert engine.updates[row][0].num_cached == 12
    assert engine.tokens(row) == engine.model.generate(prompt(16), 2)


def test_another_tenant_never_hits() -> None:
    engine = TurnedEngine()
    for tenant, cached in (("a", 0), ("a", 16), ("ab", 0), ("b", 0), ("b", 16)):
        (row,) = engine.submit(generate_row(prompt(18), 1), tenant=tenant)
        engine.run()
        assert engine.updates[row][0].num_cached == cached


def test_prompt_logprobs_stay_exact_on_a_warm_cache() -> None:
    engine = TurnedEngine()
    for _ in range(2):
        asked = Prepared(prompt(30), SamplingParams(max_tokens=1, temperature=0.0), prompt_logprobs=0)
        (row,) = engine.submit(generate_row(prompt(30), 1), asked)[1:]
        engine.run()
        entries = engine.last(row).prompt_logprobs
        assert [e.token_id for e in entries] == list(prompt(30)[1:])
        for i, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(engine.model.logprobs(prompt(30)[: i + 1])[entry.token_id]))


def test_choices_of_one_prompt_share_its_pages_and_compute_it_once() -> None:
    engine = TurnedEngine()
    p = prompt(30)
    rows = engine.submit(*[generate_row(p, 4, temperature=1.0, seed=i) for i in range(4)])
    engine.run()
    assert extended(engine) == 30 + 3 * (30 - 28)
    assert engine.pool.high_water <= 7 + 4 * 2  # seven whole pages once; each its own tail and growth
    for i, row in enumerate(rows):
        assert engine.tokens(row) == engine.model.generate(p, 4, temperature=1.0, seed=i)


def test_cached_pages_count_as_free_and_go_when_they_are_needed() -> None:
    engine = TurnedEngine(num_pages=9)
    for i in range(12):
        (row,) = engine.submit(generate_row(prompt(25, i), 6))  # all eight pages
        engine.run()
        assert engine.tokens(row) == engine.model.generate(prompt(25, i), 6)
        assert engine.pool.used == 0
    assert engine.scheduler.cache.num_evicted > 0
    assert engine.pool.cached + engine.pool.free == engine.pool.total


def test_nothing_is_kept_from_a_row_whose_logits_were_not_finite_or_from_a_lost_cache() -> None:
    bad = prompt(12)
    engine = TurnedEngine(model=ToyModel(poisoned=frozenset({bad})), fail_result=[3])
    engine.submit(generate_row(bad, 1))
    engine.run()
    assert engine.pool.cached == 2  # the chunk of eight before the bad one was good
    engine.submit(generate_row(prompt(20, 1), 4))
    engine.run()
    assert engine.pool.cached == 0


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    engine = TurnedEngine(replace(SMALL, prefix_cache=False))
    for _ in range(2):
        (row,) = engine.submit(generate_row(prompt(18), 9))
        engine.run()
        assert engine.updates[row][0].num_cached == 0
        assert engine.pool.cached == 0


# Cancels


@pytest.mark.parametrize("turns", range(8))
def test_a_cancel_at_any_point_frees_the_pages_and_ends_the_row_once(turns: int) -> None:
    engine = TurnedEngine()
    row, other = engine.submit(generate_row(prompt(20), 9), generate_row(prompt(6, 1), 9))
    for _ in range(turns):
        engine.loop.turn()
    engine.cancel(row)
    engine.cancel(row)
    assert isinstance(engine.last(row).error, Cancelled)
    assert engine.pool.held_by(row) == frozenset()
    (late,) = engine.submit(generate_row(prompt(33, 2), 9))  # takes the freed pages and slot over
    engine.run()
    assert engine.tokens(other) == engine.model.generate(prompt(6, 1), 9)
    assert engine.tokens(late) == engine.model.generate(prompt(33, 2), 9)


def test_cancelled_rows_are_counted() -> None:
    engine = TurnedEngine()
    for row in engine.submit(*[generate_row(prompt(4, i), 9) for i in range(12)]):
        engine.cancel(row)
    assert engine.stats.cancelled_rows == 12
    assert engine.scheduler.num_waiting == 0


# Faults


def test_logits_that_are_not_finite_end_their_row_alone() -> None:
    bad, good = prompt(5), prompt(5, 1)
    engine = TurnedEngine(model=ToyModel(poisoned=frozenset({bad})))
    rows = engine.submit(generate_row(bad, 4), generate_row(good, 4), Prepared(bad), Prepared(good))
    engine.run()
    assert [isinstance(engine.last(row).error, StepFailed) for row in rows] == [True, False, True, False]
    assert engine.tokens(rows[1]) == engine.model.generate(good, 4)
    assert engine.pool.used == 0


@pytest.mark.parametrize("where", ["fail_submit", "fail_result"])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 5])
def test_a_failed_kv_step_ends_its_own_rows_and_the_others_start_again(where: str, step: int) -> None:
    engine = TurnedEngine(**{where: [step]})
    rows = engine.submit(*[generate_row(prompt(12, i), 6) for i in range(6)])  # four run, two wait
    engine.run()
    failed = [row for row in rows if engine.last(row).error is not None]
    batch = engine.runner.batches[step]
    assert len(failed) == int((batch.length > 0).sum()) > 0
    assert all(isinstance(engine.last(row).error, StepFailed) for row in failed)
    for i, row in enumerate(rows):
        if row not in failed:
            assert engine.tokens(row) == engine.model.generate(prompt(12, i), 6)
    assert rows[4] not in failed
    assert rows[5] not in failed
    assert engine.runner.num_resets == 1
    assert engine.scheduler.num_preempted == 0  # nobody made room
    assert engine.pool.used == 0
    (again,) = engine.submit(generate_row(prompt(12), 6))
    engine.run()
    assert engine.tokens(again) == engine.model.generate(prompt(12), 6)


@pytest.mark.parametrize("where", ["fail_submit", "fail_result"])
def test_a_failed_score_step_takes_no_stream_along(where: str) -> None:
    engine = TurnedEngine(**{where: [2]})
    (stream,) = engine.submit(generate_row(prompt(3), 10))
    engine.loop.turn()
    engine.loop.turn()
    rows = engine.submit(*score(4))
    engine.loop.turn()
    assert kinds(engine)[2] is Kind.SCORE
    engine.run()
    assert all(isinstance(engine.last(row).error, StepFailed) for row in rows)
    assert engine.tokens(stream) == engine.model.generate(prompt(3), 10)
    assert engine.runner.num_resets == 0
