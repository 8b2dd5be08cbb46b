"""Chat messages: every fault names its field; all accepted forms become one."""

from typing import Any

import pytest

from model.messages import MessageError, check_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER_MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ({}, "messages"),
        ("text", "messages"),
        ([], "messages"),
        ([USER_MESSAGE, "text"], "messages[1]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{**USER_MESSAGE, "name": 1}], "messages[0].name"),
        ([{**USER_MESSAGE, "name": "\udfff"}], "messages[0].name"),
        ([{**USER_MESSAGE, "mood": "good"}], "messages[0].mood"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{**USER_MESSAGE, "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [CALL, {"id": "d"}]}], "messages[0].tool_calls[1].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_malformed_messages_name_the_field(messages: Any, param: str) -> None:
    with pytest.raises(MessageError) as caught:
        check_messages(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    str(caught.value).encode()  # fit for a response


def test_the_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    got = check_messages(
        (
            {"role": "developer", "content": parts},
            {"role": "user", "content": "", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "assistant", "content": "x", "tool_calls": None, "annotations": [], "reasoning_content": "r"},
            {"role": "tool", "content": "22", "tool_call_id": "c1"},
        )
    )
    assert got == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "reasoning_content": "r"},
        {"role": "tool", "content": "22", "tool_call_id": "c1"},
    ]
