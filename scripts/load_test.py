"""A thousand requests at once: python -m scripts.load_test [--requests 1000] [--waves 4]

Starts a server of its own on the embedded model and sends waves of requests that are all open at the same time: rows to
score, completions, streams, and streams whose client leaves in the middle. After each wave, once the server is idle, it
says what it holds. Fails where a request is lost or wrong, where a KV page is still in use, or where resident memory
after the last wave is above that after the second by more than 2 % (the first ones fill caches).
"""

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from scripts.bare_loop import Features, read_rows
from scripts.bench_serving import ROOT, server
from scripts.report import finish, parser

GROWTH = 1.02
GAUGES = ("tidegate_kv_pages_used", "tidegate_kv_pages_cached", "tidegate_engine_running_rows",
          "tidegate_engine_waiting_rows", "tidegate_http_in_flight_requests")  # fmt: skip


async def score(session: aiohttp.ClientSession, url: str, rows: Features, number: int) -> bool:
    """Four rows, all labelled."""
    chosen = [rows[(4 * number + i) % len(rows)] for i in range(4)]
    async with session.post(f"{url}/v1/score", json={"inputs": [{"features": row} for row in chosen]}) as response:
        answer = await response.json()
        return response.status == 200 and all(result.get("label") for result in answer["results"])


def completion(rows: Features, number: int, *, stream: bool) -> dict[str, Any]:
    prompt = " ".join(f"{k}={v}" for k, v in list(rows[number % len(rows)].items())[: 2 + number % 9])
    return {"prompt": prompt, "max_tokens": 8 + number % 25, "ignore_eos": True, "stream": stream, "seed": number}


async def complete(session: aiohttp.ClientSession, url: str, rows: Features, number: int) -> bool:
    body = completion(rows, number, stream=False)
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        return response.status == 200 and answer["usage"]["completion_tokens"] == body["max_tokens"]


async def stream(session: aiohttp.ClientSession, url: str, rows: Features, number: int) -> bool:
    async with session.post(f"{url}/v1/completions", json=completion(rows, number, stream=True)) as response:
        text = await response.text()
        return response.status == 200 and text.endswith("data: [DONE]\n\n")


async def leave(session: aiohttp.ClientSession, url: str, rows: Features, number: int) -> bool:
    """Reads one event and goes."""
    async with session.post(f"{url}/v1/completions", json=completion(rows, number, stream=True)) as response:
        await response.content.readline()
        response.close()
        return response.status == 200


async def wave(url: str, rows: Features, count: int, first: int) -> int:
    """All at once; how many were not answered as they should."""
    kinds = [score, complete, stream, leave]
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        tasks = [kinds[i % len(kinds)](session, url, rows, first + i) for i in range(count)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    return sum(result is not True for result in results)


async def settled(url: str, timeout_s: float = 60.0) -> dict[str, float]:
    """The gauges, once nothing runs or waits, or as they are after the time."""
    end = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            gauges = {name: float(re.findall(rf"^{name} (\S+)$", text, re.M)[0]) for name in GAUGES}
            if gauges["tidegate_engine_running_rows"] + gauges["tidegate_engine_waiting_rows"] == 0:
                return gauges
            if time.monotonic() > end:
                return gauges
            await asyncio.sleep(0.1)


def resident_mb(port: int) -> float:
    """Of the process that was started with this port."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if b"serving.cli" in command and str(port).encode() in command:
                pages = int((entry / "statm").read_text().split()[1])
                return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        except OSError:
            continue
    return 0.0


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=1000, help="open at the same time (default %(default)s)")
    options.add_argument("--waves", type=int, default=4, help="one after the other (default %(default)s)")
    options.add_argument("--port", type=int, default=8766, help="of the server under test (default %(default)s)")
    args = options.parse_args()
    rows = read_rows(ROOT / "data/credit_default/test.csv")
    report: list[dict[str, Any]] = []
    with server("credit-mini", args.port, -1) as url:
        for number in range(args.waves):
            start = time.perf_counter()
            wrong = asyncio.run(wave(url, rows, args.requests, number * args.requests))
            elapsed = time.perf_counter() - start
            gauges = asyncio.run(settled(url))
            held = {name.removeprefix("tidegate_"): value for name, value in gauges.items()}
            report.append(
                {"wave": number, "seconds": elapsed, "wrong": wrong, "resident_mb": resident_mb(args.port)} | held
            )
    wrong, used = sum(row["wrong"] for row in report), report[-1]["kv_pages_used"]
    growth = report[-1]["resident_mb"] / report[min(1, len(report) - 1)]["resident_mb"]
    figure = (
        f"{args.waves} x {args.requests} requests at once: {wrong} lost or wrong, {used:.0f} KV pages still in use, "
        f"resident memory {growth:.3f} x that after the second wave (allowed {GROWTH})"
    )
    return finish(report, figure, ok=wrong == 0 and used == 0 and growth <= GROWTH, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
