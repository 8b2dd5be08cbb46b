"""Truncation against a sorted-list model, draws against the distribution, and independence of neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling import Sampling, sample, truncate
from tests.fakes_tables import walked

VOCAB = 9

pytestmark = pytest.mark.usefixtures("quick_compile")


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    full = lambda value, dtype: jnp.full((rows,), value, dtype)  # noqa: E731
    seeds = jnp.stack([jnp.arange(rows, dtype=jnp.uint32) + seed, jnp.zeros((rows,), jnp.uint32)], axis=1)
    return Sampling(full(temperature, jnp.float32), full(top_k, jnp.int32), full(top_p, jnp.float32),
                    full(min_p, jnp.float32), seeds)  # fmt: skip


truncate_jit = jax.jit(truncate)
sample_jit = jax.jit(sample)  # called as it is, it would compile its branches anew each time


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(VOCAB)), st.integers(0, VOCAB), st.sampled_from([0.05, 0.33, 0.72, 0.951, 1.0]),
       st.sampled_from([0.0, 0.07, 0.5, 1.0]))  # fmt: skip
def test_truncation_equals_the_walk(order, top_k, top_p, min_p):
    logits = np.array(order, np.float32) * 0.7
    got = truncate_jit(jnp.asarray(logits)[None], params(1, top_k=top_k, top_p=top_p, min_p=min_p))
    assert set(np.flatnonzero(np.isfinite(np.asarray(got)[0])).tolist()) == walked(
        logits, top_k=top_k, top_p=top_p, min_p=min_p
    )


def test_draws_follow_the_distribution():
    rows, logits = 4000, np.array([2.0, 1.0, 0.0, -1.0, 1.5], np.float32)
    tokens = sample_jit(
        jnp.broadcast_to(logits, (rows, 5)), params(rows, temperature=0.7), jnp.zeros((rows,), jnp.int32)
    )
    want = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    got = np.bincount(np.asarray(tokens), minlength=5) / rows
    np.testing.assert_allclose(got, want, atol=4 * np.sqrt(0.25 / rows))


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((6, 50), np.float32))
    positions = jnp.arange(6, dtype=jnp.int32) * 7
    full = params(6, temperature=1.3, seed=11)
    together = sample_jit(logits, full, positions)
    order = jnp.array([4, 0, 5, 2, 1, 3])
    shuffled = sample_jit(logits[order], jax.tree.map(lambda a: a[order], full), positions[order])
    np.testing.assert_array_equal(np.asarray(together)[np.asarray(order)], shuffled)
    alone = sample_jit(logits[3:4], jax.tree.map(lambda a: a[3:4], full), positions[3:4])
    assert int(alone[0]) == int(together[3])
    moved = [int(sample_jit(logits[3:4], jax.tree.map(lambda a: a[3:4], full), jnp.array([p]))[0]) for p in range(12)]
    assert len(set(moved)) > 3


def test_greedy_and_nearly_greedy_rows_beside_a_warm_one():
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((3, 40), np.float32))
    mixed = params(3)._replace(temperature=jnp.array([0.0, 1e-9, 5.0]))
    tokens = sample_jit(logits, mixed, jnp.zeros((3,), jnp.int32))
    np.testing.assert_array_equal(np.asarray(tokens)[:2], np.asarray(logits.argmax(-1))[:2])


def test_top_k_holds_whatever_the_masses_round_to():
    """float32 masses of the k best add up to a little less than 1 in some rows: the rest must stay out."""
    rows, vocab = 512, 17
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((rows, vocab), np.float32)) * 0.01
    for k in (2, 3, 5):
        kept = np.isfinite(np.asarray(truncate_jit(logits, params(rows, top_k=k))))
        assert (kept.sum(-1) == k).all()


def test_top_p_of_one_keeps_the_whole_tail():
    logits = jnp.asarray([[0.0] + [-17.0] * 8, [158.0, 79.0, 1.0] + [0.0] * 6], jnp.float32)
    assert np.isfinite(np.asarray(truncate_jit(logits, params(2)))).all()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.3, 0, 1.0, 0.0), (1.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2),
     (1.4, 6, 0.9, 0.1)],
)  # fmt: skip
def test_draws_follow_the_truncated_distribution(temperature, top_k, top_p, min_p):
    """Pearson's chi-square over 6,000 fixed seeds against float64, and nothing outside the set."""
    rows, logits = 6000, np.array([1.1, -0.4, 2.3, 0.2, 1.9, -1.5, 0.9, 1.4], np.float64)
    how = params(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = sample_jit(jnp.broadcast_to(jnp.float32(logits), (rows, 8)), how, jnp.full((rows,), 5, jnp.int32))
    counts = np.bincount(np.asarray(drawn), minlength=8)
    kept = sorted(walked(logits / temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    p = np.exp(logits[kept] / temperature)
    want = rows * p / p.sum()
    assert counts[kept].sum() == rows
    chi_square = ((counts[kept] - want) ** 2 / want).sum()
    assert chi_square < 30, (counts, want)  # 7 degrees of freedom: 1 in 10,000 beyond 29.9
