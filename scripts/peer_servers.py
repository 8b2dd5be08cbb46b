"""Servers that `bench_peers` holds against each other: how each is started, and whose processor time a run took."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.load_client import wait_ready

ROOT = Path(__file__).parent.parent
HOST, CONTEXT = "127.0.0.1", 256  # tokens of one request: 64 + 32 fit with room


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: its command without the port, and the path that says 200 when it is ready."""

    name: str
    command: tuple[str, ...]
    ready: str = "/health"
    environment: dict[str, str] = field(default_factory=dict)


def tidegate(directory: Path, *, name: str = "tidegate", slots: int = 64) -> Peer:
    """Our server; shapes that only scoring needs are left out, so that it starts sooner."""
    settings = (
        f"engine.max_slots={slots}",
        "engine.max_score_rows=1",
        "engine.max_score_tokens=32",
        "log.access=false",
    )
    command = (sys.executable, "-m", "serving.cli", "serve", "--model", str(directory), "--max-context", str(CONTEXT))
    return Peer(name, (*command, *(part for setting in settings for part in ("--set", setting))), "/readyz")


def llama_server(program: Path, file: Path, *, slots: int, threads: int) -> Peer:
    """llama.cpp's server with continuous batching and no prompt cache; its KV cache stays f16, its default."""
    command = (str(program), "-m", str(file), "-c", str(slots * CONTEXT), "--parallel", str(slots), "-t", str(threads),
               "-tb", str(threads), "--no-cache-prompt", "-b", "2048", "-ub", "512", "--host", HOST)  # fmt: skip
    return Peer("llama.cpp", command)


def vllm(python: Path, directory: Path, *, slots: int, threads: int) -> Peer:
    command = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--dtype", "float32",
               "--max-model-len", str(CONTEXT), "--max-num-seqs", str(slots), "--no-enable-prefix-caching",
               "--served-model-name", directory.name, "--host", HOST)  # fmt: skip
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    return Peer("vllm", command, environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores})


def imports(python: Path, module: str) -> bool:
    """Whether this interpreter has that module."""
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def alive(peer: Peer, port: int, log: Path) -> Iterator[str]:
    """URL of a server that is ready; stopped at the end. Raises RuntimeError where it does not start."""
    with log.open("w") as output:
        environment = {**os.environ, **peer.environment}
        command = [*peer.command, "--port", str(port)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://{HOST}:{port}"
    try:
        asyncio.run(wait_ready(url, timeout_s=1200, path=peer.ready, alive=lambda: process.poll() is None))
        yield url
    except TimeoutError as error:
        raise RuntimeError(f"{peer.name} did not start: {error}; its last words: {log.read_text()[-800:]}") from error
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def processor_seconds(pid: int) -> float:
    """User and system time of a process, its threads and its children."""
    total, todo = 0.0, [pid]
    while todo:
        directory = Path("/proc") / str(todo.pop())
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for task in (directory / "task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended
    return total


def busy_seconds() -> float:
    """Processor time that the whole machine has spent on anything but idling or waiting for disks."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def foreign_seconds() -> float:
    """Processor time that others have used: neither this process nor those that it started and that still run."""
    return busy_seconds() - processor_seconds(os.getpid())
