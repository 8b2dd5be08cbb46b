"""Steps of a round: as few as take least time, and every row once in each."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from serving.batch import Kind, StepTimes
from serving.engine.rounds import first_count
from tests.fakes_engine import SMALL, TurnedEngine, generate_row, prompt

COUNTS = [1, 4, 16, 32, 64]


def steps(num_rows: int, seconds: dict[int, float]) -> list[int]:
    """The steps of a round."""
    counts = []
    while num_rows:
        counts.append(first_count(num_rows, COUNTS, seconds.__getitem__))
        num_rows -= counts[-1]
    return counts


def bucket_rows(rows: int) -> int:
    return next(count for count in COUNTS if count >= rows)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, [1]), (16, [16]), (17, [16, 1]), (18, [16, 2]), (30, [30]), (34, [32, 2]), (45, [32, 13]), (60, [60])],
)
def test_a_full_step_and_one_for_the_rest_where_that_is_sooner(num_rows: int, expected: list[int]) -> None:
    assert steps(num_rows, {1: 0.013, 4: 0.019, 16: 0.044, 32: 0.080, 64: 0.150}) == expected


@given(st.integers(1, 64))
def test_one_step_where_a_larger_one_takes_hardly_longer(num_rows: int) -> None:
    assert steps(num_rows, {1: 0.010, 4: 0.010, 16: 0.011, 32: 0.011, 64: 0.012}) == [num_rows]


@given(st.integers(1, 64))
def test_one_step_where_all_are_too_short_to_matter_or_not_known(num_rows: int) -> None:
    assert steps(num_rows, {count: count * 1e-6 for count in COUNTS}) == [num_rows]
    assert steps(num_rows, dict.fromkeys(COUNTS, 0.0)) == [num_rows]
    assert steps(num_rows, {1: 1.0, 4: 0.0, 16: 0.0, 32: 0.0, 64: 0.0}) == [num_rows]


@given(st.integers(1, 64), st.lists(st.floats(0.002, 1.0), min_size=5, max_size=5))
def test_a_round_takes_no_longer_than_one_step(num_rows: int, times: list[float]) -> None:
    seconds = dict(zip(COUNTS, sorted(times), strict=True))
    found = steps(num_rows, seconds)
    assert sum(found) == num_rows
    assert sum(seconds[bucket_rows(rows)] for rows in found) <= seconds[bucket_rows(num_rows)]


def test_every_row_has_one_token_a_round_and_prompts_come_between_rounds() -> None:
    """Buckets of 1, 4, 16 and 64 rows took 4, 7, 19 and 67 ms: 18 rows go as 16 and 2, in 26 ms."""
    config = replace(SMALL, max_slots=32, max_context=256)
    engine = TurnedEngine(config, ms_per_token=1.0, num_pages=1025, max_context=256)
    for bucket in engine.runner.buckets:
        engine.costs.learn(bucket, StepTimes((bucket.rows + 3) / 1000))
    rows = engine.submit(*[generate_row(prompt(3, i), 60) for i in range(18)])
    while len(engine.updates[rows[-1]]) < 8:
        engine.loop.turn()
    come = len(engine.runner.batches)
    (late,) = engine.submit(generate_row(prompt(40, 99), 1))
    engine.run()
    assert engine.ended(late)
    assert [engine.tokens(row) for row in rows] == [engine.model.generate(prompt(3, i), 60) for i in range(18)]
    sizes = [int((b.length > 0).sum()) if b.bucket.kind is Kind.DECODE else 0 for b in engine.runner.batches[come:]]
    full = sizes[: max(i for i, size in enumerate(sizes) if size == 2) + 1]
    assert full.count(16) > 20
    assert all(after == 2 for size, after in pairwise(full) if size == 16)
