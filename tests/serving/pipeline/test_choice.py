import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from model.reasoning import ReasoningSplit
from model.tokenizer import Detokenizer
from serving.errors import StepFailed
from serving.pipeline.choice import Choice
from serving.pipeline.stops import StopMatcher
from serving.types import Delta, Finish, TokenLogprob, Update
from tests.fakes_text import EOS, ByteTokenizer

EMOJI = "风控👩‍💻é"


def make(*stops: str, logprobs: bool = False, opened: bool | None = None, offset: int = 0) -> Choice:
    return Choice(
        3,
        detokenizer=Detokenizer(ByteTokenizer(), skip_special=True),
        stops=StopMatcher(stops),
        splitter=None if opened is None else ReasoningSplit(opened=opened),
        stop_token_ids=frozenset({EOS}),
        with_logprobs=logprobs,
        offset=offset,
    )


def updates(raw: bytes, sizes: list[int], finish: Finish = Finish.LENGTH, last: tuple[int, ...] = ()) -> list[Update]:
    """The tokens of `raw` in groups of `sizes`, the last group ending the row."""
    tokens = [TokenLogprob(token, -float(i)) for i, token in enumerate((*raw, *last))]
    groups, rest = [], tokens
    for size in sizes:
        groups.append(rest[:size])
        rest = rest[size:]
    groups.append(rest)
    out = [Update(0, tuple(group)) for group in groups if group]
    tail = out.pop() if out else Update(0)
    return [*out, Update(0, tail.tokens, finish=finish)]


def run(choice: Choice, news: list[Update]) -> list[Delta]:
    deltas: list[Delta] = []
    for update in news:
        if not choice.ended:
            deltas += choice.push(update)
        if choice.cut:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(st.lists(st.integers(1, 4), max_size=20))
def test_characters_split_over_tokens_come_whole(sizes: list[int]) -> None:
    deltas = run(make(), updates(EMOJI.encode(), sizes))
    assert text_of(deltas) == EMOJI
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert [delta.finish for delta in deltas if delta.finish] == [Finish.LENGTH]


def test_a_character_cut_by_max_tokens_is_one_replacement() -> None:
    assert text_of(run(make(), updates("ok👩".encode()[:-1], [1] * 10))) == "ok\ufffd"


def test_a_stop_string_right_after_a_split_character() -> None:
    choice = make("STOP")
    deltas = run(choice, updates("é👩STOPmore".encode(), [1] * 30))
    assert text_of(deltas) == "é👩"
    assert deltas[-1].finish is Finish.STOP
    assert choice.cut
    assert choice.num_tokens == len("é👩STOP".encode())


def test_the_token_that_ends_the_sequence_counts_and_has_no_text() -> None:
    choice = make(logprobs=True)
    deltas = run(choice, updates(b"ab", [1, 1], Finish.STOP, last=(EOS,)))
    assert text_of(deltas) == "ab"
    assert choice.num_tokens == 3
    assert not choice.cut
    assert [token.token_id for delta in deltas for token in delta.tokens] == [97, 98]


def test_held_text_comes_with_the_end() -> None:
    deltas = run(make("abcd"), updates(b"xabc", [1, 1, 1]))
    assert [delta.text for delta in deltas] == ["x", "abc"]


def test_a_stop_string_that_the_last_character_completes_beats_the_length() -> None:
    deltas = run(make("\ufffd"), updates("a👩".encode()[:-1], []))
    assert (text_of(deltas), deltas[-1].finish) == ("a", Finish.STOP)


def test_an_error_ends_the_choice_without_what_was_held() -> None:
    choice = make("abcd")
    choice.push(Update(0, (TokenLogprob(97, -1.0),)))
    failure = StepFailed("gone")
    assert choice.push(Update(0, error=failure)) == [Delta(3, error=failure)]
    assert choice.ended


@given(st.text(alphabet="abé<", max_size=12), st.lists(st.integers(1, 4), max_size=12))
@settings(max_examples=200)
def test_logprobs_never_run_ahead_of_the_text_and_none_is_lost(text: str, sizes: list[int]) -> None:
    raw = text.encode()
    choice = make("<é<", logprobs=True)
    shown, tokens = "", []
    for update in updates(raw, sizes):
        for delta in choice.push(update) if not choice.ended else []:
            shown += delta.text
            tokens += [token.token_id for token in delta.tokens]
            if delta.finish is None:
                assert bytes(tokens) == shown.encode()[: len(tokens)]
    stopped = text.partition("<é<")[0] if "<é<" in text else text
    assert shown == stopped
    assert bytes(tokens) == stopped.encode()


def test_offsets_count_characters_of_the_whole_text() -> None:
    deltas = run(make(logprobs=True, offset=10), updates("aé👩b".encode(), [1] * 20))
    assert [offset for delta in deltas for offset in delta.offsets] == [10, 11, 11, 12, 12, 12, 12, 13]


def splits(deltas: list[Delta]) -> tuple[str, str]:
    assert not any(delta.text and delta.reasoning for delta in deltas)
    return "".join(delta.reasoning for delta in deltas), text_of(deltas)


def reasoned(*pieces: str) -> tuple[str, str]:
    """The answer to a prompt that opened the reasoning, its text arriving in `pieces`."""
    raw = "".join(pieces).encode()
    return splits(run(make(opened=True), updates(raw, [len(piece.encode()) for piece in pieces])))


def test_reasoning_is_split_from_content() -> None:
    assert reasoned("a", "</", "think", ">", "b") == ("a", "b")
    assert reasoned("a</think>b") == ("a", "b")
    assert reasoned("a") == ("a", "")
    assert reasoned("</think>", "b") == ("", "b")
    assert reasoned("a</think>say </think> to end") == ("a", "say </think> to end")


def test_without_an_opened_reasoning_content_is_content() -> None:
    assert splits(run(make(opened=False), updates(b"plain", [1, 1]))) == ("", "plain")


@given(st.lists(st.integers(1, 6), max_size=10))
def test_any_grouping_gives_the_same_split(sizes: list[int]) -> None:
    choice = make(opened=True)
    deltas = run(choice, updates("thé</think>ansẃer".encode(), sizes))
    assert splits(deltas) == ("thé", "ansẃer")
    kinds = [
        kind
        for kind, _ in itertools.groupby(bool(delta.reasoning) for delta in deltas if delta.text or delta.reasoning)
    ]
    assert kinds == [True, False]
    assert [delta.finish for delta in deltas if delta.finish] == [Finish.LENGTH]
