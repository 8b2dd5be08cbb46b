"""Closed-loop HTTP clients for benchmarks and load tests: each sends its next request when the last one is answered."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Body = dict[str, Any]


@dataclass(slots=True)
class Load:
    """What a run of clients saw; times in seconds."""

    latencies: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # between two tokens, of streams that say their usage
    errors: int = 0
    elapsed: float = 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies) / self.elapsed if self.elapsed else 0.0

    def row(self, name: str) -> dict[str, Any]:
        """One line of a report: rates and percentiles in milliseconds."""
        row: dict[str, Any] = {"run": name, "requests": len(self.latencies), "errors": self.errors}
        row["requests_per_s"] = self.requests_per_s
        kinds = (("latency", self.latencies), ("ttft", self.ttfts), ("token_time", self.token_times))
        for kind, values in kinds:
            row |= {f"{kind}_p{q}_ms": percentile(values, q) * 1e3 for q in (50, 95, 99) if values}
        return row


def percentile(values: Sequence[float], q: int) -> float:
    """Nearest rank. Raises ValueError on nothing."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * q // 100) - 1)]


async def _one(session: aiohttp.ClientSession, url: str, body: Body, load: Load) -> None:
    start = time.perf_counter()
    try:
        async with session.post(url, json=body) as response:
            first, last, usage = None, b"", None
            async for line in response.content:
                if first is None and line.startswith(b"data: "):
                    first = time.perf_counter() - start
                if line.startswith(b"data: {"):
                    usage = line
                last = line
            good = response.status == 200 and (not body.get("stream") or last.strip() in (b"data: [DONE]", b""))
    except aiohttp.ClientError:
        good = False
    if not good:
        load.errors += 1
        return
    load.latencies.append(time.perf_counter() - start)
    if first is not None:
        load.ttfts.append(first)
    if first is not None and usage is not None and "stream_options" in body:
        _count(json.loads(usage[len(b"data: ") :]), first, body, load)


def _count(chunk: Body, first: float, body: Body, load: Load) -> None:
    """A stream of fewer tokens than were asked for would flatter its server: it counts as an error."""
    tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
    load.errors += tokens != body["max_tokens"]
    load.token_times.append((load.latencies[-1] - first) / max(1, tokens - 1))


async def run_clients(
    url: str,
    bodies: Callable[[int], Body],
    *,
    clients: int,
    seconds: float = math.inf,
    requests: int = 1 << 62,
    fresh: bool = False,
) -> Load:
    """`bodies(i)` is the i-th request. Clients stop sending after `seconds`, or after `requests` of all of them; what
    was sent is waited for. fresh: every request opens a connection of its own.
    """
    load, count = Load(), iter(range(requests))
    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=clients, force_close=fresh), json_serialize=json.dumps
    ) as session:

        async def client() -> None:
            while time.perf_counter() - start < seconds:
                index = next(count, None)
                if index is None:
                    return
                await _one(session, url, bodies(index), load)

        await asyncio.gather(*(client() for _ in range(clients)))
    load.elapsed = time.perf_counter() - start
    return load


async def wait_ready(
    url: str, *, timeout_s: float, path: str = "/readyz", alive: Callable[[], bool] = lambda: True
) -> None:
    """Until `path` says 200. Raises TimeoutError, at once where the server is not `alive` any more."""
    end = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end and alive():
            try:
                async with session.get(url + path) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {timeout_s:.0f} s" if alive() else f"the server of {url} has ended")
