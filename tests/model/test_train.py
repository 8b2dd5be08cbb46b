"""The training step against float64 NumPy, one row at a time and without padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.examples import Rows, pack
from model.train import Examples, Losses, Recipe, init_state, losses, make_step
from model.transformer import Transformer
from tests.fakes_model import tiny_model

END = 1
LABELS = ((5,), (6, 7))

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(vocab_size=24)


@pytest.fixture(scope="module")
def examples() -> Examples:
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(8, 24, n).tolist()) for n in (5, 3, 5))
    return pack(Rows(prompts, np.array([0, 1, 0], np.int32)), LABELS, END)


@nnx.jit(static_argnums=2)
def compiled_losses(model: Transformer, examples: Examples, recipe: Recipe) -> Losses:
    return losses(model, examples, recipe)


def log_softmax(logits: Any) -> Any:
    wide = np.asarray(logits, np.float64)
    return (
        wide - wide.max(-1, keepdims=True) - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


@pytest.fixture(scope="module")
def reference(model: Transformer, examples: Examples) -> list[tuple[float, list[float], list[float]]]:
    """(label, language of each token, mtp of each token) of every row, run alone."""

    @nnx.jit
    def run(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = model.hidden(tokens, jnp.arange(tokens.shape[1])[None])
        return model.logits(hidden), model.mtp_logits(hidden[:, :-1], tokens[:, 1:])

    out = []
    for i in range(len(examples.tokens)):
        tokens = np.asarray(examples.tokens)[i, : int(examples.length[i])]
        logprobs, ahead = (log_softmax(logits)[0] for logits in run(model, jnp.asarray(tokens[None])))
        prompt = int(examples.prompt[i])
        label = -sum(logprobs[t - 1, tokens[t]] for t in range(prompt, len(tokens) - 1))
        language = [-logprobs[t - 1, tokens[t]] for t in range(1, len(tokens))]
        mtp = [-ahead[t - 2, tokens[t]] for t in range(2, len(tokens))]
        out.append((label, language, mtp))
    return out


@pytest.mark.parametrize("rows", [2, 100])
def test_losses_equal_float64(rows: int, model: Transformer, examples: Examples, reference: Any) -> None:
    recipe = Recipe(10, label_width=2, language=0.3, mtp=0.2, auxiliary_rows=rows)
    got = compiled_losses(model, examples, recipe)
    label = np.mean([row[0] for row in reference])
    language = np.mean([loss for row in reference[:rows] for loss in row[1]])
    mtp = np.mean([loss for row in reference[:rows] for loss in row[2]])
    np.testing.assert_allclose([got.label, got.language, got.mtp], [label, language, mtp], rtol=2e-5)
    np.testing.assert_allclose(got.total, label + 0.3 * language + 0.2 * mtp, rtol=2e-5)


def test_losses_that_are_off_are_zero(model: Transformer, examples: Examples) -> None:
    got = compiled_losses(model, examples, Recipe(10, language=0.0, mtp=0.0))
    assert float(got.language) == float(got.mtp) == 0.0
    assert float(got.total) == float(got.label)


def test_pack_pads_with_the_end(examples: Examples) -> None:
    tokens, length = np.asarray(examples.tokens), np.asarray(examples.length)
    assert tokens.shape == (3, 7)
    assert length.tolist() == [7, 6, 7]
    assert tokens[1, 3:].tolist() == [6, 7, END, END]
    assert tokens[0, 5:].tolist() == [5, END]
    assert pack(Rows(((8, 9),), np.array([0], np.int32)), LABELS, END, 6).tokens.shape == (1, 6)


class TestStep:
    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, quick_compile: None) -> tuple[Any, Any, list[Any], list[Losses]]:
        """(graph, first params, every state's (params, average) on the host, losses) of 12 steps on one batch."""
        rng = np.random.default_rng(1)
        prompts = tuple(tuple(rng.integers(8, 24, 5).tolist()) for _ in range(6))
        batch = pack(Rows(prompts, np.array([0, 1, 1, 0, 0, 1], np.int32)), LABELS, END)
        recipe = Recipe(
            12, label_width=2, language=0.1, mtp=0.1, learning_rate=2e-2, warmup_steps=2, average=0.9, auxiliary_rows=2
        )
        graph, params = nnx.split(tiny_model(1, vocab_size=24))
        state, step = init_state(params, recipe), make_step(graph, recipe)
        history, parts = [], []
        for _ in range(12):
            state, losses = step(state, batch)
            history.append(jax.tree.map(np.asarray, (state.params, state.average)))
            parts.append(losses)
        assert int(state.step) == 12
        return graph, params, history, parts

    def test_learns_the_batch(self, run: Any) -> None:
        parts = run[3]
        assert float(parts[-1].label) < 0.5 * float(parts[0].label)
        assert float(parts[-1].language) < float(parts[0].language)
        assert float(parts[-1].mtp) < float(parts[0].mtp)

    def test_the_first_params_survive_donation(self, run: Any) -> None:
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(run[1]))

    def test_average_is_the_running_mean(self, run: Any) -> None:
        mean = jax.tree.map(np.asarray, run[1])
        for index, (params, average) in enumerate(run[2]):
            keep = min(0.9, (1 + index) / (10 + index))
            mean = jax.tree.map(lambda m, p, k=keep: m * k + p * (1 - k), mean, params)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), mean, average)

    def test_the_routing_bias_is_not_trained_by_gradient(self, run: Any) -> None:
        flat = nnx.to_flat_state(run[2][-1][0])
        biases = [leaf for path, leaf in flat if "e_score_correction_bias" in path]
        assert len(biases) == 2
        assert all((np.asarray(b[...]) == 0).all() for b in biases)

    def test_every_matrix_moves(self, run: Any) -> None:
        before, after = run[1], run[2][-1][0]
        moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()) if a.ndim >= 2 else True, before, after)
        assert all(jax.tree.leaves(moved))
