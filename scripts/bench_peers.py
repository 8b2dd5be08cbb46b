"""Our server against others: python -m scripts.bench_peers --ours DIR [--llama-server PROGRAM --gguf FILE]
[--vllm PYTHON] [--naive] [--transformers PYTHON]

Streaming clients send distinct 64-token prompts (token ids, seeded) and take 32 tokens each, greedily, without end of
sequence, prefix reuse or kept connections. Every peer serves the same weights in f32 (FILE: DIR written with
`tidegate convert DIR FILE --to gguf`). Ours and the peer run in turns (A B A B), one server alive at a time; a ratio is
ours over theirs in one turn, its figure the median with min and max. Turns in which other processes took more than
--foreign cores are left out where enough others remain. --naive: our own server with one slot, so one request at a
time. --transformers: its generate over batches of 16, in turns likewise. Floor: 1.0 (naive: 5, transformers: 3).
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.peer_servers import Peer, imports, llama_server, tidegate, vllm
from scripts.peer_turns import Plan, compare
from scripts.report import finish, parser

FLOORS = {"llama.cpp": 1.0, "vllm": 1.0, "naive": 5.0, "transformers": 3.0}
Row = dict[str, Any]


def ratios(ours: list[Row], theirs: list[Row], foreign: float) -> tuple[list[float], int]:
    """Requests/s of ours over theirs, turn by turn, and how many noisy turns were left out: all quiet, or none."""
    pairs = list(zip(ours, theirs, strict=True))
    quiet = [pair for pair in pairs if all(row.get("foreign_cores", 0.0) <= foreign for row in pair)]
    kept = quiet if len(quiet) >= 3 else pairs
    return [a["requests_per_s"] / b["requests_per_s"] for a, b in kept], len(pairs) - len(kept)


def figure(name: str, clients: int, ours: list[Row], theirs: list[Row], foreign: float) -> tuple[str, bool]:
    """A line, and whether the floor is kept."""
    found, left_out = ratios(ours, theirs, foreign)
    middle, floor = statistics.median(found), FLOORS[name]
    noisy = sum(row.get("foreign_cores", 0.0) > foreign for row in (*ours, *theirs))
    note = f", {left_out} noisy turns left out" if left_out else f", {noisy} runs were noisy" if noisy else ""
    span = f"{min(found):.2f} to {max(found):.2f}"
    line = f"{name}, {clients} clients: {middle:.2f}x requests/s ({span}; floor {floor}{note})"
    if "ttft_p95_ms" in theirs[0]:
        p95 = [statistics.median(row["ttft_p95_ms"] for row in rows) for rows in (ours, theirs)]
        line += f", TTFT p95 {p95[0]:.0f} against {p95[1]:.0f} ms"
    return line, middle >= floor


def peers(args: Any, plan: Plan) -> Iterator[tuple[str, Peer | Path | None]]:
    """Every peer that was asked for, with None where it is not installed."""
    slots = args.slots
    if args.llama_server is not None:
        there = args.llama_server.is_file() and args.gguf is not None and args.gguf.is_file()
        yield (
            "llama.cpp",
            llama_server(args.llama_server, args.gguf, slots=slots, threads=plan.threads) if there else None,
        )
    if args.vllm is not None:
        there = imports(args.vllm, "vllm")
        yield "vllm", vllm(args.vllm, args.ours, slots=slots, threads=plan.threads) if there else None
    if args.naive:
        yield "naive", tidegate(args.ours, name="naive", slots=1)
    if args.transformers is not None:
        yield "transformers", args.transformers if imports(args.transformers, "transformers") else None


def main() -> int:
    options = parser(__doc__)
    add = options.add_argument
    add("--ours", type=Path, required=True, help="a hub directory")
    add("--llama-server", type=Path, help="llama.cpp's server, built natively")
    add("--gguf", type=Path, help="the same weights for it")
    add("--vllm", type=Path, help="a Python that has vllm")
    add("--transformers", type=Path, help="a Python that has transformers and torch")
    add("--naive", action="store_true", help="our server with one slot")
    add("--clients", default="16,64", help="concurrent clients (default %(default)s)")
    add("--rounds", type=int, default=4, help="requests of each client in a turn (default %(default)s)")
    add("--pairs", type=int, default=3, help="turns of each (default %(default)s)")
    add("--slots", type=int, default=16, help="sequences at a time in llama.cpp and vllm (default %(default)s)")
    add("--foreign", type=float, default=0.1, help="cores of others that spoil a turn (default %(default)s)")
    add("--port", type=int, default=8790, help="of the server under test (default %(default)s)")
    args = options.parse_args()
    hub = json.loads((args.ours / "config.json").read_text("utf-8"))
    clients = tuple(map(int, args.clients.split(",")))
    threads = len(os.sched_getaffinity(0))
    plan = Plan(clients, args.rounds, hub["vocab_size"], args.port, args.ours.resolve(), threads)
    report: list[Row] = []
    lines, good = [], True
    for name, peer in peers(args, plan):
        if peer is None:
            lines.append(f"{name}: not installed")
            continue
        ours, theirs = compare(peer, plan, args.pairs)
        for count in clients:
            line, kept = figure(name, count, ours[count], theirs[count], args.foreign)
            lines, good = [*lines, line], good and kept
            report += [row for pair in zip(ours[count], theirs[count], strict=True) for row in pair]
    good = good and not any(row["errors"] for row in report)
    return finish(report, "\n".join(lines), ok=good, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
