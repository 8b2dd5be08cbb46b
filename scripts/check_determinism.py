"""Is an answer the same to the bit, whatever else is served? python -m scripts.check_determinism [--model DIR]

Drives the real engine, in this process, with the deterministic arithmetic and without it. Every condition asks for the
same answers again (greedy, drawn, penalised, scored) and compares tokens and log-probabilities, bit for bit, with those
of each request alone. Prints per condition how many are equal, with the mode and without it, then the flip rate without
it and the mode's cost: tokens/s with it as a share of tokens/s without it. Floor: bit-equal everywhere in the mode.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from model.load import load_model
from scripts.determinism_rig import NARROW, NEW_TOKENS, WIDE, Answer, neighbours, one_by_one, probes, running, submit
from scripts.report import finish, parser
from serving.engine.engine import Engine
from serving.types import Prepared, Priority, SamplingParams

ZOO = Path(__file__).resolve().parent.parent / "model" / "zoo"
CROWD = 64
TURNS = 3  # of the cost's measurement
Answers = list[Answer]
Condition = tuple[str, Callable[[], Answers]]


def alone(engine: Engine, rows: Sequence[Prepared]) -> Answers:
    return one_by_one(engine, rows, "alone")


def in_a_crowd(engine: Engine, rows: Sequence[Prepared], vocab: int, seed: int) -> Answers:
    """All at once, in a random order, 63 neighbours to each."""
    crowd = [*enumerate(rows), *((-1, row) for row in neighbours(vocab, CROWD - len(rows), seed))]
    order = np.random.default_rng(seed).permutation(len(crowd))
    answers = [(crowd[i][0], submit(engine, crowd[i][1], f"crowd {seed}")) for i in order]
    found = {index: answer.wait() for index, answer in answers}
    return [found[index] for index in range(len(rows))]


def joining(engine: Engine, rows: Sequence[Prepared], vocab: int) -> Answers:
    """Each comes when the one before it has begun to answer, amid neighbours that are under way."""
    others = [submit(engine, row, "under way") for row in neighbours(vocab, CROWD - len(rows), 5)]
    answers = []
    for row in rows:
        answers.append(submit(engine, row, "joining"))
        answers[-1].started.wait()
    return [answer.wait() for answer in (*answers, *others)][: len(rows)]


def after_a_shared_prefix(engine: Engine, rows: Sequence[Prepared]) -> Answers:
    """Another prompt has left the first half of each in the cache."""
    warm = [Prepared((*row.token_ids[: len(row.token_ids) // 2], 3), SamplingParams(max_tokens=1)) for row in rows]
    one_by_one(engine, warm, "shared")
    return provoked(engine, "cached_tokens", lambda: one_by_one(engine, rows, "shared"))


def preempted(engine: Engine, rows: Sequence[Prepared], vocab: int) -> Answers:
    """Last and least among neighbours that need all pages: they make room, and start again with their tokens."""

    def run() -> Answers:
        answers = [submit(engine, row, "least", Priority.LOW) for row in rows]
        answers[0].started.wait()
        others = [submit(engine, row, "most", Priority.URGENT) for row in neighbours(vocab, CROWD - len(rows), 6)]
        return [answer.wait() for answer in (*answers, *others)][: len(rows)]

    return provoked(engine, "preemptions", run)


def provoked(engine: Engine, counter: str, run: Callable[[], Answers]) -> Answers:
    """What `run` gives; RuntimeError where the counter of the engine's stats did not move."""
    before = getattr(engine.stats, counter)
    answers = run()
    if getattr(engine.stats, counter) == before:
        raise RuntimeError(f"{counter} did not move: the condition was not met")
    return answers


def scored(engine: Engine, rows: Sequence[Prepared], known: Answers) -> Answers:
    """Prompt and answer as one row to score: the log-probabilities of its end are those that generation gave."""
    out = []
    for row, answer in zip(rows, known, strict=True):
        whole = Prepared((*row.token_ids, *answer.ids), targets=row.targets, prompt_logprobs=0)
        got = submit(engine, whole, "scored").wait()
        cut = len(got.prompt) - len(answer.ids)
        out.append(Answer(answer.ids, got.prompt[cut:], got.targets, got.prompt[:cut] if answer.prompt else []))
    return out


def conditions(wide: Engine, narrow: Engine, rows: Sequence[Prepared], vocab: int, known: Answers) -> list[Condition]:
    return [
        ("again, from the prefix cache", lambda: provoked(wide, "cached_tokens", lambda: alone(wide, rows))),
        ("half of the prompt from the prefix cache", lambda: after_a_shared_prefix(wide, rows)),
        ("63 neighbours", lambda: in_a_crowd(wide, rows, vocab, 1)),
        ("63 others, another order", lambda: in_a_crowd(wide, rows, vocab, 2)),
        ("joining one by one", lambda: joining(wide, rows, vocab)),
        ("other chunks, pages and buckets", lambda: alone(narrow, rows)),
        ("these, with 63 neighbours", lambda: in_a_crowd(narrow, rows, vocab, 3)),
        ("preempted, computed again", lambda: preempted(narrow, rows, vocab)),
        ("scored in one step", lambda: scored(wide, rows, known)),
        ("scored in chunks", lambda: scored(narrow, rows, known)),
    ]


def compare(wide: Engine, narrow: Engine, vocab: int) -> list[dict[str, Any]]:
    """Per condition how many answers have the same tokens and the same bits as each request alone."""
    rows, found = probes(vocab), []
    known = alone(wide, rows)
    for name, run in conditions(wide, narrow, rows, vocab, known):
        pairs = list(zip(run(), known, strict=True))
        ids, bits = sum(a.ids == b.ids for a, b in pairs), sum(a.bits == b.bits for a, b in pairs)
        found.append({"condition": name, "answers": len(pairs), "ids": ids, "bits": bits})
    return found


def cost(fixed: Engine, fast: Engine, vocab: int, streams: int) -> float:
    """Tokens/s with the mode over tokens/s without it, turn by turn; the median."""
    return statistics.median(
        throughput(fixed, vocab, streams, turn) / throughput(fast, vocab, streams, turn) for turn in range(TURNS)
    )


def throughput(engine: Engine, vocab: int, streams: int, turn: int) -> float:
    """Generated tokens/s of so many requests of one length at once."""
    greedy = SamplingParams(max_tokens=2 * NEW_TOKENS, temperature=0.0)
    rows = [Prepared((turn + 2, *(2 + (n + k) % (vocab - 2) for k in range(64))), greedy) for n in range(streams)]
    start = time.perf_counter()
    answers = [submit(engine, row, f"turn {turn}") for row in rows]
    tokens = sum(len(answer.wait().ids) for answer in answers)
    return tokens / (time.perf_counter() - start)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=ZOO / "credit-mini", help="a model directory")
    options.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="flips are rare in float32"
    )
    args = options.parse_args()
    model = load_model(args.model, dtype=jnp.dtype(args.dtype))
    vocab = model.config.vocab_size
    with ExitStack() as stack:
        engines = {
            mode: [stack.enter_context(running(model, config, deterministic=mode)) for config in (WIDE, NARROW)]
            for mode in (True, False)
        }
        fixed, fast = (compare(wide, narrow, vocab) for wide, narrow in (engines[True], engines[False]))
        ratios = [cost(engines[True][0], engines[False][0], vocab, streams) for streams in (CROWD, 1)]
    return report(fixed, fast, ratios, as_json=args.json)


def report(fixed: list[dict[str, Any]], fast: list[dict[str, Any]], ratios: list[float], *, as_json: bool) -> int:
    table = [
        {"condition": a["condition"], "answers": a["answers"]}
        | {"same_ids": a["ids"], "same_bits": a["bits"], "fast_same_ids": b["ids"], "fast_same_bits": b["bits"]}
        for a, b in zip(fixed, fast, strict=True)
    ]
    total, ok = sum(row["answers"] for row in fast), all(row["answers"] == row["ids"] == row["bits"] for row in fixed)
    flips, moved = (sum(row["answers"] - row[key] for row in fast) / total for key in ("ids", "bits"))
    figure = (
        f"bit-equal {'everywhere' if ok else 'NOT everywhere'} in the mode; without it {flips:.1%} of the answers flip "
        f"and {moved:.1%} have other log-probabilities; tokens/s with the mode: {ratios[0]:.2f} x with "
        f"{CROWD} streams, {ratios[1]:.2f} x with one"
    )
    prices = {"condition": "cost", f"tokens_per_s_{CROWD}": ratios[0], "tokens_per_s_1": ratios[1]}
    return finish([*table, prices], figure, ok=ok, as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
