"""What a step of each bucket takes: a line over the number of tokens before the step's own, which attention reads.

The warm-up draws it, and a moving average of what steps take moves it. For a bucket not seen yet a guess by tokens."""

import numpy as np

from serving.batch import Bucket, Kind, StepTimes

_WEIGHT = 0.2  # of the newest time


class StepCosts:
    def __init__(self) -> None:
        self._lines: dict[Bucket, tuple[float, float]] = {}  # seconds without a prefix, and for each of its tokens
        self._warm_up_s: dict[Bucket, float] = {}

    def learn(self, bucket: Bucket, times: StepTimes) -> None:
        """As measured in the warm-up."""
        self._warm_up_s[bucket] = times.alone_s
        more_s = max(0.0, times.far_s - times.alone_s)
        self._lines[bucket] = (times.alone_s, more_s / times.prefix if times.prefix else 0.0)

    def observe(self, bucket: Bucket, seconds: float, prefix: int = 0) -> None:
        """A step with so many tokens before the first of its own, in the row where they are most."""
        expected = self.seconds(bucket, prefix) if bucket in self._lines else 0.0
        if expected <= 0.0:
            self._lines[bucket] = (seconds, 0.0)
            return
        alone_s, token_s = self._lines[bucket]
        factor = 1 + _WEIGHT * (seconds / expected - 1)
        self._lines[bucket] = (alone_s * factor, token_s * factor)

    def warm_up_s(self, bucket: Bucket) -> float:
        """As measured in the warm-up, all buckets in one go: what to compare them by. 0 where it was not."""
        return self._warm_up_s.get(bucket, 0.0)

    def seconds(self, bucket: Bucket, prefix: int = 0) -> float:
        """0 where no step of this kind has been seen."""
        if bucket in self._lines:
            alone_s, token_s = self._lines[bucket]
            return alone_s + token_s * prefix
        size = bucket.rows * bucket.tokens
        like = [(b.rows * b.tokens, s) for b, (s, _) in self._lines.items() if b.kind is bucket.kind]
        if not like:
            return 0.0
        nearest, seconds = min(like, key=lambda seen: abs(seen[0] - size))
        return seconds * size / nearest

    def between_s(self, kind: Kind, num_rows: int) -> float:
        """What a step of so many rows would take if there were a bucket of just as many; 0 where none has been seen."""
        seen = sorted((b.rows, s) for b, (s, _) in self._lines.items() if b.kind is kind)
        if not seen:
            return 0.0
        rows, seconds = zip(*seen, strict=True)
        return float(np.interp(num_rows, rows, seconds))

    def prefill_token_s(self) -> float:
        """What a token of a prompt takes in the best step seen; 0 where none has been."""
        seen = [s / (b.rows * b.tokens) for b, (s, _) in self._lines.items() if b.kind is Kind.EXTEND]
        return min(seen, default=0.0)
