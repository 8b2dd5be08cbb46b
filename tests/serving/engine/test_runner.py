"""The compiled steps behind the border, against the model's own full forward."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.sharding import make_mesh, replicated
from model.transformer import Transformer
from serving.batch import Batch, Bucket, Kind
from serving.config import EngineConfig
from serving.engine.runner import JaxRunner
from serving.engine.sequence import make_sequences
from serving.engine.step import score_step
from serving.types import Job, Prepared, SamplingParams, TokenLogprob, Update
from tests.fakes_model import Driven, Logprobs, tiny_model

CONFIG = EngineConfig(
    max_slots=4,
    page_size=8,
    num_pages=40,
    hard_size=4,
    soft_size=2,
    max_context=64,
    prefill_chunk=16,
    prefill_batch_tokens=32,
    max_score_rows=4,
    max_score_tokens=32,
    score_batch_tokens=128,
)


pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(3)


@pytest.fixture(scope="module")
def runner(model: Transformer, quick_compile: None) -> Iterator[JaxRunner]:
    runner = JaxRunner(model, CONFIG, max_context=64)
    seen: list[tuple[int, int]] = []
    runner.warmup(lambda done, total: seen.append((done, total)))
    assert seen == [(i, len(runner.buckets)) for i in range(len(runner.buckets) + 1)]
    yield runner
    runner.close()


@pytest.fixture
def driven(runner: JaxRunner) -> Driven:
    runner.reset()
    return Driven(runner, CONFIG)


@pytest.fixture(scope="module")
def logprobs(model: Transformer) -> Logprobs:
    return Logprobs(model)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(2, 320, length))


def tokens(updates: list[Update]) -> list[TokenLogprob]:
    return [t for u in updates for t in u.tokens]


def greedy(max_tokens: int, **params: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)


def test_greedy_generation_equals_the_full_forward(driven: Driven, logprobs: Logprobs) -> None:
    asked = [(prompt(n, n), 6) for n in (1, 7, 8, 16, 17, 33, 50)]
    got = driven.run(*(Prepared(p, sampling=greedy(n)) for p, n in asked))
    for updates, (p, n) in zip(got, asked, strict=True):
        context = list(p)
        assert len(tokens(updates)) == n
        for token in tokens(updates):
            expected = logprobs(context)[-1]
            assert expected[token.token_id] >= expected.max() - 1e-5
            assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-4)
            context.append(token.token_id)


@pytest.mark.parametrize("length", [1, 2, 16, 31, 32, 33, 48, 49, 64])
def test_scores_and_prompt_logprobs(driven: Driven, logprobs: Logprobs, length: int) -> None:
    p = prompt(length, length)
    (updates,) = driven.run(Prepared(p, targets=(5, 7, 300), prompt_logprobs=3))
    expected = logprobs(list(p))
    assert updates[-1].target_logprobs == pytest.approx(expected[-1][[5, 7, 300]].tolist(), abs=1e-4)
    entries = updates[-1].prompt_logprobs
    assert [e.token_id for e in entries] == list(p[1:])
    assert [e.logprob for e in entries] == pytest.approx([float(expected[i, t]) for i, t in enumerate(p[1:])], abs=1e-4)
    for i, entry in enumerate(entries):
        best = np.sort(expected[i])[::-1][:3]
        assert [q for _, q in entry.top] == pytest.approx(best.tolist(), abs=1e-4)


def test_a_sampled_row_is_the_same_alone_and_among_others(driven: Driven) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.8, top_k=40, top_p=0.95, seed=2**50 + 3)
    wanted = Prepared(prompt(9), sampling=sampling)
    (alone,) = driven.run(wanted)
    others = [Prepared(prompt(5, i), sampling=replace(sampling, seed=i)) for i in range(5)]
    among = driven.run(*others, wanted)[-1]
    assert [t.token_id for t in tokens(alone)] == [t.token_id for t in tokens(among)]
    different = driven.run(Prepared(prompt(9), sampling=replace(sampling, seed=4)))[0]
    assert [t.token_id for t in tokens(alone)] != [t.token_id for t in tokens(different)]


def test_the_warm_up_timed_every_step_with_a_cache(runner: JaxRunner) -> None:
    assert set(runner.step_s) == {bucket for bucket in runner.buckets if bucket.kind is not Kind.SCORE}
    assert min(times.alone_s for times in runner.step_s.values()) > 0
    far = {bucket: times for bucket, times in runner.step_s.items() if times.prefix}
    assert set(far) == {b for b in runner.buckets if b.kind is Kind.EXTEND and b.rows == 1 and b.tokens < 64}
    assert min(times.far_s for times in far.values()) > 0


def test_nothing_compiles_after_warmup(driven: Driven, runner: JaxRunner) -> None:
    before = runner.num_compiles
    for length in (1, 8, 16, 17, 32, 33, 63):
        rows = [
            Prepared(prompt(length), targets=(1,), prompt_logprobs=2),
            Prepared(prompt(length), sampling=greedy(1, top_logprobs=5), prompt_logprobs=0),
            Prepared(prompt(length), sampling=SamplingParams(max_tokens=1, temperature=1.0, min_p=0.1, seed=9)),
        ]
        driven.run(*rows)
        driven.run(*rows[:1] * 7, *rows[1:] * 3)
    runner.reset()
    assert runner.num_compiles == before
    jax.jit(lambda x: x * 3)(np.ones(3))  # the counter does see what compiles
    assert runner.num_compiles > before


def test_no_step_copies_the_cache(runner: JaxRunner) -> None:
    """The pools are donated and written in place: a copy would cost their whole size at every step."""
    sizes = {pool.size for pool in runner._state.pools}
    for bucket, program in runner._programs.items():
        text = program.run.as_text()  # type: ignore[attr-defined]
        copied = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        assert not [dims for dims in copied if math.prod(map(int, dims.split(","))) in sizes], bucket


def test_a_mesh_of_one_device_gives_the_same(model: Transformer, driven: Driven) -> None:
    mesh = make_mesh({})
    buckets = [Bucket(Kind.SCORE, 4, 32, 0), Bucket(Kind.EXTEND, 1, 16, 8), Bucket(Kind.DECODE, 4, 1, 8)]
    params = nnx.state(model)
    placed = nnx.merge(nnx.graphdef(model), jax.device_put(params, replicated(mesh)))
    meshed = JaxRunner(placed, CONFIG, max_context=64, mesh=mesh, buckets=buckets)
    meshed.warmup(lambda done, total: None)
    rows = [Prepared(prompt(9), sampling=greedy(4)), Prepared(prompt(12), targets=(5, 6))]
    plain, on_mesh = driven.run(*rows), Driven(meshed, CONFIG).run(*rows)
    assert [t.token_id for t in tokens(plain[0])] == [t.token_id for t in tokens(on_mesh[0])]
    assert plain[1][-1].target_logprobs == pytest.approx(on_mesh[1][-1].target_logprobs, abs=1e-4)
    meshed.close()


def test_a_shape_that_was_not_compiled_raises(runner: JaxRunner) -> None:
    bucket = Bucket(Kind.SCORE, 2, 32, 0)
    with pytest.raises(ValueError, match="not compiled"):
        runner.submit(score_step(bucket, make_sequences(None, Job("j", "t", (Prepared((1,)),)))).batch)


def test_a_lost_cache_is_replaced_by_reset(driven: Driven, runner: JaxRunner, logprobs: Logprobs) -> None:
    """The donated state is gone when the host raises between the call and the rebind."""
    state = runner._state
    assert state is not None
    for array in jax.tree.leaves(state):
        array.delete()
    (failed,) = driven.run(Prepared(prompt(5), sampling=greedy(3)))
    assert failed[-1].error is not None
    (good,) = driven.run(Prepared(prompt(5), sampling=greedy(3)))
    assert len(tokens(good)) == 3
    assert tokens(good)[0].token_id == int(logprobs(list(prompt(5)))[-1].argmax())


def test_pages_of_an_earlier_prompt_are_read_as_if_they_were_computed(driven: Driven, logprobs: Logprobs) -> None:
    first = prompt(21)
    driven.run(Prepared(first, sampling=greedy(2)))
    second = (*first[:18], 3, 4, 5)
    (warm,) = driven.run(Prepared(second, targets=(1, 2), sampling=greedy(3)))
    assert warm[0].num_cached >= CONFIG.page_size
    context = list(second)
    for token in tokens(warm):
        expected = logprobs(context)[-1]
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-4)
        assert token.token_id == int(expected.argmax())
        context.append(token.token_id)


def test_nan_left_in_pages_by_an_earlier_owner_harms_nobody(driven: Driven, runner: JaxRunner) -> None:
    (clean,) = driven.run(Prepared(prompt(20), sampling=greedy(4)))
    assert runner._state is not None
    pools = tuple(jax.device_put(np.full(p.shape, np.nan, p.dtype)) for p in runner._state.pools)
    runner._state = runner._state._replace(pools=pools)
    driven.scheduler.cache.clear()
    (dirty,) = driven.run(Prepared(prompt(20), sampling=greedy(4)))
    assert tokens(clean) == tokens(dirty)


def test_logits_that_are_not_finite_end_one_row(model: Transformer) -> None:
    """Token 3 has a NaN embedding."""
    broken = nnx.clone(model)
    broken.embed_tokens.embedding[...] = broken.embed_tokens.embedding[...].at[3].set(jnp.nan)
    runner = JaxRunner(broken, CONFIG, max_context=64, buckets=[b for b in _small() if b.rows == 4])
    runner.warmup(lambda done, total: None)
    batch = _two_rows(Bucket(Kind.SCORE, 4, 32, 0), (4, 5), (4, 3, 5))
    out = runner.submit(batch).result()
    assert out.finite.tolist()[:2] == [True, False]
    runner.close()


def _small() -> list[Bucket]:
    return [Bucket(Kind.SCORE, 4, 32, 0)]


def _two_rows(bucket: Bucket, *prompts: tuple[int, ...]) -> Batch:
    return score_step(bucket, make_sequences(None, Job("j", "t", tuple(map(Prepared, prompts))))).batch


@pytest.mark.parametrize(("want_top", "want_prompt"), [(False, False), (True, False), (False, True)])
def test_only_what_is_wanted_is_fetched(runner: JaxRunner, want_top: bool, want_prompt: bool) -> None:
    batch = _two_rows(Bucket(Kind.SCORE, 4, 32, 0), (4, 5), (4, 6, 5))
    batch = replace(batch, want_top=np.array(want_top), want_prompt=np.array(want_prompt))
    out = runner.submit(batch).result()
    assert (out.top_ids is not None) is (out.top_logprobs is not None) is want_top
    assert (out.prompt_logprobs is not None) is (out.prompt_top_ids is not None) is want_prompt
