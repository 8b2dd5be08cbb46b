"""Does a long prompt stall the streams? python -m scripts.bench_token_gap MODEL [--streams 16] [--prompt 4000]

Starts a server on MODEL (a directory; `python -m scripts.make_bench_ckpt llama DIR --layers 4` makes one), keeps
`--streams` streams running and sends one long prompt among them, in each of `--turns`. Prints the median and the worst
time between two tokens of a stream, from the long prompt's arrival to its last token and without it (before and after:
steps take longer as the streams grow), and the share of the time in which the device waited for the host. Floors: worst
gap beside the prompt below 3 times the median without it (beside it the median itself is stretched, so a ratio of the
two there would hardly fail), by the median of the turns (on a shared machine one step in a thousand takes twice its
time, and one is enough for the worst of a turn), stall ratio below 5 %.
"""

import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import time
from typing import Any, NamedTuple

import aiohttp

from scripts.bench_serving import server
from scripts.report import finish, parser

RATIO, STALL = 3.0, 0.05


class Token(NamedTuple):
    """An event with text. `alone` False: the text of a token before it, a byte that might have begun a character, was
    held back for it, so it ends the gap of two."""

    at: float
    alone: bool


def prompt_of(seed: int, length: int, vocabulary: int) -> list[int]:
    draw = random.Random(seed)  # noqa: S311
    return [draw.randrange(300, vocabulary) for _ in range(length)]


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> list[Token]:
    """When each token came."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    events: list[Token] = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
                events.append(Token(time.perf_counter(), alone=text.isascii()))
    return events


def gaps(streams: list[list[Token]], *intervals: tuple[float, float]) -> list[float]:
    """Between two tokens of one stream, the later one in an interval and alone in its event."""
    pairs = [pair for tokens in streams for pair in itertools.pairwise(tokens)]
    return [b.at - a.at for a, b in pairs if b.alone and any(start < b.at <= end for start, end in intervals)]


async def measure(url: str, args: Any, turn: int) -> list[dict[str, Any]]:
    seed = 1000 * turn
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [
            asyncio.create_task(stream(session, url, prompt_of(seed + 1 + i, 32, args.vocabulary), args.tokens))
            for i in range(args.streams)
        ]
        await asyncio.sleep(args.alone)
        sent = time.perf_counter()
        answer = await stream(session, url, prompt_of(seed + 99, args.prompt, args.vocabulary), 4)
        first, last = answer[0].at, answer[-1].at
        streams = await asyncio.gather(*running)
        async with session.get(f"{url}/metrics") as response:
            stall = float(re.findall(r"^tidegate_engine_stall_ratio (\S+)$", await response.text(), re.M)[0])
    begun, end = max(tokens[2].at for tokens in streams), min(tokens[-1].at for tokens in streams)
    if end < last:
        raise SystemExit("the streams ended before the long prompt's answer: give them more --tokens")
    report = []
    alone = [(begun, sent), (last, end)]
    for name, intervals in (("without", alone), ("with the long prompt", [(sent, last)])):
        found = gaps(streams, *intervals)
        median, worst = statistics.median(found), max(found)
        report.append(
            {
                "run": f"turn {turn + 1}, {name}",
                "gaps": len(found),
                "median_ms": median * 1e3,
                "worst_ms": worst * 1e3,
                "ratio": worst / median,
            }
        )
    return [*report, {"run": f"turn {turn + 1}", "ttft_long_s": first - sent, "stall_ratio": stall}]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("model", help="a model directory with a context of 4,096 tokens")
    options.add_argument("--streams", type=int, default=16, help="streams that run (default %(default)s)")
    options.add_argument("--tokens", type=int, default=600, help="of each stream (default %(default)s)")
    options.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt (default %(default)s)")
    options.add_argument("--vocabulary", type=int, default=20_000, help="ids are below it (default %(default)s)")
    options.add_argument("--alone", type=float, default=8.0, help="seconds of streams before it (default %(default)s)")
    options.add_argument("--turns", type=int, default=3, help="long prompts, one after the other (default %(default)s)")
    options.add_argument("--port", type=int, default=8767, help="of the server under test (default %(default)s)")
    args = options.parse_args()
    with server(args.model, args.port, -1) as url:
        turns = [asyncio.run(measure(url, args, turn)) for turn in range(args.turns)]
    ratios = [beside["worst_ms"] / without["median_ms"] for without, beside, _ in turns]
    ratio, stall = statistics.median(ratios), max(row["stall_ratio"] for *_, row in turns)
    figure = (
        f"worst token gap of {args.streams} streams beside a {args.prompt}-token prompt over their median without it: "
        f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; floor {RATIO}); stall ratio {stall:.3f} (floor {STALL})"
    )
    report = [row for turn in turns for row in turn]
    return finish(report, figure, ok=ratio < RATIO and stall < STALL, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
