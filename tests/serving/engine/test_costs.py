"""Step times by bucket."""

import pytest

from serving.batch import Bucket, Kind
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
