"""Also case A34: the reasoning of DeepSeek models over HTTP."""

import pytest

from tests.fakes import ToyModel
from tests.fakes_http import Served
from tests.fakes_text import ASSISTANT, BOS, EOS, THINK, USER, byte_language

PROMPT = (BOS, USER, *b"q", ASSISTANT)


def scripted(*pieces: bytes, think: bool = False) -> Served:
    prompt = (*PROMPT, THINK) if think else PROMPT
    answer = [token for piece in pieces for token in piece]
    return Served(ToyModel(scripts={prompt: [*answer, EOS]}), byte_language(think=think))


def streamed(server: Served, **fields: object) -> tuple[str, str, list[dict]]:
    """(reasoning, content, events)."""
    events = server.chat("q", temperature=0, stream=True, **fields).events
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    assert not any(delta.get("content") and delta.get("reasoning_content") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return reasoning, "".join(delta.get("content", "") for delta in deltas), events[:-1]


def test_an_answer_is_a_message() -> None:
    with scripted(b"hello") as server:
        answer = server.chat("q", temperature=0).json
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 6)
        assert answer["object"] == "chat.completion"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    with scripted(b"hello") as server:
        reasoning, content, events = streamed(server, n=2)
        assert (reasoning, sorted(content)) == ("", sorted("hellohello"))
        for index in (0, 1):
            mine = [c for event in events for c in event["choices"] if c["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
            assert mine[-1]["finish_reason"] == "stop"


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    with Served(language=byte_language(max_context=40)) as server:
        usage = server.chat("q", ignore_eos=True).json["usage"]
        assert usage["total_tokens"] == 40


def test_both_names_of_max_tokens() -> None:
    with scripted(b"hello") as server:
        for fields in ({"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}):
            assert server.chat("q", temperature=0, **fields).json["choices"][0]["message"]["content"] == "he"
        differ = server.chat("q", max_tokens=2, max_completion_tokens=3)
        assert (differ.status, differ.error["param"]) == (400, "max_tokens")


def test_logprobs_have_an_entry_a_token_with_bytes() -> None:
    with scripted("é!".encode()) as server:
        found = server.chat("q", temperature=0, logprobs=True, top_logprobs=3).json["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in found for byte in entry["bytes"]) == "é!".encode()
        assert all(len(entry["top_logprobs"]) == 3 for entry in found)
        assert found[0]["top_logprobs"][0]["token"] == found[0]["token"] == "bytes:\\xc3"
        _, _, events = streamed(server, logprobs=True, top_logprobs=3)
        pieces = [c["logprobs"]["content"] for event in events for c in event["choices"] if c["logprobs"]]
        assert [entry for piece in pieces for entry in piece] == found
        alone = server.chat("q", temperature=0, logprobs=True).json["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in alone] == [[], [], []]


def test_a14_top_logprobs_without_logprobs_or_above_the_limit_is_refused() -> None:
    with scripted(b"x") as server:
        for fields in (
            {"top_logprobs": 2},
            {"top_logprobs": 2, "logprobs": False},
            {"top_logprobs": 21, "logprobs": True},
        ):
            answer = server.chat("q", **fields)
            assert (answer.status, answer.error["param"]) == (400, "top_logprobs")
        assert server.chat("q", logprobs=1).error["param"] == "logprobs"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((b"a", b"</", b"think", b">", b"b"), ("a", "b")),
        ((b"a</think>b",), ("a", "b")),
        ((b"a",), ("a", "")),
        ((b"</think>", b"b"), ("", "b")),
        ((b"a</think>say </think> to end",), ("a", "say </think> to end")),
    ],
)
def test_a34_reasoning_and_content_are_apart(pieces: tuple[bytes, ...], expected: tuple[str, str]) -> None:
    with scripted(*pieces, think=True) as server:
        message = server.chat("q", temperature=0).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == expected
        assert streamed(server)[:2] == expected


def test_a34_cut_by_length_inside_the_reasoning_leaves_content_empty() -> None:
    with scripted(b"thinking</think>b", think=True) as server:
        choice = server.chat("q", temperature=0, max_tokens=5).json["choices"][0]
        assert choice["message"]["reasoning_content"] == "think"
        assert choice["message"]["content"] == ""
        assert choice["finish_reason"] == "length"


def test_a34_raw_completions_show_the_text_as_it_is() -> None:
    with scripted(b"a</think>b", think=True) as server:
        text = server.complete([*PROMPT, THINK], temperature=0).json["choices"][0]["text"]
        assert text == "a</think>b"


def test_control_tokens_of_users_are_text() -> None:
    with scripted(b"x") as server:
        ids = server.post("/tokenize", {"messages": [{"role": "user", "content": "<eos><think>"}]}).json["tokens"]
        assert ids == [BOS, USER, *b"<eos><think>", ASSISTANT]


def test_tools_and_other_forms_of_answers_are_refused_plainly() -> None:
    with scripted(b"x") as server:
        tool = {"type": "function", "function": {"name": "f"}}
        for fields in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}, {"reasoning_effort": "high"}):
            answer = server.chat("q", **fields)
            assert (answer.status, answer.error["code"]) == (400, "unsupported")


def test_the_history_of_a_conversation_may_carry_what_answers_carry() -> None:
    with scripted(b"x") as server:
        history = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "function_call": None},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        ]
        assert server.post("/v1/chat/completions", {"messages": history, "max_tokens": 1}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a11_max_tokens_in_chat(stream: bool) -> None:
    with scripted(b"hello") as server:
        for name in ("max_tokens", "max_completion_tokens"):
            for count, text in ((0, ""), (1, "h")):
                answer = server.chat("q", temperature=0, stream=stream, **{name: count})
                choices = [c for event in (answer.events[:-1] if stream else [answer.json]) for c in event["choices"]]
                parts = [c["delta"] if stream else c["message"] for c in choices]
                assert "".join(part.get("content", "") for part in parts) == text
                assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
            for wrong in (-1, 2**63):
                answer = server.chat("q", stream=stream, **{name: wrong})
                assert (answer.status, answer.error["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
def test_a10_a_conversation_without_room_for_an_answer(stream: bool) -> None:
    with Served(language=byte_language(max_context=40)) as server:
        fits = server.chat("a" * 36, stream=stream)  # and <bos>, <user>, <assistant>
        assert fits.status == 200
        answer = server.chat("a" * 37, stream=stream)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
