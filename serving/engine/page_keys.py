"""Names of KV pages by what is in them: equal keys mean the same tenant and the same tokens from position 0 on.

The keys of a prompt form a chain, each the hash of the one before it and of the tokens of its own page; the first link
is the tenant, framed by its length, so no choice of tokens makes one tenant's key another's. Only whole pages have
keys.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 20


def root_key(tenant: str) -> bytes:
    """What the first page's key hangs on."""
    name = tenant.encode()
    return blake2b(len(name).to_bytes(8, "little") + name, digest_size=KEY_BYTES, person=b"tidegate-kv").digest()


def next_key(parent: bytes, tokens: NDArray[np.int32]) -> bytes:
    """The key of the page that holds `tokens` [page_size] after those of `parent`."""
    return blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest()


def chain(tenant: str, tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
    """The keys of all whole pages of `tokens`."""
    keys, parent = [], root_key(tenant)
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = next_key(parent, tokens[start : start + page_size])
        keys.append(parent)
    return keys
