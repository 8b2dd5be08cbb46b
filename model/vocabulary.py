"""A small tokenizer.json made for one template: every word that its rows can hold is one token.

Any other text is encoded byte by byte, so nothing is out of vocabulary. The word tokens are found whole (BPE with
`ignore_merges` and no merges), which needs no training and cannot split a word in a surprising place.
"""

from collections.abc import Iterable
from typing import Any

from .template import Template
from .tokenizer import byte_alphabet

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
CONTROL = (BOS, EOS, USER, ASSISTANT)

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% else %}{{ '<｜User｜>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)


def template_words(template: Template) -> list[str]:
    """Every piece of a row's text and of the labels, as the tokenizer splits it: words keep their leading space."""
    rows = [f" {text}" for word in template.words for text in word.vocabulary]
    fixed = [f" {piece}" for part in template.literals for piece in part.split()]
    return list(dict.fromkeys(rows + fixed + [label.text for label in template.labels]))


def tokenizer_definition(words: Iterable[str]) -> dict[str, Any]:
    """tokenizer.json: control tokens, then the 256 bytes, then the words."""
    symbols = {byte: symbol for symbol, byte in byte_alphabet().items()}
    pieces = ["".join(symbols[b] for b in word.encode()) for word in words]
    tokens = [*CONTROL, *(symbols[b] for b in range(256)), *pieces]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # Before every space: a plain string, since a regular expression would double the cost of encoding a row.
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags, "special": text in (BOS, EOS)} for i, text in enumerate(CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text: i for i, text in enumerate(dict.fromkeys(tokens))},
            "merges": [],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """tokenizer_config.json: rows and chats start with bos. max_length: tokens of the model's context."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
    }
