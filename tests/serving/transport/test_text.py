"""Also case A13: forms of Unicode go to the tokenizer as they are."""

import pytest

from tests.fakes_http import Served
from tests.fakes_text import ASSISTANT, BOS, USER, ByteTokenizer, byte_language

FORMS = ["（风控）", "(风控)", "é", "e\u0301", "½", "👨‍👩‍👧‍👦", "\ufeffa", "a\x00b", "ﬁ", "İ", "\u2028", "\r\n"]


@pytest.mark.parametrize("text", FORMS)
def test_a13_text_reaches_the_tokenizer_unchanged_and_comes_back(server: Served, text: str) -> None:
    tokens = server.post("/tokenize", {"prompt": text}).json["tokens"]
    assert tokens == list(text.encode())
    assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": text}
    echoed = server.complete(text, max_tokens=0, echo=True).json["choices"][0]["text"]
    assert echoed == text


def test_counts_and_pieces(server: Served) -> None:
    answer = server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [97, 0xC3, 0xA9],
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"],
    }


def test_messages_are_encoded_as_chat_would() -> None:
    with Served() as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert server.post("/tokenize", body).json["tokens"] == [BOS, USER, 97, ASSISTANT]


def test_bos_is_there_as_in_completions_unless_asked_off() -> None:
    with Served(language=byte_language(tokenizer=ByteTokenizer(add_bos=True))) as server:
        assert server.post("/tokenize", {"prompt": "a"}).json["tokens"] == [BOS, 97]
        assert server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json["tokens"] == [97]
        assert server.complete("a", max_tokens=1).json["usage"]["prompt_tokens"] == 2


def test_a_text_longer_than_the_context_can_be_counted(server: Served) -> None:
    assert server.post("/tokenize", {"prompt": "a" * 5000}).json["count"] == 5000


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, {"prompt": 1}])
def test_exactly_one_of_prompt_and_messages(server: Served, body: object) -> None:
    assert server.post("/tokenize", body).status == 400


@pytest.mark.parametrize("tokens", [[-1], [320], [2**70], ["a"], [1.0], "a", None])
def test_ids_outside_the_vocabulary_are_refused(server: Served, tokens: object) -> None:
    assert server.post("/detokenize", {"tokens": tokens}).status == 400
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
