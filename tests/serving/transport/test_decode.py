"""Also cases A06, A07 and A12: what the wire refuses, and that the server goes on after each."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BadRequest, Unsupported
from serving.transport.decode import parse_json, read_body
from serving.transport.schema.completions import CompletionIn
from tests.fakes_http import Served


def refused(raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_body(raw, CompletionIn)
    json.dumps(caught.value.message, allow_nan=False).encode("utf-8")
    return caught.value


keys = st.text(alphabet='ab:"\\', min_size=1, max_size=3)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(alphabet='ab:"\\{}é', max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=10,
)


@given(values)
def test_json_without_a_key_twice_is_read_as_the_standard_library_does(value: object) -> None:
    for raw in (json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
        assert parse_json(raw.encode()) == value


@given(st.dictionaries(keys, values, min_size=1, max_size=3), st.data())
def test_a_key_twice_is_found_at_any_depth(inner: dict[str, object], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(inner)))
    pairs = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in (*inner.items(), (key, 1)))
    for raw in (f"{{{pairs}}}", f'{{"a": [1, {{{pairs}}}]}}', f'[{{"x:y": {{{pairs}}}}}]'):
        with pytest.raises(BadRequest, match="twice"):
            parse_json(raw.encode())


@pytest.mark.parametrize("raw", [b"", b"  ", b"[]", b'"x"', b"1", b"null", b"{", b"{}x", b"\xff", b'{"prompt":"\xff"}'])
def test_bodies_that_are_no_object(raw: bytes) -> None:
    assert refused(raw).status == 400


def test_nesting_is_no_way_to_the_stack() -> None:
    for opened, closed in ((b"[", b"]"), (b'{"prompt":', b"}")):
        assert "deep" in refused(opened * 100_000 + b"1" + closed * 100_000).message
    assert "deep" in refused(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}").message


@pytest.mark.parametrize(
    ("fragment", "param"),
    [
        (b'"stream":"false"', "stream"),
        (b'"top_k":0.01', "top_k"),
        (b'"n":"2"', "n"),
        (b'"n":true', "n"),
        (b'"n":0', "n"),
        (b'"stop":[1,null]', "stop[0]"),
        (b'"stop":""', "stop"),
        (b'"stop":["a",""]', "stop[1]"),
        (b'"prompt":[1,[2,true]]', "prompt[1][1]"),
        (b'"stream_options":{"x":1}', "stream_options.x"),
        (b'"nope":1', "nope"),
        (b'"priority":"high"', "priority"),
        (b'"timeout_ms":0', "timeout_ms"),
        (b'"max_tokens":-1', "max_tokens"),
        (b'"max_tokens":9223372036854775808', "max_tokens"),
        (b'"max_tokens":1.0', "max_tokens"),
        (b'"temperature":"0.7"', "temperature"),
        (b'"temperature":true', "temperature"),
        (b'"temperature":[]', "temperature"),
        (b'"temperature":2.1', "temperature"),
        (b'"top_p":"nan"', "top_p"),
        (b'"top_p":0', "top_p"),
        (b'"min_p":-0.1', "min_p"),
        (b'"presence_penalty":2.1', "presence_penalty"),
        (b'"frequency_penalty":-2.1', "frequency_penalty"),
        (b'"repetition_penalty":0', "repetition_penalty"),
        (b'"logit_bias":{"1":100.5}', "logit_bias"),
        (b'"logit_bias":[1]', "logit_bias"),
        (b'"allowed_token_ids":[]', "allowed_token_ids"),
        (b'"allowed_token_ids":[-1]', "allowed_token_ids[0]"),
        (b'"response_format":{"type":"xml"}', "response_format.type"),
        (b'"guided_choice":[]', "guided_choice"),
        (b'"guided_choice":"a"', "guided_choice"),
        (b'"guided_json":5', "guided_json"),
    ],
)
def test_the_field_at_fault_is_named(fragment: bytes, param: str) -> None:
    prompt = b"" if fragment.startswith(b'"prompt"') else b'"prompt":"a",'
    error = refused(b"{" + prompt + fragment + b"}")
    assert error.param == param
    assert param.split("[")[0] in error.message


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"nan"', '"0.7"', "true", "[]", "{}"]
)
def test_a06_no_value_that_is_no_finite_number_passes(name: str, value: str) -> None:
    assert refused(f'{{"prompt":"a","{name}":{value}}}'.encode()).status == 400


def test_null_is_the_default() -> None:
    fields = ",".join(f'"{name}":null' for name in CompletionIn.__struct_fields__ if name != "prompt")
    assert read_body(f'{{"prompt":"a",{fields},"tools":null}}'.encode(), CompletionIn) == CompletionIn("a")


@pytest.mark.parametrize("surrogate", [b"\\ud800", b"\\udc00", b"\\ud800\\ud800", b"\\ud800x", b"\xed\xa0\x80"])
def test_a12_half_a_surrogate_pair_is_refused_wherever_it_stands(surrogate: bytes) -> None:
    for template in (
        b'{"prompt":"%s"}',
        b'{"prompt":"a","stop":"%s"}',
        b'{"prompt":"a","profile_id":"%s"}',
        b'{"%s":1}',
    ):
        refused(template.replace(b"%s", surrogate))
    assert read_body(b'{"prompt":"\\ud83d\\ude00"}', CompletionIn).prompt == "😀"


@pytest.mark.parametrize(
    "field", ['"best_of":2', '"suffix":"x"', '"reasoning_effort":"low"', '"min_tokens":5', '"tools":[{}]']
)
def test_what_would_change_the_answer_is_refused_and_named(field: str) -> None:
    with pytest.raises(Unsupported) as caught:
        read_body(f'{{"prompt":"a",{field}}}'.encode(), CompletionIn)
    assert caught.value.param == field.split('"')[1]


def test_what_changes_nothing_is_accepted() -> None:
    harmless = '"user":"u","metadata":{"a":1},"store":false,"best_of":1'
    neutral = '"suffix":"","tools":[],"min_tokens":0'
    assert read_body(f'{{"prompt":"a",{harmless},{neutral}}}'.encode(), CompletionIn) == CompletionIn("a")


BAD_BODIES = [
    b'{"prompt":"a","temperature":NaN}',
    b'{"prompt":"a","stream":"false"}',
    b'{"prompt":"\\ud800","stream":true}',
    b'{"prompt":"a","stop":"\\ud800"}',
    b"[]",
    b'"x"',
    b"",
    b"[" * 100_000,
    b'{"prompt":"a","prompt":"b"}',
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/score", "/tokenize", "/detokenize"])
def test_every_endpoint_answers_400_in_openais_shape_and_goes_on(server: Served, path: str) -> None:
    for raw in BAD_BODIES:
        answer = server.post(path, raw)
        assert answer.status == 400
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert "msgspec" not in answer.body.decode()
    assert server.complete("count", max_tokens=1).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a07_messages_of_wrong_form_name_their_field(server: Served, body: object, param: str) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a12_the_same_in_both_modes_and_in_names(server: Served) -> None:
    for stream in (b"true", b"false"):
        for message in (b'{"role":"user","content":"\\ud800"}', b'{"role":"user","content":"a","name":"\\ud800"}'):
            raw = b'{"messages":[' + message + b'],"stream":' + stream + b"}"
            assert server.post("/v1/chat/completions", raw).status == 400


def test_a06_a_tiny_temperature_is_greedy(server: Served) -> None:
    texts = {
        server.complete("noise", temperature=t, max_tokens=8).json["choices"][0]["text"] for t in (0, 1e-9, 1e-300)
    }
    assert len(texts) == 1
