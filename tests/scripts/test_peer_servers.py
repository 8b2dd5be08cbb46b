import os
import socket
import sys
from pathlib import Path

import pytest

from scripts.peer_servers import (
    Peer,
    alive,
    busy_seconds,
    foreign_seconds,
    imports,
    llama_server,
    processor_seconds,
    tidegate,
    vllm,
)

SERVER = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), H).serve_forever()
"""


def test_a_server_is_alive_within_the_block_only(tmp_path: Path, unused_port: int) -> None:
    peer = Peer("fake", (sys.executable, "-c", SERVER))
    with alive(peer, unused_port, tmp_path / "log") as url:
        assert url == f"http://127.0.0.1:{unused_port}"
        with socket.create_connection(("127.0.0.1", unused_port)):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", unused_port))


def test_a_server_that_does_not_start_says_its_last_words(tmp_path: Path, unused_port: int) -> None:
    peer = Peer("broken", (sys.executable, "-c", "import sys; sys.exit('no such model')"))
    with pytest.raises(RuntimeError, match="no such model"), alive(peer, unused_port, tmp_path / "log"):
        pass


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_commands_name_model_and_slots(tmp_path: Path) -> None:
    llama = llama_server(Path("/x/llama-server"), Path("m.gguf"), slots=16, threads=2).command
    assert llama[:3] == ("/x/llama-server", "-m", "m.gguf")
    assert llama[llama.index("-c") + 1] == str(16 * 256)
    assert "--no-cache-prompt" in llama
    assert str(tmp_path) in tidegate(tmp_path).command
    assert "engine.max_slots=1" in tidegate(tmp_path, slots=1).command
    assert vllm(Path("/v/python"), tmp_path, slots=16, threads=1).environment["VLLM_CPU_OMP_THREADS_BIND"].isdigit()


def test_an_interpreter_is_asked_for_a_module() -> None:
    assert imports(Path(sys.executable), "json")
    assert not imports(Path(sys.executable), "no_such_module_here")
    assert not imports(Path("/no/python"), "json")


def test_processor_time_grows_with_work() -> None:
    before, machine = processor_seconds(os.getpid()), busy_seconds()
    while processor_seconds(os.getpid()) < before + 0.02:
        sum(range(10_000))
    assert busy_seconds() > machine
    assert foreign_seconds() < busy_seconds()
    assert processor_seconds(1 << 30) == 0.0
