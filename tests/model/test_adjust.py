"""Penalties, bias and allowed tokens on the device against the float64 model of their definitions."""

from collections import Counter

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from model.adjust import PROMPT, WORD, Adjust, Tables, adjusted, count, neutral_tables, set_allowed, set_row
from model.sampling import Sampling, sample
from tests.fakes_tables import RowTable

VOCAB, SLOTS = 37, 5

pytestmark = pytest.mark.usefixtures("quick_compile")


def words(allowed, vocab=VOCAB):
    """[words] from a set of token ids, bit by bit."""
    out = [0] * -(-vocab // WORD)
    for token in allowed:
        out[token // WORD] |= 1 << token % WORD
    return jnp.asarray(np.array(out, np.uint32))


def written(tables: Tables, slot: int, row: RowTable) -> Tables:
    counts = np.zeros(VOCAB, np.int32)
    for token, n in row.generated.items():
        counts[token] = n
    counts[list(row.prompt)] |= PROMPT
    bias = np.zeros(VOCAB, np.float32)
    for token, value in row.bias.items():
        bias[token] = value
    allowed = words(range(VOCAB) if row.allowed is None else row.allowed)
    return set_row(tables, jnp.int32(slot), jnp.asarray(counts), jnp.asarray(bias), allowed)


def adjust(table, repetition=1.0, presence=0.0, frequency=0.0) -> Adjust:
    rows = len(table)
    floats = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), (rows,)) for x in (repetition, presence, frequency)]
    return Adjust(jnp.asarray(table, jnp.int32), *floats)


tokens = st.integers(0, VOCAB - 1)
row_tables = st.builds(
    RowTable,
    prompt=st.frozensets(tokens, max_size=9),
    generated=st.lists(tokens, max_size=20).map(Counter),
    bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=6),
    allowed=st.none() | st.frozensets(tokens, min_size=1),
)
jitted = jax.jit(adjusted)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(row_tables, min_size=3, max_size=3),
    repetition=st.floats(0.125, 4, width=32),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    seed=st.integers(0, 2**16),
)
def test_every_row_is_what_the_definitions_say(rows, repetition, presence, frequency, seed):
    logits = (np.random.default_rng(seed).standard_normal((4, VOCAB)) * 5).astype(np.float32)
    tables = neutral_tables(SLOTS, VOCAB)
    slots = [3, 1, 4]
    for slot, row in zip(slots, rows, strict=True):
        tables = written(tables, slot, row)
    table = [slots[0], 0, slots[1], slots[2]]
    # The row that points at the neutral table has penalties of its own here: they must find nothing to act on.
    got = np.asarray(jitted(jnp.asarray(logits), tables, adjust(table, repetition, presence, frequency)))
    np.testing.assert_array_equal(got[1], logits[1])
    for r, row in ((0, rows[0]), (2, rows[1]), (3, rows[2])):
        want = row.adjusted(logits[r], repetition, presence, frequency)
        np.testing.assert_allclose(got[r], want, rtol=1e-5, atol=1e-4)


def test_where_nobody_adjusts_the_logits_are_the_models_bit_by_bit():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, VOCAB)), jnp.float32)
    dirty = Tables(jnp.full((SLOTS, VOCAB), 7), jnp.full((SLOTS, VOCAB), jnp.nan), jnp.zeros((SLOTS, 2), jnp.uint32))
    np.testing.assert_array_equal(jitted(logits, dirty, adjust([0, 0, 0], 3.0, 1.0, 1.0)), logits)


def test_a_row_replaces_all_that_its_slots_last_owner_left():
    old = RowTable(frozenset({1, 2}), Counter({3: 4}), {5: -100.0}, frozenset({6}))
    tables = written(written(neutral_tables(SLOTS, VOCAB), 2, old), 2, RowTable())
    fresh = neutral_tables(SLOTS, VOCAB)
    np.testing.assert_array_equal(tables.counts, fresh.counts)
    np.testing.assert_array_equal(tables.bias, fresh.bias)
    np.testing.assert_array_equal(tables.allowed[2] & words(range(VOCAB)), words(range(VOCAB)))


@given(steps=st.lists(st.tuples(tokens, tokens, tokens), max_size=8))
@settings(max_examples=20, deadline=None)
def test_counting_is_of_rows_that_adjust_alone(steps):
    tables, counter = neutral_tables(SLOTS, VOCAB), {1: Counter(), 4: Counter()}
    for step in steps:
        tables = jax.jit(count)(tables, adjust([4, 0, 1]), jnp.asarray(step, jnp.int32))
        counter[4][step[0]] += 1
        counter[1][step[2]] += 1
    want = np.zeros((SLOTS, VOCAB), np.int32)
    for slot, tally in counter.items():
        for token, n in tally.items():
            want[slot, token] = n
    np.testing.assert_array_equal(tables.counts, want)


def test_a_batch_of_nobody_counts_nothing():
    tables = count(neutral_tables(SLOTS, VOCAB), adjust([0, 0]), jnp.asarray([3, 3], jnp.int32))
    assert not np.asarray(tables.counts).any()


def test_masks_are_set_for_some_slots_and_the_neutral_row_stays():
    masks = jnp.stack([words({7}), words({0, 36}), words(())])
    tables = set_allowed(neutral_tables(SLOTS, VOCAB), jnp.asarray([2, 4, 0]), masks)
    out = np.asarray(adjusted(jnp.zeros((3, VOCAB)), tables, adjust([2, 4, 0])))
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in out] == [[7], [0, 36], list(range(VOCAB))]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64])
def test_masks_of_any_vocabulary(vocab):
    tables = set_allowed(neutral_tables(2, vocab), jnp.asarray([1]), words({vocab - 1}, vocab)[None])
    out = np.asarray(adjusted(jnp.zeros((1, vocab)), tables, adjust([1])))[0]
    assert np.flatnonzero(np.isfinite(out)).tolist() == [vocab - 1]


def test_draws_follow_the_adjusted_distribution():
    """4,000 seeds, one row each, all on one slot's table."""
    rows, logits = 4000, np.array([2.0, 1.0, 0.5, -1.0, 1.5], np.float32)
    row = RowTable(frozenset({0}), Counter({1: 2, 3: 1}), {2: 0.8, 3: 1.5}, frozenset({0, 1, 2, 3}))
    counts = jnp.array([PROMPT, 2, 0, 1, 0], jnp.int32)
    bias = jnp.array([0, 0, 0.8, 1.5, 0], jnp.float32)
    tables = set_row(neutral_tables(2, 5), jnp.int32(1), counts, bias, words(row.allowed, 5))
    repetition, presence, frequency = 1.3, 0.4, 0.2
    scores = adjusted(jnp.broadcast_to(logits, (rows, 5)), tables, adjust([1] * rows, repetition, presence, frequency))
    seeds = jnp.stack([jnp.arange(rows, dtype=jnp.uint32), jnp.zeros((rows,), jnp.uint32)], axis=1)
    ones = jnp.ones((rows,), jnp.float32)
    how = Sampling(ones * 0.8, jnp.zeros((rows,), jnp.int32), ones, ones * 0, seeds)
    got = np.bincount(np.asarray(sample(scores, how, jnp.zeros((rows,), jnp.int32))), minlength=5) / rows
    want = np.exp(row.adjusted(logits, repetition, presence, frequency) / 0.8)
    np.testing.assert_allclose(got, want / want.sum(), atol=4 * np.sqrt(0.25 / rows))
    assert got[4] == 0
