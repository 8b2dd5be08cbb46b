"""How byte-level vocabularies cut a text before merging: llama.cpp's name (`tokenizer.ggml.pre`) and the expressions.

Each expression cuts the pieces that the one before it left, and what it does not match stays a piece, in llama.cpp as
in tokenizers' Split. A tokenizer that was made elsewhere is recognised by its cuts of a probe, as llama.cpp's own
converter does it.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHERS}"
_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK, _KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_LETTERS = (  # of scripts with two cases, as DeepSeek-LLM cuts them; escaped, because some look alike
    "A-Za-z"
    "\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0"
    "-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-"
    "\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6"
    "-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


class Cut(NamedTuple):
    """`whole_words`: a piece that is a token is not merged anew (tokenizers' ignore_merges)."""

    expressions: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False  # where the file does not say


CUTS: Mapping[str, Cut] = {
    "gpt-2": Cut((_GPT2,)),
    "smollm": Cut((r"\p{N}", _GPT2)),
    "llama-bpe": Cut((_LLAMA3,), whole_words=True, adds_bos=True),
    "smaug-bpe": Cut((_LLAMA3,)),
    "qwen2": Cut((_QWEN2,)),
    # As DeepSeek's own file has it; llama.cpp leaves runs of digits whole, and no vocabulary of theirs joins digits.
    "deepseek-llm": Cut((r"[\r\n]", rf"\s?[{_LETTERS}]+", _MARKS, r"\s+$", _CJK, r"\p{N}")),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": Cut((r"\p{N}{1,3}", _KANA, _V3)),
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
# Other names that llama.cpp has for the same cuts, among models of llama and qwen2 form.
ALIASES: Mapping[str, str] = {
    "phi-2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2", "jais": "gpt-2", "exaone4": "gpt-2", "a.x-4.0": "gpt-2",
    "starcoder": "smollm", "refact": "smollm", "codeshell": "smollm", "exaone": "smollm", "minerva-7b": "smollm",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "stablelm2": "qwen2", "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "kormo": "qwen2",
    "dbrx": "smaug-bpe",
}  # fmt: skip
_PROBE = (
    "Hello, World! It's 3 o'clock; we'LL see 1234567 (items) at 3.14€ \n\n  \t\u201cquoted\u201d\u2026 x=y+z;\r\n"
    " caf\u00e9 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c12\u3042\u30a2\ud55c\uae00"
    " \u041f\u0440\u0438\u0432\u0435\u0442 \u0b95\u0bcd\u0937 \U0001f600\U0001f44d"
    " __init__.py #include<a> a\u0301b $5 ~ ^ | `code` ...---   \n   end  "
)


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The part of a tokenizer.json that cuts as `name` does. Raises KeyError."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in cut(name).expressions
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def cut(name: str) -> Cut:
    """Raises KeyError."""
    return CUTS[ALIASES.get(name, name)]


def recognise(definition: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for the cuts of a tokenizer.json; None where no known one cuts the probe the same way."""
    wanted = _pieces(definition.get("pre_tokenizer"))
    whole_words = bool(definition["model"].get("ignore_merges"))
    known = (name for name, known in CUTS.items() if known.whole_words == whole_words)
    return next((name for name in known if _pieces(pre_tokenizer(name)) == wanted), None)


def _pieces(definition: Any) -> list[str]:
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    made: Any = tokenizers.Tokenizer.from_str(json.dumps({"model": empty, "pre_tokenizer": definition}))
    return [] if made.pre_tokenizer is None else [text for text, _ in made.pre_tokenizer.pre_tokenize_str(_PROBE)]
