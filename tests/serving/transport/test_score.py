import numpy as np
import pytest

from tests.fakes import FakeRunner
from tests.fakes_http import Served
from tests.fakes_text import byte_language


def probability(server: Served, prompt: bytes, label: bytes, labels: tuple[bytes, ...]) -> float:
    """From the model alone, in float64."""

    def likelihood(text: bytes) -> np.float64:
        context, product = list(prompt), np.float64(1.0)
        for token in text:
            product *= np.exp(server.model.logprobs(context)[token].astype(np.float64))
            context.append(token)
        return product

    return float(likelihood(label) / sum(likelihood(each) for each in labels))


def test_the_form_of_the_answer(server: Served) -> None:
    inputs = [{"features": {"x": 1, "unused": "y"}}, {"text": "abc"}, {"token_ids": [1, 2]}]
    answer = server.post("/v1/score", {"inputs": inputs, "labels": ["good", "bad"]}).json
    assert set(answer) == {"id", "object", "created", "model", "results", "usage", "timing"}
    assert (answer["model"], answer["object"]) == ("toy", "score")
    assert set(answer["timing"]) == {"encode_ms", "engine_ms", "total_ms"}
    assert answer["usage"]["prompt_tokens"] == 4 + 3 + 2
    for index, result in enumerate(answer["results"]):
        assert set(result) == {"index", "label", "probabilities", "tier"}
        assert (result["index"], result["tier"]) == (index, "full")
        assert sum(result["probabilities"].values()) == pytest.approx(1.0)
        assert result["label"] == ("bad" if result["probabilities"]["bad"] >= 0.5 else "good")
    first = answer["results"][0]["probabilities"]["bad"]
    assert first == pytest.approx(probability(server, b"x=1>", b"B", (b"G", b"B")), rel=1e-5)


def test_labels_default_to_the_templates(server: Served) -> None:
    body = {"inputs": [{"text": "abc"}]}
    named = server.post("/v1/score", {**body, "labels": ["bad", "good"]}).json["results"][0]
    assert server.post("/v1/score", body).json["results"][0]["probabilities"] == pytest.approx(named["probabilities"])


def test_labels_of_several_tokens_are_scored_whole(server: Served) -> None:
    labels = ["yes", "no", "perhaps", "é", {"name": "fine", "text": " ok"}]
    texts = (b"yes", b"no", b"perhaps", "é".encode(), b" ok")
    result = server.post("/v1/score", {"inputs": [{"text": "abc"}], "labels": labels}).json["results"][0]
    assert list(result["probabilities"]) == ["yes", "no", "perhaps", "é", "fine"]
    for name, text in zip(result["probabilities"], texts, strict=True):
        assert result["probabilities"][name] == pytest.approx(probability(server, b"abc", text, texts), rel=1e-4)


def test_malformed_rows_fail_alone_by_index(server: Served) -> None:
    inputs = [
        {"text": "abc"},
        {"features": {}},
        {"text": 5},
        7,
        None,
        {},
        {"text": "a", "token_ids": [1]},
        {"nope": 1},
        {"messages": [{"role": "bot", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}]},
        {"token_ids": [9999]},
        {"token_ids": [True]},
        {"text": "y" * 600},
        {"features": {"x": 1}, "template": "../toy"},
        {"messages": "x"},
    ]
    results = server.post("/v1/score", {"inputs": inputs}).json["results"]
    assert [result["index"] for result in results] == list(range(len(inputs)))
    assert [i for i, result in enumerate(results) if "error" not in result] == [0, 9]
    for result in results:
        if "error" in result:
            assert set(result) == {"index", "error"}
            assert set(result["error"]) == {"message", "type", "param", "code"}
    assert results[12]["error"]["code"] == "context_length_exceeded"
    assert results[1]["error"]["param"] == "features.x"
    assert results[2]["error"]["param"] == "inputs[2].text"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": {"text": "a"}}, "inputs"),
        ({"inputs": [{"text": "a"}], "labels": ["a"]}, "labels"),
        ({"inputs": [{"text": "a"}], "labels": ["a", "a"]}, "labels"),
        ({"inputs": [{"text": "a"}], "labels": ["a", ""]}, "labels[1]"),
        ({"inputs": [{"text": "a"}], "labels": ["a", {"name": "b"}]}, "labels[1].text"),
        ({"inputs": [{"text": "a"}] * 1025}, "inputs"),
        ({"inputs": [{"text": "a"}], "temperature": 1}, "temperature"),
    ],
)
def test_what_is_wrong_with_the_request_is_a_400(server: Served, body: object, param: str) -> None:
    answer = server.post("/v1/score", body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_model_without_a_template_scores_with_the_requests_labels() -> None:
    with Served(language=byte_language(templates={})) as server:
        assert server.post("/v1/score", {"inputs": [{"text": "a"}]}).error["param"] == "labels"
        body = {"inputs": [{"text": "a"}, {"features": {"x": 1}}], "labels": ["a", "b"]}
        results = server.post("/v1/score", body).json["results"]
        assert ["error" in result for result in results] == [False, True]


def test_all_rows_of_a_request_go_to_the_engine_together() -> None:
    runner = FakeRunner()
    with Served(runner=runner) as server:
        inputs = [{"features": {"x": i}} for i in range(64)]
        assert len(server.post("/v1/score", {"inputs": inputs}).json["results"]) == 64
        assert len(runner.batches) <= 4


def test_the_same_row_scores_the_same_in_any_company(server: Served) -> None:
    alone = server.post("/v1/score", {"inputs": [{"features": {"x": 5}}]}).json["results"][0]["probabilities"]
    crowd = server.post("/v1/score", {"inputs": [{"features": {"x": i}} for i in range(40)]}).json["results"]
    assert crowd[5]["probabilities"] == alone


def test_routing_fields_are_taken(server: Served) -> None:
    fields = {"priority": "urgent", "latency_class": "batch", "timeout_ms": 60_000, "profile_id": "p"}
    assert server.post("/v1/score", {"inputs": [{"text": "a"}], **fields}).status == 200
    assert server.complete("a", max_tokens=1, **fields).status == 200
    assert server.chat("a", max_tokens=1, **fields).status == 200


def test_a_step_that_fails_is_its_rows_error_and_the_next_request_is_fine() -> None:
    with Served(runner=FakeRunner(fail_result=[0])) as server:
        assert (
            server.post("/v1/score", {"inputs": [{"text": "a"}]}).json["results"][0]["error"]["code"] == "step_failed"
        )
        assert "error" not in server.post("/v1/score", {"inputs": [{"text": "a"}]}).json["results"][0]


def test_outcomes_are_counted(server: Served) -> None:
    before = [server.metric(f'tidegate_score_rows_total{{outcome="{outcome}"}}') for outcome in ("ok", "error")]
    server.post("/v1/score", {"inputs": [{"text": "a"}, {}, {"text": "b"}]})
    after = [server.metric(f'tidegate_score_rows_total{{outcome="{outcome}"}}') for outcome in ("ok", "error")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1]
