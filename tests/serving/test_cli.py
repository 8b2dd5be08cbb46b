import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serving import cli
from serving.cli import main
from serving.config import Config
from serving.config_file import load_config

COMMANDS = ("serve", "score", "convert", "check", "tokenize")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"tidegate {command}" in capsys.readouterr().out.split("examples:")[1]


def test_print_config_is_the_effective_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[server]\nport = 1\nmax_rows = 5\n[engine]\nhard_size = 32")
    flags = ["--port", "2", "--model", "m", "--set", "log.form=json", "--served-model-name", "n", "--max-context", "64"]
    assert main(["serve", "--config", str(file), *flags, "--print-config"]) == 0
    config = load_config(capsys.readouterr().out)
    assert (config.server.port, config.server.max_rows, config.engine.hard_size) == (2, 5, 32)
    assert (config.model.path, config.model.served_name, config.log.form, config.engine.max_context) == (
        "m",
        "n",
        "json",
        64,
    )


def test_defaults_print_as_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config"]) == 0
    assert load_config(capsys.readouterr().out) == Config()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--model", "no-such-model"], "zoo: "),
        (["serve", "--host", "0.0.0.0"], "server.host"),
        (["serve", "--port", "x"], "server.port"),
        (["serve", "--set", "server.prot=1"], "server.prot: unknown key"),
        (["serve", "--set", "server"], "KEY=VALUE"),
        (["tokenize", "a", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_wrong_usage_is_one_message_and_code_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_a_missing_configuration_file_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/no/such/file.toml"]) == 1
    assert "/no/such/file.toml" in capsys.readouterr().err


def test_tokenize_prints_ids(capsys: pytest.CaptureFixture[str]) -> None:
    zoo = str(cli.ZOO / "credit-mini")
    assert main(["tokenize", "hello", "--model", zoo]) == 0
    ids = json.loads(capsys.readouterr().out)
    assert all(isinstance(token, int) for token in ids)
    assert main(["tokenize", "hello", "--model", zoo, "--pieces"]) == 0
    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == ids


def test_simulated_devices_are_set_before_jax_is_imported() -> None:
    program = (
        "import sys; from serving import cli; assert 'jax' not in sys.modules; cli._simulate_devices(3); "
        "import jax; print(len(jax.devices()))"
    )
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "3"


def test_the_programs_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli._compile_cache(Config()) == tmp_path / "tidegate" / "programs"
    assert cli._compile_cache(load_config(flags={"runtime.compile_cache": "off"})) is None
    assert cli._compile_cache(load_config(flags={"runtime.compile_cache": "/x"})) == Path("/x")


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_the_process_cleanly(name: signal.Signals) -> None:
    command = [sys.executable, "-m", "serving.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("tidegate serves")
        process.send_signal(name)
        out, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert out.splitlines()[-1] == "stopping"


def test_threads_of_ours_that_still_run_do_not_hold_the_process_up(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(cli.os, "_exit", codes.append)
    enumerate_all, others = threading.enumerate, threading.enumerate()  # servers that other tests still need
    monkeypatch.setattr(threading, "enumerate", lambda: [t for t in enumerate_all() if t not in others])
    assert cli._leave(3) == 3
    assert codes == []
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="tidegate-load")
    thread.start()
    cli._leave(3)
    done.set()
    thread.join()
    assert codes == [3]
