import json

import pytest
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from model.gguf_splits import ALIASES, CUTS, cut, pre_tokenizer, recognise
from model.tokenizer import byte_alphabet, read_json

BYTE_OF = byte_alphabet()


def pieces(name: str, text: str) -> list[str]:
    """What `name` cuts a text into, spelled as text again."""
    bare = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    made = tokenizers.Tokenizer.from_str(json.dumps(bare | {"pre_tokenizer": pre_tokenizer(name)}))
    return [bytes(BYTE_OF[c] for c in piece).decode() for piece, _ in made.pre_tokenizer.pre_tokenize_str(text)]


# By hand, from the published models' tokenizer.json.
@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("gpt-2", "It's 123  go\n\n", ["It", "'s", " 123", " ", " go", "\n\n"]),
        ("smollm", "It's 123  go", ["It", "'s", " ", "1", "2", "3", " ", " go"]),
        ("llama-bpe", "It'LL be 12345 x!\n\n y", ["It", "'LL", " be", " ", "123", "45", " x", "!\n\n", " y"]),
        ("qwen2", "It's 12\n y", ["It", "'s", " ", "1", "2", "\n", " y"]),
        ("deepseek-llm", "ab 12\n你好!", ["ab", " ", "1", "2", "\n", "你好", "!"]),
        ("deepseek-coder", "if(x1):\n", ["if", "(", "x", "1", "):", "\n"]),
        ("deepseek-v3", "ab 1234你好\n", ["ab", " ", "123", "4", "你好", "\n"]),
        ("default", "a-b 1234", ["a", "-", "b", " ", "123", "4"]),
    ],
)
def test_cuts(name: str, text: str, want: list[str]) -> None:
    assert pieces(name, text) == want


def test_gpt2s_and_smollms_are_the_librarys_own_parts() -> None:
    level = ByteLevel(add_prefix_space=False)
    text = "Hello, it's 2024!  \n\n x\t y—z  ½ ² 你好 end  "
    for name, whole in (("gpt-2", level), ("smollm", Sequence([Digits(individual_digits=True), level]))):
        want = [bytes(BYTE_OF[c] for c in piece).decode() for piece, _ in whole.pre_tokenize_str(text)]
        assert pieces(name, text) == want


@pytest.mark.parametrize("name", CUTS)
def test_each_is_recognised(name: str) -> None:
    definition = {
        "model": {"type": "BPE", "ignore_merges": cut(name).whole_words},
        "pre_tokenizer": pre_tokenizer(name),
    }
    assert recognise(definition) == name


def test_aliases_name_cuts() -> None:
    assert set(ALIASES.values()) <= set(CUTS)


def test_others_are_not_recognised() -> None:
    model = {"type": "BPE"}
    assert recognise({"model": model, "pre_tokenizer": None}) is None
    assert recognise({"model": model, "pre_tokenizer": {"type": "Whitespace"}}) is None


@pytest.mark.parametrize(("key", "name"), [("v2", "deepseek-llm"), ("r1", "deepseek-v3")])
def test_deepseeks_own_tokenizers_are_recognised(deepseek_files, key, name):
    assert recognise(read_json(deepseek_files(key) / "tokenizer.json")) == name
