"""The tokenizer of a GGUF as the hub's files: tokenizer.json, tokenizer_config.json and generation_config.json.

Byte-level BPE only (`tokenizer.ggml.model` gpt2, with a `pre` that gguf_splits knows); llama.cpp applies no
normaliser to it, so there is none here.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .gguf_splits import ALIASES, CUTS, cut, pre_tokenizer
from .hub_fields import shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."
ENDS = ("eos", "eot", "eom")  # of a text, a turn and a message: generation stops at each


class HubTokenizer(NamedTuple):
    """The hub's files, and the ids that config.json repeats."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    generation: dict[str, Any]

    @property
    def ids(self) -> dict[str, Any]:
        return {name: self.generation.get(name) for name in ("bos_token_id", "eos_token_id")}


def hub_tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> tuple[HubTokenizer | None, list[str]]:
    """The files, or None where the GGUF holds no tokenizer; and the problems, which make them worthless."""
    kind = metadata.get(PREFIX + "model")
    if kind in (None, "none", "no_vocab"):
        return None, []
    if kind != "gpt2":
        return None, [f"tokenizer: model {shown(kind)} is not supported; known: 'gpt2' (byte-level BPE)"]
    problems = _problems(metadata, vocab_size)
    return (None, problems) if problems else (_files(metadata), [])


def _problems(metadata: Mapping[str, Any], vocab_size: int) -> list[str]:
    problems = []
    pre = metadata.get(PREFIX + "pre", "default")
    if pre not in CUTS and pre not in ALIASES:
        problems.append(f"tokenizer: pre {shown(pre)} is not supported; known: {', '.join((*CUTS, *ALIASES))}")
    tokens, merges = metadata.get(PREFIX + "tokens"), metadata.get(PREFIX + "merges")
    for name, value in (("tokens", tokens), ("merges", merges)):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            problems.append(f"tokenizer: {name} are not a list of strings")
    if problems or not isinstance(tokens, list):
        return problems
    if len(tokens) > vocab_size:
        problems.append(f"tokenizer: {len(tokens)} tokens, the embedding has {vocab_size} rows")
    twice = [token for token, count in Counter(filter(None, tokens)).items() if count > 1]
    problems += [f"tokenizer: the token {shown(token)} occurs twice" for token in twice]
    types = metadata.get(PREFIX + "token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        problems.append("tokenizer: token_type has not one type for each token")
    return problems + _id_problems(metadata, len(tokens)) + _merge_problems(metadata)


def _id_problems(metadata: Mapping[str, Any], count: int) -> list[str]:
    found = {name: metadata[key] for name in (*ENDS, "bos", "padding") if (key := _id_key(name)) in metadata}
    return [
        f"tokenizer: {name}_token_id {shown(value)} is not a token's id"
        for name, value in found.items()
        if type(value) is not int or not 0 <= value < count
    ]


def _merge_problems(metadata: Mapping[str, Any]) -> list[str]:
    known = set(metadata[PREFIX + "tokens"])
    parts = ((merge, *_pair(merge)) for merge in metadata[PREFIX + "merges"])
    wrong = [merge for merge, left, right in parts if not {left, right, left + right} <= known]
    return [f"tokenizer: {len(wrong)} merges of unknown tokens, such as {shown(wrong[0])}"] if wrong else []


def _pair(merge: str) -> tuple[str, str]:
    """Parted at the first space that is not its first character, as llama.cpp does it."""
    at = merge.find(" ", 1)
    return (merge[:at], merge[at + 1 :]) if at > 0 else (merge, "")


def _files(metadata: Mapping[str, Any]) -> HubTokenizer:
    tokens: list[str] = metadata[PREFIX + "tokens"]
    types: list[int] = metadata.get(PREFIX + "token_type", [NORMAL] * len(tokens))
    known = cut(metadata.get(PREFIX + "pre", "default"))
    named = {name: metadata[key] for name in (*ENDS, "bos", "padding") if (key := _id_key(name)) in metadata}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["add_bos_token"] = bool(metadata.get(PREFIX + "add_bos_token", known.adds_bos))
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if name in named:
            config[key] = tokens[named[name]]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    ends = list(dict.fromkeys(named[name] for name in ENDS if name in named))
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    if "bos" in named:
        generation["bos_token_id"] = named["bos"]
    definition = _definition(tokens, types, metadata)
    return HubTokenizer(definition, config, generation)


def _definition(tokens: list[str], types: list[int], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json. Unused ids, which pad the vocabulary, stay without a token."""
    pre = metadata.get(PREFIX + "pre", "default")
    used = {token: i for i, token in enumerate(tokens) if token and types[i] != UNUSED}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **plain, "special": types[i] != USER_DEFINED}
        for token, i in used.items()
        if types[i] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": cut(pre).whole_words,
        "vocab": used, "merges": [list(_pair(merge)) for merge in metadata[PREFIX + "merges"]],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": pre_tokenizer(pre), "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip


def _id_key(name: str) -> str:
    return f"{PREFIX}{name}_token_id"
