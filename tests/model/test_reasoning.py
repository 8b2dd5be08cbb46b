"""Case A34: the split of R1's reasoning, wherever the stream is cut."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.chat import ChatTemplate
from model.reasoning import Piece, ReasoningSplit, opens_reasoning
from model.tokenizer import Tokenizer


def run(chunks: Sequence[str], *, opened: bool) -> list[Piece]:
    split = ReasoningSplit(opened=opened)
    return [piece for chunk in chunks for piece in split.push(chunk)] + split.flush()


def joined(pieces: Sequence[Piece]) -> tuple[str, str]:
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["a", "</", "think", ">", "b"], ("a", "b")),
        (["a</think>b"], ("a", "b")),
        (["a"], ("a", "")),
        (["</think>", "b"], ("", "b")),
        (["a</think>say </think> twice"], ("a", "say </think> twice")),
        (["<think>a</think>b"], ("a", "b")),  # some models write the tag although the prompt has
        (["\nadd\n", "</think>", "\n\n4\n"], ("add", "4\n")),
        (["a </thin"], ("a </thin", "")),  # cut by length
        (["a < b </ c"], ("a < b </ c", "")),
        ([], ("", "")),
    ],
)
def test_prompt_that_opens_the_reasoning(chunks: list[str], expected: tuple[str, str]) -> None:
    assert joined(run(chunks, opened=True)) == expected


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["<think>\nadd\n</think>\n\n4"], ("add", "4")),
        (["\n<th", "ink>add</think>4"], ("add", "4")),
        (["plain"], ("", "plain")),
        (["  indented"], ("", "  indented")),
        (["quotes </think> it"], ("", "quotes </think> it")),
        (["a <think> later"], ("", "a <think> later")),
        (["<thi"], ("", "<thi")),
        (["<think>cut"], ("cut", "")),
        ([" "], ("", " ")),
    ],
)
def test_prompt_that_does_not(chunks: list[str], expected: tuple[str, str]) -> None:
    assert joined(run(chunks, opened=False)) == expected


def test_nothing_of_the_tag_leaks_before_it_is_whole() -> None:
    split = ReasoningSplit(opened=True)
    assert split.push("a") == [Piece(reasoning="a")]
    assert split.push("\n</") == split.push("think") == []
    assert split.push(">b") == [Piece(content="b")]
    assert split.flush() == []


TEXT = st.lists(st.sampled_from(["a", "<", "</", "think", ">", "<think>", "</think>", " ", "\n", "é"])).map("".join)


@given(TEXT, st.booleans(), st.data())
def test_cuts_do_not_matter(text: str, opened: bool, data: st.DataObject) -> None:
    chunks, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        chunks.append(rest[:size])
        rest = rest[size:]
    pieces = run(chunks, opened=opened)
    assert joined(pieces) == joined(run([text], opened=opened))
    assert all(bool(p.reasoning) != bool(p.content) for p in pieces)
    # Independent reference over the whole text.
    body = text.lstrip()
    inside = opened or body.startswith("<think>")
    if not inside:
        assert joined(pieces) == ("", text)
        return
    reasoning, tag, content = body.removeprefix("<think>").partition("</think>")
    reasoning = reasoning.strip() if tag else reasoning.lstrip()
    assert joined(pieces) == (reasoning, content.lstrip())


class TestOpensReasoning:
    @pytest.fixture
    def r1(self, deepseek_tokenizer: Callable[[str], Tokenizer]) -> Tokenizer:
        return deepseek_tokenizer("r1")

    def test_the_end_of_the_prompt_decides(self, r1: Tokenizer) -> None:
        assert opens_reasoning(r1.encode_trusted("<｜User｜>a<｜Assistant｜><think>\n"), r1)
        assert opens_reasoning(r1.encode_trusted("<｜Assistant｜><think>"), r1)
        assert not opens_reasoning(r1.encode_trusted("<think>\n</think>\n\n"), r1)
        assert not opens_reasoning(r1.encode_trusted("<think> word"), r1)
        assert not opens_reasoning(r1.encode_trusted("a<｜Assistant｜>"), r1)
        assert not opens_reasoning([], r1)

    def test_users_cannot_open_it(self, r1: Tokenizer) -> None:
        assert not opens_reasoning(r1.encode("<think>"), r1)

    def test_not_after_a_tool_result(self, r1: Tokenizer, deepseek_files: Callable[[str], Path]) -> None:
        """R1's published template opens the reasoning after <｜Assistant｜>, which a tool's result does not get."""
        config = json.loads((deepseek_files("r1") / "tokenizer_config.json").read_text("utf-8"))
        source = config["chat_template"].replace("{{'<｜Assistant｜>'}}", "{{'<｜Assistant｜><think>\\n'}}")
        assert source != config["chat_template"]
        template = ChatTemplate(source, r1.control, {"bos_token": "<｜begin▁of▁sentence｜>"})
        user = {"role": "user", "content": "q"}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        tool = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "22"}]
        assert opens_reasoning(template.encode([user], r1), r1)
        assert not opens_reasoning(template.encode([user, *tool], r1), r1)

    def test_a_vocabulary_without_the_tag(self, zoo_tokenizer: Tokenizer) -> None:
        assert not opens_reasoning(zoo_tokenizer.encode("<think>"), zoo_tokenizer)
