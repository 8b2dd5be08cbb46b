"""Chat messages to ids: the checkpoint's Jinja template in a sandbox, with users kept out of its control tokens.

The template decides which control tokens there are. Before it is compiled, every control token in its own text is
replaced by a placeholder that cannot come from a message; after rendering, placeholders become control ids and all
else is encoded as a user's text. So a message that spells `<｜Assistant｜>` gets letters, wherever the template puts it
and however it cuts it (R1's drops everything up to `</think>`), and harmless messages get the reference's ids.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .messages import check_messages
from .tokenizer import Tokenizer, control_tokens, read_json, token_text

# Unicode noncharacters, which are for use inside a program. A message that holds one has it escaped, and back.
_OPEN, _CLOSE, _ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_RESERVED = re.compile(f"[{_OPEN}{_CLOSE}{_ESCAPE}]")
_ESCAPED = re.compile(f"{_ESCAPE}([012])")
# Methods and filters that search for their first argument: a literal there is looked for in messages, never shown.
_SEARCHES = frozenset(
    {
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "replace",
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "strip",
        "lstrip",
        "rstrip",
        "removeprefix",
        "removesuffix",
    }
)


class ChatTemplate:
    """One checkpoint's chat format. Immutable, safe to use from several threads."""

    def __init__(self, source: str, control: Mapping[str, int], special: Mapping[str, str]) -> None:
        """source: Jinja; control: text -> id of each control token; special: bos_token, eos_token, ... by name.

        Raises ValueError where the template is not valid.
        """
        self._control = dict(control)
        # Longest first: of two tokens that start alike, the longer one is meant.
        by_length = sorted(control, key=len, reverse=True)
        self._any_control = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._special = {name: self._mark(text) for name, text in special.items()}
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._mark_tree(tree, shown=True)
            code = environment.compile(tree)
        except JinjaError as error:
            raise ValueError(f"chat template: {error}") from error
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    @classmethod
    def load(cls, directory: str | Path) -> "ChatTemplate | None":
        """Read chat_template.jinja, else chat_template of tokenizer_config.json. None where there is neither."""
        root = Path(directory)
        config = read_json(root / "tokenizer_config.json")
        source = _source(root / "chat_template.jinja", config.get("chat_template"))
        if source is None:
            return None
        names = {key: token_text(config, key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        special = {key: text for key, text in names.items() if text is not None}
        return cls(source, control_tokens(read_json(root / "tokenizer.json")), special)

    def encode(
        self, messages: object, tokenizer: Tokenizer, add_generation_prompt: bool = True, tools: object = None
    ) -> list[int]:
        """Ids of a conversation; the template itself places bos. `tokenizer` is the checkpoint's.

        Raises MessageError (a ValueError that names the field), or ValueError with what the template said.
        """
        context = {**self._special, "messages": _escape(check_messages(messages)), "tools": _escape(tools)}
        pieces = _PLACEHOLDER.split(self._render({**context, "add_generation_prompt": add_generation_prompt}))
        texts = tokenizer.encode_batch([_unescape(text) for text in pieces[::2]])
        ids = texts[0]
        for control, text in zip(pieces[1::2], texts[1:], strict=True):
            ids.append(int(control))
            ids.extend(text)
        return ids

    def _render(self, context: Mapping[str, Any]) -> str:
        try:
            return self._template.render(context)
        except (JinjaError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def _mark(self, text: str) -> str:
        return self._any_control.sub(lambda m: f"{_OPEN}{self._control[m[0]]}{_CLOSE}", _escape(text))

    def _mark_tree(self, node: nodes.Node, *, shown: bool) -> None:
        """Mark every literal that can reach the output; `shown`: this node's value can."""
        if isinstance(node, nodes.TemplateData):
            node.data = self._mark(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str) and shown:
            node.value = self._mark(node.value)
        hidden = set(map(id, _hidden(node)))
        for child in node.iter_child_nodes():
            self._mark_tree(child, shown=shown and id(child) not in hidden)


def _hidden(node: nodes.Node) -> Iterable[nodes.Node]:
    """The children whose literals are compared or looked up, and so must stay as messages spell them."""
    if isinstance(node, nodes.Compare):
        return node.iter_child_nodes()
    if isinstance(node, nodes.Test | nodes.Getitem):
        return [child for child in node.iter_child_nodes() if child is not node.node]
    called = node.node if isinstance(node, nodes.Call) else None
    if isinstance(called, nodes.Getattr) and called.attr in _SEARCHES:
        return node.args[:1]  # type: ignore[attr-defined]
    if isinstance(node, nodes.Filter) and node.name in _SEARCHES:
        return node.args[:1]
    return ()


def _environment() -> ImmutableSandboxedEnvironment:
    """As the hub's templates expect it."""
    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _source(path: Path, configured: object) -> str | None:
    if path.is_file():
        return path.read_text("utf-8")
    if isinstance(configured, list):  # several by name
        configured = {c.get("name"): c.get("template") for c in configured}.get("default")
    return configured if isinstance(configured, str) else None


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise JinjaError(message)


def _escape(value: Any) -> Any:
    """The reserved characters of every string inside, escaped."""
    if isinstance(value, str):
        return _RESERVED.sub(lambda m: f"{_ESCAPE}{ord(m[0]) - ord(_OPEN)}", value)
    if isinstance(value, Mapping):
        return {_escape(k): _escape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(v) for v in value]
    return value


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda m: chr(ord(_OPEN) + int(m[1])), text)
