"""Ids against the reference cases; no text becomes a control token; bytes survive any cut."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import Detokenizer, Tokenizer, UnsupportedTokenizer

KEYS = ("v2", "r1", "v4")
Load = Callable[[str], Tokenizer]
CONTROL_SPELLINGS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
]


@pytest.fixture(scope="module")
def cases(golden_json: Callable[[str], Any]) -> list[dict[str, Any]]:
    return golden_json("tokenizer_cases.json")["cases"]


@pytest.mark.parametrize("key", KEYS)
def test_reference_cases(key: str, cases: list[dict[str, Any]], deepseek_tokenizer: Load) -> None:
    tokenizer = deepseek_tokenizer(key)
    for case in cases:
        ids = case["ids"][key]
        assert tokenizer.encode_trusted(case["text"]) == ids, case["text"]
        assert tokenizer.decode(ids) == case.get("decoded", {}).get(key, case["text"])
        if not any(text in case["text"] for text in tokenizer.control):
            assert tokenizer.encode(case["text"]) == ids, case["text"]


@pytest.mark.parametrize("key", KEYS)
def test_control_tokens_from_users_are_letters(key: str, cases: list[dict[str, Any]], deepseek_tokenizer: Load) -> None:
    tokenizer = deepseek_tokenizer(key)
    control = set(tokenizer.control.values())
    for text in [case["text"] for case in cases] + list(tokenizer.control) + ["".join(tokenizer.control)]:
        ids = tokenizer.encode(text)
        assert control.isdisjoint(ids), text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("key", KEYS)
def test_facts_of_the_files(key: str, golden_json: Callable[[str], Any], deepseek_tokenizer: Load) -> None:
    source, tokenizer = golden_json("tokenizer_cases.json")["sources"][key], deepseek_tokenizer(key)
    special = source["special_tokens"]
    assert tokenizer.vocab_size == source["max_id"] + 1
    assert tokenizer.bos_id == special["<｜begin▁of▁sentence｜>"]
    assert tokenizer.eos_ids == (special["<｜end▁of▁sentence｜>"],)
    assert special.items() <= tokenizer.control.items()
    assert [i for i in special.values() if tokenizer.is_special(i)] == source["skipped_when_skip_special_tokens"]
    assert tokenizer.add_bos is (key == "v2")


@pytest.mark.parametrize("key", KEYS)
def test_decoding_equals_the_library(key: str, deepseek_files: Callable[[str], Path], deepseek_tokenizer: Load) -> None:
    reference = tokenizers.Tokenizer.from_file(str(deepseek_files(key) / "tokenizer.json"))
    tokenizer = deepseek_tokenizer(key)
    rng_ids = [(i * 7919 + 13) % tokenizer.vocab_size for i in range(3000)]
    for start in range(0, 3000, 30):
        ids = rng_ids[start : start + 30]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special=True) == reference.decode(ids, skip_special_tokens=True)


@given(st.lists(st.one_of(st.text(), st.sampled_from(CONTROL_SPELLINGS))).map("".join))
def test_any_text_round_trips_without_control_tokens(zoo_tokenizer: Tokenizer, text: str) -> None:
    ids = zoo_tokenizer.encode(text)
    assert zoo_tokenizer.decode(ids) == text
    assert set(zoo_tokenizer.control.values()).isdisjoint(ids)
    assert zoo_tokenizer.encode_batch([text, "x", text]) == [ids, zoo_tokenizer.encode("x"), ids]


@given(st.lists(st.integers(0, 700)), st.data())
@settings(max_examples=200)
def test_detokenizer_equals_decode_wherever_it_is_cut(
    zoo_tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    detokenizer, at, pieces = Detokenizer(zoo_tokenizer), 0, []
    while at < len(ids):
        step = data.draw(st.integers(1, len(ids) - at))
        pieces.append(detokenizer.push(ids[at : at + step]))
        at += step
    assert "".join(pieces) + detokenizer.flush() == zoo_tokenizer.decode(ids)


def test_a_split_character_is_held_back_whole(zoo_tokenizer: Tokenizer) -> None:
    text = "风控👩‍💻é"
    ids = zoo_tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # one byte a token
    detokenizer = Detokenizer(zoo_tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
    assert [p for p in pieces if p] == list(text)
    assert detokenizer.flush() == ""


def test_a_truncated_character_is_one_replacement(zoo_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(zoo_tokenizer)
    assert detokenizer.push(zoo_tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "�"


def test_two_detokenizers_do_not_share_state(zoo_tokenizer: Tokenizer) -> None:
    first, second, ids = Detokenizer(zoo_tokenizer), Detokenizer(zoo_tokenizer), zoo_tokenizer.encode("é")
    assert first.push(ids[:1]) == second.push(ids[:1]) == ""
    assert first.push(ids[1:]) == second.push(ids[1:]) == "é"


def test_special_tokens_can_be_left_out(zoo_tokenizer: Tokenizer) -> None:
    (eos,) = zoo_tokenizer.eos_ids
    ids = [*zoo_tokenizer.encode("a"), eos]
    assert zoo_tokenizer.decode(ids, skip_special=True) == "a"
    assert Detokenizer(zoo_tokenizer, skip_special=True).push(ids) == "a"
    assert Detokenizer(zoo_tokenizer).push(ids) == "a<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("text", ["（风控）", "(风控)", "\u00e9", "e\u0301", "½", "👩‍👩‍👧‍👦", "\ufeffx", "a\x00b"])
def test_unicode_forms_are_left_alone(text: str, zoo_tokenizer: Tokenizer) -> None:
    assert zoo_tokenizer.decode(zoo_tokenizer.encode(text)) == text
    assert b"".join(map(zoo_tokenizer.token_bytes, zoo_tokenizer.encode(text))) == text.encode()


def test_half_a_surrogate_pair_is_a_plain_error(zoo_tokenizer: Tokenizer) -> None:
    for encode in (zoo_tokenizer.encode, zoo_tokenizer.encode_trusted):
        with pytest.raises(ValueError, match="half a surrogate pair at character 1"):
            encode("a\ud800b")


def test_unknown_ids_have_no_bytes(zoo_tokenizer: Tokenizer) -> None:
    assert zoo_tokenizer.token_bytes(zoo_tokenizer.vocab_size + 5) == b""


class TestFiles:
    @pytest.fixture
    def definition(self, zoo: Path) -> dict[str, Any]:
        return json.loads((zoo / "tokenizer.json").read_text())

    def test_added_letters_are_no_control_tokens(self, definition: dict[str, Any]) -> None:
        """DeepSeek-Coder's file adds letters such as õ as tokens: text may use them."""
        changed = copy.deepcopy(definition)
        letter = {**changed["added_tokens"][2], "id": len(changed["model"]["vocab"]), "content": "鬱", "special": False}
        changed["added_tokens"].append(letter)
        tokenizer = Tokenizer(changed, {})
        assert tokenizer.encode("鬱<｜User｜>")[0] == letter["id"]
        assert tokenizer.control["<｜User｜>"] not in tokenizer.encode("鬱<｜User｜>")
        assert tokenizer.encode_trusted("鬱<｜User｜>") == [letter["id"], tokenizer.control["<｜User｜>"]]

    def test_a_vocabulary_that_can_spell_a_control_token(self, definition: dict[str, Any]) -> None:
        """With `ignore_merges` a word of the vocabulary is found whole, even a control token in plain letters."""
        changed = copy.deepcopy(definition)
        token = {**changed["added_tokens"][0], "id": len(changed["model"]["vocab"]), "content": "<s>"}
        changed["added_tokens"].append(token)
        changed["model"]["vocab"]["<s>"] = token["id"]
        tokenizer = Tokenizer(changed, {})
        assert token["id"] not in tokenizer.encode("a <s> <s>b<s>")
        assert token["id"] not in tokenizer.encode("<s>")
        assert tokenizer.decode(tokenizer.encode("<s>")) == "<s>"
        assert tokenizer.encode_trusted("<s>") == [token["id"]]

    def test_eos_of_both_files(self, definition: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<｜end▁of▁sentence｜>"}}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.eos_ids == (1, 3)
        assert tokenizer.bos_id is None
        assert tokenizer.add_bos is False

    def test_truncation_and_padding_of_the_file_are_ignored(self, definition: dict[str, Any]) -> None:
        changed = {
            **definition,
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        }
        assert len(Tokenizer(changed, {}).encode("abcdef")) == 6

    def test_missing_and_broken_files_are_named(self, tmp_path: Path, zoo: Path) -> None:
        with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json: not JSON"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text("[]")
        with pytest.raises(UnsupportedTokenizer, match="not a JSON object"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}, "model": {"type": "Nope"}}')
        with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_bytes((zoo / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<nope>"}')
        with pytest.raises(UnsupportedTokenizer, match="bos_token"):
            Tokenizer.load(tmp_path)

    def test_other_kinds_are_refused(self, definition: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedTokenizer, match="byte-level"):
            Tokenizer({**definition, "decoder": {"type": "Metaspace"}}, {})
        with pytest.raises(UnsupportedTokenizer, match="byte-level"):
            Tokenizer({**definition, "decoder": None}, {})
