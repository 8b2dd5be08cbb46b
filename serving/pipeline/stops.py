"""Stop strings in a stream of text: nothing that could still become a part of one is released.

One Knuth-Morris-Pratt automaton per stop string: its state is the length of the longest end of the text that begins
the stop string, so the longest state is what must be held back, and the answer does not depend on how the text was
cut into pieces. The string that is complete first wins; of two complete at once, the longer.
"""

from collections.abc import Sequence


class _Automaton:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = _failures(pattern)

    def step(self, char: str) -> bool:
        """Take one character; True when the pattern is complete."""
        while self.state and self.pattern[self.state] != char:
            self.state = self._failure[self.state]
        if self.pattern[self.state] == char:
            self.state += 1
        return self.state == len(self.pattern)


def _failures(pattern: str) -> list[int]:
    """[i]: the longest proper beginning of pattern that ends pattern[:i]."""
    table = [0] * (len(pattern) + 1)
    state = 0
    for i in range(1, len(pattern)):
        while state and pattern[state] != pattern[i]:
            state = table[state]
        if pattern[state] == pattern[i]:
            state += 1
        table[i + 1] = state
    return table


class StopMatcher:
    """`released` is the number of characters that may be shown; it never goes back. `hit`: a stop string came."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.released = 0
        self.hit = False

    def push(self, text: str) -> str:
        """The text that is now safe to show. After a hit, text is dropped."""
        if self.hit:
            return ""
        if not self._automata:
            self.released += len(text)
            return text
        for i, char in enumerate(text):
            done = [len(a.pattern) for a in self._automata if a.step(char)]
            if done:
                self.hit = True
                return self._release(self._held + text[: i + 1], max(done))
        return self._release(self._held + text, max(a.state for a in self._automata))

    def flush(self) -> str:
        """The end of the text: what was held back is no stop string after all."""
        return "" if self.hit else self._release(self._held, 0)

    def _release(self, text: str, num_held: int) -> str:
        cut = len(text) - num_held
        self._held = "" if self.hit else text[cut:]
        self.released += cut
        return text[:cut]
