"""A byte-level tokenizer, a chat template and a row template small enough to work out by hand.

Token i < 256 is the byte i; then come the control tokens. The interface is that of model.tokenizer and model.chat.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from model.messages import check_messages
from model.reasoning import ReasoningSplit, opens_reasoning
from model.template import TemplateError
from model.tokenizer import Detokenizer, Tokenizer
from serving.pipeline.language import Language

BOS, EOS, USER, ASSISTANT, THINK, UNTHINK = 256, 257, 258, 259, 260, 261
VOCAB_SIZE = 320
CONTROL = {"<bos>": BOS, "<eos>": EOS, "<user>": USER, "<assistant>": ASSISTANT, "<think>": THINK, "</think>": UNTHINK}
_TEXT_OF = {token: text for text, token in CONTROL.items()}


@dataclass
class ByteTokenizer(Tokenizer):
    """A Tokenizer without a tokenizer.json, for the real Detokenizer and reasoning to work with."""

    bos_id: int | None = BOS
    add_bos: bool = False
    eos_ids: tuple[int, ...] = (EOS,)
    vocab_size: int = VOCAB_SIZE
    control: Mapping[str, int] = field(default_factory=lambda: dict(CONTROL))

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_trusted(self, text: str) -> list[int]:
        return [CONTROL[text]] if text in CONTROL else self.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else _TEXT_OF.get(token_id, "").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in (BOS, EOS)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        kept = (i for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


@dataclass(frozen=True)
class ByteChat:
    """<bos> then, per message, a control token and the text; `think`: the generation prompt opens the reasoning."""

    think: bool = False

    def encode(
        self, messages: object, tokenizer: ByteTokenizer, add_generation_prompt: bool = True, tools: object = None
    ) -> list[int]:
        ids = [BOS]
        for message in check_messages(messages):
            ids += [USER if message["role"] == "user" else ASSISTANT, *tokenizer.encode(message["content"] or "")]
        return [*ids, ASSISTANT, *([THINK] if self.think else [])]


@dataclass(frozen=True)
class FakeLabel:
    name: str
    text: str


@dataclass(frozen=True)
class FakeTemplate:
    """Renders column `x`; positive from `threshold` on."""

    name: str = "toy"
    columns: tuple[str, ...] = ("x",)
    labels: tuple[FakeLabel, ...] = (FakeLabel("good", "G"), FakeLabel("bad", "B"))
    threshold: float = 0.5
    example: Mapping[str, object] = field(default_factory=dict)

    def render(self, features: Mapping[str, object]) -> str:
        if "x" not in features:
            raise TemplateError("column x is missing", "x")
        return f"x={features['x']}>"

    def decide(self, probabilities: Mapping[str, float]) -> str:
        return "bad" if probabilities["bad"] >= self.threshold else "good"


def byte_language(
    *,
    max_context: int = 512,
    think: bool = False,
    templates: Mapping[str, FakeTemplate] | None = None,
    tokenizer: ByteTokenizer | None = None,
) -> Language:
    """`think`: the model reasons aloud and its chat prompt opens the reasoning. Default templates: one, the default."""
    tokenizer = tokenizer or ByteTokenizer()
    templates = {"toy": FakeTemplate()} if templates is None else templates
    new_splitter: Callable[[Sequence[int]], ReasoningSplit] | None = None
    if think:
        new_splitter = lambda ids: ReasoningSplit(opened=opens_reasoning(ids, tokenizer))  # noqa: E731
    return Language(
        tokenizer=tokenizer,
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
        new_detokenizer=lambda: Detokenizer(tokenizer, skip_special=True),
        chat=ByteChat(think),  # type: ignore[arg-type]
        new_splitter=new_splitter,
        templates=templates,
        default_template=next(iter(templates), None),
    )
