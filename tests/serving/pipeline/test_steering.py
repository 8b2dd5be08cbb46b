"""Token ids are checked against the vocabulary, grammars need a guide, and each row has a constraint of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from serving.errors import BadRequest, Unsupported
from serving.pipeline.generation import GenerationRequest, prepare_generation
from serving.pipeline.guide import AfterReasoning, Form, Grammar
from serving.types import ChatInput, TextInput
from tests.fakes_text import EOS, UNTHINK, VOCAB_SIZE, byte_language

REQUEST = GenerationRequest(prompts=(TextInput("ab"), TextInput("c")), num_choices=2)
GRAMMAR = Grammar(Form.REGEX, "x*", "guided_regex")


class Anything:
    mask = b"\xff" * (VOCAB_SIZE // 8)

    def push(self, token_id: int) -> None:
        return


@dataclass
class FakeGuide:
    asked: list[Grammar] = field(default_factory=list)

    def compile(self, grammar: Grammar) -> Callable[[], Anything]:
        self.asked.append(grammar)
        return Anything


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (3, VOCAB_SIZE)}, "allowed_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match=str(VOCAB_SIZE - 1)) as caught:
        prepare_generation(byte_language(), replace(REQUEST, **fields))
    assert caught.value.param == param


def test_a_grammar_without_a_guide() -> None:
    with pytest.raises(Unsupported, match=r"tidegate\[guided\]") as caught:
        prepare_generation(byte_language(), replace(REQUEST, grammar=GRAMMAR))
    assert caught.value.param == "guided_regex"


def test_every_row_has_its_own_constraint() -> None:
    guide = FakeGuide()
    plan = prepare_generation(replace(byte_language(), guide=guide), replace(REQUEST, grammar=GRAMMAR))
    constraints = [row.sampling.constraint for row in plan.rows if row.sampling]
    assert len({id(each) for each in constraints}) == 4
    assert all(isinstance(each, Anything) for each in constraints)
    assert guide.asked == [GRAMMAR], "compiled once"


@pytest.mark.parametrize("split", [True, False])
def test_reasoning_that_the_prompt_begins_is_free(split: bool) -> None:
    language = replace(byte_language(think=True), guide=FakeGuide(), reasoning_end=lambda ids: UNTHINK)
    chat = ChatInput(({"role": "user", "content": "a"},))
    request = replace(REQUEST, prompts=(chat,), num_choices=1, grammar=GRAMMAR, split_reasoning=split)
    row = prepare_generation(language, request).rows[0].sampling
    assert row is not None
    assert isinstance(row.constraint, AfterReasoning) is split
    if split:
        assert row.constraint is not None
        mask = row.constraint.mask
        assert mask is not None
        assert not mask[EOS // 8] >> EOS % 8 & 1


@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.1}, {"logit_bias": ((1, 1.0),)}, {"grammar": GRAMMAR}])
def test_a_server_without_tables(fields: dict[str, Any]) -> None:
    language = replace(byte_language(), adjusts=False, guide=FakeGuide())
    with pytest.raises(Unsupported, match="sampling_tables"):
        prepare_generation(language, replace(REQUEST, **fields))
    prepare_generation(language, REQUEST)
