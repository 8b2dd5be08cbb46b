"""Every form of the experts' product against a float64 loop, and against dropping a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import grouped_mlp

pytestmark = pytest.mark.usefixtures("quick_compile")


def loop64(x, experts, weights, gate, up, down):
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    out = np.zeros_like(x)
    for n, row in enumerate(x):
        for e, w in zip(np.asarray(experts)[n], np.asarray(weights, np.float64)[n], strict=True):
            g = gate[e] @ row
            out[n] += w * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
    return out


def case(n, num_experts, k, *, one_sided=False):
    rng = np.random.default_rng(n * 100 + num_experts)
    dim, width = 12, 9
    x = rng.standard_normal((n, dim), np.float32)
    experts = np.stack([rng.permutation(num_experts)[:k] for _ in range(n)]).astype(np.int32)
    if one_sided:
        experts[:] = np.arange(k)
    stacks = [
        rng.standard_normal(s, np.float32) for s in ((num_experts, width, dim),) * 2 + ((num_experts, dim, width),)
    ]
    return x, experts, rng.random((n, k), np.float32), *stacks


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("impl", ["dense", "flat", "loop", "runs", "blocks", "ragged", "auto"])
@pytest.mark.parametrize(
    ("n", "num_experts", "k", "one_sided"),
    [(1, 4, 2, False), (9, 40, 2, False), (70, 5, 3, False), (67, 6, 2, True), (300, 4, 2, True)],
)
def test_form_equals_float64_loop(impl, n, num_experts, k, one_sided, joined):
    args = case(n, num_experts, k, one_sided=one_sided)
    *others, down = map(jnp.asarray, args)
    down = down.swapaxes(0, 1) if joined else down
    got = jax.jit(lambda *a: grouped_mlp(*a, impl=impl, joined=joined))(*others, down)
    np.testing.assert_allclose(np.asarray(got), loop64(*args), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("impl", ["dense", "flat", "loop", "runs", "blocks", "ragged"])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_bfloat16_runs_in_every_form_and_is_close(impl, n):
    """The dense form once lowered to a bf16 x bf16 -> f32 product that XLA's CPU refuses when it runs."""
    x, experts, weights, *stacks = case(n, 4, 2)
    x, *stacks = (jnp.asarray(a, jnp.bfloat16) for a in (x, *stacks))
    got = jax.jit(lambda *a: grouped_mlp(*a, impl=impl))(x, experts, weights, *stacks)
    want = loop64(x.astype(jnp.float32), experts, weights, *(a.astype(jnp.float32) for a in stacks))
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.05, atol=0.3)


def test_gradients_of_the_trainable_forms_agree():
    args = [jnp.asarray(a) for a in case(40, 4, 2)]

    def loss(gate, impl):
        return jnp.sum(jnp.sin(grouped_mlp(*args[:3], gate, *args[4:], impl=impl)))

    want = jax.grad(loss)(args[3], "dense")
    for impl in ("loop", "runs", "blocks"):
        np.testing.assert_allclose(jax.grad(loss)(args[3], impl), want, rtol=1e-3, atol=1e-4)


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="blocks"):
        grouped_mlp(*map(jnp.asarray, case(1, 4, 2)), impl="fastest")


def test_large_experts_take_the_blocked_product_and_agree():
    rng = np.random.default_rng(0)
    n, num_experts, dim = 5, 3, 512  # 512 x 512 weights: large enough for blocks
    x = jnp.asarray(rng.standard_normal((n, dim), np.float32))
    experts = jnp.asarray(np.stack([rng.permutation(num_experts)[:2] for _ in range(n)]), jnp.int32)
    weights = jnp.asarray(rng.random((n, 2), np.float32))
    stacks = [jnp.asarray(rng.standard_normal((num_experts, dim, dim), np.float32) * 0.05) for _ in range(3)]
    want = grouped_mlp(x, experts, weights, *stacks, impl="dense")
    for impl in ("flat", "loop", "runs", "blocks"):
        np.testing.assert_allclose(grouped_mlp(x, experts, weights, *stacks, impl=impl), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", ["dense", "flat", "loop", "runs", "blocks"])
def test_an_expert_that_overflows_harms_only_the_rows_that_are_routed_to_it(impl):
    x, experts, weights, gate, up, down = case(6, 4, 2)
    experts[:] = [[0, 1], [0, 2], [1, 2], [3, 0], [3, 1], [1, 2]]
    down[3] = np.float32(3e38)
    up[3] *= np.float32(1e30)
    got = np.asarray(
        jax.jit(lambda *a: grouped_mlp(*a, impl=impl))(*map(jnp.asarray, (x, experts, weights, gate, up, down)))
    )
    assert np.isfinite(got).all(axis=1).tolist() == [True, True, True, False, False, True]


@pytest.mark.parametrize("impl", ["loop", "runs", "blocks"])
@pytest.mark.parametrize("n", [6, 90])
def test_a_token_that_is_not_finite_and_an_expert_that_nobody_uses_harm_nobody(impl, n):
    x, experts, weights, *stacks = case(n, 5, 2)
    experts[experts == 2] = 4
    for stack in stacks:
        stack[2] = np.nan
    want = loop64(x, experts, weights, *stacks)
    x[4] = np.inf
    got = np.asarray(jax.jit(lambda *a: grouped_mlp(*a, impl=impl))(*map(jnp.asarray, (x, experts, weights, *stacks))))
    others = np.arange(n) != 4
    assert not np.isfinite(got[4]).any()
    np.testing.assert_allclose(got[others], want[others], rtol=2e-4, atol=2e-4)
