"""Replays the wall-clock forms of the serving cases against a running server; exits 1 when one of them misses.

    python -m scripts.replay_cases --url http://127.0.0.1:8000 [--key KEY] [--json] [A05 A08 ...]

The suite holds the same cases on injected clocks and fakes; here real sockets, sizes and times count. After each case
a plain request must succeed. What the server under test cannot show (a key, a model that fails) is skipped, and said.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import aiohttp

from scripts.replay_client import REFUSED, Server, Skip, events

MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    case: str
    status: str  # ok, miss, skipped
    seconds: float
    detail: str


async def a01(server: Server) -> str:
    """200 streams, 32 at a time: each has one terminal state."""
    gate = asyncio.Semaphore(32)

    async def one(seed: int) -> bool:
        async with gate:
            status, stream = await server.complete(max_tokens=64, stream=True, seed=seed)
        if status == 503:
            return False
        parsed = events(stream)
        finishes = [c["finish_reason"] for e in parsed[:-1] for c in e.get("choices", ()) if c["finish_reason"]]
        errors = [e for e in parsed[:-1] if "error" in e]
        assert (parsed[-1] == "[DONE]" and len(finishes) == 1 and not errors) or "error" in parsed[-1]
        return True

    done = await asyncio.gather(*(one(seed) for seed in range(200)))
    return f"{sum(done)} of 200 streams accepted and ended"


async def a05(server: Server) -> str:
    """64 clients leave after 0-300 ms; pages and running rows are back to the baseline."""
    before = await server.gauge("tidegate_engine_cancelled_rows_total")

    async def leave(stream: bool, after_s: float) -> None:
        task = asyncio.create_task(server.complete(max_tokens=2000, ignore_eos=True, stream=stream))
        await asyncio.sleep(after_s)
        task.cancel()

    await asyncio.gather(*(leave(i % 2 == 0, random.random() * 0.3) for i in range(64)))  # noqa: S311
    started_s = time.monotonic()
    while await server.gauge("tidegate_kv_pages_used") or await server.gauge("tidegate_engine_running_rows"):
        assert time.monotonic() - started_s < 10, "KV pages are still held 10 s after the last client left"
        await asyncio.sleep(0.02)
    cancelled = await server.gauge("tidegate_engine_cancelled_rows_total") - before
    return f"baseline {time.monotonic() - started_s:.2f} s after the last one left, {cancelled:.0f} rows cancelled"


async def a08(server: Server) -> str:
    """64 MiB, declared and chunked; a bomb of 1 GiB."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * MIB

    for body in (b" " * (64 * MIB), chunks()):
        try:
            status, _ = await server.send("/v1/completions", body)
        except aiohttp.ClientConnectionError:
            continue  # closed while the rest was being sent
        assert status == 413, f"got {status}"
    status, _ = await server.send("/v1/completions", b"\x1f\x8b" * MIB, {"Content-Encoding": "gzip"})
    assert status in (413, 415)
    return "413 for 64 MiB, compressed bodies refused"


async def a10(server: Server) -> str:
    """Prompts around the context's length."""
    context = await server.context()
    for length in (context - 1, context, context + 1, 10 * context):
        for stream in (False, True):
            status, answer = await server.complete([3] * length, max_tokens=1, stream=stream)
            assert status == (200 if length < context else 400), f"{length} tokens got {status}"
            assert status == 200 or answer["error"]["code"] == "context_length_exceeded"
    return f"context {context}"


async def a16(server: Server) -> str:
    """One seed: the same text alone and among 31 others."""
    body = {"max_tokens": 24, "seed": 123, "temperature": 1.0}
    _, alone = await server.complete(**body)
    noise = [server.complete(f"noise {i}", max_tokens=24, seed=i) for i in range(31)]
    (_, inside), *_ = await asyncio.gather(server.complete(**body), *noise)
    assert alone["choices"][0]["text"] == inside["choices"][0]["text"]
    return "equal"


async def a24(server: Server) -> str:
    """A server that warms up is alive, says how far it is, and asks to come back."""
    async with server.session.get(server.url + "/readyz") as response:
        if response.status == 200:
            raise Skip("start the server and this at the same time")
        assert response.headers["Retry-After"]
        shown = await response.json()
    async with server.session.get(server.url + "/livez") as response:
        assert response.status == 200
    status, answer = await server.complete("a", max_tokens=1)
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    while (await server.complete("a", max_tokens=1))[0] == 503:
        await asyncio.sleep(0.5)
    return f"was {shown}, is ready"


async def refusals(server: Server) -> str:
    """A06, A07, A12, A30: what must be refused, with which status."""
    for body, wanted in REFUSED:
        status, raw = await server.send("/v1/completions", body)
        assert status == wanted, f"{body[:60]!r} got {status}"
        assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}
    return f"{len(REFUSED)} bodies refused"


async def a29(server: Server) -> str:
    """Wrong keys get one body."""
    if server.key is None:
        raise Skip("give --key of a server that has keys")
    bodies = set()
    for wrong in ("", server.key[:-1], server.key + "x", "钥匙"):
        status, raw = await server.send("/v1/completions", b"{", {"Authorization": f"Bearer {wrong}"})
        assert status == 401
        bodies.add(raw)
    assert len(bodies) == 1
    return "401 for each"


CASES = {"A24": a24, "A01": a01, "A05": a05, "REFUSALS": refusals, "A08": a08, "A10": a10, "A16": a16, "A29": a29}


async def replay(server: Server, name: str) -> Row:
    started_s = time.monotonic()
    try:
        detail, status = await CASES[name](server), "ok"
        assert (await server.complete("plain", max_tokens=1))[0] == 200, "a plain request failed afterwards"
    except Skip as why:
        detail, status = str(why), "skipped"
    except (AssertionError, aiohttp.ClientError, ValueError, KeyError) as error:
        detail, status = f"{type(error).__name__}: {error}", "miss"
    return Row(name, status, round(time.monotonic() - started_s, 2), detail)


async def main(args: argparse.Namespace) -> int:
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        server = Server(args.url.rstrip("/"), args.key, session)
        rows = []
        for name in args.cases or CASES:
            rows.append(await replay(server, name))
            if not args.json:
                print(f"{rows[-1].case}  {rows[-1].status:<8}{rows[-1].seconds:>7.2f} s  {rows[-1].detail}", flush=True)
    missed = sum(row.status == "miss" for row in rows)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(f"{sum(row.status == 'ok' for row in rows)} of {len(rows)} cases ok, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--key", help="an API key, where the server has keys")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one a case")
    sys.exit(asyncio.run(main(parser.parse_args())))
