"""What a warm prefix cache shows over HTTP: `cached_tokens`, and that it never crosses tenants."""

import hashlib

import pytest

from serving.config import ApiKey
from tests.fakes_http import Served

KEYS = tuple(ApiKey(tenant=t, sha256=hashlib.sha256(f"key-{t}".encode()).hexdigest()) for t in ("a", "ab"))
PROMPT = list(range(1, 51))  # three whole pages of 16, and two tokens


def cached(server: Served, tenant: str, **fields: object) -> int:
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body, {"Authorization": f"Bearer key-{tenant}"})
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_hits_its_own_pages_and_no_others() -> None:
    with Served(keys=KEYS) as server:
        assert [cached(server, tenant) for tenant in ("a", "a", "ab", "ab")] == [0, 48, 0, 48]


def test_choices_tell_what_an_earlier_request_left() -> None:
    with Served(keys=KEYS) as server:
        assert cached(server, "a", n=3, temperature=1) == 0
        assert cached(server, "a", n=3, temperature=1) == 48


def test_echoed_logprobs_are_the_same_on_a_warm_cache() -> None:
    with Served() as server:
        answers = [
            server.complete(PROMPT, max_tokens=2, temperature=0, echo=True, logprobs=1).json["choices"][0]["logprobs"]
            for _ in range(2)
        ]
        assert server.complete(PROMPT, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        again = server.complete(PROMPT, max_tokens=2, temperature=0, echo=True, logprobs=1).json["choices"][0][
            "logprobs"
        ]
    assert answers[0]["tokens"] == answers[1]["tokens"] == again["tokens"]
    for other in (answers[1], again):
        assert other["token_logprobs"][1:] == pytest.approx(answers[0]["token_logprobs"][1:])


def test_idle_no_page_is_used_and_what_is_cached_is_told() -> None:
    with Served() as server:
        server.complete(PROMPT, max_tokens=2)
        server.wait_for("tidegate_kv_pages_used", 0)  # the step after the last one was already on its way
        assert server.metric("tidegate_kv_pages_cached") == 3
        assert server.metric("tidegate_engine_preemptions_total") == 0
