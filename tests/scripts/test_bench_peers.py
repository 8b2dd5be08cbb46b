import os
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import peer_turns
from scripts.bench_peers import figure, ratios
from scripts.peer_servers import Peer, alive, busy_seconds, imports, llama_server, processor_seconds, tidegate, vllm
from scripts.peer_turns import NEW, PROMPT, Plan, body, compare, prompt

SERVER = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), H).serve_forever()
"""


def rows(*rates: float, foreign: float = 0.0) -> list[dict[str, Any]]:
    return [{"requests_per_s": rate, "foreign_cores": foreign, "ttft_p95_ms": 10.0} for rate in rates]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan((2, 4), 3, 32000, 8790, tmp_path, 2)


def test_prompts_are_distinct_and_repeatable(plan: Plan) -> None:
    prompts = [tuple(prompt(plan, seed)) for seed in range(50)]
    assert len(set(prompts)) == 50
    assert all(len(ids) == PROMPT and min(ids) >= 300 and max(ids) < 32000 for ids in prompts)
    assert body(plan, 7, "m", 3)["prompt"] == prompt(plan, 10)
    assert body(plan, 7, "m", 3)["max_tokens"] == NEW


def test_the_figure_is_the_median_of_the_turns() -> None:
    line, good = figure("llama.cpp", 16, rows(2.0, 3.0, 4.0), rows(2.0, 2.0, 2.0), 0.1)
    assert line.startswith("llama.cpp, 16 clients: 1.50x requests/s (1.00 to 2.00; floor 1.0)")
    assert good
    assert not figure("naive", 16, rows(2.0), rows(1.0), 0.1)[1]


def test_noisy_turns_are_left_out_where_enough_are_quiet() -> None:
    ours, theirs = rows(9.0, foreign=0.5) + rows(2.0, 2.0, 2.0), rows(1.0, 1.0, 1.0, 1.0)
    assert ratios(ours, theirs, 0.1) == ([2.0, 2.0, 2.0], 1)
    assert ratios(ours[:3], theirs[:3], 0.1) == ([9.0, 2.0, 2.0], 0)
    assert "1 runs were noisy" in figure("vllm", 64, ours[:3], theirs[:3], 0.1)[0]


def test_ours_and_the_peer_take_turns(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def turn(peer: Peer, plan: Plan, number: int, log: Path) -> dict[int, dict[str, Any]]:
        order.append(f"{peer.name} {number}")
        return {clients: {"requests_per_s": 1.0, "clients": clients} for clients in plan.clients}

    monkeypatch.setattr(peer_turns, "serve_turn", turn)
    ours, theirs = compare(Peer("other", ()), plan, pairs=2)
    assert order == ["tidegate 0", "other 0", "tidegate 1", "other 1"]
    assert [len(found[clients]) for found in (ours, theirs) for clients in plan.clients] == [2, 2, 2, 2]


def test_a_server_is_alive_within_the_block_only(tmp_path: Path, unused_port: int) -> None:
    peer = Peer("fake", (sys.executable, "-c", SERVER))
    with alive(peer, unused_port, tmp_path / "log") as (url, pid):
        assert url == f"http://127.0.0.1:{unused_port}"
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_says_its_last_words(tmp_path: Path, unused_port: int) -> None:
    peer = Peer("broken", (sys.executable, "-c", "import sys; sys.exit('no such model')"))
    with pytest.raises(RuntimeError, match="no such model"), alive(peer, unused_port, tmp_path / "log"):
        pass


@pytest.fixture
def unused_port() -> int:
    import socket

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
    assert processor_seconds(1 << 30) == 0.0
