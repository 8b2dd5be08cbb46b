"""Chat messages as a client sent them, checked and brought to the one form that chat templates read.

The form is OpenAI's. Every fault is a MessageError whose `param` is the path of the field, before any template runs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
# Other fields of OpenAI's answers, which clients send back as they came: allowed while they say nothing.
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call")


class MessageError(ValueError):
    """A message that cannot be used. `param`: where, for example messages[2].content."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with `content` as one string (None only beside tool calls). Raises MessageError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise MessageError("messages", "must be a list of messages")
    if not messages:
        raise MessageError("messages", "must hold at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(at, "must be an object with role and content")
    for key, value in message.items():
        known = key in ("role", "content", "tool_calls", *_TEXT_FIELDS)
        if not known and not (key in _EMPTY_FIELDS and not value):
            raise MessageError(f"{at}.{key}", "unknown field")
    role = message.get("role")
    if role not in _ROLES:
        raise MessageError(f"{at}.role", f"got {role!r:.40}, allowed are {', '.join(_ROLES)}")
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if calls is not None and role != "assistant":
        raise MessageError(f"{at}.tool_calls", "only an assistant message has tool calls")
    if calls:
        out["tool_calls"] = _tool_calls(calls, f"{at}.tool_calls")
    out["content"] = _content(message.get("content"), f"{at}.content", optional=bool(calls))
    for key in _TEXT_FIELDS:
        if message.get(key) is not None:
            out[key] = _text(message[key], f"{at}.{key}")
    return out


def _content(content: object, at: str, *, optional: bool) -> str | None:
    if content is None:
        if optional:
            return None
        raise MessageError(at, "is missing")
    if isinstance(content, str):
        return _text(content, at)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise MessageError(at, "must be a string or a list of text parts")
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: object, at: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise MessageError(at, f"only parts of type 'text' are supported, got {kind!r:.40}")
    return _text(part.get("text"), f"{at}.text")


def _tool_calls(calls: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise MessageError(at, "must be a list")
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, at: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise MessageError(at, "must be an object")
    if call.get("type", "function") != "function":
        raise MessageError(f"{at}.type", f"got {call['type']!r:.40}, allowed is 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise MessageError(f"{at}.function", "must be an object with name and arguments")
    name = _text(function.get("name"), f"{at}.function.name")
    arguments = _text(function.get("arguments"), f"{at}.function.arguments")
    if not _is_json_object(arguments):
        raise MessageError(f"{at}.function.arguments", "must be a string that holds a JSON object")
    out: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        out["id"] = _text(call["id"], f"{at}.id")
    return out


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise MessageError(at, f"must be a string, got {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise MessageError(at, "holds half a surrogate pair") from None
    return value
