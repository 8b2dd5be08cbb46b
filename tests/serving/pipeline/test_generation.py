import math
from dataclasses import replace

import pytest

from serving.errors import BadRequest, ContextLengthExceeded, StepFailed
from serving.pipeline.generation import GenerationRequest, prepare_generation
from serving.types import ChatInput, Finish, SamplingParams, TextInput, TokenInput, TokenLogprob, Update
from tests.fakes_text import EOS, ByteTokenizer, byte_language

REQUEST = GenerationRequest(prompts=(TextInput("ab"),), seed=7)


def sampling(request: GenerationRequest, max_context: int = 512) -> SamplingParams:
    row = prepare_generation(byte_language(max_context=max_context), request).rows[0]
    assert row.sampling is not None
    return row.sampling


def test_choices_of_a_prompt_differ_in_their_seed_alone() -> None:
    plan = prepare_generation(
        byte_language(), replace(REQUEST, num_choices=3, prompts=(TextInput("a"), TextInput("b")))
    )
    assert [row.token_ids for row in plan.rows] == [(97,)] * 3 + [(98,)] * 3
    seeds = [row.sampling.seed for row in plan.rows if row.sampling]
    assert len(set(seeds)) == 3
    assert seeds[:3] == seeds[3:]
    assert plan.num_prompt_tokens == 2
    alone = prepare_generation(byte_language(), REQUEST).rows[0].sampling
    assert alone is not None
    assert alone.seed == seeds[0]


def test_equal_prompts_differ_where_the_client_gave_no_seed() -> None:
    request = replace(REQUEST, num_choices=2, prompts=(TextInput("a"), TextInput("a")), seed_is_fresh=True)
    plan = prepare_generation(byte_language(), request)
    assert len({row.sampling.seed for row in plan.rows if row.sampling}) == 4


def test_max_tokens_is_clipped_to_what_the_context_leaves() -> None:
    assert sampling(replace(REQUEST, max_tokens=5), 10).max_tokens == 5
    assert sampling(replace(REQUEST, max_tokens=500), 10).max_tokens == 8
    assert sampling(replace(REQUEST, max_tokens=None), 10).max_tokens == 8


@pytest.mark.parametrize(("length", "fits"), [(9, True), (10, False), (11, False), (100, False)])
def test_a_prompt_that_leaves_no_room_is_refused(length: int, fits: bool) -> None:
    for max_tokens in (1, 10, None):
        request = replace(REQUEST, prompts=(TextInput("a" * length),), max_tokens=max_tokens)
        if fits:
            assert sampling(request, 10).max_tokens == 1
        else:
            with pytest.raises(ContextLengthExceeded, match=rf"10 tokens.*{length}"):
                sampling(request, 10)


def test_scoring_a_prompt_needs_no_room_for_an_answer() -> None:
    assert sampling(replace(REQUEST, prompts=(TextInput("a" * 10),), max_tokens=0), 10).max_tokens == 0


def test_stop_ids_are_those_of_the_model_and_the_request() -> None:
    assert sampling(replace(REQUEST, stop_token_ids=(5, EOS))).stop_token_ids == (EOS, 5)
    assert sampling(replace(REQUEST, ignore_eos=True)).stop_token_ids == ()


def test_one_bad_prompt_fails_the_request() -> None:
    language = byte_language(tokenizer=ByteTokenizer(bos_id=None))
    with pytest.raises(BadRequest):
        prepare_generation(language, replace(REQUEST, prompts=(TextInput("a"), TextInput(""))))


def test_echo_is_the_prompt_before_the_answer() -> None:
    plan = prepare_generation(byte_language(), replace(REQUEST, prompts=(TextInput("é"),), echo=True))
    assert plan.rows[0].prompt_logprobs == -1
    deltas = plan.choices[0].push(Update(0, (TokenLogprob(97, -1.0),), finish=Finish.LENGTH))
    assert [(delta.text, delta.finish) for delta in deltas] == [("é", None), ("a", Finish.LENGTH)]
    assert plan.num_completion_tokens == 1


def test_echo_with_logprobs_waits_for_all_of_the_prompts() -> None:
    request = replace(REQUEST, prompts=(TokenInput((0xC3, 0xA9, 97)),), echo=True, logprobs=1)
    plan = prepare_generation(byte_language(), request)
    assert plan.rows[0].prompt_logprobs == 1
    choice = plan.choices[0]
    assert choice.push(Update(0, prompt_logprobs=(TokenLogprob(0xA9, -1.0),))) == []
    last = Update(0, (TokenLogprob(98, -3.0),), prompt_logprobs=(TokenLogprob(97, -2.0),), finish=Finish.LENGTH)
    echoed, generated = choice.push(last)
    assert echoed.text == "éa"
    assert echoed.offsets == (0, 0, 1)
    assert [token.token_id for token in echoed.tokens] == [0xC3, 0xA9, 97]
    assert math.isnan(echoed.tokens[0].logprob)
    assert [token.logprob for token in echoed.tokens[1:]] == [-1.0, -2.0]
    assert generated.offsets == (2,)


def test_echo_of_one_token_and_no_generation() -> None:
    request = replace(REQUEST, prompts=(TextInput("a"),), echo=True, logprobs=0, max_tokens=0)
    choice = prepare_generation(byte_language(), request).choices[0]
    echoed, end = choice.push(Update(0, finish=Finish.LENGTH))
    assert (echoed.text, len(echoed.tokens)) == ("a", 1)
    assert (end.text, end.finish) == ("", Finish.LENGTH)


def test_a_failed_row_is_not_echoed() -> None:
    choice = prepare_generation(byte_language(), replace(REQUEST, echo=True)).choices[0]
    deltas = choice.push(Update(0, error=StepFailed("gone")))
    assert [delta.text for delta in deltas] == [""]


@pytest.mark.parametrize(("think", "split", "reasoning"), [(True, True, "a"), (True, False, ""), (False, True, "")])
def test_reasoning_is_split_where_the_model_reasons_and_the_endpoint_asks(
    think: bool, split: bool, reasoning: str
) -> None:
    request = replace(REQUEST, prompts=(ChatInput(({"role": "user", "content": "q"},)),), split_reasoning=split)
    choice = prepare_generation(byte_language(think=think), request).choices[0]
    deltas = choice.push(Update(0, (TokenLogprob(97, -1.0),), finish=Finish.LENGTH))
    assert "".join(delta.reasoning for delta in deltas) == reasoning


def test_penalties_and_biases_reach_the_row() -> None:
    request = replace(
        REQUEST,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((5, 1.5),),
        allowed_token_ids=(5, 6),
    )
    got = sampling(request)
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.2, 0.5, -0.5)
    assert (got.logit_bias, got.allowed_token_ids) == (((5, 1.5),), (5, 6))
    assert got.adjusts
    assert not sampling(REQUEST).adjusts
