"""What a served model knows of text: its tokenizer, chat template, row templates and context length.

The pipeline sees them through the Protocols below, so that it is tested with a byte-level fake and never reads a file.
Everything is read-only after construction: encode threads and the event loop share one Language.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .guide import Guide


class Vocabulary(Protocol):
    """The tokenizer. `encode*` take text from users and never yield control tokens."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def add_bos(self) -> bool:
        """The tokenizer's own config says that a raw prompt starts with BOS."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_trusted(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer(Protocol):
    """Incremental: never gives a part of a character."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ReasoningPiece(Protocol):
    """Some text of one part; the other is empty."""

    @property
    def reasoning(self) -> str: ...

    @property
    def content(self) -> str: ...


class ReasoningSplitter(Protocol):
    """Text in, pieces out; holds back what could still be a part of a tag."""

    def push(self, text: str) -> Sequence[ReasoningPiece]: ...

    def flush(self) -> Sequence[ReasoningPiece]: ...


class Chat(Protocol):
    """A chat template. `encode` raises ValueError that names the field at fault."""

    def encode(
        self,
        messages: object,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        tools: object = None,
    ) -> list[int]: ...


class TemplateLabel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...


class RowTemplate(Protocol):
    """Features to text, and the labels that follow it. `render` raises ValueError that names the column."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> Sequence[str]: ...

    @property
    def labels(self) -> Sequence[TemplateLabel]: ...

    @property
    def example(self) -> Mapping[str, object]:
        """A row to show people; may be empty."""
        ...

    def render(self, features: Mapping[str, object]) -> str: ...

    def decide(self, probabilities: Mapping[str, float]) -> str: ...


class DetokenizerFactory(Protocol):
    def __call__(self) -> Detokenizer: ...


class SplitterFactory(Protocol):
    def __call__(self, prompt_ids: Sequence[int]) -> ReasoningSplitter:
        """The prompt says whether the answer begins inside the reasoning."""
        ...


def no_reasoning(prompt_ids: Sequence[int]) -> int | None:
    """Of a model that never reasons aloud."""
    return None


@dataclass(frozen=True)
class Language:
    """One served model's text side. `max_context` counts prompt and generated tokens.

    `reasoning_end`: the token that ends the reasoning, where a prompt ends inside it.
    """

    tokenizer: Vocabulary
    max_context: int
    vocab_size: int  # the model's: token ids of clients are below it
    new_detokenizer: DetokenizerFactory
    chat: Chat | None = None
    new_splitter: SplitterFactory | None = None  # None: the model does not reason aloud
    templates: Mapping[str, RowTemplate] = field(default_factory=dict)
    default_template: str | None = None
    reasoning_end: Callable[[Sequence[int]], int | None] = no_reasoning
    adjusts: bool = True  # the engine keeps what penalties, biases and allowed tokens need
    guide: Guide | None = None  # None: no guided output
