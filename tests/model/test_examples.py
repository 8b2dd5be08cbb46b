"""Rows to prompts, and dropped words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.examples import Rows, drop_words, encode_rows, label_ids, neighbours, shift_words
from model.template import Template, TemplateError
from model.tokenizer import Tokenizer
from model.vocabulary import tokenizer_config, tokenizer_definition


@pytest.fixture(scope="module")
def template(zoo: Path) -> Template:
    return Template.load(zoo / "template.toml")


@pytest.fixture
def row(template: Template) -> dict[str, Any]:
    return {**dict.fromkeys(template.columns, 1), "default": "1", "sex": "male"}


def test_encode_rows(template: Template, zoo_tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    rows = encode_rows([row, {**row, "default": 0}], template, zoo_tokenizer)
    assert rows.label.tolist() == [1, 0]
    assert rows.prompts[0] == rows.prompts[1] == (0, *zoo_tokenizer.encode(template.render(row)))
    assert len(rows) == 2
    assert len(rows.take([1])) == 1


def test_a_row_without_label(template: Template, zoo_tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="default: got None"):
        encode_rows([{k: v for k, v in row.items() if k != "default"}], template, zoo_tokenizer)


def test_label_ids(template: Template, zoo_tokenizer: Tokenizer) -> None:
    assert label_ids(template, zoo_tokenizer) == tuple(tuple(zoo_tokenizer.encode(t)) for t in (" good", " bad"))


@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_drop_words_keeps_order_and_ends(seed: int, rate: float) -> None:
    rows = Rows((tuple(range(30)), (7,), (1, 2)), np.array([0, 1, 0], np.int32))
    thin = drop_words(np.random.default_rng(seed), rows, rate)
    assert thin.label is rows.label
    for before, after in zip(rows.prompts, thin.prompts, strict=True):
        assert after[0] == before[0]
        assert after[-1] == before[-1]
        assert list(after) == sorted(set(after))
    if rate == 0:
        assert thin.prompts == rows.prompts


def test_drop_words_drops_that_share() -> None:
    rows = Rows(tuple(tuple(range(102)) for _ in range(2000)), np.zeros(2000, np.int32))
    thin = drop_words(np.random.default_rng(0), rows, 0.2)
    sizes = np.array([len(p) - 2 for p in thin.prompts])
    assert abs(sizes.mean() - 80) < 1
    assert sizes.min() > 40
    assert sizes.max() == 100


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_shift_words_moves_to_the_next_word_of_the_same_name(
    template: Template, zoo_tokenizer: Tokenizer, seed: int, rate: float
) -> None:
    table = neighbours(template, zoo_tokenizer)
    rows = encode_rows([{**dict.fromkeys(template.columns, 1), "default": 1}], template, zoo_tokenizer)
    shifted = shift_words(np.random.default_rng(seed), rows, table, rate)
    before, after = (zoo_tokenizer.decode(r.prompts[0][1:]).split() for r in (rows, shifted))
    for old, new in zip(before, after, strict=True):
        assert old.split("=")[0] == new.split("=")[0]
        if old != "=>":
            assert abs(int(old.split("=")[1]) - int(new.split("=")[1])) <= 1
    if rate == 0:
        assert before == after


def test_neighbours_at_the_ends(template: Template, zoo_tokenizer: Tokenizer) -> None:
    table = neighbours(template, zoo_tokenizer)
    (lowest,), (second,) = zoo_tokenizer.encode_batch([" lim=0", " lim=1"])
    (highest,) = zoo_tokenizer.encode(" " + template.words[0].vocabulary[-1])
    assert table[lowest].tolist() == [lowest, second]
    assert table[highest].tolist() == [highest - 1, highest]
    assert table[zoo_tokenizer.bos_id].tolist() == [zoo_tokenizer.bos_id] * 2


def test_neighbours_need_words_of_one_token(template: Template) -> None:
    plain = Tokenizer(tokenizer_definition([]), tokenizer_config(64))
    with pytest.raises(ValueError, match=r"words\.lim: a word is more than one token"):
        neighbours(template, plain)
