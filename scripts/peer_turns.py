"""The turns of `bench_peers`: the same requests to one server at a time, or to transformers' generate, ours first."""

import asyncio
import json
import random
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.load_client import Body, run_clients
from scripts.peer_servers import ROOT, Peer, alive, foreign_seconds, tidegate

PROMPT, NEW, BATCH = 64, 32, 16
Rows = dict[int, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every turn is made of."""

    clients: tuple[int, ...]
    rounds: int
    vocabulary: int
    port: int
    directory: Path
    threads: int


def prompt(plan: Plan, seed: int) -> list[int]:
    """Ids that no other seed repeats; low ones, which may be control tokens, are left out."""
    rng = random.Random(seed)  # noqa: S311
    return [rng.randrange(300, plan.vocabulary) for _ in range(PROMPT)]


def body(plan: Plan, first: int, model: str, index: int) -> Body:
    return {
        "model": model, "prompt": prompt(plan, first + index), "max_tokens": NEW, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def serve_turn(peer: Peer, plan: Plan, turn: int, log: Path) -> dict[int, dict[str, Any]]:
    """Start the server, warm it up, load it with each number of clients; a row for each number."""
    found = {}
    with alive(peer, plan.port, log) as url:
        for clients in plan.clients:
            first = turn * 1_000_000 + clients * 1000
            load = partial(run_clients, url + "/v1/completions", clients=clients, fresh=True)
            asyncio.run(load(partial(body, plan, first + 500_000, plan.directory.name), requests=clients))  # warm-up
            before = foreign_seconds()
            done = asyncio.run(load(partial(body, plan, first, plan.directory.name), requests=clients * plan.rounds))
            after = foreign_seconds()
            row = done.row(f"{peer.name}, {clients} clients")
            found[clients] = row | {"turn": turn, "foreign_cores": max(0.0, after - before) / done.elapsed}
    return found


def generate_turn(python: Path, plan: Plan, turn: int) -> dict[int, dict[str, Any]]:
    """transformers' generate over as many prompts as the clients of a turn send; a row for each number of clients."""
    found = {}
    for clients in plan.clients:
        prompts = [prompt(plan, turn * 1_000_000 + clients * 1000 + i) for i in range(clients * plan.rounds)]
        job = {"prompts": prompts, "new": NEW, "batch": BATCH, "threads": plan.threads}
        command = [str(python), str(ROOT / "scripts/peer_transformers.py"), str(plan.directory)]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"transformers failed: {done.stderr[-800:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        found[clients] = {
            "run": f"transformers {said['version']}, batches of {BATCH}", "requests": len(prompts), "errors": 0,
            "requests_per_s": len(prompts) / said["seconds"], "turn": turn, "foreign_cores": said["foreign_cores"],
        }  # fmt: skip
    return found


def compare(peer: Peer | Path, plan: Plan, pairs: int) -> tuple[Rows, Rows]:
    """Ours and the peer in turns: rows by number of clients, one a turn."""
    ours: Rows = {clients: [] for clients in plan.clients}
    theirs: Rows = {clients: [] for clients in plan.clients}
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "log"
        for turn in range(pairs):
            mine = serve_turn(tidegate(plan.directory), plan, turn, log)
            other = serve_turn(peer, plan, turn, log) if isinstance(peer, Peer) else generate_turn(peer, plan, turn)
            for clients in plan.clients:
                ours[clients].append(mine[clients])
                theirs[clients].append(other[clients])
    return ours, theirs
