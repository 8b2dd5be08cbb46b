"""What a chunk may take beside streams, and what saves up for a batch."""

import pytest

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.costs import StepCosts
from serving.engine.token_gap import TokenGap

STEP, WIDE = Bucket(Kind.DECODE, 4, 1, 8), Bucket(Kind.DECODE, 16, 1, 8)
SHORT, LONG, BATCH = (Bucket(Kind.EXTEND, rows, tokens, 8) for rows, tokens in ((1, 32), (1, 64), (8, 64)))
SECONDS = {STEP: 0.1, WIDE: 0.4, SHORT: 0.15, LONG: 0.3, BATCH: 1.0}


@pytest.fixture
def gap() -> TokenGap:
    costs = StepCosts()
    for bucket, seconds in SECONDS.items():
        costs.observe(bucket, seconds)
    return TokenGap(EngineConfig(token_gap_ratio=3.0, token_gap_ms=20.0), BATCH, costs)


def test_a_chunk_stretches_the_step_by_the_ratio_less_a_margin(gap: TokenGap) -> None:
    assert gap.allows(SHORT, STEP, 4)  # 0.15 of 2 x 0.1 x 0.8
    assert not gap.allows(LONG, STEP, 4)


def test_rows_that_wait_count_as_if_they_ran(gap: TokenGap) -> None:
    """With ten rows a step would take half way between those of 4 and of 16."""
    assert gap.allows(LONG, STEP, 10)  # 0.3 of 2 x 0.25 x 0.8


def test_a_batch_is_saved_up_step_by_step_and_spent_at_once(gap: TokenGap) -> None:
    assert not gap.allows_batch
    for _ in range(7):
        gap.decoded(STEP, 4)  # 0.16 each
        saved = gap.allows_batch
    assert saved
    gap.decoded(STEP, 4)
    gap.extended(BATCH)
    gap.decoded(STEP, 4)
    assert not gap.allows_batch  # more than one is never saved
    gap.no_streams()
    assert gap.allows_batch
