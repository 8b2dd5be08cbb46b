"""What the commands of `tidegate` take, and their help. What they do is in `cli`."""

import argparse
from importlib.metadata import version
from typing import Any

Commands = Any  # argparse has no public name for what add_subparsers returns


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidegate", description="Serves, scores with, converts and checks DeepSeek-family models in JAX."
    )
    parser.add_argument("--version", action="version", version=f"tidegate {version('tidegate')}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_score(commands)
    _add_convert(commands)
    _add_check(commands)
    _add_tokenize(commands)
    return parser


def _add(commands: Commands, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="FILE", help="a TOML file; flags go over it")
    add("--model", metavar="MODEL", help="a directory, a model of the zoo, or a demo model (default: credit-mini)")
    add("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16")
    add("--mesh", metavar="AXES", help="device mesh such as data=2,tensor=2,expert=2")
    add("--template", metavar="FILE", help="a row template (default: template.toml beside the model)")
    add("--max-context", metavar="N", help="prompt and generated tokens at most")
    add("--deterministic", action="store_const", const=True, help="the same bits whatever else is served; slower")
    add("--speculate", action="store_const", const=True, help="draft tokens with the model's MTP layer")
    add("--simulate-devices", metavar="N", help="pretend that the CPU is N devices")
    add("--compile-cache", metavar="DIR", help="where compiled programs are kept; off: nowhere")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="any key of the configuration, dotted")


def _add_serve(commands: Commands) -> None:
    parser = _add(
        commands,
        "serve",
        "Serve a model over HTTP.",
        "  tidegate serve\n"
        "  tidegate serve --model ./DeepSeek-V2-Lite --served-model-name v2-lite --port 9000\n"
        "  tidegate serve --config tidegate.toml --set server.max_rows=256\n"
        "  tidegate serve --print-config > tidegate.toml",
    )
    _add_model_flags(parser)
    add = parser.add_argument
    add("--served-model-name", metavar="NAME", help="the name that clients use (default: the directory's)")
    add("--host", metavar="ADDRESS", help="other than loopback only with [auth] keys (default: 127.0.0.1)")
    add("--port", metavar="PORT", help="0: any free one (default: 8000)")
    add("--print-config", action="store_true", help="print the whole effective configuration and exit")
    add("--dry-run", action="store_true", help="load and compile, print what it takes bucket by bucket, and exit")


def _add_score(commands: Commands) -> None:
    parser = _add(
        commands,
        "score",
        "Score the rows of a file, without HTTP.",
        "  tidegate score rows.csv --out scored.csv\n  tidegate score rows.jsonl --out scored.parquet --model ./m",
    )
    parser.add_argument("input", metavar="INPUT", help="rows: .csv or .jsonl")
    parser.add_argument("--out", metavar="OUT", required=True, help="where to write: .csv, .jsonl or .parquet")
    parser.add_argument("--labels", metavar="A,B,...", help="labels instead of the template's")
    _add_model_flags(parser)


def _add_convert(commands: Commands) -> None:
    parser = _add(
        commands,
        "convert",
        "Write a hub directory as an Orbax checkpoint with a manifest, or from and to GGUF.",
        "  tidegate convert ./DeepSeek-V2-Lite ./v2-lite-orbax --dtype bfloat16\n"
        "  tidegate convert model.Q4_K_M.gguf ./model\n"
        "  tidegate convert ./model model.q8_0.gguf --to gguf --dtype q8_0",
    )
    parser.add_argument("source", metavar="SRC", help="a hub directory, or a GGUF file of llama or qwen2 form")
    parser.add_argument("target", metavar="DST", help="where to write: a GGUF becomes a hub directory")
    parser.add_argument("--to", metavar="FORM", help="gguf: a file that llama.cpp reads")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="float32, bfloat16 or float16 (default: the checkpoint's); to GGUF: f32, q8_0"
    )
    parser.add_argument(
        "--ignore", metavar="PATTERN", action="append", default=[], help="extra tensors to leave out, by name"
    )


def _add_check(commands: Commands) -> None:
    parser = _add(
        commands,
        "check",
        "Compare directories with their reference results (expected.npz).",
        "  tidegate check golden/v3 golden/v2\n"
        "  tidegate check golden/v3 --mesh data=2,tensor=2,expert=2 --simulate-devices 8 --json",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", help="config.json, safetensors, expected.npz")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one a directory")
    parser.add_argument("--mesh", metavar="AXES", default="", help="device mesh such as data=2,tensor=2,expert=2")
    parser.add_argument("--simulate-devices", metavar="N", type=int, default=0, help="pretend the CPU is N devices")
    parser.add_argument(
        "--attention",
        choices=("auto", "xla", "pallas", "interpret"),
        default="auto",
        help="what computes attention: the kernels (pallas), XLA, or the kernels step by step through XLA, which any "
        "device can and which is slow (interpret); auto: the kernels on a GPU",
    )


def _add_tokenize(commands: Commands) -> None:
    parser = _add(
        commands,
        "tokenize",
        "Print the token ids of a text, as a JSON list.",
        "  tidegate tokenize 'Hello, tide' --model ./DeepSeek-V2-Lite\n  echo 'Hello' | tidegate tokenize -",
    )
    parser.add_argument("text", metavar="TEXT", help="the text; -: standard input")
    parser.add_argument("--model", metavar="MODEL", default="credit-mini", help="a directory or a model's name")
    parser.add_argument("--trusted", action="store_true", help="recognise control tokens in the text")
    parser.add_argument("--pieces", action="store_true", help="print each token's text beside its id")
