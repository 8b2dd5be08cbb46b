"""What a step of each bucket takes, as seen: moving averages, and a guess by tokens for a bucket not seen yet."""

import numpy as np

from serving.batch import Bucket, Kind

_WEIGHT = 0.2  # of the newest time


class StepCosts:
    def __init__(self) -> None:
        self._seconds: dict[Bucket, float] = {}

    def observe(self, bucket: Bucket, seconds: float) -> None:
        seen = self._seconds.get(bucket)
        self._seconds[bucket] = seconds if seen is None else seen + _WEIGHT * (seconds - seen)

    def seconds(self, bucket: Bucket) -> float:
        """0 where no step of this kind has been seen."""
        if bucket in self._seconds:
            return self._seconds[bucket]
        size = bucket.rows * bucket.tokens
        like = [(b.rows * b.tokens, s) for b, s in self._seconds.items() if b.kind is bucket.kind]
        if not like:
            return 0.0
        nearest, seconds = min(like, key=lambda seen: abs(seen[0] - size))
        return seconds * size / nearest

    def between_s(self, kind: Kind, num_rows: int) -> float:
        """What a step of so many rows would take if there were a bucket of just as many; 0 where none has been seen."""
        seen = sorted((b.rows, s) for b, s in self._seconds.items() if b.kind is kind)
        if not seen:
            return 0.0
        rows, seconds = zip(*seen, strict=True)
        return float(np.interp(num_rows, rows, seconds))

    def prefill_token_s(self) -> float:
        """What a token of a prompt takes in the best step seen; 0 where none has been."""
        seen = [s / (b.rows * b.tokens) for b, s in self._seconds.items() if b.kind is Kind.EXTEND]
        return min(seen, default=0.0)
