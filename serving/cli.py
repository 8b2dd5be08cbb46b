"""The command line: reads arguments, environment and the configuration file, and hands over to the layers.

The only module that reads the environment. jax is imported by what the commands call, never at the top here: the
number of simulated devices must be set before.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import build_parser
from .catalog import UnknownModel, find_model
from .config import Config
from .config_file import ConfigError, load_config, render_config

if TYPE_CHECKING:
    from .backend import Backend

EXIT_USAGE = 2
ZOO = Path(__file__).resolve().parent.parent / "model" / "zoo"

_FLAGS = {  # argparse destination -> dotted key
    "model": "model.path",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "mesh": "model.mesh",
    "template": "model.template",
    "max_context": "engine.max_context",
    "deterministic": "engine.deterministic",
    "speculate": "engine.speculate",
    "host": "server.host",
    "port": "server.port",
    "compile_cache": "runtime.compile_cache",
    "simulate_devices": "runtime.simulate_devices",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 fine, 1 failed, 2 wrong usage or configuration; `check` has a few of its own."""
    args = build_parser().parse_args(argv)
    run = {"serve": _serve, "score": _score, "convert": _convert, "check": _check, "tokenize": _tokenize}
    try:
        return run[args.command](args)
    except (ConfigError, UnknownModel) as error:
        print(f"tidegate: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except (ValueError, OSError) as error:
        print(f"tidegate: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return _leave(130)


def _serve(args: argparse.Namespace) -> int:
    config = _config(args)
    if args.print_config:
        print(render_config(config), end="")  # noqa: T201
        return 0
    directory = _directory(config.model.path)
    _simulate_devices(config.runtime.simulate_devices)
    if args.dry_run:
        return _leave(_dry_run(_load(config, directory)))
    from .app import serve

    return _leave(serve(config, directory.resolve().name, lambda: _load(config, directory)))


def _dry_run(backend: "Backend") -> int:
    """Everything that `serve` does before it is ready; then the table, or why it failed."""
    from tqdm import tqdm

    backend.engine.start()
    with tqdm(total=backend.engine.progress[1], desc="compiling", unit="program", disable=None) as bar:
        while not backend.engine.wait_ready(0.2):
            bar.update(backend.engine.progress[0] - bar.n)
        bar.update(backend.engine.progress[0] - bar.n)
    failure = backend.engine.failure
    if failure is None:
        print(backend.footprint().render())  # noqa: T201
    backend.engine.close()
    if failure is not None:
        raise ValueError(f"the engine did not start: {failure}")
    return 0


def _leave(code: int) -> int:
    """The code; ends the process at once where a thread of ours still loads, compiles or computes.

    The interpreter's own end would wait for such a thread, or be aborted by it.
    """
    if any(thread.name.startswith("tidegate-") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _score(args: argparse.Namespace) -> int:
    config = _config(args)
    directory = _directory(config.model.path)
    _simulate_devices(config.runtime.simulate_devices)
    from .offline.score import score_file

    backend = _load(config, directory)
    labels = None if args.labels is None else args.labels.split(",")
    return score_file(Path(args.input), Path(args.out), language=backend.language, engine=backend.engine, labels=labels)


def _load(config: Config, directory: Path) -> "Backend":
    """Takes seconds before it reads anything: jax is imported here."""
    from .loading import load_backend

    return load_backend(config, directory, compile_cache=_compile_cache(config), clock=time.monotonic)


def _convert(args: argparse.Namespace) -> int:
    from model import convert

    return convert.run(args.source, args.target, dtype=args.dtype, ignore=tuple(args.ignore), to=args.to)


def _check(args: argparse.Namespace) -> int:
    _simulate_devices(args.simulate_devices)
    from model import check

    return check.run(args.directories, as_json=args.json, mesh=args.mesh, attention=args.attention)


def _tokenize(args: argparse.Namespace) -> int:
    from model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(_directory(args.model))
    text = sys.stdin.read() if args.text == "-" else args.text
    ids = tokenizer.encode_trusted(text) if args.trusted else tokenizer.encode(text)
    if args.pieces:
        for token in ids:
            print(token, repr(tokenizer.token_bytes(token).decode("utf-8", "replace")))  # noqa: T201
    else:
        print(json.dumps(ids))  # noqa: T201
    return 0


def _config(args: argparse.Namespace) -> Config:
    """The configuration file with the flags over it. Raises ConfigError."""
    flags = {key: value for name, key in _FLAGS.items() if (value := getattr(args, name, None)) is not None}
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError([f"--set {pair}: write KEY=VALUE, such as server.port=9000"])
        flags[key] = value
    return load_config(Path(args.config).read_text("utf-8") if args.config else "", flags)


def _directory(name: str) -> Path:
    return find_model(name, zoo=ZOO, demos=_cache_home() / "models")


def _cache_home() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tidegate"


def _compile_cache(config: Config) -> Path | None:
    asked = config.runtime.compile_cache
    if asked == "off":
        return None
    return Path(asked).expanduser() if asked else _cache_home() / "programs"


def _simulate_devices(num_devices: int) -> None:
    """Must come before the first import of jax."""
    if num_devices > 0:
        assert "jax" not in sys.modules, "jax was imported before the number of devices was set"
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"


if __name__ == "__main__":
    sys.exit(main())
