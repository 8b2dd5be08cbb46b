"""After ready nothing compiles, whatever is asked: the product of features and bucket edges over HTTP."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.batch import Kind
from tests.fakes_http import Served

COMPILES = "tidegate_jit_compiles_total"
SAMPLING = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": -1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.3, "logit_bias": {"5": -1, "6": 2}},
)
OUTPUT = (
    {},
    {"logprobs": 0},
    {"logprobs": 5, "echo": True},
    {"stream": True, "stop": ["zz"]},
    {"n": 2, "logprobs": 20},
)


def edges(limit: int, sizes: list[int]) -> list[int]:
    """Each bucket's size and its neighbours, within the context."""
    return sorted({length for size in sizes for length in (size - 1, size, size + 1) if 1 <= length <= limit})


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def server(request: pytest.FixtureRequest) -> Served:
    """A model whose long rows are scored in chunks through the cache, and the one that ships."""
    served: Served = request.getfixturevalue(request.param)
    return served


@pytest.fixture(scope="module")
def lengths(server: Served) -> list[int]:
    tokens = [bucket.tokens for bucket in server.engine._runner.buckets if bucket.kind is not Kind.DECODE]
    pages = [bucket.pages * server.engine_config.page_size for bucket in server.engine._runner.buckets]
    return edges(server.language.max_context - 1, [1, *tokens, *pages])


def test_completions_of_every_length_and_feature(server: Served, lengths: list[int]) -> None:
    before = server.metric(COMPILES)
    assert before > 0
    for length, sampling, output in itertools.product(lengths, SAMPLING, OUTPUT):
        max_tokens = min(3, server.language.max_context - length)
        answer = server.complete([5] * length, max_tokens=max_tokens, ignore_eos=True, **sampling, **output)
        assert answer.status == 200, answer.body
    assert server.complete([5] * 3, max_tokens=0, echo=True, logprobs=1).status == 200
    rest = server.language.max_context - 3
    answer = server.complete([5] * 3, max_tokens=2 * rest, ignore_eos=True).json
    assert answer["usage"]["completion_tokens"] == rest
    assert server.metric(COMPILES) == before


def test_scores_of_every_length_row_count_and_label_form(server: Served, lengths: list[int]) -> None:
    before = server.metric(COMPILES)
    most = max(bucket.rows for bucket in server.engine._runner.buckets if bucket.kind is Kind.SCORE)
    row_counts = edges(most + 1, sorted({bucket.rows for bucket in server.engine._runner.buckets}))
    shapes = [(length, 1) for length in (*lengths, server.language.max_context)]
    shapes += [(length, num_rows) for length in (32, 33) for num_rows in row_counts]
    for length, num_rows in shapes:
        for labels in ({}, {"labels": ["good", "of several tokens"]}):
            answer = server.post("/v1/score", {"inputs": [{"token_ids": [7] * length}] * num_rows, **labels})
            assert answer.status == 200, answer.body
    many = {"labels": [f"l{i}" for i in range(20)] + list("abcdefghijklmnopqrs")}
    assert "error" not in server.post("/v1/score", {"inputs": [{"text": "a"}], **many}).json["results"][0]
    assert server.metric(COMPILES) == before


def test_everything_at_once(server: Served) -> None:
    before = server.metric(COMPILES)

    def one(i: int) -> int:
        if i % 3 == 0:
            return server.post("/v1/score", {"inputs": [{"text": "row " * (i % 7 + 1)}] * (i % 5 + 1)}).status
        if i % 3 == 1:
            return server.chat(f"question {i}", max_tokens=i % 4, stream=bool(i % 2), seed=i).status
        return server.complete("word " * (i % 9 + 1), max_tokens=i % 6, n=i % 3 + 1, logprobs=i % 4).status

    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(one, range(90))) == {200}
    assert server.metric(COMPILES) == before
    assert server.metric("tidegate_engine_failed_steps_total") == 0
