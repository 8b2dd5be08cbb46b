import json
from pathlib import Path

import pytest

from model.tokenizer import Tokenizer
from serving.backend import example_request
from serving.loading import load_template, make_language

ZOO = Path(__file__).resolve().parents[2] / "model" / "zoo" / "credit-mini"


def test_the_template_beside_the_model_is_the_default(tmp_path: Path) -> None:
    own = load_template("", ZOO)
    assert own is not None
    assert own.name == "credit-mini"
    assert load_template("", tmp_path) is None
    named = load_template(str(ZOO / "template.toml"), tmp_path)
    assert named is not None
    assert named.labels == own.labels


def test_the_example_is_a_request_that_the_template_renders() -> None:
    template, tokenizer = load_template("", ZOO), Tokenizer.load(ZOO)
    assert template is not None
    language = make_language(tokenizer, None, template, max_context=512, vocab_size=tokenizer.vocab_size)
    path, body = example_request(language)
    assert path == "/v1/score"
    features = json.loads(body)["inputs"][0]["features"]
    assert template.render(features)
    assert features == template.example
    assert features["limit_bal"] > 0
    bare = make_language(tokenizer, None, None, max_context=512, vocab_size=tokenizer.vocab_size)
    assert example_request(bare)[0] == "/v1/completions"


def test_only_models_that_reason_aloud_have_a_splitter() -> None:
    tokenizer = Tokenizer.load(ZOO)
    language = make_language(tokenizer, None, None, max_context=512, vocab_size=tokenizer.vocab_size)
    assert (language.new_splitter is not None) == ("<think>" in tokenizer.control)


def test_generated_text_shows_no_special_tokens() -> None:
    tokenizer = Tokenizer.load(ZOO)
    language = make_language(tokenizer, None, None, max_context=512, vocab_size=tokenizer.vocab_size)
    assert tokenizer.bos_id is not None
    shown = language.new_detokenizer().push([tokenizer.bos_id, *tokenizer.encode("hi"), *tokenizer.eos_ids])
    assert shown == "hi"


@pytest.mark.parametrize("path", ["/no/such/template.toml", str(ZOO / "tokenizer.json")])
def test_a_template_that_cannot_be_read_is_an_expected_error(path: str) -> None:
    with pytest.raises((ValueError, OSError)):
        load_template(path, ZOO)
