"""Also cases A09 (empty prompts), A10 (long prompts), A11 (max_tokens), A14 (logprobs), A15 and A16 (n and seeds)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.config import EngineConfig
from serving.errors import BadRequest
from serving.transport.completions import read_prompts
from serving.types import TextInput, TokenInput
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_http import Served
from tests.fakes_text import BOS, EOS, ByteTokenizer, byte_language

CONTEXT = 512


def test_prompts_of_every_form() -> None:
    assert read_prompts("a") == (TextInput("a"),)
    assert read_prompts(["a", "b"]) == (TextInput("a"), TextInput("b"))
    assert read_prompts([1, 2]) == (TokenInput((1, 2)),)
    assert read_prompts([[1], [2, 3]]) == (TokenInput((1,)), TokenInput((2, 3)))
    assert read_prompts([]) == (TokenInput(()),)
    assert read_prompts([[]]) == (TokenInput(()),)
    for mixed in (["a", 1], [1, [2]], ["a", [1]]):
        with pytest.raises(BadRequest):
            read_prompts(mixed)  # type: ignore[arg-type]


def test_the_answer_is_the_models(server: Served) -> None:
    answer = server.complete("count", temperature=0, max_tokens=20).json
    assert answer["choices"] == [{"index": 0, "text": " 1 2 3", "logprobs": None, "finish_reason": "stop"}]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 7, 12)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "toy")


def test_greedy_text_is_the_toy_models_own(server: Served) -> None:
    expected = server.model.generate(tuple(b"noise"), 12, (EOS,))
    text = server.complete("noise", temperature=0, max_tokens=12).json["choices"][0]["text"]
    shown = [token for token in expected if token not in (BOS, EOS)]
    assert text == ByteTokenizer().decode(shown)


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(server: Served) -> None:
    answer = server.complete(["count", "noise"], n=2, temperature=0, max_tokens=4).json
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices[:2]] == [" 1 2"] * 2
    assert choices[2]["text"] == choices[3]["text"] != " 1 2"
    assert answer["usage"]["prompt_tokens"] == 10
    assert server.complete([list(b"count")], temperature=0, max_tokens=4).json["choices"][0]["text"] == " 1 2"


def test_a_stop_string_cuts_and_ignore_eos_goes_on(server: Served) -> None:
    cut = server.complete("count", temperature=0, max_tokens=20, stop=["2 ", "never"]).json["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (" 1 ", "stop")
    longer = server.complete("count", temperature=0, max_tokens=9, ignore_eos=True).json
    assert longer["choices"][0]["finish_reason"] == "length"
    assert longer["usage"]["completion_tokens"] == 9
    token = server.complete("count", temperature=0, max_tokens=20, stop_token_ids=[ord("2")]).json["choices"][0]
    assert (token["text"], token["finish_reason"]) == (" 1 ", "stop")


def test_echo_gives_the_prompt_first(server: Served) -> None:
    echoed = server.complete("count", echo=True, temperature=0, max_tokens=2).json["choices"][0]
    assert echoed["text"] == "count 1"
    events = server.complete("count", echo=True, temperature=0, max_tokens=2, stream=True).events
    assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "count 1"


EMPTY = ["", [""], [], [[]]]


@pytest.mark.parametrize("prompt", EMPTY)
@pytest.mark.parametrize("stream", [False, True])
def test_a09_an_empty_prompt_is_bos_alone(server: Served, prompt: object, stream: bool) -> None:
    answer = server.complete(prompt, temperature=0, max_tokens=3, stream=stream)
    assert answer.status == 200
    if not stream:
        assert answer.json["usage"]["prompt_tokens"] == 1
        same = server.complete([BOS], temperature=0, max_tokens=3).json["choices"][0]["text"]
        assert answer.json["choices"][0]["text"] == same


def test_a09_without_a_bos_an_empty_prompt_is_refused_everywhere() -> None:
    with Served(language=byte_language(tokenizer=ByteTokenizer(bos_id=None))) as server:
        for prompt in (*EMPTY, ["a", ""]):
            for stream in (False, True):
                answer = server.complete(prompt, stream=stream)
                assert answer.status == 400
        scored = server.post("/v1/score", {"inputs": [{"text": ""}, {"token_ids": []}, {"text": "a"}]}).json["results"]
        assert ["error" in result for result in scored] == [True, True, False]
        assert server.complete("count").status == 200


def test_a09_white_space_and_an_empty_one_among_others(server: Served) -> None:
    assert server.complete("  ", max_tokens=2).status == 200
    usage = server.complete(["a", ""], max_tokens=2).json["usage"]
    assert usage["prompt_tokens"] == 2


@pytest.mark.parametrize("max_tokens", [1, CONTEXT])
@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a10_a_prompt_without_room_is_a_400_in_both_modes(server: Served, length: int, max_tokens: int) -> None:
    answers = [
        server.complete("a" * length, max_tokens=max_tokens, stream=stream, ignore_eos=True) for stream in (False, True)
    ]
    if length < CONTEXT:
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[0].json["usage"]["completion_tokens"] == 1
        assert answers[0].json["choices"][0]["finish_reason"] == "length"
    else:
        for answer in answers:
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert str(CONTEXT) in answer.error["message"]
            assert str(length) in answer.error["message"]
        assert answers[0].error == answers[1].error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sent", "tokens"), [({"max_tokens": 0}, 0), ({"max_tokens": 1}, 1), ({}, 16), ({"max_tokens": 2**31 - 1}, 507)]
)
def test_a11_max_tokens(server: Served, sent: dict, tokens: int, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.complete("count", ignore_eos=True, stream=stream, **options, **sent)
    assert answer.status == 200
    whole = [answer.json] if not stream else answer.events[:-1]
    assert whole[-1]["usage"]["completion_tokens"] == tokens
    assert [c["finish_reason"] for part in whole for c in part["choices"] if c["finish_reason"]] == ["length"]
    if tokens == 0:
        assert "".join(c["text"] for part in whole for c in part["choices"]) == ""


@pytest.mark.parametrize("max_tokens", [-1, 2**63, 2**64, 10**30, 1.5])
@pytest.mark.parametrize("stream", [False, True])
def test_a11_values_that_are_no_count_are_refused(server: Served, max_tokens: object, stream: bool) -> None:
    answer = server.complete("count", max_tokens=max_tokens, stream=stream)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
def test_a14_arrays_are_parallel_one_entry_a_token(server: Served, logprobs: int) -> None:
    answer = server.complete("noise", logprobs=logprobs, top_k=1, max_tokens=8, seed=1, ignore_eos=True).json
    found = answer["choices"][0]["logprobs"]
    assert {len(found[name]) for name in found} == {8}
    assert answer["usage"]["completion_tokens"] == 8
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert logprobs <= len(top) <= logprobs + 1


def test_a14_logprobs_are_the_models_and_streams_give_the_same(server: Served) -> None:
    body = {"logprobs": 2, "temperature": 0, "max_tokens": 6, "echo": True}
    whole = server.complete("count", **body).json["choices"][0]
    context = list(b"count")
    for i, logprob in enumerate(whole["logprobs"]["token_logprobs"][1:5], start=1):
        assert logprob == pytest.approx(float(server.model.logprobs(context[:i])[context[i]]), abs=1e-6)
    events = server.complete("count", **body, stream=True).events[:-1]
    pieces = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces for value in piece[name]] == values
    assert whole["logprobs"]["token_logprobs"][0] is None
    assert whole["text"] == "count 1 2 3"


@pytest.mark.parametrize("logprobs", [-1, 21, 10**9, True, "5"])
def test_a14_beyond_the_limit_is_refused(server: Served, logprobs: object) -> None:
    answer = server.complete("a", logprobs=logprobs)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")


def test_a14_split_characters_have_their_raw_bytes() -> None:
    model = ToyModel(scripts={tuple(b"emoji"): [*"👩".encode(), EOS]})
    with Served(model) as server:
        found = server.complete("emoji", logprobs=1, temperature=0, max_tokens=9).json["choices"][0]["logprobs"]
        assert found["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "👩".encode()]
        assert found["text_offset"] == [0, 0, 0, 0]


def texts(server: Served, **fields: object) -> list[str]:
    return [choice["text"] for choice in server.complete("noise", max_tokens=12, **fields).json["choices"]]


def test_a15_choices_differ_and_the_set_is_reproducible(server: Served) -> None:
    first = server.complete("noise", n=4, seed=7, temperature=1.0, max_tokens=12).json
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in first["choices"]}) == 4
    assert texts(server, n=4, seed=7, temperature=1.0) == [choice["text"] for choice in first["choices"]]
    assert texts(server, n=2, seed=7, temperature=1.0) == [choice["text"] for choice in first["choices"][:2]]
    assert first["usage"]["prompt_tokens"] == 5
    alone = [server.complete("noise", n=1, seed=7, temperature=1.0, max_tokens=12).json["choices"][0]["text"]]
    assert alone == texts(server, n=4, seed=7, temperature=1.0)[:1]


def test_a15_more_choices_than_slots_still_all_come() -> None:
    with Served(runner=FakeRunner(num_pages=8, max_slots=3), engine_config=EngineConfig(max_slots=3)) as server:
        answer = server.complete("noise", n=4, seed=7, max_tokens=12)
        assert len({choice["text"] for choice in answer.json["choices"]}) == 4


@pytest.mark.parametrize("n", [0, -1, 129, 100_000, 2**70])
def test_a15_numbers_of_choices_that_are_refused(server: Served, n: int) -> None:
    answer = server.complete("a", n=n)
    assert (answer.status, answer.error["param"]) == (400, "n")


def test_prompts_times_choices_are_bounded(server: Served) -> None:
    answer = server.complete(["a"] * 100, n=11)
    assert (answer.status, answer.error["param"]) == (400, "n")


@pytest.mark.parametrize("seed", [123, 0, -1, -(2**63), 2**63, 2**64 - 1])
def test_a16_a_seed_gives_the_same_text_alone_and_in_company(server: Served, seed: int) -> None:
    alone = texts(server, seed=seed)
    with ThreadPoolExecutor(8) as clients:
        noise = [clients.submit(server.complete, f"other {i}", max_tokens=12, seed=i) for i in range(16)]
        assert texts(server, seed=seed) == alone
        assert all(future.result().status == 200 for future in noise)


def test_a16_without_a_seed_texts_differ(server: Served) -> None:
    assert texts(server) != texts(server)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "1", True])
def test_a16_seeds_that_are_no_64_bit_integer_are_refused(server: Served, seed: object) -> None:
    answer = server.complete("a", seed=seed)
    assert (answer.status, answer.error["param"]) == (400, "seed")


def test_a_model_of_another_name_is_not_found(server: Served) -> None:
    assert server.complete("a", model="toy", max_tokens=1).status == 200
    answer = server.complete("a", model="gpt-4")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
