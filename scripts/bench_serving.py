"""What HTTP costs: python -m scripts.bench_serving [--clients 8] [--seconds 3] [--pairs 10]

Concurrent clients on /v1/score (64 rows a request, and one row a request) and on streamed completions, and the ratio of
served rows/s to the bare jitted loop over the same rows (`scripts.bare_loop`). Loop and server are pinned to one core,
the clients to another. Both are alive and warm all the time and take turns of a few seconds, each turn of the server
held against the mean of the loop's before and after it, so that a machine whose speed drifts bends both; the ratio is
the median of the turns. Floor: 0.7 with 64 rows a request.
"""

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bare_loop import ROWS, Features, read_rows
from scripts.load_client import Body, Load, run_clients, wait_ready
from scripts.report import finish, parser

ROOT = Path(__file__).parent.parent
FLOOR, NEW_TOKENS = 0.7, 32


@contextmanager
def pinned(core: int, *command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python module in a process of its own, on one core; stopped at the end."""
    pin = partial(os.sched_setaffinity, 0, {core})
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, text=True, preexec_fn=pin if core >= 0 else None, **options
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def server(model: str, port: int, core: int) -> Iterator[str]:
    """A server that is ready, by its URL."""
    command = ("serving.cli", "serve", "--model", model, "--port", str(port))
    with pinned(core, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        url = f"http://127.0.0.1:{port}"
        asyncio.run(wait_ready(url, timeout_s=600))
        yield url


@contextmanager
def loop(model: str, data: str, core: int) -> Iterator[Callable[[float], float]]:
    """The bare loop; called with seconds, it runs so long and says rows/s."""
    with pinned(core, "scripts.bare_loop", model, data, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(seconds: float) -> float:
            print(seconds, file=stdin, flush=True)
            return float(stdout.readline())

        yield run


def score_body(rows: Features, count: int, index: int) -> Body:
    start = index * count % (len(rows) - count)
    return {"inputs": [{"features": row} for row in rows[start : start + count]]}


def stream_body(texts: list[str], index: int) -> Body:
    return {
        "prompt": texts[index % len(texts)], "max_tokens": NEW_TOKENS, "stream": True, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=ROOT / "model/zoo/credit-mini", help="a model directory")
    options.add_argument("--data", type=Path, default=ROOT / "data/credit_default/test.csv", help="rows as CSV")
    options.add_argument("--clients", type=int, default=8, help="concurrent clients (default %(default)s)")
    options.add_argument("--seconds", type=float, default=3.0, help="length of a turn (default %(default)s)")
    options.add_argument("--pairs", type=int, default=10, help="turns of loop and server (default %(default)s)")
    options.add_argument("--port", type=int, default=8765, help="of the server under test (default %(default)s)")
    args = options.parse_args()
    rows = read_rows(args.data)
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (-1, -1)
    if client_core >= 0:
        os.sched_setaffinity(0, {client_core})
    texts = [" ".join(f"{k}={v}" for k, v in list(row.items())[:4]) for row in rows[:200]]

    with (
        server(str(args.model), args.port, server_core) as url,
        loop(str(args.model), str(args.data), server_core) as bare,
    ):

        def load(path: str, bodies: Callable[[int], Body], seconds: float = args.seconds) -> Load:
            return asyncio.run(run_clients(url + path, bodies, clients=args.clients, seconds=seconds))

        full_body = partial(score_body, rows, ROWS)
        bare(min(2.0, args.seconds))
        load("/v1/score", full_body, min(2.0, args.seconds))  # warm-up
        report, ratios, before = [], [], bare(args.seconds)
        for _ in range(args.pairs):
            full = load("/v1/score", full_body)
            after = bare(args.seconds)
            bare_rows, before = (before + after) / 2, after
            ratios.append(full.requests_per_s * ROWS / bare_rows)
            report.append(full.row("score 64 rows") | {"loop_rows_per_s": bare_rows, "ratio": ratios[-1]})
        report.append(load("/v1/score", partial(score_body, rows, 1)).row("score 1 row"))
        report.append(load("/v1/completions", partial(stream_body, texts)).row(f"stream {NEW_TOKENS} tokens"))
    ratio, errors = statistics.median(ratios), sum(row["errors"] for row in report)
    figure = (
        f"served rows/s over bare loop, 64 rows a request: {ratio:.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}; floor {FLOOR}), errors {errors}"
    )
    return finish(report, figure, ok=ratio >= FLOOR and not errors, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
