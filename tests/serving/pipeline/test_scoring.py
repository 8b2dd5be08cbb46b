import pytest

from serving.errors import BadRequest, ContextLengthExceeded, StepFailed
from serving.pipeline.collect import Collected
from serving.pipeline.labels import LabelText
from serving.pipeline.scoring import ScorePlan, prepare_scores
from serving.types import FeatureInput, Finish, Score, TextInput, Update
from tests.fakes_text import FakeTemplate, byte_language


def fold(plan: ScorePlan, *logprobs: tuple[float, ...] | Exception) -> tuple[Score, ...]:
    collected = Collected(len(plan.rows))
    for row, answer in enumerate(logprobs):
        error = answer if isinstance(answer, Exception) else None
        targets = answer if isinstance(answer, tuple) else ()
        collected.add([Update(row, target_logprobs=targets, finish=None if error else Finish.SCORED, error=error)])
    return plan.fold(collected)


def test_one_row_an_input_and_one_score_an_input_in_order() -> None:
    plan = prepare_scores(byte_language(), [FeatureInput({"x": 1}), TextInput("abc")])
    assert [row.token_ids for row in plan.rows] == [tuple(b"x=1>"), tuple(b"abc")]
    assert plan.num_prompt_tokens == 7
    first, second = fold(plan, (-1.0, -2.0), (-5.0, -1.0))
    assert (first.index, first.label) == (0, "good")
    assert (second.index, second.label) == (1, "bad")
    assert sum(second.probabilities.values()) == pytest.approx(1.0)


def test_a_bad_input_fails_alone() -> None:
    refused = BadRequest("inputs[0]: no")
    plan = prepare_scores(byte_language(), [refused, FeatureInput({}), FeatureInput({"x": 1}), TextInput("y" * 600)])
    assert len(plan.rows) == 1
    scores = fold(plan, (-1.0, -2.0))
    assert scores[0].error is refused
    assert isinstance(scores[1].error, BadRequest)
    assert scores[2].label == "good"
    assert isinstance(scores[3].error, ContextLengthExceeded)


def test_a_row_that_the_engine_failed_fails_alone() -> None:
    plan = prepare_scores(byte_language(), [TextInput("a"), TextInput("b")])
    scores = fold(plan, StepFailed("gone"), (-1.0, -2.0))
    assert isinstance(scores[0].error, StepFailed)
    assert scores[1].label == "good"


def test_labels_of_several_tokens_take_rows_of_their_own() -> None:
    plan = prepare_scores(byte_language(), [TextInput("p")], labels=[LabelText("a"), LabelText("bc")])
    assert [(row.token_ids, row.prompt_logprobs) for row in plan.rows] == [((112,), -1), (tuple(b"pbc"), 0)]
    assert plan.num_prompt_tokens == 1


def test_prompt_and_longest_label_must_fit_the_context() -> None:
    language = byte_language(max_context=10)
    fits = prepare_scores(language, [TextInput("x" * 8)], labels=[LabelText("a"), LabelText("bc")])
    assert len(fits.rows) == 2
    plan = prepare_scores(language, [TextInput("x" * 9)], labels=[LabelText("a"), LabelText("bc")])
    assert isinstance(fold(plan)[0].error, ContextLengthExceeded)


def test_wrong_labels_are_the_requests_error() -> None:
    with pytest.raises(BadRequest, match="labels"):
        prepare_scores(byte_language(), [TextInput("a")], labels=[LabelText("a"), LabelText("a")])


def test_a_model_without_a_template_needs_labels() -> None:
    language = byte_language(templates={})
    with pytest.raises(BadRequest, match="labels"):
        prepare_scores(language, [TextInput("a")])
    plan = prepare_scores(language, [TextInput("a"), FeatureInput({"x": 1})], labels=[LabelText("a"), LabelText("b")])
    assert len(plan.rows) == 1


def test_the_inputs_template_wins_over_the_requests() -> None:
    other = FakeTemplate(name="other", threshold=0.0)
    language = byte_language(templates={"toy": FakeTemplate(threshold=1.1), "other": other})
    plan = prepare_scores(language, [FeatureInput({"x": 1}, "other"), FeatureInput({"x": 1})], template="toy")
    assert [score.label for score in fold(plan, (-1.0, -2.0), (-1.0, -2.0))] == ["bad", "good"]


def test_an_unknown_template_of_a_row_fails_the_row_and_one_of_the_request_each_row() -> None:
    plan = prepare_scores(byte_language(), [FeatureInput({"x": 1}, "nope"), TextInput("a")])
    assert isinstance(fold(plan, (-1.0, -2.0))[0].error, BadRequest)
