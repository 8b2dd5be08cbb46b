"""What the host does for a step: python -m scripts.bench_scheduler [--live 2000]

Turns the engine's loop over a device that answers at once, with `--live` sequences inside: `--slots` of them generate,
the others wait. Prints CPU time a turn (form the batch, take the results in, make the news of every row) as a ratio to
a fixed piece of Python that takes about a millisecond (both in one run, so the machine's speed cancels out), early and
late in the rows' lives: the cost must not grow with history. Floors: ratio 1, and 1.25 between late and early.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.report import finish, parser
from serving.batch import NUM_TARGETS, Batch, Bucket, PendingPages, Progress, StepOutput, StepTimes
from serving.config import EngineConfig
from serving.engine.buckets import BucketSet, derive
from serving.engine.kv_pool import KvPool
from serving.engine.loop import Loop
from serving.engine.scheduler import Events, Scheduler
from serving.engine.sequence import make_sequences
from serving.engine.stats import EngineStats
from serving.types import Job, Prepared, SamplingParams

RATIO_FLOOR, GROWTH_FLOOR = 1.0, 1.25
CONTEXT = 4096


@dataclass(frozen=True)
class Done:
    output: StepOutput

    def done(self) -> bool:
        return False

    def result(self) -> StepOutput:
        return self.output


class NullRunner:
    """A device that takes no time: token 1 for every row."""

    def __init__(self, buckets: tuple[Bucket, ...], num_pages: int) -> None:
        self.buckets, self.num_pages = buckets, num_pages
        self._outputs = {rows: Done(_output(rows)) for rows in {bucket.rows for bucket in buckets}}

    def warmup(self, progress: Progress) -> None: ...

    def submit(self, batch: Batch) -> Done:
        return self._outputs[batch.bucket.rows]

    page_bytes, page_copy_s = 0, 0.0
    step_s: Mapping[Bucket, StepTimes] = {}

    def read_pages(self, pages: Sequence[int]) -> PendingPages:
        raise NotImplementedError("no tiers here")

    def write_pages(self, pages: Sequence[int], content: NDArray[np.uint8]) -> None:
        raise NotImplementedError("no tiers here")

    def reset(self) -> None: ...

    def close(self) -> None: ...


def _output(rows: int) -> StepOutput:
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.int32)
    return StepOutput(ones, zeros, np.zeros((rows, NUM_TARGETS), np.float32), ones != 0, None, None, None, None, None)


def fixed_work() -> int:
    """The yardstick: 20,000 turns of a plain loop."""
    total = 0
    for i in range(20_000):
        total += i & 7
    return total


class Bench:
    def __init__(self, live: int, slots: int) -> None:
        config = EngineConfig(max_slots=slots, max_context=CONTEXT, prefix_cache=True)
        buckets = derive(config, CONTEXT)
        pool = KvPool(slots * CONTEXT // config.page_size + 1, config.page_size)
        self.scheduler = Scheduler(config, BucketSet(buckets), pool, CONTEXT)
        runner = NullRunner(buckets, pool.total + 1)
        self.num_updates = 0
        self.loop = Loop(runner, self.scheduler, self._count, clock=time.perf_counter, stats=EngineStats())
        sampling = SamplingParams(max_tokens=CONTEXT - 64, temperature=1.0)
        rows = tuple(Prepared((1 + i, *range(2, 33)), sampling) for i in range(live))
        for row in make_sequences(None, Job("bench", "tenant", rows)):
            self.scheduler.check(row)
            self.scheduler.submit(row, time.perf_counter())

    def _count(self, events: Events) -> None:
        self.num_updates += len(events)

    def turn_ms(self, turns: int) -> float:
        """CPU time a turn, in milliseconds."""
        start = time.process_time()
        for _ in range(turns):
            self.loop.turn()
        return (time.process_time() - start) / turns * 1e3


def yardstick_ms() -> float:
    start = time.process_time()
    for _ in range(20):
        fixed_work()
    return (time.process_time() - start) / 20 * 1e3


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--live", type=int, default=2000, help="sequences in the engine (default %(default)s)")
    options.add_argument("--slots", type=int, default=64, help="of them generating (default %(default)s)")
    options.add_argument("--turns", type=int, default=100, help="turns a measurement (default %(default)s)")
    args = options.parse_args()
    bench = Bench(args.live, args.slots)
    while bench.scheduler.num_running < args.slots or bench.num_updates < 4 * args.slots:
        bench.loop.turn()
    report: list[dict[str, Any]] = []
    for phase in ("early", "late"):
        for _ in range(5):
            yardstick, turn = yardstick_ms(), bench.turn_ms(args.turns)
            report.append({"phase": phase, "turn_ms": turn, "yardstick_ms": yardstick, "ratio": turn / yardstick})
        if phase == "early":
            bench.turn_ms(2500)
    early, late = (statistics.median(r["ratio"] for r in report if r["phase"] == p) for p in ("early", "late"))
    live = bench.scheduler.num_running + bench.scheduler.num_waiting
    growth = late / early
    figure = (
        f"host work a step, {live} live sequences, over a fixed millisecond of Python: {max(early, late):.2f} "
        f"(floor {RATIO_FLOOR}); late over early {growth:.2f} (floor {GROWTH_FLOOR})"
    )
    return finish(report, figure, ok=max(early, late) <= RATIO_FLOOR and growth <= GROWTH_FLOOR, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
