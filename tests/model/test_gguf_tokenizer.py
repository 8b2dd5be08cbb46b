"""A GGUF's vocabulary as tokenizer.json, checked by an encoder of its own, and every fault of it named."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.gguf_tokenizer import hub_tokenizer
from model.tokenizer import Tokenizer, byte_alphabet
from tests.model import tiny_gguf as tiny

SIZE = len(tiny.TOKENS)


def read(**changes: Any) -> Tokenizer:
    files, problems = hub_tokenizer(tiny.metadata() | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}, SIZE)
    assert problems == []
    assert files is not None
    eos = files.generation["eos_token_id"]
    return Tokenizer(files.tokenizer, files.config, eos if isinstance(eos, list) else [eos])


def merged(text: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding of one piece as the paper has it: the pair of the least rank first, the leftmost of those."""
    letter = {byte: char for char, byte in byte_alphabet().items()}
    parts = [letter[byte] for byte in text.encode()]
    while len(parts) > 1:
        pairs = [(ranks.get((a, b), 1 << 30), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        rank, at = min(pairs)
        if rank == 1 << 30:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@given(st.text(st.sampled_from(" the19in\nü你"), max_size=20))
def test_ids_are_those_of_a_plain_byte_pair_encoder(text: str) -> None:
    pieces = []
    for letter in text:  # smollm's cuts, for this alphabet: digits alone, a space before a word goes with it
        kind = "d" if letter.isdigit() else "w" if letter.isalpha() else "s"
        pieces.append((kind, letter))
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(tiny.MERGES)}
    want: list[int] = []
    for piece in _cuts(pieces):
        want += [tiny.TOKENS.index(part) for part in merged(piece, ranks)]  # type: ignore[arg-type]
    assert read().encode(text) == want


def _cuts(letters: list[tuple[str, str]]) -> list[str]:
    """Runs of one kind; a run of spaces before a word lends it its last one, if that is a space."""
    runs: list[list[str]] = []
    for kind, letter in letters:
        if runs and runs[-1][0] == kind and kind != "d":
            runs[-1][1] += letter
        else:
            runs.append([kind, letter])
    out: list[str] = []
    for i, (kind, run) in enumerate(runs):
        following = runs[i + 1][0] if i + 1 < len(runs) else None
        if kind == "w" and out and out[-1] == "\0":
            out[-1] = " " + run
            continue
        if kind == "s" and following == "w":
            head, last = run[:-1], run[-1]
            out += [head] if head else []
            out.append("\0" if last == " " else last)
            continue
        out.append(run)
    return [piece for piece in out if piece]


def test_types_become_control_added_and_plain_tokens() -> None:
    tokenizer = read()
    assert tokenizer.encode_trusted("<|im_start|>the<|im_end|>") == [1, *tokenizer.encode("the"), 2]
    assert 1 not in tokenizer.encode("<|im_start|>")
    assert tokenizer.encode("a tool call") == [*tokenizer.encode("a "), tiny.TOKENS.index("tool call")]
    assert tokenizer.token_bytes(tiny.TOKENS.index("[PAD266]")) == b""
    assert (tokenizer.is_special(0), tokenizer.is_special(tiny.TOKENS.index("tool call"))) == (True, False)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2, 0), False)


def test_bos_is_added_as_the_file_says_or_as_its_kind_does() -> None:
    assert read(add_bos_token=True).add_bos
    keys = {k: v for k, v in tiny.metadata().items() if k != "tokenizer.ggml.add_bos_token"}
    for pre, adds in (("llama-bpe", True), ("smollm", False)):
        files, _ = hub_tokenizer(keys | {"tokenizer.ggml.pre": pre}, SIZE)
        assert files is not None
        assert files.config["add_bos_token"] is adds


def test_the_chat_template_is_the_files() -> None:
    files, _ = hub_tokenizer(tiny.metadata(), SIZE)
    assert files is not None
    assert files.config["chat_template"] == tiny.TEMPLATE
    assert files.ids == {"bos_token_id": 1, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "llama", "model 'llama' is not supported; known: 'gpt2'"),
        ("pre", "tekken", "pre 'tekken' is not supported; known: gpt-2"),
        ("tokens", ["a", 3], "tokens are not a list of strings"),
        ("tokens", [f"t{i}" for i in range(SIZE + 1)], f"the embedding has {SIZE} rows"),
        ("tokens", [*tiny.TOKENS[:-1], "!"], "the token '!' occurs twice"),
        ("token_type", [1], "has not one type for each token"),
        ("merges", None, "merges are not a list of strings"),
        ("merges", ["h e", "x yz"], "1 merges of unknown tokens, such as 'x yz'"),
        ("eos_token_id", 1 << 20, "eos_token_id 1048576 is not a token's id"),
        ("bos_token_id", "1", "bos_token_id '1' is not a token's id"),
    ],
)
def test_faults_are_named(key: str, value: Any, said: str) -> None:
    files, problems = hub_tokenizer(tiny.metadata() | {f"tokenizer.ggml.{key}": value}, SIZE)
    assert files is None
    assert any(said in problem for problem in problems), problems


def test_no_tokenizer_is_no_fault() -> None:
    assert hub_tokenizer({"tokenizer.ggml.model": "none"}, SIZE) == (None, [])
    assert hub_tokenizer({}, SIZE) == (None, [])
