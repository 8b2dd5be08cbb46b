"""The tokenizer made for a template: every word of a row is one token, any other text is bytes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.template import Template
from model.tokenizer import Tokenizer
from model.vocabulary import CONTROL, template_words, tokenizer_config, tokenizer_definition


@pytest.fixture(scope="module")
def template(zoo: Path) -> Template:
    return Template.load(zoo / "template.toml")


@pytest.fixture(scope="module")
def made(template: Template) -> Tokenizer:
    return Tokenizer(tokenizer_definition(template_words(template)), tokenizer_config(512))


def test_every_word_is_one_token(template: Template, made: Tokenizer) -> None:
    words = [f" {text}" for word in template.words for text in word.vocabulary]
    ids = made.encode_batch([*words, " =>", " good", " bad"])
    assert all(len(i) == 1 for i in ids)
    assert len({i[0] for i in ids}) == len(ids) == made.vocab_size - 256 - len(CONTROL)


def test_a_row_costs_one_token_a_word(template: Template, made: Tokenizer) -> None:
    text = template.render(dict.fromkeys(template.columns, 1))
    assert len(made.encode(text)) == len(template.words) + 1
    assert made.decode(made.encode(text)) == text


@given(st.text())
def test_other_text_is_its_bytes(made: Tokenizer, text: str) -> None:
    ids = made.encode(text)
    assert made.decode(ids) == text
    if " " not in text:
        assert len(ids) == len(text.encode())


def test_ends(made: Tokenizer) -> None:
    assert (made.bos_id, made.eos_ids, made.add_bos) == (0, (1,), True)
