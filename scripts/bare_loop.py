"""The loop that serving is held against: python -m scripts.bare_loop MODEL DATA.csv

Renders and tokenises rows and scores 64 a step with one jitted program: nothing around it, no engine and no HTTP.
Each line on stdin says for how many seconds to run, each line on stdout how many rows/s that gave, so that a benchmark
can alternate between it and a server while both are warm.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.load import load_model
from model.sampling import Sampling
from model.steps import StepInput, score_step
from model.template import Template
from model.tokenizer import Tokenizer

ROWS = 64
Features = list[dict[str, str]]


def read_rows(path: Path) -> Features:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "default"} for row in csv.DictReader(file)]


def make_score(model: Path, rows: Features) -> Callable[[Features], Any]:
    """Label probabilities [ROWS, labels] of ROWS rows; compiled for the longest of `rows`."""
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
        batch = StepInput(
            sampling=sampling, adjust=None, **{name: jnp.asarray(value) for name, value in arrays.items()}
        )
        logprobs = np.asarray(step(params, batch).target_logprobs)[:, : len(labels)]
        powers = np.exp(logprobs - logprobs.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    return score


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path, help="a model directory with a template")
    options.add_argument("data", type=Path, help="rows as CSV")
    args = options.parse_args()
    rows = read_rows(args.data)
    score = make_score(args.model, rows)
    chunks = [rows[i : i + ROWS] for i in range(0, len(rows) - ROWS + 1, ROWS)]
    score(chunks[0])
    for line in sys.stdin:
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < float(line):
            score(chunks[done % len(chunks)])
            done += 1
        print(done * ROWS / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
