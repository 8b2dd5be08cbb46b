"""One choice of a completion: tokens in, pieces of text out, in the order detokenise, stop strings, reasoning split.

A piece of text, and a token's log-probability with it, is released only when no stop string can begin in it. The
concatenated pieces are the same however the engine groups the tokens into updates.
"""

from dataclasses import dataclass, replace

from serving.types import Delta, Finish, TokenLogprob, Update

from .language import Detokenizer, ReasoningSplitter
from .stops import StopMatcher


@dataclass(slots=True)
class _Held:
    """A token whose text may still be cut: `start` and `end` count characters of the generated text."""

    token: TokenLogprob
    start: int
    end: int | None  # None: its character is not complete yet


class Choice:
    """`num_tokens` were generated (the one that ended the text included); `ended` once the last Delta was given."""

    def __init__(
        self,
        index: int,
        *,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        splitter: ReasoningSplitter | None,
        stop_token_ids: frozenset[int],
        with_logprobs: bool,
        offset: int = 0,
    ) -> None:
        """offset: characters that precede the generated text in the choice's text (an echoed prompt)."""
        self._index = index
        self._detokenizer = detokenizer
        self._stops = stops
        self._splitter = splitter
        self._stop_token_ids = stop_token_ids
        self._with_logprobs = with_logprobs
        self._offset = offset
        self._held: list[_Held] = []
        self._fed = 0
        self.num_tokens = 0
        self.ended = False
        self.cut = False  # by a stop string, while the engine would go on

    def push(self, update: Update) -> list[Delta]:
        """What the update shows; a Delta has either reasoning or text, the last one finish or error."""
        assert not self.ended
        shown = self._shown(update)
        pieces = [self._token(token) for token in shown]
        if not self._stops.hit:
            self.num_tokens += len(update.tokens) - len(shown)
            if update.finish is not None:
                pieces += [self._feed(self._detokenizer.flush()), self._stops.flush()]
        finish = Finish.STOP if self._stops.hit else update.finish
        self.cut = self._stops.hit and update.finish is None
        self.ended = finish is not None or update.error is not None
        return self._deltas("".join(pieces), finish, update.error if finish is None else None)

    def _shown(self, update: Update) -> tuple[TokenLogprob, ...]:
        """A token that ends the sequence has no text."""
        tokens = update.tokens
        if update.finish is Finish.STOP and tokens and tokens[-1].token_id in self._stop_token_ids:
            return tokens[:-1]
        return tokens

    def _token(self, token: TokenLogprob) -> str:
        if self._stops.hit:
            return ""
        self.num_tokens += 1
        start = self._fed
        piece = self._detokenizer.push((token.token_id,))
        if self._with_logprobs:
            self._held.append(_Held(token, start, None))
        return self._feed(piece)

    def _feed(self, piece: str) -> str:
        self._fed += len(piece)
        if piece:
            for held in self._held:
                if held.end is None:
                    held.end = self._fed
        return self._stops.push(piece)

    def _deltas(self, text: str, finish: Finish | None, error: Exception | None) -> list[Delta]:
        tokens = self._release_tokens(final=finish is not None)
        logprobs = tuple(held.token for held in tokens)
        offsets = tuple(self._offset + held.start for held in tokens)
        pieces = self._split(text, final=finish is not None)
        if not (pieces or logprobs or finish or error):
            return []
        parts = [Delta(self._index, content, reasoning) for reasoning, content in pieces or [("", "")]]
        parts[0] = replace(parts[0], tokens=logprobs, offsets=offsets)
        parts[-1] = replace(parts[-1], finish=finish, error=error)
        return parts

    def _split(self, text: str, *, final: bool) -> list[tuple[str, str]]:
        """(reasoning, content) pairs, one of each two empty; neighbours of one kind are joined."""
        if self._splitter is None:
            return [("", text)] if text else []
        pieces = [*self._splitter.push(text), *(self._splitter.flush() if final else ())]
        joined: list[tuple[str, str]] = []
        for piece in pieces:
            reasoning, content = piece.reasoning, piece.content
            if joined and bool(joined[-1][0]) == bool(reasoning):
                before = joined.pop()
                reasoning, content = before[0] + reasoning, before[1] + content
            joined.append((reasoning, content))
        return joined

    def _release_tokens(self, *, final: bool) -> list[_Held]:
        """Tokens whose text is out; at a stop string those that began before it, at any other end all."""
        limit = self._stops.released
        if self._stops.hit:
            out = [held for held in self._held if held.start < limit]
            self._held = []
        elif final:
            out, self._held = self._held, []
        else:
            num_out = sum(held.end is not None and held.end <= limit for held in self._held)
            out, self._held = self._held[:num_out], self._held[num_out:]
        return out
