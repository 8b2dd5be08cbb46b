"""Metrics against brute force; probabilities against the model run on each row alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.evaluate import auc, best_threshold, label_probabilities
from model.examples import Rows
from tests.fakes_model import tiny_model

pytestmark = pytest.mark.usefixtures("quick_compile")

SCORED = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40)


@given(SCORED)
def test_auc_is_the_share_of_ordered_pairs(scored: list[tuple[int, bool]]) -> None:
    scores, positive = np.array([s / 9 for s, _ in scored]), np.array([p for _, p in scored])
    if positive.all() or not positive.any():
        with pytest.raises(ValueError, match="both classes"):
            auc(scores, positive)
        return
    pairs = [(a, b) for a in scores[positive] for b in scores[~positive]]
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert auc(scores, positive) == pytest.approx(expected)


@given(SCORED)
def test_best_threshold_is_the_best(scored: list[tuple[int, bool]]) -> None:
    scores, positive = np.array([s / 9 for s, _ in scored]), np.array([p for _, p in scored])
    threshold, accuracy = best_threshold(scores, positive)
    assert ((scores >= threshold) == positive).mean() == pytest.approx(accuracy)
    tried = [((scores >= t) == positive).mean() for t in np.linspace(0, 1, 91)]
    # A cut above a score of exactly 1 is no threshold that a template may state.
    assert accuracy >= max(tried) - 1e-12


def test_probabilities_equal_each_row_alone() -> None:
    model = tiny_model(3, vocab_size=24)
    rng = np.random.default_rng(0)
    prompts = tuple(tuple(rng.integers(8, 24, n).tolist()) for n in (4, 2, 4, 2, 2))
    got = label_probabilities(model, Rows(prompts, np.zeros(5, np.int32)), ((5,), (6, 7)), batch_rows=2)
    for prompt, row in zip(prompts, got, strict=True):
        logits = model.logits(model.hidden(jnp.asarray([prompt]), jnp.arange(len(prompt))[None]))[0, -1, [5, 6]]
        powers = np.exp(np.asarray(logits, np.float64))
        np.testing.assert_allclose(row, powers / powers.sum(), rtol=1e-5)


def test_threshold_with_slack_is_near_a_half() -> None:
    scores = np.linspace(0.005, 0.995, 100)
    positive = scores > 0.3
    positive[scores > 0.9] = True
    assert best_threshold(scores, positive)[0] == pytest.approx(0.3, abs=0.01)
    threshold, accuracy = best_threshold(scores, positive, slack=0.05)
    assert threshold == pytest.approx(0.35, abs=0.011)
    assert accuracy == pytest.approx(0.95, abs=0.011)


def test_labels_that_start_alike_are_refused() -> None:
    rows = Rows(((8, 9),), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="differ in their first token"):
        label_probabilities(tiny_model(3, vocab_size=24), rows, ((5, 6), (5, 7)))
