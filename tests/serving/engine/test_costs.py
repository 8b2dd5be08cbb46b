"""Step times by bucket."""

import pytest

from serving.batch import Bucket, Kind, StepTimes
from serving.engine.costs import StepCosts


def extend(rows: int, tokens: int) -> Bucket:
    return Bucket(Kind.EXTEND, rows, tokens, 4)


def test_unseen_kinds_cost_nothing_and_unseen_buckets_what_their_tokens_would() -> None:
    costs = StepCosts()
    assert costs.seconds(extend(1, 64)) == 0.0
    costs.observe(extend(1, 64), 0.1)
    costs.observe(Bucket(Kind.DECODE, 4, 1, 4), 9.0)
    assert costs.seconds(extend(1, 64)) == 0.1
    assert costs.seconds(extend(1, 256)) == pytest.approx(0.4)
    assert costs.seconds(Bucket(Kind.SCORE, 1, 64, 0)) == 0.0


def test_the_average_follows_a_change() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(extend(1, 64), 1.0)
    costs.observe(extend(1, 64), 3.0)
    assert 1.0 < costs.seconds(extend(1, 64)) < 2.0
    for _ in range(50):
        costs.observe(extend(1, 64), 3.0)
    assert costs.seconds(extend(1, 64)) == pytest.approx(3.0, rel=1e-3)


def test_a_step_takes_longer_behind_more_tokens_as_the_warm_up_said() -> None:
    costs = StepCosts()
    costs.learn(extend(1, 32), StepTimes(1.0, 3.0, 4000))
    assert [costs.seconds(extend(1, 32), prefix) for prefix in (0, 1000, 4000)] == pytest.approx([1.0, 1.5, 3.0])
    costs.learn(extend(1, 64), StepTimes(1.0, 0.9, 4000))  # measured so by chance
    costs.learn(extend(8, 64), StepTimes(1.0))
    assert costs.seconds(extend(1, 64), 4000) == costs.seconds(extend(8, 64), 4000) == 1.0


def test_what_is_seen_moves_the_whole_line() -> None:
    """Twice as slow far on: twice as slow at the start of the next prompt."""
    costs = StepCosts()
    costs.learn(extend(1, 32), StepTimes(1.0, 3.0, 4000))
    for _ in range(50):
        costs.observe(extend(1, 32), 4.0, 2000)
    assert [costs.seconds(extend(1, 32), prefix) for prefix in (0, 4000)] == pytest.approx([2.0, 6.0], rel=1e-3)
