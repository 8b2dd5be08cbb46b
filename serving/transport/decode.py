"""A request body to a struct: strict JSON, strict types, and no field that is quietly dropped.

Refused with 400: bytes that are no UTF-8 JSON, NaN and infinities, half a surrogate pair, nesting deeper than the
interpreter's limit, a key twice in one object, wrong types, unknown fields. Fields of OpenAI's interface that change
nothing here are ignored; those that would change the answer are refused unless they hold their neutral value.
"""

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from serving.errors import BadRequest, Unsupported

T = TypeVar("T", bound=msgspec.Struct)

_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",  # says how to call tools, of which there are none
        "cache_prompt",
    }
)
# Field -> the values besides null that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "min_tokens": (0,),
}
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_json(raw: bytes) -> Any:
    """The body as plain Python values. Raises BadRequest; the message never quotes the body."""
    if not raw.strip():
        raise BadRequest("the body is empty; send a JSON object")
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # well formed, but a number that no float or int holds
        raise BadRequest(f"the body: {_lowered(str(error).partition(' - at ')[0])}") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is no valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    if _has_duplicates(raw, value):
        raise BadRequest(f"the body has the key {_duplicate(raw)!r} twice in one object")
    return value


def read_body(raw: bytes, cls: type[T]) -> T:
    """Parse and check a whole body. Raises BadRequest or Unsupported with the field's dotted path as `param`."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    check_fields(value, cls)
    return convert(value, cls)


def convert(value: object, cls: type[T], path: str = "") -> T:
    """`value` as `cls`, strictly. Raises BadRequest whose param is `path` and the place inside."""
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        message, param = _reworded(str(error), path)
        raise BadRequest(message, param=param or None) from None


def check_fields(value: Mapping[str, object], cls: type[msgspec.Struct]) -> None:
    known = cls.__struct_fields__
    for name, given in value.items():
        if name in known or name in _IGNORED:
            continue
        if name not in _UNSUPPORTED:
            raise BadRequest(f"unknown field {name[:64]!r}", param=name[:64])
        if given is not None and not any(_same(given, neutral) for neutral in _UNSUPPORTED[name]):
            raise Unsupported(f"{name} is not supported by this server; leave it out", param=name)


def _same(given: object, neutral: object) -> bool:
    return type(given) is type(neutral) and given == neutral


def _reworded(said: str, path: str) -> tuple[str, str]:
    """msgspec's "Expected `int` - at `$.n`" as ("n: expected `int`", "n")."""
    what, _, place = said.partition(" - at ")
    place = place.strip("`").removeprefix("$").replace("[...]", "").removeprefix(".")
    if place.startswith("key"):  # "key` in `$.x": a key of x is wrong
        place = place.rpartition("$.")[2]
    dotted = ".".join(part for part in (path, place) if part).replace(".[", "[")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    if missing:
        dotted = ".".join(part for part in (dotted, missing[1]) if part)
        return f"{dotted} is required", dotted
    if unknown:
        dotted = ".".join(part for part in (dotted, unknown[1][:64]) if part)
        return f"unknown field {dotted!r}", dotted
    return (f"{dotted}: {_lowered(what)}" if dotted else f"the body: {_lowered(what)}"), dotted


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _has_duplicates(raw: bytes, value: object) -> bool:
    """A decoder keeps one of two equal keys, so the colons outside strings outnumber the pairs that it gives."""
    num_colons = raw.count(b":")
    if _count_pairs(value, enough=num_colons) == num_colons:
        return False
    num_colons = _STRING.sub(b"", raw).count(b":")
    return _count_pairs(value, enough=num_colons) < num_colons


def _count_pairs(value: object, enough: int) -> int:
    """Pairs of all objects inside `value`; stops at `enough`, which spares long lists of token ids."""
    num_pairs = 0
    todo = deque((value,))
    while todo and num_pairs < enough:
        item = todo.popleft()
        if isinstance(item, dict):
            num_pairs += len(item)
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return num_pairs


def _duplicate(raw: bytes) -> str:
    found: list[str] = []

    def keep(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)

    json.loads(raw, object_pairs_hook=keep)
    return found[0][:64] if found else ""
