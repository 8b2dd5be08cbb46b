"""Reads a Config from one TOML file and flags over it, and writes the whole effective Config as commented TOML.

Every problem is found in one go and reported with its full dotted key; nothing is guessed or ignored.
"""

import ipaddress
import json
import math
import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from .config import Config

S = TypeVar("S", bound=msgspec.Struct)


class ConfigError(ValueError):
    """`problems`: one line each, starting with the dotted key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("the configuration is wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
        self.problems = problems


def load_config(text: str = "", flags: Mapping[str, object] | None = None) -> Config:
    """`text`: TOML. `flags`: dotted key -> value, strings are converted. Raises ConfigError with all problems."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"not TOML: {error}"]) from None
    problems: list[str] = []
    for key, value in (flags or {}).items():
        _set(tables, key, value, problems)
    config = _read(Config, tables, "", problems, lax=frozenset(flags or {}))
    if config is not None:
        problems += _contradictions(config)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def render_config(config: Config) -> str:
    """TOML that `load_config` reads back to an equal Config, with every field's description."""
    lines = ["# tidegate: the whole effective configuration", ""]
    for name in config.__struct_fields__:
        lines += _render_section(name, getattr(config, name))
    return "\n".join(lines)


def _set(tables: dict[str, Any], key: str, value: object, problems: list[str]) -> None:
    *sections, last = key.split(".")
    table = tables
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            problems.append(f"{key}: {section} is not a table")
            return
    table[last] = value


def _read(cls: type[S], table: object, path: str, problems: list[str], lax: frozenset[str] = frozenset()) -> S | None:
    """Build one struct; append to `problems` and return None where that fails."""
    if not isinstance(table, dict):
        problems.append(f"{path}: expected a table, got {_shown(table)}")
        return None
    hints = get_type_hints(cls, include_extras=True)
    before = len(problems)
    values: dict[str, Any] = {}
    for key, value in table.items():
        dotted = f"{path}.{key}" if path else key
        if key not in hints:
            problems.append(f"{dotted}: unknown key; known here: {', '.join(hints)}")
            continue
        values[key] = _read_value(hints[key], value, dotted, problems, lax)
    for field in msgspec.structs.fields(cls):
        if field.required and field.name not in table:
            problems.append(f"{path}.{field.name}: missing")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # a struct's own check over several fields
        problems.append(f"{path}: {error}")
        return None


def _read_value(hint: Any, value: object, path: str, problems: list[str], lax: frozenset[str]) -> object:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _read(hint, value, path, problems, lax)
    item = _struct_item(hint)
    if item is not None:
        if not isinstance(value, list):
            problems.append(f"{path}: expected a list of tables, got {_shown(value)}")
            return ()
        return tuple(_read(item, each, f"{path}[{i}]", problems) for i, each in enumerate(value))
    try:
        converted = msgspec.convert(value, hint, strict=path not in lax)
    except msgspec.ValidationError as error:
        said = str(error).split(", got ")[0]
        problems.append(f"{path}: {said[:1].lower()}{said[1:]}, got {_shown(value)}")
        return None
    if isinstance(converted, float) and not math.isfinite(converted):
        problems.append(f"{path}: expected a finite number, got {_shown(value)}")
    return converted


def _struct_item(hint: Any) -> type[msgspec.Struct] | None:
    """The struct of a `tuple[Struct, ...]`, under Annotated or not."""
    bare = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    item = get_args(bare)[0] if get_args(bare) else None
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def _contradictions(config: Config) -> list[str]:
    problems = []
    if not is_loopback(config.server.host) and not config.auth.keys:
        problems.append(
            f"server.host: {config.server.host} can be reached from other machines; "
            "set [auth] keys (at least one API key) or serve on 127.0.0.1"
        )
    if config.engine.deterministic and config.model.mesh:
        problems.append("engine.deterministic: one device only; leave model.mesh empty")
    if config.engine.deterministic and config.engine.speculate:
        problems.append("engine.speculate: guesses are checked two at a time; not with engine.deterministic")
    hashes = [key.sha256 for key in config.auth.keys]
    if len(set(hashes)) != len(hashes):
        problems.append("auth.keys: the same sha256 is there twice")
    return problems


def _render_section(name: str, section: msgspec.Struct) -> list[str]:
    doc = (type(section).__doc__ or "").strip().splitlines()[0]
    lines = [f"# {doc}", f"[{name}]"]
    hints = get_type_hints(type(section), include_extras=True)
    for key in section.__struct_fields__:
        lines += [f"# {_description(hints[key])}", f"{key} = {_toml(getattr(section, key))}"]
    return [*lines, ""]


def _description(hint: Any) -> str:
    """What a comment says of a field: its description, its choices, its bounds."""
    parts = [m.description for m in hint.__metadata__ if isinstance(m, msgspec.Meta) and m.description]
    for meta in hint.__metadata__:
        if meta.ge is not None:
            parts.append(f"({meta.ge} to {meta.le})" if meta.le is not None else f"({meta.ge} or more)")
        elif meta.gt is not None:
            parts.append(f"(more than {meta.gt})")
    choices = get_args(get_args(hint)[0])
    if choices and all(isinstance(choice, str) for choice in choices):
        parts.append(f"({', '.join(choices)})")
    return " ".join(parts)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, msgspec.Struct):
        pairs = ", ".join(f"{key} = {_toml(getattr(value, key))}" for key in value.__struct_fields__)
        return "{ " + pairs + " }"
    return repr(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
