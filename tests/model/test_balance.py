"""Expert loads against the routers run on each row alone; the bias moves against the load."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.arithmetic import PARTITIONED
from model.balance import expert_loads, make_balance
from model.examples import Rows, pack
from model.moe import Router
from model.rope import rope_table
from model.train import Examples, Recipe, init_state
from model.transformer import Transformer
from tests.fakes_model import tiny_model

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model(2, vocab_size=24)


@pytest.fixture(scope="module")
def examples() -> Examples:
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(8, 24, n).tolist()) for n in (5, 3, 5))
    return pack(Rows(prompts, np.array([0, 1, 0], np.int32)), ((5,), (6,)), 1)


def loads_of(model: Transformer, examples: Examples) -> list[np.ndarray]:
    graph, params = nnx.split(model)
    compiled = jax.jit(lambda params, rows: [load for _, load in expert_loads(nnx.merge(graph, params), rows)])
    return [np.asarray(load) for load in compiled(params, examples)]


def test_loads_count_the_real_tokens(model: Transformer, examples: Examples) -> None:
    loads = loads_of(model, examples)
    assert len(loads) == 2  # the MoE layer's and the MTP layer's
    alone = np.zeros((2, 4))
    for i, length in enumerate(np.asarray(examples.length)):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], examples)._replace(tokens=examples.tokens[i : i + 1, :length])
        alone += np.stack(loads_of(model, row))
    np.testing.assert_array_equal(loads, alone)
    real = int(examples.length.sum())
    assert [load.sum() for load in loads] == [2 * real, 2 * (real - 3)]


def test_the_walk_is_the_model(model: Transformer, examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs that the routers see here are those that they see in the model's own forward pass."""
    seen: list[Any] = []
    original = Router.__call__

    def spy(self: Router, x: jax.Array) -> Any:
        seen.append(np.asarray(x))
        return original(self, x)

    monkeypatch.setattr(Router, "__call__", spy)
    list(expert_loads(model, examples))
    walked = seen[::2]  # the walk asks each router twice: for the load, and inside the layer's feed-forward
    seen.clear()
    positions = jnp.broadcast_to(jnp.arange(examples.tokens.shape[1]), examples.tokens.shape)
    table = rope_table(model.config.layers[0].attention.rope, positions)
    x = model.embed_tokens(examples.tokens)
    for layer in model.layers:
        x, _ = layer(x, table, None, PARTITIONED)
    hidden = model.norm(x)
    joined = model.mtp[0].join(model.embed_tokens(examples.tokens[:, 1:]), hidden[:, :-1])
    model.mtp[0](joined, tuple(part[:, :-1] for part in table), None, PARTITIONED)
    monkeypatch.undo()
    np.testing.assert_allclose(hidden, model.hidden(examples.tokens, positions), atol=1e-5)
    for got, expected in zip(walked, seen, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_bias_moves_against_the_load(model: Transformer, examples: Examples) -> None:
    loads = [np.asarray(load) for _, load in expert_loads(model, examples)]
    graph, params = nnx.split(model)
    state = init_state(params, Recipe(1, warmup_steps=0))
    after = make_balance(graph, 0.25)(state, examples)
    moved: Transformer = nnx.merge(graph, after.params)
    biases = [np.asarray(router.e_score_correction_bias[...]) for router, _ in expert_loads(moved, examples)]
    for bias, load in zip(biases, loads, strict=True):
        np.testing.assert_array_equal(bias, 0.25 * np.sign(load.mean() - load))
    unchanged = [path for path, leaf in nnx.to_flat_state(after.params) if "e_score_correction_bias" not in path]
    before = dict(nnx.to_flat_state(params))
    flat = dict(nnx.to_flat_state(after.params))
    assert all((np.asarray(flat[path][...]) == np.asarray(before[path][...])).all() for path in unchanged)
