"""The hub's tokenizer as a GGUF's metadata: there and back is the same, and what has no form there is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from model.gguf_tokenizer import hub_tokenizer
from model.gguf_vocabulary import gguf_vocabulary
from model.tokenizer import Tokenizer
from tests.model import tiny_gguf as tiny
from tests.model.shared import hub_config

SIZE = len(tiny.TOKENS)


def config(size: int = SIZE) -> ModelConfig:
    return ModelConfig.from_hub(hub_config("llama_tied", vocab_size=size, bos_token_id=1, eos_token_id=[2, 0]))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The hub's files of the tiny vocabulary."""
    files, _ = hub_tokenizer(tiny.metadata(), SIZE)
    assert files is not None
    named = {"tokenizer": files.tokenizer, "tokenizer_config": files.config, "generation_config": files.generation}
    for name, value in named.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_there_and_back(directory: Path) -> None:
    metadata, problems = gguf_vocabulary(directory, config())
    assert problems == []
    for key, value in tiny.metadata().items():
        assert not key.startswith("tokenizer") or metadata[key] == value, key


def test_ids_beyond_the_tokens_pad_the_vocabulary(directory: Path) -> None:
    metadata, _ = gguf_vocabulary(directory, config(SIZE + 2))
    assert metadata["tokenizer.ggml.tokens"][SIZE:] == [f"[PAD{SIZE}]", f"[PAD{SIZE + 1}]"]
    assert metadata["tokenizer.ggml.token_type"][SIZE:] == [5, 5]


def test_a_template_in_its_own_file_is_taken(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert gguf_vocabulary(directory, config())[0]["tokenizer.chat_template"] == "{{ messages }}"


def test_no_tokenizer_is_said_so(tmp_path: Path) -> None:
    assert gguf_vocabulary(tmp_path, config()) == ({"tokenizer.ggml.model": "none"}, [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"normalizer": {"type": "NFC"}}, "its normalizer has no form in GGUF"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "llama.cpp has no known name for"),
    ],
)
def test_what_has_no_form_there_is_a_problem(directory: Path, changes: dict[str, Any], said: str) -> None:
    definition = json.loads((directory / "tokenizer.json").read_text()) | changes
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    problems = gguf_vocabulary(directory, config())[1]
    assert len(problems) == 1
    assert said in problems[0]


def test_more_tokens_than_the_model_has_is_a_problem(directory: Path) -> None:
    assert "tokens, the model has 100" in gguf_vocabulary(directory, config(100))[1][0]


@pytest.mark.parametrize("key", ["v2", "r1"])
def test_deepseeks_tokenizers_give_their_own_ids_through_gguf(deepseek_files, golden_json, key, tmp_path):
    directory = deepseek_files(key)
    tokenizer = Tokenizer.load(directory)
    metadata, problems = gguf_vocabulary(directory, config(tokenizer.vocab_size))
    assert problems == []
    files, problems = hub_tokenizer(metadata, tokenizer.vocab_size)
    assert problems == []
    again = Tokenizer(files.tokenizer, files.config)
    texts = [case["text"] for case in golden_json("tokenizer_cases.json")["cases"] if isinstance(case.get("text"), str)]
    assert len(texts) > 10
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert again.control == tokenizer.control
