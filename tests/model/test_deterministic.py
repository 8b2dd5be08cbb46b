"""The deterministic arithmetic through the served steps: a row's bits are its own, and right."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.cache import init_cache
from model.config import ModelConfig
from model.load import load_model
from model.sampling import Sampling
from model.steps import DeviceState, StepInput, decode_step, extend_step, score_step
from model.transformer import Transformer
from tests.fakes_model import random_model, tiny_model
from tests.model.shared import GOLDEN

PAGE, LENGTH, VOCAB = 4, 21, 256
IDS = np.random.default_rng(0).integers(0, VOCAB, LENGTH).astype(np.int32)


def wide_model() -> Transformer:
    """Products large enough for the forms that a CPU prefers for real weights."""
    return tiny_model(hidden_size=512, intermediate_size=512, moe_intermediate_size=512, kv_lora_rank=64)


def two_layers(name: str) -> Transformer:
    """A golden's model with random weights and two layers, one of each kind where there are kinds: another of a kind
    compiles for longer and adds no arithmetic."""
    hub = json.loads((GOLDEN / name / "config.json").read_text())
    config = ModelConfig.from_hub({**hub, "num_hidden_layers": 2})
    return random_model(config, 0)


MODELS = {
    "v3": lambda: two_layers("v3"),
    "r1_distill_llama": lambda: two_layers("r1_distill_llama"),
    "wide": wide_model,
}


class Steps:
    """One model's steps in the deterministic arithmetic; row `place` of a batch is the one that is looked at."""

    def __init__(self, model: Transformer) -> None:
        model.arithmetic = model.arithmetic.fixed()
        self.config = model.config
        graph, self.params = nnx.split(model)

        def run(step: Any, params: Any, *args: Any) -> Any:
            return step(nnx.merge(graph, params), *args, num_top=3)

        self.run = {step: jax.jit(partial(run, step)) for step in (score_step, extend_step, decode_step)}

    def score(self, rows: int, tokens: int, place: int) -> list[np.ndarray]:
        """Log-probabilities of the row's tokens from the second on, and what follows it."""
        batch = self._batch(np.random.default_rng(rows), rows, tokens, 0, LENGTH, place, pages=0)
        out = self.run[score_step](self.params, batch)
        return [np.asarray(out.prompt_logprobs)[place, : LENGTH - 1], *self._last(out, place)]

    def served(self, rows: int, chunks: list[int], pages: int, place: int) -> list[np.ndarray]:
        """The same from chunks into the cache, then single tokens; all pages hold NaN before."""
        rng = np.random.default_rng(100 * rows + place)
        pools = init_cache(self.config, 1 + rows * pages, PAGE, jnp.dtype(jnp.float32))
        state = DeviceState(jax.tree.map(lambda p: p * jnp.nan, pools), jnp.zeros((rows + 1,), jnp.int32))
        table = 1 + rng.permutation(rows * pages).astype(np.int32).reshape(rows, pages)
        start, logprobs = 0, []
        for width in chunks:
            count = min(width, LENGTH - start)
            batch = self._batch(rng, rows, width, start, count, place, pages)._replace(page_table=jnp.asarray(table))
            if width == 1:
                state = state._replace(last_token=state.last_token.at[place + 1].set(int(IDS[start])))
            state, out = self.run[decode_step if width == 1 else extend_step](self.params, state, batch)
            logprobs += np.asarray(out.prompt_logprobs)[place, :count].tolist()
            start += count
        return [np.asarray(logprobs[:-1], np.float32), *self._last(out, place)]

    def _batch(
        self, rng: np.random.Generator, rows: int, width: int, start: int, count: int, place: int, pages: int
    ) -> StepInput:
        """Random neighbours of random lengths at the same start, drawn at random temperatures."""
        tokens = rng.integers(0, VOCAB, (rows, width)).astype(np.int32)
        tokens[place, :count] = IDS[start : start + count]
        length = rng.integers(0, width + 1, rows)
        length[place] = count
        following = int(IDS[start + count]) if start + count < LENGTH else 0
        warm = rng.random(rows).astype(np.float32)
        warm[place] = 0.7
        sampling = Sampling(
            *map(
                jnp.asarray, (warm, np.zeros(rows, np.int32), warm * 0 + 0.9, warm * 0, np.zeros((rows, 2), np.uint32))
            )
        )

        def ints(value: Any) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (rows,))

        return StepInput(
            tokens=jnp.asarray(tokens),
            next_token=ints(following),
            start=ints(start),
            length=ints(length),
            page_table=jnp.zeros((rows, pages), jnp.int32),
            slot=jnp.arange(1, rows + 1, dtype=jnp.int32),
            targets=jnp.broadcast_to(jnp.asarray([3, 250], jnp.int32), (rows, 2)),
            sampling=sampling,
            want_top=jnp.asarray(True),
            want_prompt=jnp.asarray(True),
        )

    def _last(self, out: Any, place: int) -> list[np.ndarray]:
        fields = (out.token, out.logprob, out.target_logprobs, out.top_ids, out.top_logprobs)
        return [np.asarray(value)[place] for value in fields]


def bits(arrays: list[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_however_it_is_served(name):
    steps = Steps(MODELS[name]())
    alone = bits(steps.score(1, 24, 0))
    for place in (0, 2):
        assert bits(steps.score(3, 40, place)) == alone
    for place in (1, 19):  # 20 rows: more than a tile
        assert bits(steps.served(20, [5] * 4 + [1], 6, place)) == alone
    assert bits(steps.served(2, [8] + [1] * 13, 16, 1)) == alone  # decoded, another width of the page table


@pytest.mark.parametrize("variant", ["v3", "moe_16b", "r1_distill_qwen", "llama_tied"])
def test_the_numbers_are_those_of_the_reference(variant):
    model = load_model(GOLDEN / variant)
    model.arithmetic = model.arithmetic.fixed()
    expected = np.load(GOLDEN / variant / "expected.npz")
    ids = jnp.asarray(expected["input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    logits = nnx.jit(lambda m: m.logits(m.hidden(ids, positions)))(model)
    real = np.arange(ids.shape[1])[None, :] < expected["lengths"][:, None]
    np.testing.assert_allclose(np.asarray(logits)[real], expected["logits"][real], atol=2e-4)
