"""The compiled shapes: which ones there are, and which one a set of rows goes into.

`derive` turns limits into a list short enough to compile at start (two dozen for a small context); `BucketSet` picks
the cheapest member that holds what is asked. Invariant: whatever single row the limits allow fits some bucket.
"""

from collections.abc import Iterable

from serving.batch import Bucket, Kind
from serving.config import EngineConfig

MIN_SCORE_TOKENS = 32
MIN_CHUNK_TOKENS = 64
BESIDE_TOKENS = (16, 32)  # chunks that may be added to the time of a token of running streams
FAR_CONTEXT = 2048  # below it there is no need of the shorter one: what is before a chunk adds little to its time
MIN_PAGES = 512  # attention walks as far as the longest row (model/key_blocks.py): width costs the copy of the table
PAGE_STEP = 16  # widths of a decode step's table grow so, and the last step is no smaller
ROW_STEP = 4  # rows grow fourfold: 1, 4, 16, 64
FINE_ROWS = 16  # from here on a decode step's time is that of its rows, and they double
_CACHED = (Kind.EXTEND, Kind.DECODE, Kind.SPECULATE)
FINE_TOKENS = 128  # score lengths double up to here and grow fourfold beyond, except for full batches


def ladder(first: int, last: int, step: int) -> list[int]:
    """first, first*step, ... and `last` itself; only `last` where it is not above `first`."""
    rungs = []
    while first < last:
        rungs.append(first)
        first *= step
    return [*rungs, last]


def derive(config: EngineConfig, max_context: int) -> tuple[Bucket, ...]:
    """The buckets for a model that sees `max_context` tokens."""
    pages = -(-max_context // config.page_size)
    widths = [w for w in ladder(MIN_PAGES, pages, PAGE_STEP) if w == pages or w * PAGE_STEP <= pages]
    return (
        *_score(config, max_context),
        *_extend(config, max_context, pages),
        *_decode(config, widths),
        *_speculate(config, widths),
    )


def _score(config: EngineConfig, max_context: int) -> list[Bucket]:
    longest = min(max_context, config.max_score_tokens)
    fine = ladder(MIN_SCORE_TOKENS, longest, 2)
    coarse = sorted({*(t for t in fine if t <= FINE_TOKENS), *ladder(MIN_SCORE_TOKENS, longest, 4)})
    rows = ladder(1, max(1, config.score_batch_tokens // fine[0]), ROW_STEP)
    rows = [r for r in rows if r <= config.max_score_rows]
    return [
        Bucket(Kind.SCORE, r, t, 0)
        for r in rows
        for t in (coarse if r < config.hard_size else fine)
        if r == 1 or r * t <= config.score_batch_tokens
    ]


def _extend(config: EngineConfig, max_context: int, pages: int) -> list[Bucket]:
    longest = min(max_context, config.prefill_chunk)
    beside = BESIDE_TOKENS if max_context >= FAR_CONTEXT else BESIDE_TOKENS[1:]
    shapes = {(1, longest), *((1, t) for t in (*beside, MIN_CHUNK_TOKENS) if t < longest)}
    shortest = min(longest, MIN_CHUNK_TOKENS)
    shapes.add((max(1, config.prefill_batch_tokens // shortest), shortest))
    return [Bucket(Kind.EXTEND, r, t, pages) for r, t in sorted(shapes)]


def _decode(config: EngineConfig, widths: list[int]) -> list[Bucket]:
    few = ladder(1, min(FINE_ROWS, config.max_slots), ROW_STEP)
    many = ladder(2 * FINE_ROWS, config.max_slots, 2) if config.max_slots > FINE_ROWS else []
    return [Bucket(Kind.DECODE, r, 1, p) for r in (*few, *many) for p in widths]


def _speculate(config: EngineConfig, widths: list[int]) -> list[Bucket]:
    rows = ladder(1, min(config.speculate_rows, config.max_slots), ROW_STEP) if config.speculate else []
    return [Bucket(Kind.SPECULATE, r, 2, p) for r in rows for p in widths]


class BucketSet:
    """Buckets by kind, cheapest first."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._by_kind: dict[Kind, list[Bucket]] = {kind: [] for kind in Kind}
        for bucket in sorted(buckets, key=_cost):
            self._by_kind[bucket.kind].append(bucket)

    def check(self, config: EngineConfig, max_context: int) -> None:
        """ValueError where a row that the limits allow would fit no bucket."""
        if self.max_rows(Kind.DECODE) < config.max_slots:
            raise ValueError(f"{config.max_slots} slots, but decode buckets hold {self.max_rows(Kind.DECODE)} rows")
        cached = [kind for kind in _CACHED if kind is not Kind.SPECULATE or self.max_rows(kind)]
        for kind in cached:
            pages = max((b.pages for b in self._by_kind[kind]), default=0)
            if pages * config.page_size < max_context:
                raise ValueError(f"{kind} buckets hold {pages} pages of {config.page_size}, the context {max_context}")

    def fit(self, kind: Kind, rows: int, tokens: int = 1, pages: int = 0) -> Bucket | None:
        """The cheapest bucket with at least that many rows, tokens a row and pages a row; None: there is none."""
        for b in self._by_kind[kind]:
            if b.rows >= rows and b.tokens >= tokens and b.pages >= pages:
                return b
        return None

    def sizes(self, kind: Kind) -> list[int]:
        """The different tokens a row, ascending."""
        return sorted({b.tokens for b in self._by_kind[kind]})

    def row_counts(self, kind: Kind) -> list[int]:
        """The different rows, ascending."""
        return sorted({b.rows for b in self._by_kind[kind]})

    def max_tokens(self, kind: Kind) -> int:
        return max((b.tokens for b in self._by_kind[kind]), default=0)

    def max_rows(self, kind: Kind) -> int:
        return max((b.rows for b in self._by_kind[kind]), default=0)

    def most_rows(self, kind: Kind) -> Bucket:
        """The cheapest bucket among those with the most rows. KeyError where the kind has none."""
        buckets = self._by_kind[kind]
        if not buckets:
            raise KeyError(kind)
        return min(buckets, key=lambda b: (-b.rows, _cost(b)))

    def max_pages(self) -> int:
        return max((b.pages for kind in _CACHED for b in self._by_kind[kind]), default=0)


def _cost(bucket: Bucket) -> tuple[int, int, int]:
    return (bucket.rows * bucket.tokens, bucket.pages, bucket.rows)
