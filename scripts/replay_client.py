"""The client side of `replay_cases`: requests to the server under test, what must be refused, how streams read."""

import json
from typing import Any

import aiohttp

_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"nan"', b'"0.7"', b"true", b"[]")
_FIELDS = (
    b'"stream":"false"',
    b'"top_k":0.01',
    b'"n":"2"',
    b'"stop":[1,null]',
    b'"n":0',
    b'"n":100000',
    b'"stop":"\\ud800"',
)
_NAMES = (b"../../etc/passwd", b"/etc/passwd", b"..%2f", b"a\\u0000b")
REFUSED = (
    *((b'{"prompt":"a","temperature":%s}' % number, 400) for number in _NUMBERS),
    *((b'{"prompt":"a","top_p":%s}' % number, 400) for number in _NUMBERS),
    *((b'{"prompt":"a",%s}' % field, 400) for field in _FIELDS),
    *((b'{"prompt":"a","model":"%s"}' % name, 404) for name in _NAMES),
    *(
        (form, 400)
        for form in (b"[]", b'"x"', b"", b"[" * 100_000, b'{"prompt":"a","prompt":"b"}', b'{"prompt":"\\ud800"}')
    ),
)


class Skip(Exception):
    """The server cannot show this case; the message says why."""


class Server:
    """The server under test."""

    def __init__(self, url: str, key: str | None, session: aiohttp.ClientSession) -> None:
        self.url, self.key, self.session = url, key, session
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def send(self, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) or hasattr(body, "__aiter__") else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            return response.status, await response.read()

    async def complete(self, prompt: object = "count", **fields: object) -> tuple[int, Any]:
        status, raw = await self.send("/v1/completions", {"prompt": prompt, **fields})
        return status, raw.decode() if fields.get("stream") and status == 200 else json.loads(raw)

    async def gauge(self, name: str) -> float:
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    async def context(self) -> int:
        async with self.session.get(self.url + "/v1/models", headers=self.headers) as response:
            return int((await response.json())["data"][0]["max_model_len"])


def events(stream: str) -> list[Any]:
    blocks = stream.split("\n\n")
    assert blocks.pop() == "", "the stream ends inside an event"
    assert all(block.startswith("data: ") for block in blocks), "an event is not data: ..."
    return [block[6:] if block[6:] == "[DONE]" else json.loads(block[6:]) for block in blocks]
