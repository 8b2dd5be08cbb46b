"""The hub's tokenizer files as a GGUF's metadata, so that llama.cpp reads the same ids from a text."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .config import ModelConfig
from .gguf_splits import recognise
from .gguf_tokenizer import CONTROL, ENDS, NORMAL, PREFIX, UNUSED, USER_DEFINED
from .tokenizer import Tokenizer, control_tokens, read_json, token_text


def gguf_vocabulary(directory: Path, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """(metadata, problems). Without a tokenizer.json the file says that it has none. Raises UnsupportedTokenizer."""
    if not (directory / "tokenizer.json").is_file():
        return {PREFIX + "model": "none"}, []
    tokenizer = Tokenizer.load(directory)
    definition, named = read_json(directory / "tokenizer.json"), read_json(directory / "tokenizer_config.json")
    model = definition["model"]
    pre = recognise(definition) if model.get("type") == "BPE" else None
    problems = [] if pre else ["tokenizer: its pre_tokenizer cuts texts in a way that llama.cpp has no known name for"]
    tokens, types = _tokens(definition, config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        problems.append(f"tokenizer: {tokenizer.vocab_size} tokens, the model has {config.vocab_size}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    if any(merge.count(" ") != 1 for merge in merges):
        problems.append("tokenizer: merges of tokens with spaces have no form in GGUF")
    if _normalises(definition.get("normalizer")):
        problems.append("tokenizer: its normalizer has no form in GGUF")
    keys: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges,
            "add_bos_token": tokenizer.add_bos, "add_eos_token": False, "add_space_prefix": False}  # fmt: skip
    keys |= _ids(tokenizer, config, tokens, named)
    metadata = {PREFIX + name: value for name, value in keys.items()}
    template = _chat_template(directory, named)
    return metadata | ({} if template is None else {"tokenizer.chat_template": template}), problems


def _tokens(definition: Mapping[str, Any], count: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; ids without a token pad the vocabulary to the embedding's rows."""
    texts, types = [f"[PAD{i}]" for i in range(count)], [UNUSED] * count
    added = {t["content"]: t["id"] for t in definition.get("added_tokens") or ()}
    control = control_tokens(definition)
    for token, index in (definition["model"].get("vocab", {}) | added).items():
        if index < count:
            texts[index] = token
            types[index] = CONTROL if token in control else USER_DEFINED if token in added else NORMAL
    return texts, types


def _ids(tokenizer: Tokenizer, config: ModelConfig, tokens: list[str], named: Mapping[str, Any]) -> dict[str, int]:
    """bos, ends of sequence and padding, where they are known."""
    ends: Iterable[int] = dict.fromkeys((*tokenizer.eos_ids, *config.eos_ids))
    found: dict[str, int | None] = dict(zip(ENDS, ends, strict=False))
    found["bos"] = tokenizer.bos_id if tokenizer.bos_id is not None else config.bos_id
    padding = token_text(named, "pad_token")
    found["padding"] = tokens.index(padding) if padding in tokens else None
    return {f"{name}_token_id": value for name, value in found.items() if value is not None}


def _normalises(normalizer: Any) -> bool:
    """Whether it does anything; an empty sequence does not."""
    return bool(normalizer) and not (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers"))


def _chat_template(directory: Path, named: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = named.get("chat_template")
    return template if isinstance(template, str) else None
