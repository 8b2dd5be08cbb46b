"""What HTTP costs: python -m scripts.bench_serving [--clients 8] [--seconds 8] [--pairs 3]

Concurrent clients on /v1/score (64 rows a request, and one row a request) and on streamed completions, and the ratio of
served rows/s to the bare jitted loop over the same rows: render, tokenise, one compiled score step of 64 rows, read the
label probabilities. Loop and server are pinned to one core, the clients to another. Loop and server alternate: each
server run is held against the mean of the loops before and after it; the ratio is the median of the runs. Floor: 0.7
with 64 rows a request.
"""

import asyncio
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scripts.load_client import Body, Load, run_clients, wait_ready
from scripts.report import finish, parser

ROOT = Path(__file__).parent.parent
ROWS, FLOOR, NEW_TOKENS = 64, 0.7, 32
Features = list[dict[str, str]]


def read_rows(path: Path) -> Features:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "default"} for row in csv.DictReader(file)]


def bare_loop(model: Path, rows: Features, seconds: float) -> float:
    """Rows/s of the jitted score step with nothing around it but rendering and tokenising."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from model.load import load_model
    from model.sampling import Sampling
    from model.steps import StepInput, score_step
    from model.template import Template
    from model.tokenizer import Tokenizer

    tokenizer, template = Tokenizer.load(model), Template.load(model / "template.toml")
    graph, params = nnx.split(load_model(model))
    step = jax.jit(lambda p, b: score_step(nnx.merge(graph, p), b, num_top=20))
    targets = np.zeros((ROWS, 16), np.int32)
    labels = [tokenizer.encode(label.text)[0] for label in template.labels]
    targets[:, : len(labels)] = labels
    zeros, ints = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.int32)
    sampling = Sampling(*map(jnp.asarray, (zeros, ints, zeros + 1, zeros, np.zeros((ROWS, 2), np.uint32))))
    bos = [] if tokenizer.bos_id is None or not tokenizer.add_bos else [tokenizer.bos_id]
    longest = max(len(tokenizer.encode(template.render(row))) for row in rows) + len(bos)
    width = 32
    while width < longest:
        width *= 2

    def score(chunk: Features) -> Any:
        tokens, length = np.zeros((ROWS, width), np.int32), ints.copy()
        for r, ids in enumerate(tokenizer.encode_batch([template.render(row) for row in chunk])):
            ids = bos + ids
            tokens[r, : len(ids)], length[r] = ids, len(ids)
        arrays: dict[str, Any] = {
            "tokens": tokens, "next_token": ints, "start": ints, "length": length, "slot": ints, "targets": targets,
            "page_table": np.zeros((ROWS, 0), np.int32), "want_top": np.False_, "want_prompt": np.False_,
        }  # fmt: skip
        batch = StepInput(sampling=sampling, **{name: jnp.asarray(value) for name, value in arrays.items()})
        logprobs = np.asarray(step(params, batch).target_logprobs)[:, : len(labels)]
        powers = np.exp(logprobs - logprobs.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    chunks = [rows[i : i + ROWS] for i in range(0, len(rows) - ROWS + 1, ROWS)]
    score(chunks[0])
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        score(chunks[done % len(chunks)])
        done += 1
    return done * ROWS / (time.perf_counter() - start)


def pinned(core: int, *command: str, **options: Any) -> subprocess.Popen[str]:
    """A Python module in a process of its own, on one core."""
    pin = partial(os.sched_setaffinity, 0, {core})
    return subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, text=True, preexec_fn=pin if core >= 0 else None, **options
    )


@contextmanager
def server(model: str, port: int, core: int) -> Iterator[str]:
    """A server that is ready, and is stopped at the end."""
    command = ("serving.cli", "serve", "--model", model, "--port", str(port))
    process = pinned(core, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(wait_ready(url, timeout_s=600))
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def score_body(rows: Features, count: int, index: int) -> Body:
    start = index * count % (len(rows) - count)
    return {"inputs": [{"features": row} for row in rows[start : start + count]]}


def stream_body(texts: list[str], index: int) -> Body:
    return {
        "prompt": texts[index % len(texts)], "max_tokens": NEW_TOKENS, "stream": True, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def loop_rate(model: Path, core: int, seconds: float) -> float:
    command = ("scripts.bench_serving", "--loop", str(model), "--seconds", str(seconds))
    process = pinned(core, *command, stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=600)
    return float(json.loads(out)["rows_per_s"])


def load(url: str, path: str, bodies: Any, clients: int, seconds: float) -> Load:
    asyncio.run(run_clients(url + path, bodies, clients=clients, seconds=min(2.0, seconds)))  # warm-up
    return asyncio.run(run_clients(url + path, bodies, clients=clients, seconds=seconds))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=ROOT / "model/zoo/credit-mini", help="a model directory")
    options.add_argument("--data", type=Path, default=ROOT / "data/credit_default/test.csv", help="rows as CSV")
    options.add_argument("--clients", type=int, default=8, help="concurrent clients (default %(default)s)")
    options.add_argument("--seconds", type=float, default=8.0, help="length of each run (default %(default)s)")
    options.add_argument("--pairs", type=int, default=3, help="loop and server runs to pair (default %(default)s)")
    options.add_argument("--port", type=int, default=8765, help="of the server under test (default %(default)s)")
    options.add_argument("--loop", type=Path, help="only the bare loop over this model, as JSON (used by the script)")
    args = options.parse_args()
    rows = read_rows(args.data)
    if args.loop is not None:
        print(json.dumps({"rows_per_s": bare_loop(args.loop, rows, args.seconds)}))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (-1, -1)
    if client_core >= 0:
        os.sched_setaffinity(0, {client_core})
    report, ratios = [], []
    before = loop_rate(args.model, server_core, args.seconds)
    for pair in range(args.pairs):
        with server(str(args.model), args.port, server_core) as url:
            full = load(url, "/v1/score", partial(score_body, rows, ROWS), args.clients, args.seconds)
            if pair == 0:
                single = load(url, "/v1/score", partial(score_body, rows, 1), args.clients, args.seconds)
                texts = [" ".join(f"{k}={v}" for k, v in list(row.items())[:4]) for row in rows[:200]]
                streams = load(url, "/v1/completions", partial(stream_body, texts), args.clients, args.seconds)
                others = [single.row("score 1 row"), streams.row(f"stream {NEW_TOKENS} tokens")]
        after = loop_rate(args.model, server_core, args.seconds)
        bare, before = (before + after) / 2, after
        ratios.append(full.requests_per_s * ROWS / bare)
        report.append(full.row("score 64 rows") | {"loop_rows_per_s": bare, "ratio": ratios[-1]})
    ratio = statistics.median(ratios)
    errors = sum(row["errors"] for row in report + others)
    figure = f"served rows/s over bare loop, 64 rows a request: {ratio:.3f} (floor {FLOOR}), errors {errors}"
    return finish([*report, *others], figure, ok=ratio >= FLOOR and not errors, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
