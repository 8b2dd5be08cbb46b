import math

from hypothesis import given
from hypothesis import strategies as st

from serving.transport.logprobs import chat_logprobs, completion_logprobs, finite, token_text
from serving.types import TokenLogprob
from tests.fakes_text import ByteTokenizer

VOCABULARY = ByteTokenizer()


@given(st.floats(allow_nan=False, max_value=0.0))
def test_every_logprob_is_a_json_number(logprob: float) -> None:
    assert math.isfinite(finite(logprob))
    assert finite(logprob) == max(logprob, -9999.0)


def test_impossible_tokens_have_the_floor() -> None:
    token = TokenLogprob(97, -0.1, ((97, -0.1), (98, -math.inf)))
    completion = completion_logprobs(VOCABULARY, [token], [0])
    assert completion.top_logprobs == [{"a": -0.1, "b": -9999.0}]
    assert chat_logprobs(VOCABULARY, [token]).content[0].top_logprobs[1].logprob == -9999.0


def test_undefined_is_null() -> None:
    completion = completion_logprobs(VOCABULARY, [TokenLogprob(97, math.nan), TokenLogprob(98, -1.0)], [0, 1])
    assert completion.token_logprobs == [None, -1.0]
    assert completion.top_logprobs == [None, {"b": -1.0}]


def test_the_token_itself_is_among_the_top_ones() -> None:
    completion = completion_logprobs(VOCABULARY, [TokenLogprob(99, -5.0, ((97, -0.1),))], [4])
    assert completion.top_logprobs == [{"a": -0.1, "c": -5.0}]
    assert completion.text_offset == [4]


class Words(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return (b"a", "é".encode(), b"\xf0\x9f", b"")[token_id]


def test_tokens_without_a_text_of_their_own_are_named() -> None:
    assert [token_text(Words(), i) for i in range(4)] == ["a", "é", "bytes:\\xf0\\x9f", "token_id:3"]


def test_bytes_are_the_tokens_own() -> None:
    entries = chat_logprobs(VOCABULARY, [TokenLogprob(byte, -1.0) for byte in "👩".encode()]).content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "👩"
