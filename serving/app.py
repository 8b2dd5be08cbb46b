"""`tidegate serve`: opens the port, loads the model beside it, and ends cleanly on a signal."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import TextIO

from .backend import Backend, example_request
from .config import Config
from .engine.export import engine_readings
from .logs import set_up_logging
from .metrics import Metrics
from .pipeline.pool import EncodePool
from .service import Service
from .startup import Startup
from .transport.auth import Authenticator
from .transport.context import Context
from .transport.http import build_app, listen

_log = logging.getLogger("tidegate")
EXIT_OK, EXIT_FAILED = 0, 1


def serve(config: Config, name: str, load: Callable[[], Backend], *, out: TextIO = sys.stdout) -> int:
    """Serve until a signal; the process's exit code.

    name: the directory's, used where the configuration gives none. load: called in a thread once the port is open.
    out: where the address and a first request are shown.
    """
    set_up_logging(config.log, sys.stderr)
    return asyncio.run(_Server(config, name, load, out).run())


class _Server:
    def __init__(self, config: Config, name: str, load: Callable[[], Backend], out: TextIO) -> None:
        self._config = config
        self._name = config.model.served_name or name
        self._load = load
        self._out = out
        self._startup = Startup()
        self._metrics = Metrics()
        self._pool = EncodePool(config.server.encode_threads)
        self._backend: Backend | None = None
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signalled)
        app = build_app(self._context(), version("tidegate"))
        try:
            async with listen(app, host=self._config.server.host, port=self._config.server.port) as addresses:
                self._say_where(addresses[0])
                threading.Thread(target=self._load_in_thread, name="tidegate-load", daemon=True).start()
                await self._stop.wait()
                await self._drain()
        except OSError as error:
            self._say(f"cannot listen on {self._config.server.host}:{self._config.server.port}: {error.strerror}")
            return EXIT_FAILED
        self._pool.close()
        return self._exit_code

    async def _drain(self) -> None:
        """What runs has `shutdown_s` to end; what is left is answered with an error, streams with an error event."""
        self._startup.stopping()
        if self._backend is None:
            return
        engine = self._backend.engine
        if engine.ready:
            await asyncio.to_thread(engine.close, self._config.server.shutdown_s)
        else:  # nobody waits for an answer, and a compilation on its way is not waited for
            threading.Thread(target=engine.close, name="tidegate-close", daemon=True).start()

    def _signalled(self) -> None:
        if self._stop.is_set():  # the second one: somebody does not want to wait
            os._exit(EXIT_FAILED)
        self._say("stopping")
        self._stop.set()

    def _load_in_thread(self) -> None:
        try:
            backend = self._load()
        except Exception as error:  # border: a thread must not end without a word
            expected = isinstance(error, ValueError | OSError)
            if not expected:
                _log.exception("the model could not be loaded")
            message = str(error) if expected else repr(error)
            self._tell(lambda: self._load_failed(message))
        else:
            self._tell(lambda: self._loaded(backend))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # stopped while it loaded
            return

    def _load_failed(self, message: str) -> None:
        self._startup.failed()
        self._say(f"error: {message}")
        self._exit_code = EXIT_FAILED
        self._stop.set()

    def _loaded(self, backend: Backend) -> None:
        if self._stop.is_set():
            return
        self._backend = backend
        stats = backend.engine.stats
        self._metrics.watch(lambda: engine_readings(stats, num_compiles=backend.num_compiles()))
        behind = self._config.server.stream_behind_tokens
        service = Service(
            backend.language, backend.engine, self._pool, clock=time.monotonic, stream_behind_tokens=behind
        )
        self._startup.loaded(service)
        backend.engine.start()
        path, body = example_request(backend.language)
        key = " -H 'Authorization: Bearer KEY'" if self._config.auth.keys else ""
        self._say(f"try:   curl -s {self._url}{path}{key} -H 'Content-Type: application/json' -d '{body}'")

    def _say_where(self, address: tuple[str, int]) -> None:
        host, port = address
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._say(f"tidegate serves {self._name} on {self._url}")
        self._say(f"ready: {self._url}/readyz   API: {self._url}/openapi.json   metrics: {self._url}/metrics")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _context(self) -> Context:
        return Context(
            startup=self._startup,
            config=self._config.server,
            authenticator=Authenticator(self._config.auth.keys),
            metrics=self._metrics,
            model_name=self._name,
            clock=time.monotonic,
            now=time.time,
            started=int(time.time()),
            new_id=lambda: uuid.uuid4().hex,
            new_seed=lambda: secrets.randbits(64),
            log_access=self._config.log.access,
        )
