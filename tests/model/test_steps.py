"""The device steps: chunked and paged equals the full forward, and no row ever touches another."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.cache import init_cache
from model.checkpoint import load_hub
from model.sampling import Sampling
from model.steps import DeviceState, StepInput, decode_step, extend_step, score_step
from tests.model.shared import GOLDEN

ROWS, TOKENS, PAGES, PAGE, TOP = 2, 8, 4, 4, 5
IDS = np.random.default_rng(0).integers(0, 256, (ROWS, 14)).astype(np.int32)


def batch(tokens: Any, start: Any, length: Any, **changes: Any) -> StepInput:
    def ints(value: Any) -> jax.Array:
        return jnp.asarray(value, jnp.int32)

    zeros = jnp.zeros((ROWS,), jnp.float32)
    sampling = Sampling(zeros, ints([0] * ROWS), zeros + 1, zeros, jnp.zeros((ROWS, 2), jnp.uint32))
    fields: dict[str, Any] = {
        "tokens": ints(tokens), "next_token": ints([0] * ROWS), "start": ints(start), "length": ints(length),
        "page_table": ints(1 + np.arange(ROWS * PAGES).reshape(ROWS, PAGES)), "slot": ints([1, 2]),
        "targets": ints([[3, 250]] * ROWS), "sampling": sampling,
        "want_top": jnp.asarray(True), "want_prompt": jnp.asarray(True),
    }  # fmt: skip
    return StepInput(**fields | {k: jnp.asarray(v, getattr(fields[k], "dtype", None)) for k, v in changes.items()})


class Served:
    """One model's compiled steps with their device state."""

    def __init__(self, variant: str) -> None:
        self.model = load_hub(GOLDEN / variant)
        graph, self.params = nnx.split(self.model)

        def run(step: Any, params: Any, *args: Any) -> Any:
            return step(nnx.merge(graph, params), *args, num_top=TOP)

        self.score, self.extend, self.decode = (
            jax.jit(partial(run, s)) for s in (score_step, extend_step, decode_step)
        )

    def fresh(self, fill: float = 0.0) -> DeviceState:
        pools = init_cache(self.model.config, 1 + ROWS * PAGES, PAGE, jnp.dtype(jnp.float32))
        return DeviceState(jax.tree.map(lambda p: p + fill, pools), jnp.zeros((3,), jnp.int32))

    def logprobs64(self) -> np.ndarray:
        tokens = jnp.asarray(IDS)
        logits = self.model.logits(self.model.hidden(tokens, jnp.broadcast_to(jnp.arange(14), IDS.shape)))
        wide = np.asarray(logits, np.float64)
        return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.fixture(scope="module", params=["v3", "r1_distill_llama"])
def served(request: pytest.FixtureRequest) -> Served:
    return Served(request.param)


def in_chunks(served: Served, state: DeviceState) -> tuple[DeviceState, list[Any]]:
    """Rows of 14 and 11 tokens in chunks of 8, then one greedy decode."""
    state, one = served.extend(
        served.params, state, batch(IDS[:, :8], [0, 0], [8, 8], next_token=IDS[:, 8], slot=[0, 0])
    )
    rest = np.pad(IDS[:, 8:], ((0, 0), (0, 2)))
    state, two = served.extend(served.params, state, batch(rest, [8, 8], [6, 3]))
    state, three = served.decode(served.params, state, batch([[0], [0]], [14, 11], [1, 1]))
    return state, [one, two, three]


def test_chunks_equal_the_full_forward(served):
    want = served.logprobs64()
    _, (one, two, _) = in_chunks(served, served.fresh())
    for row, length in enumerate((14, 11)):
        got = np.concatenate([np.asarray(one.prompt_logprobs)[row], np.asarray(two.prompt_logprobs)[row]])[: length - 1]
        np.testing.assert_allclose(got, want[row, np.arange(length - 1), IDS[row, 1:length]], atol=2e-4)
        last = want[row, length - 1]
        assert int(two.token[row]) == last.argmax()
        np.testing.assert_allclose(two.logprob[row], last.max(), atol=2e-4)
        np.testing.assert_allclose(two.target_logprobs[row], last[[3, 250]], atol=2e-4)
        np.testing.assert_allclose(two.top_logprobs[row], np.sort(last)[::-1][:TOP], atol=2e-4)
        np.testing.assert_array_equal(two.top_ids[row], np.argsort(-last)[:TOP])
        first = want[row, 0]
        np.testing.assert_array_equal(one.prompt_top_ids[row, 0], np.argsort(-first)[:TOP])


def test_a_chunk_that_ends_no_prompt_goes_without_logits_and_still_says_whether_it_is_finite(served):
    def chunk(params: Any, next_token: Any) -> Any:
        _, out = served.extend(params, served.fresh(), batch(IDS[:, :8], [0, 0], [8, 8], next_token=next_token))
        return out

    inner, last = chunk(served.params, IDS[:, 8]), chunk(served.params, [0, 0])
    assert len(set(np.asarray(inner.target_logprobs).ravel().tolist())) == 1  # of equal logits
    assert np.asarray(inner.finite).all()
    np.testing.assert_array_equal(chunk(served.params, [IDS[0, 8], 0]).logprob, last.logprob)
    broken = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), served.params)
    assert not np.asarray(chunk(broken, IDS[:, 8]).finite).any()


def test_score_equals_extend(served):
    padded = np.pad(IDS, ((0, 0), (0, 2)))
    _, (_, two, _) = in_chunks(served, served.fresh())
    out = served.score(served.params, batch(padded, [0, 0], [14, 11]))
    np.testing.assert_allclose(out.target_logprobs, two.target_logprobs, atol=2e-4)
    np.testing.assert_array_equal(out.token, two.token)


def test_pages_full_of_nan_do_not_matter(served):
    clean, poisoned = (in_chunks(served, served.fresh(fill)) for fill in (0.0, np.nan))
    for a, b in zip(clean[1], poisoned[1], strict=True):
        np.testing.assert_array_equal(a.logprob, b.logprob)
        assert np.asarray(b.finite).all()


def test_a_neighbour_and_padding_do_not_matter(served):
    _, outs = in_chunks(served, served.fresh())
    others = IDS.copy()
    others[1] = others[1][::-1]
    state, _ = served.extend(served.params, served.fresh(), batch(others[:, :8], [0, 0], [8, 0], next_token=IDS[:, 8]))
    rest = np.pad(others[:, 8:], ((0, 0), (0, 2)))
    state, two = served.extend(served.params, state, batch(rest, [8, 0], [6, 0], slot=[1, 0]))
    _, three = served.decode(served.params, state, batch([[0], [0]], [14, 0], [1, 0], slot=[1, 0]))
    for got, want in ((two, outs[1]), (three, outs[2])):
        np.testing.assert_array_equal(got.token[0], want.token[0])
        np.testing.assert_allclose(got.logprob[0], want.logprob[0], atol=1e-6)


def test_what_nobody_wants_is_zero(served):
    out = served.score(
        served.params, batch(np.pad(IDS, ((0, 0), (0, 2))), [0, 0], [14, 11], want_top=False, want_prompt=False)
    )
    assert not np.asarray(out.top_logprobs).any()
    assert not np.asarray(out.prompt_logprobs).any()
