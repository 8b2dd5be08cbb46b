"""Penalties, biases and allowed tokens over HTTP, against the toy model adjusted as the definitions say."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from serving.transport.logprobs import token_text
from tests.fakes import ToyModel
from tests.fakes_http import Served
from tests.fakes_tables import RowTable
from tests.fakes_text import VOCAB_SIZE, ByteTokenizer, byte_language

PROMPT = [10, 11, 12]
MODEL = ToyModel()
IDS = {token_text(ByteTokenizer(), token): token for token in range(VOCAB_SIZE)}


def reference(num_tokens: int, row: RowTable, repetition: float, presence: float, frequency: float) -> list[int]:
    row.prompt, row.generated = frozenset(PROMPT), Counter()
    context = list(PROMPT)
    for _ in range(num_tokens):
        token = int(row.adjusted(MODEL.logprobs(context), repetition, presence, frequency).argmax())
        row.generated[token] += 1
        context.append(token)
    return context[len(PROMPT) :]


def generated(server: Served, **fields: object) -> list[int]:
    """Greedy token ids, by the names that log-probabilities give them."""
    answer = server.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, logprobs=0, **fields)
    assert answer.status == 200, answer.body
    return [IDS[name] for name in answer.json["choices"][0]["logprobs"]["tokens"]]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as server:
        yield server


def test_over_http(server: Served) -> None:
    few = list(range(20, 27))  # so few that tokens come again
    cases = [
        ({"allowed_token_ids": few}, RowTable(allowed=frozenset(few)), (1.0, 0.0, 0.0)),
        (
            {"allowed_token_ids": few, "frequency_penalty": 2, "presence_penalty": 1.5},
            RowTable(allowed=frozenset(few)),
            (1.0, 1.5, 2.0),
        ),
        (
            {"logit_bias": {"65": 20, "66": 19.5, "10": 22}, "repetition_penalty": 2},
            RowTable(bias={65: 20, 66: 19.5, 10: 22}),
            (2.0, 0.0, 0.0),
        ),
        ({}, RowTable(), (1.0, 0.0, 0.0)),
    ]
    for fields, row, penalties in cases:
        assert generated(server, **fields) == reference(8, row, *penalties), fields


def test_log_probabilities_stay_the_models_own(server: Served) -> None:
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    plain = server.complete(PROMPT, **fields).json["choices"][0]["logprobs"]
    forced = server.complete(PROMPT, logit_bias={"65": 100}, **fields).json["choices"][0]["logprobs"]
    assert forced["tokens"] == ["A"]
    assert forced["token_logprobs"] == [pytest.approx(float(MODEL.logprobs(PROMPT)[65]), abs=1e-5)]
    assert plain["top_logprobs"][0].items() <= forced["top_logprobs"][0].items()


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_model_could_follow(server: Served, stream: bool) -> None:
    for fields, param in (
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ):
        answer = server.complete("a", stream=stream, **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_a_server_that_keeps_no_tables() -> None:
    with Served(language=replace(byte_language(), adjusts=False)) as server:
        answer = server.complete("a", presence_penalty=1)
        assert (answer.status, answer.error["code"]) == (400, "unsupported")
        assert server.complete("a", presence_penalty=0, logit_bias={}).status == 200
