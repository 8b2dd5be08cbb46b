"""Weights laid out for a CPU give the numbers of the hub's layout, for any number of tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import DENSE_SIZE
from model.layers import JoinedLinear, StackedLinear
from model.layout import lay_out
from model.transformer import Transformer
from tests.fakes_model import tiny_model


def hidden(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(model.hidden(jnp.asarray(tokens), positions))


def down_of(model: Transformer) -> StackedLinear | JoinedLinear:
    down: StackedLinear | JoinedLinear = model.layers[-1].mlp.experts.down_proj
    return down


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_joined_experts_give_the_same(tokens: int) -> None:
    model = tiny_model(moe_intermediate_size=512, n_routed_experts=16)
    num, width, dim = model.layers[-1].mlp.experts.gate_proj.weight().shape
    assert num * width * dim > DENSE_SIZE, "too small to be joined"
    ids = np.random.default_rng(tokens).integers(0, model.config.vocab_size, (1, tokens)).astype(np.int32)
    want = hidden(model, ids)
    lay_out(model)
    assert isinstance(down_of(model), JoinedLinear)
    np.testing.assert_allclose(hidden(model, ids), want, atol=2e-5)


def test_small_experts_stay_as_they_are() -> None:
    model = tiny_model()
    lay_out(model)
    assert isinstance(down_of(model), StackedLinear)


def test_laying_out_twice_changes_nothing() -> None:
    model = tiny_model(moe_intermediate_size=512, n_routed_experts=16)
    lay_out(model)
    down = down_of(model)
    lay_out(model)
    assert down_of(model) is down
