import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.batch import NUM_TARGETS
from serving.errors import BadRequest, StepFailed
from serving.pipeline.labels import LabelSet, LabelText, resolve_labels
from serving.types import Prepared, TokenLogprob, Update
from tests.fakes import ToyModel
from tests.fakes_text import FakeTemplate, byte_language

MODEL = ToyModel()
LANGUAGE = byte_language()


def engine(rows: list[Prepared]) -> list[Update]:
    """What the engine answers, from the model alone."""
    results = []
    for index, row in enumerate(rows):
        after = MODEL.logprobs(row.token_ids)
        wanted = row.token_ids if row.prompt_logprobs >= 0 else ()
        prompt = [TokenLogprob(t, float(MODEL.logprobs(row.token_ids[:i])[t])) for i, t in enumerate(wanted) if i > 0]
        targets = tuple(float(after[target]) for target in row.targets)
        results.append(Update(index, target_logprobs=targets, prompt_logprobs=tuple(prompt)))
    return results


def brute_force(prompt: tuple[int, ...], texts: list[str]) -> list[float]:
    """float64: the product of every label token's probability, normalised over the labels."""
    products = []
    for text in texts:
        context, product = list(prompt), np.float64(1.0)
        for token in text.encode():
            product *= np.exp(MODEL.logprobs(context)[token].astype(np.float64))
            context.append(token)
        products.append(product)
    return [float(product / sum(products)) for product in products]


label_texts = st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), min_size=2, max_size=5, unique=True)


@given(label_texts, st.binary(min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_probabilities_are_those_of_the_labels_full_token_sequences(texts: list[str], prompt: bytes) -> None:
    labels = resolve_labels(LANGUAGE, None, [LabelText(text) for text in texts])
    rows = labels.rows(tuple(prompt))
    assert len(rows) == labels.num_rows
    probabilities = labels.probabilities(engine(rows))
    assert list(probabilities) == texts
    assert list(probabilities.values()) == pytest.approx(brute_force(tuple(prompt), texts), rel=1e-5)


def test_labels_of_one_token_share_one_row() -> None:
    labels = resolve_labels(LANGUAGE, None, [LabelText("a"), LabelText("b"), LabelText("c")])
    assert labels.rows((1, 2)) == [Prepared((1, 2), targets=(97, 98, 99))]


def test_more_one_token_labels_than_targets_take_more_rows() -> None:
    texts = [chr(97 + i) for i in range(NUM_TARGETS + 1)]
    labels = resolve_labels(LANGUAGE, None, [LabelText(text) for text in texts])
    assert [len(row.targets) for row in labels.rows((5,))] == [NUM_TARGETS, 1]
    got = list(labels.probabilities(engine(labels.rows((5,)))).values())
    assert got == pytest.approx(brute_force((5,), texts), rel=1e-5)


def test_the_template_brings_labels_texts_and_decision() -> None:
    template = FakeTemplate(threshold=0.9)
    labels = resolve_labels(LANGUAGE, template, None)
    assert labels.names == ("good", "bad")
    assert labels.sequences == ((ord("G"),), (ord("B"),))
    assert labels.decide({"good": 0.2, "bad": 0.8}) == "good"


def test_names_of_the_template_take_its_text_in_any_order() -> None:
    template = FakeTemplate(threshold=0.9)
    labels = resolve_labels(LANGUAGE, template, [LabelText("bad"), LabelText("good")])
    assert labels.sequences == ((ord("B"),), (ord("G"),))
    assert labels.decide({"good": 0.2, "bad": 0.8}) == "good"


def test_other_labels_beside_the_templates_are_decided_by_the_likeliest() -> None:
    labels = resolve_labels(LANGUAGE, FakeTemplate(), [LabelText("bad"), LabelText("ugly")])
    assert labels.sequences == ((ord("B"),), tuple(b"ugly"))
    assert labels.decide({"bad": 0.4, "ugly": 0.6}) == "ugly"


def test_a_label_may_have_a_text_of_its_own() -> None:
    labels = resolve_labels(LANGUAGE, FakeTemplate(), [LabelText("good", " yes"), LabelText("bad", " no")])
    assert labels.sequences == (tuple(b" yes"), tuple(b" no"))
    assert labels.longest == 4


@pytest.mark.parametrize(
    "asked",
    [
        [LabelText("a")],
        [LabelText("a"), LabelText("a")],
        [LabelText("a", "x"), LabelText("b", "x")],
        [LabelText("a", ""), LabelText("b")],
    ],
)
def test_labels_that_cannot_be_told_apart_are_refused(asked: list[LabelText]) -> None:
    with pytest.raises(BadRequest, match="labels") as caught:
        resolve_labels(LANGUAGE, None, asked)
    assert caught.value.param == "labels"


def test_no_template_and_no_labels_is_refused() -> None:
    with pytest.raises(BadRequest, match="labels"):
        resolve_labels(LANGUAGE, None, None)


def test_a_failed_row_fails_its_input() -> None:
    labels = LabelSet(("a", "b"), ((1,), (2,)))
    with pytest.raises(StepFailed):
        labels.probabilities([Update(0, error=StepFailed("gone"))])


def test_impossible_labels_are_an_error_and_one_impossible_label_is_zero() -> None:
    labels = LabelSet(("a", "b"), ((1,), (2,)))
    with pytest.raises(StepFailed):
        labels.probabilities([Update(0, target_logprobs=(-math.inf, -math.inf))])
    assert labels.probabilities([Update(0, target_logprobs=(-math.inf, -3.0))]) == {"a": 0.0, "b": 1.0}


@pytest.mark.parametrize("logprobs", [(math.nan, -1.0), (-1.0, math.nan), (-1.0, math.inf)])
def test_a_label_without_a_number_is_an_error_wherever_it_stands(logprobs: tuple[float, float]) -> None:
    with pytest.raises(StepFailed):
        LabelSet(("a", "b"), ((1,), (2,))).probabilities([Update(0, target_logprobs=logprobs)])
