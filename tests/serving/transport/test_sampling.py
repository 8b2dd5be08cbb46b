import pytest

from serving.errors import BadRequest
from serving.pipeline.generation import GenerationRequest
from serving.transport.sampling import generation_request, wants_usage, with_output
from serving.transport.schema.common import StreamOptions
from serving.transport.schema.completions import CompletionIn
from serving.types import TextInput

PROMPTS = (TextInput("a"),)


def request(**fields: object) -> GenerationRequest:
    return generation_request(CompletionIn("a", **fields), PROMPTS, max_tokens=3, fresh_seed=99)  # type: ignore[arg-type]


def test_what_is_not_sent_has_openais_defaults() -> None:
    assert request() == GenerationRequest(prompts=PROMPTS, max_tokens=3, seed=99, seed_is_fresh=True)
    assert not request(seed=0).seed_is_fresh


def test_what_is_sent_is_taken() -> None:
    sent = request(n=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=-4, stop=["x", "y", "x"], ignore_eos=True)
    assert (sent.num_choices, sent.temperature, sent.top_k, sent.top_p, sent.min_p) == (2, 0.5, 5, 0.9, 0.1)
    assert (sent.seed, sent.stop, sent.ignore_eos) == (-4, ("x", "y"), True)
    assert request(stop="z").stop == ("z",)
    assert request(seed=0).seed == 0


@pytest.mark.parametrize(("temperature", "taken"), [(0, 0.0), (1e-9, 0.0), (1e-5, 1e-5), (2.0, 2.0)])
def test_tiny_temperatures_are_greedy(temperature: float, taken: float) -> None:
    assert request(temperature=temperature).temperature == taken


def test_minus_one_is_no_top_k() -> None:
    assert request(top_k=-1).top_k == request(top_k=0).top_k == 0


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_are_64_bit(seed: int) -> None:
    with pytest.raises(BadRequest, match="seed"):
        request(seed=seed)


def test_penalties_and_bias_are_taken() -> None:
    sent = request(presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={"7": -100, "0": 0})
    assert (sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (-2, 0.5, 1.3)
    assert sent.logit_bias == ((7, -100),), "a bias of 0 changes nothing"
    assert request(allowed_token_ids=[4, 5]).allowed_token_ids == (4, 5)
    assert request(logit_bias={}).logit_bias == ()


@pytest.mark.parametrize("key", ["", "a", "-1", "01", "1.0", " 1", "1" * 20, "½", "٣"])
def test_a_bias_is_of_a_token_id(key: str) -> None:
    with pytest.raises(BadRequest) as caught:
        request(logit_bias={key: 1.0})
    assert caught.value.param == "logit_bias"


def test_a_grammar_says_where_the_text_ends() -> None:
    assert request(guided_regex="a", ignore_eos=False).grammar is not None
    with pytest.raises(BadRequest) as caught:
        request(guided_regex="a", ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_usage_is_wanted_only_in_streams() -> None:
    assert not wants_usage(True, None)
    assert wants_usage(True, StreamOptions(include_usage=True))
    assert not wants_usage(True, StreamOptions())
    with pytest.raises(BadRequest):
        wants_usage(None, StreamOptions())


def test_output_wishes_are_added() -> None:
    asked = with_output(request(), logprobs=4, echo=True, split_reasoning=True)
    assert (asked.logprobs, asked.echo, asked.split_reasoning) == (4, True, True)
