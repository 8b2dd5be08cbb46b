"""Also cases A01, A02, A03 and A05: how streams end, where usage stands, split characters, clients that leave."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes import FakeRunner, ToyModel
from tests.fakes_http import Answer, Served
from tests.fakes_text import EOS

EMOJI = "风控👩‍💻é"


def joined(events: list[dict], index: int = 0) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


def check_terminal_state(answer: Answer, num_choices: int = 1) -> str:
    """Exactly one: [DONE] after one finish_reason a choice, or one error event at the end."""
    if answer.status != 200:
        assert answer.status == 503
        return "refused"
    events = answer.events
    if events[-1] == "[DONE]":
        finishes = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
        assert len(finishes) == num_choices
        assert not any("error" in event for event in events[:-1])
        return "done"
    assert [("error" in event) for event in events].count(True) == 1
    assert events[-1]["error"]["code"] == "step_failed"
    return "error"


def test_a01_every_stream_ends_in_one_terminal_state() -> None:
    runner = FakeRunner(fail_result=range(7, 4000, 23), fail_submit=range(15, 4000, 31))
    with Served(runner=runner) as server, ThreadPoolExecutor(8) as clients:

        def one(i: int) -> str:  # one token to 24: no run of steps between two faults holds all, every run holds some
            answer = server.complete(f"p{i}", max_tokens=1 + i % 24, stream=True, seed=i, n=1 + i % 2)
            return check_terminal_state(answer, 1 + i % 2)

        outcomes = list(clients.map(one, range(60)))
        assert set(outcomes) <= {"done", "error", "refused"}
        assert "done" in outcomes
        assert "error" in outcomes
        server.wait_for("tidegate_kv_pages_used", 0)
        runner.fail_result.clear()
        runner.fail_submit.clear()
        assert check_terminal_state(server.complete("plain", max_tokens=4, stream=True)) == "done"


def test_a01_a_step_that_fails_before_the_first_token_is_an_honest_status() -> None:
    with Served(runner=FakeRunner(fail_result=[0])) as server:
        answer = server.complete("a", max_tokens=4, stream=True)
        assert (answer.status, answer.error["code"]) == (503, "step_failed")
        assert server.complete("a", max_tokens=4, stream=True).status == 200


@pytest.mark.parametrize("n", [1, 2])
def test_a02_usage_comes_once_where_asked_for_and_nowhere_else(server: Served, n: int) -> None:
    body = {"max_tokens": 6, "n": n, "seed": 3}
    whole = server.complete("usage", **body).json["usage"]
    asked = server.complete("usage", **body, stream=True, stream_options={"include_usage": True}).events
    assert asked[-1] == "[DONE]"
    assert (asked[-2]["choices"], asked[-2]["usage"]) == ([], whole)
    assert all(event["usage"] is None for event in asked[:-2])
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}, {"stream_options": None}):
        events = server.complete("usage", **body, stream=True, **options).events
        assert all("usage" not in event and event["choices"] for event in events[:-1])


def test_a02_stream_options_without_stream_is_refused(server: Served) -> None:
    for stream in ({}, {"stream": False}):
        for send in (server.complete, server.chat):
            answer = send("a", stream_options={"include_usage": True}, **stream)
            assert (answer.status, answer.error["param"]) == (400, "stream_options")


@pytest.fixture(scope="module")
def emoji() -> ToyModel:
    return ToyModel(scripts={tuple(b"emoji"): [*EMOJI.encode(), *b"STOP", *b"more", EOS]})


def test_a03_split_characters_arrive_whole(emoji: ToyModel) -> None:
    with Served(emoji) as server:
        for n in (1, 2):
            whole = server.complete("emoji", temperature=0, max_tokens=60, n=n, stop="STOP").json["choices"]
            events = server.complete("emoji", temperature=0, max_tokens=60, n=n, stop="STOP", stream=True).events
            for index in range(n):
                assert joined(events, index) == whole[index]["text"] == EMOJI
                assert whole[index]["finish_reason"] == "stop"
        for size in range(1, len(EMOJI.encode()) + 1):
            text = server.complete("emoji", temperature=0, max_tokens=size).json["choices"][0]["text"]
            streamed = server.complete("emoji", temperature=0, max_tokens=size, stream=True).events
            assert joined(streamed) == text == EMOJI.encode()[:size].decode("utf-8", "replace")
            assert text.count("\ufffd") <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a05_a_client_that_leaves_frees_its_pages(stream: bool) -> None:
    runner = FakeRunner(held=True)
    with Served(runner=runner) as server:
        body = json.dumps({"prompt": "long", "max_tokens": 400, "stream": stream, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        sockets = [server.open_socket() for _ in range(3)]
        for each in sockets:
            each.sendall(head + body)
        server.wait_for("tidegate_http_in_flight_requests", 4)  # the scrape is one
        for _ in range(20):
            runner.release()
            if server.metric("tidegate_kv_pages_used") > 0 and server.metric("tidegate_engine_running_rows") == 3:
                break
        for each in sockets:
            each.close()
        server.wait_for("tidegate_http_in_flight_requests", 1)
        runner.release(4)  # a step was on the device and one more may have been dispatched
        server.wait_for("tidegate_kv_pages_used", 0)
        assert server.metric("tidegate_engine_cancelled_rows_total") == 3
        assert server.metric("tidegate_http_disconnects_total") == 3
        runner.release(1000)
        assert server.complete("plain", max_tokens=3).status == 200
