"""What a chunk may take beside streams, and what prompts that go whole owe them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.costs import StepCosts
from serving.engine.token_gap import TokenGap

STEP, WIDE = Bucket(Kind.DECODE, 4, 1, 8), Bucket(Kind.DECODE, 16, 1, 8)
SHORT, LONG, BATCH = (Bucket(Kind.EXTEND, rows, tokens, 8) for rows, tokens in ((1, 32), (1, 64), (8, 64)))
SECONDS = {STEP: 0.1, WIDE: 0.4, SHORT: 0.15, LONG: 0.3, BATCH: 1.0}


def new_gap() -> TokenGap:
    costs = StepCosts()
    for bucket, seconds in SECONDS.items():
        costs.observe(bucket, seconds)
    return TokenGap(EngineConfig(token_gap_ratio=3.0, token_gap_ms=20.0), BATCH, costs)


@pytest.fixture
def gap() -> TokenGap:
    return new_gap()


def test_a_chunk_stretches_the_step_by_the_ratio_less_a_margin(gap: TokenGap) -> None:
    assert gap.allows(0.099, STEP, 4)  # of 2 x 0.1 x 0.5
    assert not gap.allows(0.11, STEP, 4)


def test_rows_that_wait_count_as_if_they_ran(gap: TokenGap) -> None:
    """With ten rows a step would take half way between those of 4 and of 16."""
    assert gap.allows(0.24, STEP, 10)  # of 2 x 0.25 x 0.5
    assert not gap.allows(0.26, STEP, 10)


def test_prompts_that_go_whole_owe_what_they_took(gap: TokenGap) -> None:
    assert gap.allows_whole
    gap.extended(0.3)
    for _ in range(2):
        assert not gap.allows_whole
        gap.decoded(STEP, 4)  # pays 2 x 0.1
    assert gap.allows_whole


def test_no_more_than_a_batch_is_paid_ahead_or_owed(gap: TokenGap) -> None:
    for _ in range(100):
        gap.decoded(STEP, 4)
    gap.extended(1.0)
    assert gap.allows_whole
    for _ in range(100):
        gap.extended(0.15)
    for _ in range(4):  # each pays 0.2
        gap.decoded(STEP, 4)
        assert not gap.allows_whole
    for _ in range(2):
        gap.decoded(STEP, 4)
    assert gap.allows_whole


def test_who_finds_no_stream_owes_nothing(gap: TokenGap) -> None:
    gap.extended(1.0)
    gap.no_streams()
    gap.extended(1.0)
    assert gap.allows_whole


@given(st.lists(st.sampled_from([STEP, SHORT, LONG, BATCH]), max_size=200))
def test_in_any_stretch_prompts_take_what_decode_steps_pay_and_two_batches_more(wanted: list[Bucket]) -> None:
    gap = new_gap()
    taken_s = [0.0]  # by prompts, less what was paid
    for bucket in wanted:
        if bucket is STEP:
            gap.decoded(STEP, 4)
            taken_s.append(taken_s[-1] - 2 * 0.1)
        elif gap.allows_whole:
            gap.extended(SECONDS[bucket])
            taken_s.append(taken_s[-1] + SECONDS[bucket])
    for before in range(len(taken_s)):
        assert max(taken_s[before:]) - taken_s[before] <= 2 * SECONDS[BATCH] + 1e-9
