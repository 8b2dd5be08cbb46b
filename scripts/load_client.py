"""Closed-loop HTTP clients for benchmarks and load tests: each sends its next request when the last one is answered."""

import asyncio
import json
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
    errors: int = 0
    elapsed: float = 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies) / self.elapsed if self.elapsed else 0.0

    def row(self, name: str) -> dict[str, Any]:
        """One line of a report: rates and percentiles in milliseconds."""
        row: dict[str, Any] = {"run": name, "requests": len(self.latencies), "errors": self.errors}
        row["requests_per_s"] = self.requests_per_s
        for kind, values in (("latency", self.latencies), ("ttft", self.ttfts)):
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
            first = None
            async for line in response.content:
                if first is None and line.startswith(b"data: "):
                    first = time.perf_counter() - start
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


async def run_clients(url: str, bodies: Callable[[int], Body], *, clients: int, seconds: float) -> Load:
    """`bodies(i)` is the i-th request. Clients stop sending after `seconds`; what was sent is waited for."""
    load, count = Load(), iter(range(1 << 62))
    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=clients), json_serialize=json.dumps
    ) as session:

        async def client() -> None:
            while time.perf_counter() - start < seconds:
                await _one(session, url, bodies(next(count)), load)

        await asyncio.gather(*(client() for _ in range(clients)))
    load.elapsed = time.perf_counter() - start
    return load


async def wait_ready(url: str, *, timeout_s: float) -> None:
    """Until /readyz says 200. Raises TimeoutError."""
    end = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            try:
                async with session.get(url + "/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {timeout_s:.0f} s")
