"""A tidegate server on a loopback port, in a thread of its own, over a FakeRunner: for tests that speak HTTP."""

import asyncio
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from serving.batch import Runner
from serving.config import ApiKey, EngineConfig, ServerConfig
from serving.engine.engine import Engine
from serving.engine.export import engine_readings
from serving.metrics import Metrics
from serving.pipeline.language import Language
from serving.pipeline.pool import EncodePool
from serving.service import Service
from serving.startup import Startup
from serving.transport.auth import Authenticator
from serving.transport.context import Context
from serving.transport.http import build_app, listen
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_text import byte_language

_WAIT_S = 30.0
_COMPILE_S = 300.0  # a real model, on a busy machine


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Parsed events of a stream, "[DONE]" as itself; fails where the body is not made of whole data blocks."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-1] == "", "the stream ends inside an event"
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
        payloads = [block.removeprefix("data: ") for block in blocks[:-1]]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@dataclass
class Served:
    """`with Served(...) as server`. The engine starts at once unless `start` is False."""

    model: ToyModel = field(default_factory=ToyModel)
    language: Language = field(default_factory=byte_language)
    runner: Runner | None = None  # None: a FakeRunner over `model`
    num_compiles: Callable[[], int] = lambda: 0
    config: ServerConfig = field(default_factory=lambda: ServerConfig(port=0, shutdown_s=0.2))
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    keys: tuple[ApiKey, ...] = ()
    start: bool = True
    name: str = "toy"

    def __enter__(self) -> Self:
        self.runner = self.runner or FakeRunner(self.model)
        self.metrics = Metrics()
        self.startup = Startup()
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="served", daemon=True)
        self._thread.start()
        assert self._up.wait(_COMPILE_S), "the server did not come up"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_WAIT_S)
        self.engine.close(0.0)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._up.set()

    async def _serve(self) -> None:
        assert self.runner is not None
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = Engine(self.runner, self.engine_config, max_context=self.language.max_context, fingerprint="fake")
        pool = EncodePool(2)
        self.service = Service(
            self.language,
            self.engine,
            pool,
            clock=time.monotonic,
            stream_behind_tokens=self.config.stream_behind_tokens,
        )
        self.startup.loaded(self.service)
        self.metrics.watch(lambda: engine_readings(self.engine.stats, num_compiles=self.num_compiles()))
        if self.start:
            self.engine.start()
            while not self.engine.wait_ready(_WAIT_S):
                continue
            if self.engine.failure is not None:
                raise self.engine.failure
        async with listen(build_app(self._context(), "0"), host="127.0.0.1", port=0) as addresses:
            self.port = addresses[0][1]
            self._up.set()
            await self._stop.wait()
        pool.close()

    def _context(self) -> Context:
        ids, seeds = itertools.count(), itertools.count(1000)
        return Context(
            startup=self.startup,
            config=self.config,
            authenticator=Authenticator(self.keys),
            metrics=self.metrics,
            model_name=self.name,
            clock=time.monotonic,
            now=lambda: 1_700_000_000.0,
            started=1_700_000_000,
            new_id=lambda: f"r{next(ids)}",
            new_seed=lambda: next(seeds),
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_WAIT_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Answer:
        """`body`: bytes are sent as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, raw, {"Content-Type": "application/json", **(headers or {})})

    def complete(self, prompt: object, **fields: object) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: object = "hi", **fields: object) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def open_socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=_WAIT_S)

    def wait_for(self, line: str, value: float) -> None:
        """Until a metric has that value; a test that would hang fails instead."""
        give_up_s = time.monotonic() + _WAIT_S
        while self.metric(line) != value:
            assert time.monotonic() < give_up_s, f"{line} is {self.metric(line)}, not {value}"

    def metric(self, line: str) -> float:
        """The value of one exposition line, named with its labels; 0 where it is not there."""
        for each in self.get("/metrics").body.decode().splitlines():
            name, _, value = each.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0
