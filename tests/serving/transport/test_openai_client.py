"""The openai client from PyPI, unchanged, against a loopback server; its types parse every answer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serving.pipeline.llguide import make_guide
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_http import Served
from tests.fakes_text import ASSISTANT, BOS, CONTROL, EOS, THINK, USER, VOCAB_SIZE, ByteTokenizer, byte_language

CHAT = (BOS, USER, *b"hi", ASSISTANT, THINK)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    model = ToyModel(scripts={tuple(b"count"): [*b" 1 2 3", EOS], CHAT: [*b"hm</think>hello", EOS]})
    with (
        Served(model, byte_language(think=True)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def strictly(answer: openai.BaseModel) -> None:
    """Every field has the type that the client's own class declares; pydantic checks it from the JSON again."""
    type(answer).model_validate_json(answer.model_dump_json(), strict=True)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="count", temperature=0, max_tokens=20, logprobs=2, user="u")
    assert isinstance(answer, Completion)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 1 2 3", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer._request_id
    strictly(answer)


def test_an_echo_with_logprobs_starts_with_nulls_as_openais_does(client: openai.OpenAI) -> None:
    """The class declares plain numbers, but OpenAI's own first entries are null, and the client takes them."""
    answer = client.completions.create(model="toy", prompt="count", temperature=0, max_tokens=20, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    logprobs.token_logprobs[0], logprobs.top_logprobs[0] = 0.0, {}
    strictly(answer)


def test_streamed_completions(client: openai.OpenAI) -> None:
    with client.completions.create(
        model="toy",
        prompt="count",
        temperature=0,
        max_tokens=20,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    for (
        chunk
    ) in chunks:  # the class has no null finish_reason, which OpenAI's own streams send in all chunks but the last
        if all(choice.finish_reason for choice in chunk.choices):
            strictly(chunk)
    assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == 1) == " 1 2 3"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=30,
    )
    assert isinstance(answer, ChatCompletion)
    message = answer.choices[0].message
    assert message.content == "hello"
    assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
    strictly(answer)


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], temperature=0, stream=True, logprobs=True
    )
    chunks = list(stream)
    for chunk in chunks:
        assert isinstance(chunk, ChatCompletionChunk)
        strictly(chunk)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "hello"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    strictly(client.models.retrieve("toy"))


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="toy"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt="a" * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.embeddings.create(model="toy", input="a")
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.files.list()
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_a_stream_that_fails_raises_in_the_client() -> None:
    with Served(runner=FakeRunner(fail_result=[3])) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="step"), client:
            list(client.completions.create(model="toy", prompt="a", max_tokens=9, stream=True))


def test_a_parsed_answer_and_sampling_fields(client: openai.OpenAI) -> None:
    """`parse` sends the class's schema in OpenAI's strict form."""
    pytest.importorskip("llguidance", reason="guided output is the extra tidegate[guided]")

    class Verdict(pydantic.BaseModel):
        approve: bool
        limit: Literal[100, 200] | None

    guide = make_guide(ByteTokenizer(), control_ids=CONTROL.values(), vocab_size=VOCAB_SIZE)
    with (
        Served(language=replace(byte_language(), guide=guide)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        answer = made.chat.completions.parse(
            model="toy",
            messages=[{"role": "user", "content": "hi"}],
            response_format=Verdict,
            max_tokens=300,
            seed=3,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"32": -100, "10": -100, "9": -100, "13": -100},
        )
        assert isinstance(answer.choices[0].message.parsed, Verdict)
