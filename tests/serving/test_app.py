"""The whole `serve` but for the model's files: a fake backend is loaded in their place."""

import http.client
import io
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from serving import app
from serving.backend import Backend
from serving.config import Config, EngineConfig, ServerConfig
from serving.engine.engine import Engine
from serving.engine.footprint import Footprint
from tests.fakes import FakeRunner, ToyModel
from tests.fakes_text import byte_language

pytestmark = pytest.mark.usefixtures("restored_logging")


class Lines(io.StringIO):
    """What the server says, and a signal for each line."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Semaphore(0)

    def flush(self) -> None:
        self.wrote.release()

    def port(self) -> int:
        return int(self.getvalue().splitlines()[0].rpartition(":")[2])


@dataclass
class Visitor:
    """A client in a thread: does its visit once the server has said `num_lines`, then ends the server."""

    out: Lines
    visit: Callable[[http.client.HTTPConnection], None]
    num_lines: int = 3
    failure: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for _ in range(self.num_lines):
                assert self.out.wrote.acquire(timeout=30)
            connection = http.client.HTTPConnection("127.0.0.1", self.out.port(), timeout=30)
            self.visit(connection)
            connection.close()
        except BaseException as error:
            self.failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def fake_backend(runner: FakeRunner) -> Backend:
    engine = Engine(runner, EngineConfig(), max_context=512, clock=time.monotonic)
    return Backend(byte_language(), engine, lambda: 7, lambda: Footprint(0, 0, 0, 0, 0, ()))


def serve(
    visit: Callable[[http.client.HTTPConnection], None],
    *,
    load: Callable[[], Backend] | None = None,
    num_lines: int = 3,
    config: Config | None = None,
) -> tuple[int, str, FakeRunner]:
    runner, out = FakeRunner(), Lines()
    visitor = Visitor(out, visit, num_lines)
    config = config or Config(server=ServerConfig(port=0, shutdown_s=0.2))
    code = app.serve(config, "toy", load or (lambda: fake_backend(runner)), out=out)
    visitor.thread.join(30)
    if visitor.failure is not None:
        raise visitor.failure
    return code, out.getvalue(), runner


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read()


def test_it_says_where_to_look_answers_that_request_and_ends_cleanly() -> None:
    answers = []

    def visit(connection: http.client.HTTPConnection) -> None:
        while get(connection, "/readyz")[0] != 200:
            continue
        body = json.dumps({"inputs": [{"features": {"x": 0}}]})
        connection.request("POST", "/v1/score", body, {"Content-Type": "application/json"})
        answers.append(json.loads(connection.getresponse().read()))
        answers.append(get(connection, "/metrics")[1].decode())

    code, said, runner = serve(visit)
    assert code == 0
    assert answers[0]["model"] == "toy"
    assert "tidegate_jit_compiles_total 7.0" in answers[1]
    lines = said.splitlines()
    assert lines[0].startswith("tidegate serves toy on http://127.0.0.1:")
    assert "/readyz" in lines[1]
    assert "/v1/score -H" in lines[2]
    assert '{"inputs":[{"features":{"x":0}}]}' in lines[2]
    assert lines[3:] == ["stopping"]
    assert runner.closed


def test_the_port_is_open_while_the_model_loads() -> None:
    gate, seen = threading.Event(), []

    def load() -> Backend:
        assert gate.wait(30)
        return fake_backend(FakeRunner())

    def visit(connection: http.client.HTTPConnection) -> None:
        seen.append(get(connection, "/livez")[0])
        seen.append(json.loads(get(connection, "/readyz")[1])["status"])
        gate.set()

    code, _, _ = serve(visit, load=load, num_lines=2)
    assert (code, seen) == (0, [200, "loading"])


@pytest.mark.parametrize("error", [ValueError("missing: layer 3"), OSError("no file"), RuntimeError("odd")])
def test_a_model_that_cannot_be_loaded_ends_the_server(error: Exception) -> None:
    def load() -> Backend:
        raise error

    out = Lines()
    config = Config(server=ServerConfig(port=0, shutdown_s=0.2))
    assert app.serve(config, "toy", load, out=out) == 1
    assert str(error) in out.getvalue().splitlines()[-1]


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        out = Lines()
        config = Config(server=ServerConfig(port=taken.getsockname()[1]))
        assert app.serve(config, "toy", lambda: fake_backend(FakeRunner()), out=out) == 1
        assert out.getvalue().startswith("cannot listen on 127.0.0.1:")


def test_a_stream_that_outlasts_the_shutdown_time_ends_with_an_error_event() -> None:
    runner = FakeRunner(ToyModel(scripts={tuple(b"a"): b"b" * 90}), held=True)  # whole characters
    backend = fake_backend(runner)
    rest: list[bytes] = []
    readers: list[threading.Thread] = []
    lastings: list[http.client.HTTPConnection] = []

    def read_on(response: http.client.HTTPResponse) -> None:
        while backend.engine.ready:  # until the drain has begun
            continue
        runner.release(100)
        rest.append(response.read())

    def visit(connection: http.client.HTTPConnection) -> None:
        while get(connection, "/readyz")[0] != 200:
            continue
        runner.release(2)  # the prompt and a token; the others come after the signal
        body = json.dumps({"prompt": "a", "max_tokens": 90, "ignore_eos": True, "stream": True})
        lasting = http.client.HTTPConnection(
            "127.0.0.1", connection.port, timeout=30
        )  # `connection` is closed after us
        lasting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = lasting.getresponse()
        lastings.append(lasting)
        assert response.readline().startswith(b"data: ")
        readers.append(threading.Thread(target=read_on, args=(response,), daemon=True))
        readers[0].start()

    code, _, _ = serve(visit, load=lambda: backend, config=Config(server=ServerConfig(port=0, shutdown_s=0.0)))
    readers[0].join(30)
    lastings[0].close()
    last = rest[0].decode().rstrip().split("\n\n")[-1].strip()
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"
    assert code == 0
