"""Hit rate of LRU-K against LRU: python -m scripts.bench_lru_k [--pages 1000] [--requests 200000]

One trace, both policies, the same number of pages: requests that come back follow a Zipf law over `--keys` keys, and
now and then a scan of one-offs runs through, as a crawl or a batch of unrelated prompts does. Floor: LRU-K hits more.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from scripts.report import finish, parser
from serving.engine.lru_k import LruK

SECONDS_PER_REQUEST = 0.01
CORRELATED_S = 0.5  # a retry or the next turn of a burst is no sign that a prompt will come back later
SCAN_SHARE = 0.3  # of all requests, in scans of SCAN_LENGTH
SCAN_LENGTH = 2_000


def trace(num_requests: int, num_keys: int, exponent: float, seed: int) -> Iterator[int]:
    """Keys below num_keys come back, those above are seen once."""
    rng = np.random.default_rng(seed)
    mass = np.arange(1, num_keys + 1, dtype=np.float64) ** -exponent
    again = rng.choice(num_keys, size=num_requests, p=mass / mass.sum())
    between = round(SCAN_LENGTH * (1 - SCAN_SHARE) / SCAN_SHARE)  # requests from one scan to the next
    for index in range(num_requests):
        yield int(again[index]) if index % (between + SCAN_LENGTH) < between else num_keys + index


def lru_hits(keys: Iterator[int], num_pages: int) -> int:
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in keys:
        hits += key in resident
        resident[key] = None
        resident.move_to_end(key)
        if len(resident) > num_pages:
            resident.popitem(last=False)
    return hits


def lru_k_hits(keys: Iterator[int], num_pages: int, k: int) -> int:
    policy: LruK[int] = LruK(k, correlated_s=CORRELATED_S, max_history=2 * num_pages)
    resident: set[int] = set()
    hits = 0
    for index, key in enumerate(keys):
        hits += key in resident
        if key not in resident and len(resident) == num_pages:
            victim = policy.victim()
            assert victim is not None
            resident.remove(victim)
        policy.reference(key, index * SECONDS_PER_REQUEST)
        if key not in resident:
            policy.offer(key)
            resident.add(key)
    return hits


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--pages", type=int, default=1_000, help="what fits (default %(default)s)")
    options.add_argument("--keys", type=int, default=10_000, help="keys that come back (default %(default)s)")
    options.add_argument("--requests", type=int, default=200_000, help="length of the trace (default %(default)s)")
    options.add_argument("--exponent", type=float, default=0.9, help="of the Zipf law (default %(default)s)")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()

    def keys() -> Iterator[int]:
        return trace(args.requests, args.keys, args.exponent, args.seed)

    hits = {"lru": lru_hits(keys(), args.pages)}
    hits |= {f"lru-{k}": lru_k_hits(keys(), args.pages, k) for k in (1, 2, 3)}
    rows = [{"policy": name, "hit_rate": count / args.requests} for name, count in hits.items()]
    figure = f"LRU-3 hits {hits['lru-3'] / args.requests:.1%}, LRU {hits['lru'] / args.requests:.1%}"
    return finish(rows, figure, ok=hits["lru-3"] > hits["lru"], as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
