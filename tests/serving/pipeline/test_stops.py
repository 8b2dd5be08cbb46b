import itertools

from hypothesis import given
from hypothesis import strategies as st

from serving.pipeline.stops import StopMatcher

texts = st.text(alphabet="ab<", max_size=30)
stops = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3)


def reference(text: str, stop_strings: list[str]) -> tuple[str, bool]:
    """The string that is complete first wins, the longer of two; read letter by letter."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stops, st.lists(st.integers(0, 100), max_size=5))
def test_any_cut_gives_the_same_text_as_the_reference(text: str, stop_strings: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stop_strings)
    shown = "".join(matcher.push(piece) for piece in cut(text, places)) + matcher.flush()
    assert (shown, matcher.hit) == reference(text, stop_strings)
    assert matcher.released == len(shown)


@given(texts, stops)
def test_nothing_that_could_become_a_stop_string_is_released_early(text: str, stop_strings: list[str]) -> None:
    matcher = StopMatcher(stop_strings)
    shown = ""
    for i, letter in enumerate(text):
        shown += matcher.push(letter)
        for stop in stop_strings:  # were the rest of the stop string to come now, nothing of it would be out
            for size in range(1, len(stop)):
                if not matcher.hit and text[: i + 1].endswith(stop[:size]):
                    assert len(shown) <= i + 1 - size


def test_a_stop_string_across_token_borders_is_cut_whole() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("okE", "N", "Dmore")] == ["ok", "", ""]
    assert matcher.hit
    assert matcher.push("x") + matcher.flush() == ""


def test_held_text_comes_out_at_the_end_when_it_was_none() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("okEN") == "ok"
    assert matcher.flush() == "EN"
    assert not matcher.hit
