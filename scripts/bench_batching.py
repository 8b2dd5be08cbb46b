"""Two batching claims, before and after in one run: python -m scripts.bench_batching [--load 0.8] [--pairs 3]

After: tidegate's engine: dual thresholds, fixed buckets, continuous batching, paged KV. Before: what the design
documents start from: batches gathered for a fixed 50 ms (or until 16 are there), padded to their longest prompt,
decoded together until the longest answer is complete, with contiguous KV for the longest prompt and answer of the
batch. Both run the same compiled device steps over the same trace (data/traces/bursts.csv), at `--load` times the
rate that the engine sustains when everything is there at once. Prints throughput, p99 latency and peak memory: tokens
of KV that are reserved, and tokens of the step that runs, padding included, in bytes of KV. Floors: throughput +28 %,
memory -42 %, p99 lower.
"""

import csv
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.cache import page_bytes
from model.config import ModelConfig
from model.transformer import Transformer
from scripts.load_client import percentile
from scripts.make_bench_ckpt import PRESETS
from scripts.report import finish, parser
from serving.batch import Batch, Bucket, Kind, Pending
from serving.config import EngineConfig
from serving.engine.buckets import derive
from serving.engine.engine import Engine
from serving.engine.runner import JaxRunner, use_compilation_cache
from serving.engine.step import padding
from serving.types import Job, Prepared, SamplingParams, Update

ROOT = Path(__file__).parent.parent
CONTEXT, BATCH, WAIT_S = 1024, 16, 0.05
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "moe_intermediate_size": 128,
         "vocab_size": 4096, "kv_lora_rank": 128, "q_lora_rank": 128, "num_attention_heads": 4,
         "num_key_value_heads": 4}  # fmt: skip
CONFIG = EngineConfig(max_slots=BATCH, max_context=CONTEXT, prefix_cache=False, num_pages=BATCH * CONTEXT // 16 + 1)
FLOORS = {"throughput": 1.28, "memory": 0.58, "p99": 1.0}


@dataclass(frozen=True)
class Request:
    at: float
    prompt: int
    new: int


@dataclass
class Run:
    """What one policy did with the trace."""

    latencies_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    peak_tokens: int = 0  # of KV that is reserved and of the step that runs, together
    tokens: int = 0

    def row(self, name: str, token_bytes: float) -> dict[str, Any]:
        return {
            "policy": name, "tokens_per_s": self.tokens / self.elapsed_s,
            "p50_ms": percentile(self.latencies_s, 50) * 1e3, "p99_ms": percentile(self.latencies_s, 99) * 1e3,
            "peak_mb": self.peak_tokens * token_bytes / 1e6,
        }  # fmt: skip


class Watched:
    """A runner that lends itself out and keeps the peak of memory: what `reserved` says and the step's own shape."""

    def __init__(self, runner: JaxRunner) -> None:
        self._runner = runner
        self.run = Run()
        self.reserved = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def warmup(self, progress: Any) -> None:
        """It is warm."""

    def close(self) -> None:
        """Kept for the next policy."""

    def submit(self, batch: Batch) -> Pending:
        pages = {int(page) for page in batch.page_table[batch.length > 0].ravel()} - {0}
        reserved = max(self.reserved, len(pages) * CONFIG.page_size)
        self.run.peak_tokens = max(self.run.peak_tokens, reserved + batch.bucket.rows * batch.bucket.tokens)
        return self._runner.submit(batch)


def read_trace() -> list[Request]:
    with (ROOT / "data/traces/bursts.csv").open(newline="") as file:
        return [Request(float(r["at"]), int(r["prompt"]), int(r["new"])) for r in csv.DictReader(file)]


def prompt_of(index: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(index).integers(300, 4000, length).tolist())


def after(runner: Watched, requests: Sequence[Request], gap_s: float) -> Run:
    """The engine, fed by the clock."""
    engine = Engine(runner, CONFIG, max_context=CONTEXT)
    engine.start()
    engine.wait_ready()
    run, ended = runner.run, threading.Semaphore(0)
    start = time.perf_counter()
    for index, request in enumerate(requests):
        due = start + request.at * gap_s
        time.sleep(max(0.0, due - time.perf_counter()))

        def listen(updates: tuple[Update, ...], due: float = due) -> None:
            runner.reserved = engine.stats.pages_used * CONFIG.page_size
            for update in updates:
                if update.finish is not None or update.error is not None:
                    assert update.error is None, update.error
                    run.latencies_s.append(time.perf_counter() - due)
                    ended.release()

        sampling = SamplingParams(max_tokens=request.new, temperature=0.0)
        engine.submit(Job(str(index), "t", (Prepared(prompt_of(index, request.prompt), sampling),)), listen)
        run.tokens += request.prompt + request.new
    for _ in requests:
        ended.acquire()
    run.elapsed_s = time.perf_counter() - start
    engine.close()
    return run


def before(runner: Watched, requests: Sequence[Request], gap_s: float) -> Run:
    """Fixed wait, pad to the longest, contiguous KV, nobody joins or leaves."""
    run, arrived = runner.run, queue.Queue[tuple[int, float] | None]()
    start = time.perf_counter()

    def feed() -> None:
        for index, request in enumerate(requests):
            due = start + request.at * gap_s
            time.sleep(max(0.0, due - time.perf_counter()))
            arrived.put((index, due))
        arrived.put(None)

    threading.Thread(target=feed, daemon=True).start()
    more = True
    while more:
        batch = [first] if (first := arrived.get()) is not None else []
        more = bool(batch)
        until = time.perf_counter() + WAIT_S
        while more and len(batch) < BATCH:
            try:
                item = arrived.get(timeout=max(0.0, until - time.perf_counter()))
            except queue.Empty:
                break
            more = item is not None
            batch += [item] if item is not None else []
        if batch:
            _run_batch(runner, [requests[index] for index, _ in batch])
        now = time.perf_counter()
        run.latencies_s += [now - due for _, due in batch]
        run.tokens += sum(requests[index].prompt + requests[index].new for index, _ in batch)
    run.elapsed_s = time.perf_counter() - start
    return run


def _run_batch(runner: Watched, requests: Sequence[Request]) -> None:
    rows = next(r for r in (4, 16) if r >= len(requests))
    longest, new = max(r.prompt for r in requests), max(r.new for r in requests)
    pages_a_row = -(-(longest + new) // CONFIG.page_size)
    runner.reserved = len(requests) * pages_a_row * CONFIG.page_size
    table = np.zeros((rows, CONTEXT // CONFIG.page_size), np.int32)
    for r in range(len(requests)):
        table[r, :pages_a_row] = 1 + r * pages_a_row + np.arange(pages_a_row)
    padded = next(b for b in PADDED if b.rows == rows and b.tokens >= longest)
    for bucket, start, length in (
        (padded, 0, longest),
        *((Bucket(Kind.DECODE, rows, 1, table.shape[1]), longest + i, 1) for i in range(new - 1)),
    ):
        fields = {name: getattr(padding(bucket), name) for name in Batch.__dataclass_fields__}
        lengths = np.where(np.arange(rows) < len(requests), length, 0).astype(np.int32)
        fields |= {"page_table": table, "length": lengths, "start": np.full(rows, start, np.int32),
                   "slot": np.where(lengths > 0, 1 + np.arange(rows), 0).astype(np.int32)}  # fmt: skip
        runner.submit(Batch(**fields)).result()


PADDED = [Bucket(Kind.EXTEND, r, t, CONTEXT // 16) for r in (4, 16) for t in (64, 128, 192, 256, 384, 448)]


def make_runner() -> tuple[JaxRunner, float]:
    """A warm runner with the buckets of both policies, and the bytes of a token of KV."""
    config = ModelConfig.from_hub(PRESETS["v2"] | SMALL)
    buckets = [*derive(CONFIG, CONTEXT), *PADDED]
    buckets += [Bucket(Kind.DECODE, r, 1, CONTEXT // 16) for r in (4, 16)]
    runner = JaxRunner(Transformer(config, rngs=nnx.Rngs(0)), CONFIG, max_context=CONTEXT, buckets=sorted(set(buckets)))
    runner.warmup(lambda done, total: print(f"\rcompiling {done}/{total}", end="", file=sys.stderr))
    print(file=sys.stderr)
    return runner, page_bytes(config, CONFIG.page_size, jnp.dtype(np.float32)) / CONFIG.page_size


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--load", type=float, default=0.8, help="share of the capacity (default %(default)s)")
    options.add_argument("--pairs", type=int, default=3, help="runs of each policy (default %(default)s)")
    args = options.parse_args()
    use_compilation_cache(ROOT / ".cache" / "jax")
    jax.config.update("jax_platforms", jax.default_backend())
    runner, token_bytes = make_runner()
    requests = read_trace()
    after(Watched(runner), requests[:60], 0.0)  # warm-up
    capacity = after(Watched(runner), requests, 0.0)
    gap_s = capacity.elapsed_s / len(requests) / args.load
    report, ratios = [], {name: [] for name in FLOORS}  # type: ignore[var-annotated]
    for _ in range(args.pairs):
        old, new = before(Watched(runner), requests, gap_s), after(Watched(runner), requests, gap_s)
        report += [old.row("before", token_bytes), new.row("after", token_bytes)]
        a, b = report[-2:]
        ratios["throughput"].append(b["tokens_per_s"] / a["tokens_per_s"])
        ratios["memory"].append(b["peak_mb"] / a["peak_mb"])
        ratios["p99"].append(b["p99_ms"] / a["p99_ms"])
    median = {name: statistics.median(values) for name, values in ratios.items()}
    ok = median["throughput"] >= FLOORS["throughput"] and all(median[n] <= FLOORS[n] for n in ("memory", "p99"))
    figure = (
        f"after over before, {len(requests)} requests at {args.load} x {1 / (gap_s * args.load):.1f} requests/s: "
        f"throughput {median['throughput']:.2f} (floor 1.28), peak memory {median['memory']:.2f} (0.58), "
        f"p99 {median['p99']:.2f} (1.00)"
    )
    return finish(report, figure, ok=ok, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
