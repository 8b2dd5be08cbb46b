"""The list of shapes and the choice among them."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.batch import Bucket, Kind
from serving.config import EngineConfig
from serving.engine.buckets import BucketSet, derive, ladder

configs = st.builds(
    EngineConfig,
    max_slots=st.integers(1, 200),
    page_size=st.sampled_from([1, 8, 16, 64]),
    hard_size=st.integers(8, 64),
    max_score_rows=st.integers(1, 128),
    max_score_tokens=st.integers(1, 2048),
    score_batch_tokens=st.integers(1, 16384),
    prefill_chunk=st.integers(1, 1024),
    prefill_batch_tokens=st.integers(1, 4096),
    speculate=st.booleans(),
    speculate_rows=st.integers(1, 100),
)


def test_about_twenty_for_the_embedded_model() -> None:
    buckets = derive(EngineConfig(), 512)
    assert len(buckets) <= 24
    assert len(set(buckets)) == len(buckets)


@pytest.mark.parametrize(
    ("first", "last", "step", "rungs"),
    [(1, 64, 4, [1, 4, 16, 64]), (32, 100, 2, [32, 64, 100]), (32, 20, 2, [20]), (1, 1, 4, [1])],
)
def test_ladder(first: int, last: int, step: int, rungs: list[int]) -> None:
    assert ladder(first, last, step) == rungs


@given(configs, st.integers(2, 5000))
def test_every_row_that_the_limits_allow_fits(config: EngineConfig, max_context: int) -> None:
    buckets = BucketSet(derive(config, max_context))
    buckets.check(config, max_context)
    pages = -(-max_context // config.page_size)
    assert buckets.fit(Kind.SCORE, 1, min(max_context, config.max_score_tokens)) is not None
    assert buckets.fit(Kind.EXTEND, 1, min(config.prefill_chunk, max_context), pages) is not None
    assert buckets.fit(Kind.DECODE, config.max_slots, 1, pages) is not None
    speculative = min(config.speculate_rows, config.max_slots) if config.speculate else 0
    assert buckets.max_rows(Kind.SPECULATE) == speculative
    assert not speculative or buckets.fit(Kind.SPECULATE, speculative, 2, pages) is not None


@given(configs, st.integers(2, 5000))
def test_batches_keep_within_their_budgets(config: EngineConfig, max_context: int) -> None:
    for b in derive(config, max_context):
        if b.rows > 1 and b.kind is Kind.SCORE:
            assert b.rows * b.tokens <= config.score_batch_tokens
            assert b.rows <= config.max_score_rows
        if b.rows > 1 and b.kind is Kind.EXTEND:
            assert b.rows * b.tokens <= config.prefill_batch_tokens


@given(configs, st.sampled_from(Kind), st.integers(1, 80), st.integers(1, 600), st.integers(0, 300))
def test_the_choice_is_the_cheapest_that_fits(
    config: EngineConfig, kind: Kind, rows: int, tokens: int, pages: int
) -> None:
    buckets = derive(config, 4096)
    fitting = [b for b in buckets if b.kind is kind and b.rows >= rows and b.tokens >= tokens and b.pages >= pages]
    chosen = BucketSet(buckets).fit(kind, rows, tokens, pages)
    if not fitting:
        assert chosen is None
    else:
        assert chosen in fitting
        assert chosen.rows * chosen.tokens == min(b.rows * b.tokens for b in fitting)


def test_check_names_what_is_missing() -> None:
    config = EngineConfig(max_slots=4, page_size=16)
    extend, decode = Bucket(Kind.EXTEND, 1, 64, 32), Bucket(Kind.DECODE, 4, 1, 32)
    BucketSet([extend, decode]).check(config, 512)
    with pytest.raises(ValueError, match="extend buckets hold 0 pages"):
        BucketSet([decode]).check(config, 512)
    with pytest.raises(ValueError, match="decode buckets hold 0 rows"):
        BucketSet([extend]).check(config, 512)
