"""Guided output over HTTP: what is asked for is what comes, in both modes, beside other requests."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from serving.pipeline.language import Language
from serving.pipeline.llguide import make_guide
from tests.fakes import ToyModel
from tests.fakes_http import Answer, Served
from tests.fakes_text import ASSISTANT, BOS, CONTROL, THINK, UNTHINK, USER, VOCAB_SIZE, ByteTokenizer, byte_language

pytest.importorskip("llguidance", reason="guided output is the extra tidegate[guided]")

SCHEMA = {
    "type": "object",
    "properties": {"risk": {"enum": ["low", "high"]}, "score": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["risk", "score"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "risk", "schema": SCHEMA, "strict": True}}


def guided(**options: Any) -> Language:
    guide = make_guide(ByteTokenizer(), control_ids=CONTROL.values(), vocab_size=VOCAB_SIZE)
    return replace(byte_language(**options), guide=guide)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(language=guided()) as server:
        yield server


def read(answer: Answer, stream: bool) -> tuple[str, str]:
    """Text and finish reason of the only choice."""
    assert answer.status == 200, answer.body
    if not stream:
        choice = answer.json["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]
    assert answer.events[-1] == "[DONE]"
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
    (reason,) = [c["finish_reason"] for c in choices if c["finish_reason"]]
    return "".join(texts), reason


def check_risk(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert value["risk"] in ("low", "high")
    assert value["score"] in range(100)


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(server: Served, stream: bool) -> None:
    for seed in range(4):
        fields = {"seed": seed, "stream": stream, "max_tokens": 400}
        for answer in (
            server.chat("q", response_format=FORMAT, **fields),
            server.complete("q", response_format=FORMAT, **fields),
            server.complete("q", guided_json=SCHEMA, **fields),
        ):
            text, reason = read(answer, stream)
            assert reason == "stop"
            check_risk(text)


def test_any_json_object(server: Served) -> None:
    """A model that means to end: whatever it starts with, an object is what comes."""
    answer = [*b'{"a": [1, {"b": null}]}']
    with Served(model=ToyModel(scripts={tuple(b"q"): answer}), language=guided()) as scripted:
        text, reason = read(
            scripted.complete("q", response_format={"type": "json_object"}, temperature=0, max_tokens=60), False
        )
        assert (json.loads(text), reason) == ({"a": [1, {"b": None}]}, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_expressions_and_choices(server: Served, stream: bool) -> None:
    for seed in range(3):
        fields = {"seed": seed, "stream": stream, "max_tokens": 50}
        text, reason = read(server.complete("q", guided_regex=r"[a-f]{3}-\d{2}", **fields), stream)
        assert re.fullmatch(r"[a-f]{3}-\d{2}", text)
        assert reason == "stop"
        choices = ["approve", "decline", "日本 – review"]
        text, reason = read(server.chat("q", guided_choice=choices, **fields), stream)
        assert text in choices
        assert reason == "stop"


def test_too_few_tokens_end_by_length(server: Served) -> None:
    text, reason = read(server.complete("q", guided_regex="[ab]{40}", max_tokens=5), False)
    assert (len(text), reason) == (5, "length")


def test_the_same_seed_gives_the_same_text(server: Served) -> None:
    texts = {read(server.complete("q", guided_json=SCHEMA, seed=9, max_tokens=400), False)[0] for _ in range(3)}
    assert len(texts) == 1
    answer = server.complete("q", guided_regex="[a-z]{12}", n=4, seed=3, max_tokens=20).json
    assert len({choice["text"] for choice in answer["choices"]}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_grammar_is_a_400_that_names_the_field(server: Served, stream: bool) -> None:
    for fields, param in (
        ({"guided_regex": "[0-9"}, "guided_regex"),
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"guided_json": "no json"}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
    ):
        answer = server.complete("q", stream=stream, **fields)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "invalid_request")


def test_guided_and_free_requests_together(server: Served) -> None:
    free = server.complete("free", max_tokens=30, seed=5, ignore_eos=True).json["choices"][0]["text"]

    def one(i: int) -> None:
        if i % 2:
            check_risk(read(server.complete("q", guided_json=SCHEMA, seed=i, max_tokens=400), False)[0])
        else:
            answer = server.complete("free", max_tokens=30, seed=5, ignore_eos=True)
            assert answer.json["choices"][0]["text"] == free

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(one, range(24)))
    assert server.metric("tidegate_engine_failed_steps_total") == 0


def test_penalties_and_biases_beside_a_grammar(server: Served) -> None:
    text, _ = read(
        server.complete("q", guided_regex="[ab]{8}", logit_bias={"97": -100, "99": 100}, temperature=0, max_tokens=20),
        False,
    )
    assert text == "b" * 8, "a bias never brings back what the grammar forbids"


def test_reasoning_is_free_and_the_answer_is_not() -> None:
    prompt = (BOS, USER, *b"q", ASSISTANT, THINK)
    script = [*b"hm {", UNTHINK, *b'{"risk": "low", "score": 7}']
    language = replace(guided(think=True), reasoning_end=lambda ids: UNTHINK if ids[-1] == THINK else None)
    with Served(model=ToyModel(scripts={prompt: script}), language=language) as server:
        message = server.chat("q", response_format=FORMAT, temperature=0, max_tokens=99).json["choices"][0]["message"]
        assert message["reasoning_content"] == "hm {"
        assert message["content"] == '{"risk": "low", "score": 7}'
