"""How many rows, and how much of each, go into one step.

Pure choices over buckets. Rows are taken in their order and the first always gets something, so nobody is overtaken
inside a step and nobody starves; rows that find no room keep their places.
"""

from collections.abc import Iterable
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


def pack_score(waiting: WaitingRows, buckets: BucketSet) -> Packing:
    """Take as many waiting rows as a bucket holds out of the queue, whole."""
    rows: list[Sequence] = []
    longest, bucket = 0, None
    while (row := waiting.head()) is not None:
        wider = buckets.fit(Kind.SCORE, len(rows) + 1, max(longest, row.num_prompt))
        if wider is None:
            break
        rows.append(waiting.pop())
        longest, bucket = max(longest, row.num_prompt), wider
    assert bucket is not None, "a row that fits no bucket was queued for scoring"
    return Packing(bucket, tuple(rows), tuple(row.num_prompt for row in rows))


def pack_extend(prefill: Iterable[Sequence], buckets: BucketSet, max_chunk: int, page_size: int) -> Packing:
    """The chunk length whose bucket carries the most prompt tokens in one step; the cheaper bucket where two tie."""
    rows = list(prefill)
    tried = [_extend_at(rows, buckets, min(size, max_chunk), page_size) for size in buckets.sizes(Kind.EXTEND)]
    fitting = [packing for packing in tried if packing is not None]
    assert fitting, "no extend bucket holds one chunk of the first row"
    return max(fitting, key=lambda p: (sum(p.chunks), -p.bucket.rows * p.bucket.tokens))


def _extend_at(prefill: list[Sequence], buckets: BucketSet, size: int, page_size: int) -> Packing | None:
    """Chunks of at most `size` tokens."""
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
