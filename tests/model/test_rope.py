"""Frequencies against the papers' formulas in plain Python, and what a rotation must keep."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from model.architecture import RopeConfig
from model.rope import frequencies, rope_table, rotate


def test_plain_and_linear_frequencies():
    plain = frequencies(RopeConfig(8, 100.0, False))
    np.testing.assert_allclose(plain, [100.0 ** (-2 * i / 8) for i in range(4)])
    np.testing.assert_allclose(frequencies(RopeConfig(8, 100.0, False, "linear", 4.0)), plain / 4)


def test_llama3_frequencies_by_wavelength():
    rope = RopeConfig(16, 500000.0, False, "llama3", 8.0, 64, 1.0, 4.0)
    for i, got in enumerate(frequencies(rope)):
        inv = 500000.0 ** (-2 * i / 16)
        wave = 2 * math.pi / inv
        if wave < 64 / 4:
            want = inv
        elif wave > 64 / 1:
            want = inv / 8
        else:
            s = (64 / wave - 1) / (4 - 1)
            want = (1 - s) * inv / 8 + s * inv
        assert got == pytest.approx(want, rel=1e-12)


def test_yarn_frequencies_and_factors():
    rope = RopeConfig(32, 10000.0, True, "yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=0.5)

    def corr(n):
        return 32 * math.log(4096 / (n * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(corr(32)), 0), min(math.ceil(corr(1)), 31)
    for i, got in enumerate(frequencies(rope)):
        ramp, inv = min(max((i - low) / (high - low), 0), 1), 10000.0 ** (-2 * i / 32)
        assert got == pytest.approx(inv / 40 * ramp + inv * (1 - ramp), rel=1e-12)
    want = (0.1 * 0.707 * math.log(40) + 1) / (0.1 * 0.5 * math.log(40) + 1)
    assert rope.cos_sin_factor == pytest.approx(want)
    bare = RopeConfig(32, 10000.0, True, "yarn", 40.0, 4096)
    assert bare.cos_sin_factor == pytest.approx(0.1 * math.log(40) + 1)


@given(st.booleans(), st.integers(0, 500), st.integers(0, 500), st.integers(0, 200))
def test_products_depend_on_distance_only(interleaved, a, b, shift):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8), np.float32)) for _ in range(2))

    def turned(x, position):
        table = rope_table(RopeConfig(8, 10.0, interleaved), jnp.array([[position]]))
        return rotate(x, table, interleaved=interleaved)

    near = jnp.sum(turned(q, a) * turned(k, b))
    far = jnp.sum(turned(q, a + shift) * turned(k, b + shift))
    assert float(near) == pytest.approx(float(far), abs=2e-3)
    assert float(jnp.linalg.norm(turned(q, a))) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)


def test_pairs_of_the_two_layouts():
    x = jnp.arange(1.0, 5.0).reshape(1, 1, 1, 4)
    quarter = (jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))  # turn by 90 degrees
    np.testing.assert_allclose(rotate(x, quarter, interleaved=True)[0, 0, 0], [-2, 1, -4, 3])
    np.testing.assert_allclose(rotate(x, quarter, interleaved=False)[0, 0, 0], [-3, -4, 1, 2])


def test_shapes_are_checked_in_tests():
    table = rope_table(RopeConfig(4, 10.0, True), jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(TypeCheckError):
        rotate(jnp.zeros((1, 5, 1, 4)), table, interleaved=True)  # five tokens, three positions
