"""What a step's output says about one row: its news, and whether it ends the row.

Reads a StepOutput; changes only what the row has of results (`output`, `prompt_entries`). NumPy's numbers are turned
into Python's here and nowhere else: what every row has, in one go for the whole step.
"""

from functools import cached_property

from serving.batch import Bucket, Kind, StepOutput
from serving.types import Finish, TokenLogprob, Update

from .sequence import Sequence


class Results:
    """A step's output; lists are by row of the output."""

    def __init__(self, out: StepOutput, bucket: Bucket) -> None:
        self.arrays, self._num_rows = out, bucket.rows
        self.finite: list[bool] = out.finite.tolist()  # of all of a row's news
        self._accepted: list[bool] = []
        if bucket.kind is Kind.SPECULATE:
            assert out.accepted is not None, "a speculative step says what it accepted"
            self._accepted = out.accepted.tolist()
            self.finite = [all(self.finite[place] for place in self.places(r)) for r in range(bucket.rows)]

    def places(self, r: int) -> tuple[int, ...]:
        """The rows of the output that are row r's news, in order: one, or two where a draft was accepted."""
        return (r, self._num_rows + r) if self._accepted and self._accepted[r] else (r,)

    @cached_property
    def drafted(self) -> list[bool]:
        """Of a speculative step: whether the row had a draft."""
        assert self.arrays.drafted is not None
        return self.arrays.drafted.tolist()

    @cached_property
    def tokens(self) -> list[int]:
        return self.arrays.token.tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        return self.arrays.logprob.tolist()

    @cached_property
    def target_logprobs(self) -> list[list[float]]:
        return self.arrays.target_logprobs.tolist()


def keep_prompt(row: Sequence, out: StepOutput, r: int, start: int, length: int) -> None:
    """Collect the log-probabilities of prompt tokens start+1 .. start+length that this chunk gave."""
    if not row.wants_prompt:
        return
    assert out.prompt_logprobs is not None, "the batch did not ask for prompt log-probabilities"
    count = min(length, row.num_prompt - 1 - start)
    tokens = row.prompt[start + 1 : start + 1 + count].tolist()
    logprobs = out.prompt_logprobs[r, :count].tolist()
    tops = _prompt_tops(row, out, r, count)
    row.prompt_entries.extend(TokenLogprob(*entry) for entry in zip(tokens, logprobs, tops, strict=True))


def _prompt_tops(row: Sequence, out: StepOutput, r: int, count: int) -> list[tuple[tuple[int, float], ...]]:
    k = row.prompt_logprobs
    if k == 0:
        return [()] * count
    assert out.prompt_top_ids is not None
    assert out.prompt_top_logprobs is not None
    ids = out.prompt_top_ids[r, :count, :k].tolist()
    logprobs = out.prompt_top_logprobs[r, :count, :k].tolist()
    return [tuple(zip(i, p, strict=True)) for i, p in zip(ids, logprobs, strict=True)]


def scored(row: Sequence, out: Results, r: int) -> Update:
    """The only update of a row that generates nothing."""
    finish = Finish.SCORED if row.sampling is None else Finish.LENGTH
    return Update(
        row=row.row,
        target_logprobs=_targets(row, out, r),
        prompt_logprobs=tuple(row.prompt_entries),
        num_cached=row.num_cached,
        finish=finish,
    )


def generated(row: Sequence, out: Results, r: int) -> Update:
    """One more token, or two: what comes after the row's end is dropped. The first one brings what was asked about the
    prompt."""
    first, finish, tokens = not row.output, None, []
    for place in out.places(r):
        token = out.tokens[place]
        row.output.append(token)
        tokens.append(TokenLogprob(token, out.logprobs[place], _top(row, out.arrays, place)))
        finish = _finish(row, token)
        if finish is not None:
            break
    return Update(
        row=row.row,
        tokens=tuple(tokens),
        target_logprobs=_targets(row, out, r) if first else (),
        prompt_logprobs=tuple(row.prompt_entries) if first else (),
        num_cached=row.num_cached if first else 0,
        finish=finish,
    )


def _finish(row: Sequence, token: int) -> Finish | None:
    if token in row.stops:
        return Finish.STOP
    return Finish.LENGTH if row.generated == row.max_new else None


def _targets(row: Sequence, out: Results, r: int) -> tuple[float, ...]:
    if not row.targets:
        return ()
    return tuple(out.target_logprobs[r][: len(row.targets)])


def _top(row: Sequence, out: StepOutput, r: int) -> tuple[tuple[int, float], ...]:
    if out.top_ids is None or row.top == 0:
        return ()
    assert out.top_logprobs is not None
    return tuple(zip(out.top_ids[r, : row.top].tolist(), out.top_logprobs[r, : row.top].tolist(), strict=True))
