"""Text to ids and back, with the checkpoint's own tokenizer.json.

Two readings of one file. `encode` is for text from users: whatever it says, no control token comes out of it.
`encode_trusted` is for text that we wrote, such as a chat template's own parts: there the file's control tokens are
matched. For text that holds none of them both give the same ids. Decoding is over bytes, so a character whose bytes
lie in several tokens comes out whole, or not yet.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

# Some files add plain letters (DeepSeek-Coder: "õ", "÷") as tokens. A control token is one that the file calls
# special, or one that looks like markup.
_MARKUP = frozenset("<>[]{}|｜▁")


class UnsupportedTokenizer(ValueError):
    """The tokenizer files are missing, broken, or of a kind that cannot be decoded byte by byte."""


class Tokenizer:
    """One checkpoint's tokenizer. Immutable, safe to use from several threads."""

    def __init__(self, definition: Mapping[str, Any], config: Mapping[str, Any], extra_eos: Iterable[int] = ()) -> None:
        """definition: tokenizer.json; config: tokenizer_config.json; extra_eos: further ids that end a sequence."""
        if not _is_byte_level(definition.get("decoder")):
            raise UnsupportedTokenizer("tokenizer.json: only byte-level tokenizers are supported (decoder ByteLevel)")
        self._trusted = _build(definition)
        added: Sequence[Mapping[str, Any]] = definition.get("added_tokens") or ()
        self.control = control_tokens(definition)
        self._control_ids = frozenset(self.control.values())
        self._special_ids = frozenset(t["id"] for t in added if t.get("special"))
        # Reading control tokens as text is a switch that acts on special tokens: call all of them special.
        self._plain = _build({**definition, "added_tokens": [{**t, "special": _is_control(t)} for t in added]})
        self._plain.encode_special_tokens = True
        self.vocab_size: int = max(self._trusted.get_vocab().values()) + 1
        self.bos_id: int | None = self._named(config, "bos_token")
        eos = self._named(config, "eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(([] if eos is None else [eos]) + list(extra_eos)))
        declared = config.get("add_bos_token")
        self.add_bos: bool = self.bos_id is not None and (
            bool(declared) if declared is not None else self.bos_id in self._trusted.encode("").ids
        )

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read tokenizer.json, and tokenizer_config.json and generation_config.json where they exist.

        Raises UnsupportedTokenizer, which names the file.
        """
        root = Path(directory)
        if not (root / "tokenizer.json").is_file():
            raise UnsupportedTokenizer(f"{root}: there is no tokenizer.json")
        generation = read_json(root / "generation_config.json")
        eos = generation.get("eos_token_id")
        return cls(
            read_json(root / "tokenizer.json"),
            read_json(root / "tokenizer_config.json"),
            eos if isinstance(eos, list) else [] if eos is None else [eos],
        )

    def _named(self, config: Mapping[str, Any], key: str) -> int | None:
        text = token_text(config, key)
        if text is None:
            return None
        found: int | None = self._trusted.token_to_id(text)
        if found is None:
            raise UnsupportedTokenizer(f"tokenizer_config.json: {key} {text!r} is not in tokenizer.json")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text; never a control token. Raises ValueError on half a surrogate pair."""
        return self.encode_batch((text,))[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one go: the tokenizer works on several at the same time."""
        for text in texts:
            _check_text(text)
        rows = [e.ids for e in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [
            ids if self._control_ids.isdisjoint(ids) else self._encode_by_character(text)
            for ids, text in zip(rows, texts, strict=True)
        ]

    def _encode_by_character(self, text: str) -> list[int]:
        # A vocabulary whose merges build a control token from its letters: no known checkpoint has one.
        return [i for c in text for i in self._plain.encode(c, add_special_tokens=False).ids]

    def encode_trusted(self, text: str) -> list[int]:
        """Ids of a text of our own, control tokens recognised. No bos is added."""
        _check_text(text)
        ids: list[int] = self._trusted.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; it need not be whole characters. b"" for an id that the file does not name."""
        text: str | None = self._trusted.id_to_token(token_id)
        return b"" if text is None else _to_bytes(text, self._byte_of)

    def is_special(self, token_id: int) -> bool:
        """A token that the file flags as special (bos, eos, pad): usually not shown to users."""
        return token_id in self._special_ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self._special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return byte_alphabet()


class Detokenizer:
    """Ids to text as they come: holds back the bytes of an unfinished character. One per choice, one thread."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is now complete. All pieces and the flush joined equal `decode` of all ids."""
        kept = (i for i in ids if not (self._skip_special and self._tokenizer.is_special(i)))
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, kept)))

    def flush(self) -> str:
        """The end: U+FFFD if a character was cut, else nothing."""
        return self._decoder.decode(b"", final=True)


def control_tokens(definition: Mapping[str, Any]) -> dict[str, int]:
    """Text -> id of the control tokens of a tokenizer.json."""
    return {t["content"]: t["id"] for t in definition.get("added_tokens") or () if _is_control(t)}


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UnsupportedTokenizer(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedTokenizer(f"{path}: not a JSON object")
    return value


def token_text(config: Mapping[str, Any], key: str) -> str | None:
    """bos_token and the like: a string, or an object with `content`."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _build(definition: Mapping[str, Any]) -> Any:
    # Truncation and padding of the file would silently change what a text says.
    plain = {**definition, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedTokenizer(f"tokenizer.json: {error}") from error


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, Mapping):
        return False
    if decoder.get("type") == "Sequence":
        return [d.get("type") for d in decoder.get("decoders", ())] == ["ByteLevel"]
    return decoder.get("type") == "ByteLevel"


def _is_control(token: Mapping[str, Any]) -> bool:
    return bool(token.get("special")) or not _MARKUP.isdisjoint(token["content"])


def _to_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    # The rule of the tokenizers library: one character outside the alphabet makes the whole token plain text.
    try:
        return bytes(byte_of[c] for c in token)
    except KeyError:
        return token.encode("utf-8")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds half a surrogate pair at character {error.start}") from None
