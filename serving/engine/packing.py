"""How many rows, and how much of each, go into one step.

Pure choices over buckets, by one rule: the most work done for the cost, which is the bucket's size plus what a step
costs beside its tokens. So a batch that would leave its bucket mostly empty goes out in smaller, full ones. Rows are
taken in their order and the first always gets something, so nobody is overtaken inside a step and nobody starves;
rows that find no room keep their places.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from serving.batch import Bucket, Kind

from .buckets import BucketSet
from .sequence import Sequence
from .waiting import WaitingRows


@dataclass(frozen=True, slots=True)
class Packing:
    bucket: Bucket
    rows: tuple[Sequence, ...]
    chunks: tuple[int, ...]  # tokens of each row in this step

    def rate(self, worth: int, step_tokens: int) -> float:
        """Work for each token's time; `step_tokens` is the fixed part of a step's cost."""
        return worth / (self.bucket.rows * self.bucket.tokens + step_tokens)


def pack_score(waiting: WaitingRows, buckets: BucketSet, step_tokens: int) -> Packing:
    """Take rows out of the queue, whole: as many as the best bucket holds. A row is worth what it costs alone."""
    rows = _longest_run(waiting, buckets)
    counts = {len(rows), *(r for r in buckets.row_counts(Kind.SCORE) if r < len(rows))}
    tried = [_score_of(rows[:count], buckets) for count in sorted(counts, reverse=True)]
    cost = {length: _cost_alone(length, buckets) for length in {row.num_prompt for row in rows}}
    worths = [cost[row.num_prompt] for row in rows]
    best = max(tried, key=lambda packing: packing.rate(sum(worths[: len(packing.rows)]), step_tokens))
    for row in best.rows:
        waiting.start(row)
    return best


def _longest_run(waiting: WaitingRows, buckets: BucketSet) -> list[Sequence]:
    """The most rows, in order, that fit one bucket."""
    rows: list[Sequence] = []
    longest, bucket = 0, None
    for row in waiting.in_order():
        longest = max(longest, row.num_prompt)
        if bucket is None or len(rows) == bucket.rows or longest > bucket.tokens:
            bucket = buckets.fit(Kind.SCORE, len(rows) + 1, longest)
            if bucket is None:
                break
        rows.append(row)
    assert rows, "a row that fits no bucket was queued for scoring"
    return rows


def _cost_alone(length: int, buckets: BucketSet) -> int:
    bucket = buckets.fit(Kind.SCORE, 1, length)
    assert bucket is not None
    return bucket.tokens


def _score_of(rows: Rows[Sequence], buckets: BucketSet) -> Packing:
    lengths = tuple([row.num_prompt for row in rows])
    bucket = buckets.fit(Kind.SCORE, len(rows), max(lengths))
    assert bucket is not None, "fewer rows fit where more did"
    return Packing(bucket, tuple(rows), lengths)


def pack_extend(
    prefill: Rows[Sequence],
    buckets: BucketSet,
    *,
    max_chunk: int,
    page_size: int,
    step_tokens: int,
    allowed: Callable[[Packing], bool] = lambda _: True,
) -> Packing:
    """Chunks of the first prompts, of at most `max_chunk` tokens, at the best of the buckets' chunk lengths.

    Where none that would do is `allowed`, the first prompt goes alone with the smallest chunk that there is.
    """
    sizes = sorted({min(size, max_chunk) for size in buckets.sizes(Kind.EXTEND)}, reverse=True)
    counts = buckets.row_counts(Kind.EXTEND)
    tried = [_extend_of(prefill[:count], buckets, size, page_size) for size in sizes for count in counts]
    fitting = [packing for packing in tried if packing is not None]
    assert fitting, "no extend bucket holds one chunk of the first row"
    quick = [packing for packing in fitting if allowed(packing)]
    if not quick:
        return min(fitting, key=lambda packing: (packing.bucket.rows * packing.bucket.tokens, len(packing.rows)))
    return max(quick, key=lambda packing: packing.rate(sum(packing.chunks), step_tokens))


def pack_whole(
    prefill: Rows[Sequence], buckets: BucketSet, *, page_size: int, seconds: Callable[[Packing], float]
) -> Packing:
    """The first of these prompts, as a step takes them in whole; as many as takes least time for each. `seconds`: what
    such a step takes. The buckets must hold one of them, and the most rows all."""
    size = max(row.num_prompt - row.prefilled for row in prefill)
    counts = buckets.row_counts(Kind.EXTEND)
    tried = [_extend_of(prefill[:count], buckets, size, page_size) for count in counts]
    fitting = [packing for packing in tried if packing is not None]
    return min(fitting, key=lambda packing: (seconds(packing) / len(packing.rows), -len(packing.rows)))


def _extend_of(prefill: Rows[Sequence], buckets: BucketSet, size: int, page_size: int) -> Packing | None:
    """As many of the rows as fit with chunks of at most `size` tokens; None where the first does not."""
    rows: list[Sequence] = []
    chunks: list[int] = []
    bucket, pages = None, 0
    for row in prefill:
        chunk = min(row.num_prompt - row.prefilled, size)
        pages = max(pages, -(-(row.prefilled + chunk) // page_size))
        wider = buckets.fit(Kind.EXTEND, len(rows) + 1, max([*chunks, chunk]), pages)
        if wider is None:
            break
        bucket = wider
        rows.append(row)
        chunks.append(chunk)
    return Packing(bucket, tuple(rows), tuple(chunks)) if bucket is not None else None
