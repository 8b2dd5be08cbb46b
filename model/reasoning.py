"""R1's answers in two parts: the reasoning between `<think>` and `</think>`, and the content after it.

Works on text as it streams and is pure: the result does not depend on where the text is cut. Where the chat template
ends a prompt with `<think>`, the model never writes that tag and its first word is reasoning; whether it does is read
from each prompt (R1's does not after a tool's result). Only the first `</think>` counts: an answer may quote one.
White space next to the tags belongs to neither part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one part; the other is empty."""

    reasoning: str = ""
    content: str = ""


def opens_reasoning(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends in `<think>` (and white space) as a control token, which no user's text can be."""
    tag = tokenizer.control.get(OPEN)
    if tag is None:
        return False
    for token in reversed(prompt_ids):
        if token == tag:
            return True
        if token in tokenizer.control.values() or tokenizer.token_bytes(token).strip():
            return False
    return False


class _State(Enum):
    START = "start"  # nothing but white space so far: `<think>` may come
    OPENED = "opened"  # white space after `<think>`
    REASONING = "reasoning"
    CLOSED = "closed"  # white space after `</think>`
    CONTENT = "content"


class ReasoningSplit:
    """One choice's stream. `opened`: the prompt ends inside the reasoning (`opens_reasoning`)."""

    def __init__(self, *, opened: bool) -> None:
        self._opened = opened
        self._state = _State.START
        self._held = ""  # may yet turn out to be a tag, or the white space before one

    def push(self, text: str) -> list[Piece]:
        """What is certain after more text, in order."""
        self._held += text
        return self._run(final=False)

    def flush(self) -> list[Piece]:
        """The end of the stream: what was held back. Without `</think>` all of it is reasoning."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before = self._state
            pieces.extend(self._step(final=final))
            if self._state is before:
                return pieces

    def _step(self, *, final: bool) -> list[Piece]:
        if self._state is _State.REASONING:
            return self._reason(final=final)
        if self._state is _State.CONTENT:
            text, self._held = self._held, ""
            return [Piece(content=text)] if text else []
        if self._state is _State.START:
            self._start(final=final)
        else:
            self._skip_space()
        return []

    def _start(self, *, final: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):  # some models write it although the prompt has
            self._state, self._held = _State.OPENED, text[len(OPEN) :]
        elif final or not OPEN.startswith(text):
            self._state = _State.OPENED if self._opened else _State.CONTENT

    def _skip_space(self) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._state = _State.REASONING if self._state is _State.OPENED else _State.CONTENT

    def _reason(self, *, final: bool) -> list[Piece]:
        text, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._state, self._held = _State.CLOSED, rest
            text = text.rstrip()
        elif final:
            self._held = ""
        else:
            certain = _certain(text)
            text, self._held = text[:certain], text[certain:]
        return [Piece(reasoning=text)] if text else []


def _certain(text: str) -> int:
    """How much of `text` cannot be part of `</think>` or of the white space before it."""
    for size in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if text.endswith(CLOSE[:size]):
            text = text[:-size]
            break
    return len(text.rstrip())
