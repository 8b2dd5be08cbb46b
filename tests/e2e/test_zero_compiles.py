"""After ready nothing compiles, whatever is asked: the product of features and bucket edges over HTTP."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.batch import Kind
from tests.e2e.conftest import ENGINE
from tests.fakes_http import Served

COMPILES = "tidegate_jit_compiles_total"
SAMPLING = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "seed": -1},
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


@pytest.fixture(scope="module")
def lengths(tiny: Served) -> list[int]:
    tokens = [bucket.tokens for bucket in tiny.engine._runner.buckets if bucket.kind is not Kind.DECODE]
    pages = [bucket.pages * ENGINE.page_size for bucket in tiny.engine._runner.buckets]
    return edges(ENGINE.max_context - 1, [1, *tokens, *pages])


def test_completions_of_every_length_and_feature(tiny: Served, lengths: list[int]) -> None:
    before = tiny.metric(COMPILES)
    assert before > 0
    for length, sampling, output in itertools.product(lengths, SAMPLING, OUTPUT):
        max_tokens = min(3, ENGINE.max_context - length)
        answer = tiny.complete([5] * length, max_tokens=max_tokens, ignore_eos=True, **sampling, **output)
        assert answer.status == 200, answer.body
    assert tiny.complete([5] * 3, max_tokens=0, echo=True, logprobs=1).status == 200
    assert tiny.complete([5] * 3, max_tokens=90, ignore_eos=True).json["usage"]["completion_tokens"] == 90
    assert tiny.metric(COMPILES) == before


def test_scores_of_every_length_row_count_and_label_form(tiny: Served, lengths: list[int]) -> None:
    before = tiny.metric(COMPILES)
    for length, num_rows in itertools.product([*lengths, ENGINE.max_context], (1, 4, 5)):
        inputs = [{"token_ids": [7] * length}] * num_rows
        for labels in (None, ["good", "of several tokens"], [f"l{i}" for i in range(20)]):
            answer = tiny.post("/v1/score", {"inputs": inputs, **({"labels": labels} if labels else {})})
            assert answer.status == 200, answer.body
    assert tiny.metric(COMPILES) == before


def test_everything_at_once(tiny: Served) -> None:
    before = tiny.metric(COMPILES)

    def one(i: int) -> int:
        if i % 3 == 0:
            return tiny.post("/v1/score", {"inputs": [{"text": "row " * (i % 7 + 1)}] * (i % 5 + 1)}).status
        if i % 3 == 1:
            return tiny.chat(f"question {i}", max_tokens=i % 4, stream=bool(i % 2), seed=i).status
        return tiny.complete("word " * (i % 9 + 1), max_tokens=i % 6, n=i % 3 + 1, logprobs=i % 4).status

    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(one, range(90))) == {200}
    assert tiny.metric(COMPILES) == before
    assert tiny.metric("tidegate_engine_failed_steps_total") == 0
