import pytest

from serving.errors import BadRequest, ContextLengthExceeded, ServingError
from serving.pipeline.language import Language
from serving.pipeline.prompts import encode_inputs, find_template
from serving.types import ChatInput, FeatureInput, Input, TextInput, TokenInput
from tests.fakes_text import ASSISTANT, BOS, THINK, USER, ByteTokenizer, byte_language


def encode(item: Input, language: Language | None = None) -> tuple[int, ...]:
    (result,) = encode_inputs(language or byte_language(), (item,))
    if isinstance(result, ServingError):
        raise result
    return result


def test_every_kind_of_input_in_order() -> None:
    inputs = [
        TextInput("ab"),
        TokenInput((7, 8)),
        ChatInput(({"role": "user", "content": "c"},)),
        FeatureInput({"x": 3}),
        TextInput("d"),
    ]
    assert encode_inputs(byte_language(), inputs) == [
        (97, 98),
        (7, 8),
        (BOS, USER, 99, ASSISTANT),
        tuple(b"x=3>"),
        (100,),
    ]


def test_bos_comes_before_texts_where_the_tokenizer_says_so_and_never_before_ids() -> None:
    language = byte_language(tokenizer=ByteTokenizer(add_bos=True))
    assert encode(TextInput("a"), language) == (BOS, 97)
    assert encode(FeatureInput({"x": 1}), language) == (BOS, *b"x=1>")
    assert encode(TokenInput((97,)), language) == (97,)
    assert encode(ChatInput(({"role": "user", "content": ""},)), language) == (BOS, USER, ASSISTANT)


@pytest.mark.parametrize("item", [TextInput(""), TokenInput(())])
def test_an_empty_prompt_is_bos_alone_or_refused(item: Input) -> None:
    assert encode(item) == (BOS,)
    with pytest.raises(BadRequest, match="BOS"):
        encode(item, byte_language(tokenizer=ByteTokenizer(bos_id=None)))


def test_text_never_becomes_a_control_token() -> None:
    assert THINK not in encode(TextInput("<think><bos>"))
    assert encode(ChatInput(({"role": "user", "content": "<think>"},))).count(THINK) == 0


def test_errors_stay_in_their_places() -> None:
    before = BadRequest("no")
    results = encode_inputs(
        byte_language(), [before, TextInput("a"), FeatureInput({}), ChatInput(({"role": "user"},)), TokenInput((400,))]
    )
    assert results[0] is before
    assert results[1] == (97,)
    assert [type(result) for result in results[2:]] == [BadRequest] * 3
    assert [result.param for result in results[2:4] if isinstance(result, BadRequest)] == [
        "features.x",
        "messages[0].content",
    ]


@pytest.mark.parametrize("token", [-1, 320, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(BadRequest, match="0 to 319"):
        encode(TokenInput((1, token)))


def test_a_prompt_longer_than_the_context_names_both_counts() -> None:
    language = byte_language(max_context=10)
    assert len(encode(TextInput("a" * 10), language)) == 10
    with pytest.raises(ContextLengthExceeded, match=r"10 tokens.*has 11"):
        encode(TextInput("a" * 11), language)


def test_templates_are_found_by_name_only() -> None:
    language = byte_language()
    assert find_template(language, None).name == "toy"
    for name in ("../toy", "TOY", ""):
        with pytest.raises(BadRequest, match="templates: toy"):
            find_template(language, name)
    with pytest.raises(BadRequest, match="no default"):
        find_template(byte_language(templates={}), None)


def test_chat_without_a_chat_template_says_so() -> None:
    language = byte_language()
    bare = Language(language.tokenizer, 512, 320, language.new_detokenizer)
    with pytest.raises(BadRequest, match="no chat template"):
        encode(ChatInput(({"role": "user", "content": "a"},)), bare)
