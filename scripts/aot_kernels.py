"""Every kernel compiled for GPUs that are not there: python -m scripts.aot_kernels [--target sm_90a] [--case NAME]

For sm_90a (H200) and sm_80 (A100), the cases of scripts/aot_cases.py, each target in a process of its own
(scripts/aot_compile.py), on the CPU. It proves that a kernel is machine code that fits on the device, and nothing of
its numbers or speed. A row is a kernel: its case's seconds, registers a thread, bytes spilled (stored and loaded, a
thread), bytes of shared memory a block. Spills are reported; a case that does not compile, for its target or at all,
is named, and the exit code 1. Needs the environment of make aot, which makes it (Python 3.12, 1.3 GB from PyPI).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.aot_cases import CASES, TARGETS
from scripts.aot_compile import LOG_MARK, environment
from scripts.report import Row, finish, parser

# A Pallas kernel among XLA's own, what ptxas -v says of an entry, and who knows the shared memory that a launch wants.
PALLAS = re.compile(r'"__gpu\$xla\.gpu\.triton".*, name = "(\w+)"')
ENTRY = "Compiling entry function '"
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
PTX_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
THUNK = re.compile(r"kCustomKernel .*?\] (\w+) grid: .* shared_memory: (\d+) bytes")
RESOURCES = re.compile(r"smem_scratch_bytes=(\d+)")
WRONG = re.compile(r"\b(error|fatal|check failed)\b", re.IGNORECASE)
MOSAIC = "_mosaic_gpu_kernel"
MOST_WORDS = 500  # letters of an error


class Kernel(NamedTuple):
    name: str
    registers: int
    spilled: int
    shared: int | None


class Outcome(NamedTuple):
    """Of a case: what was wrong with it, or None, and the compilers' log."""

    case: str
    seconds: float
    error: str | None
    log: str


def entries(log: str) -> Iterator[tuple[str, int, int]]:
    """Name, registers and bytes spilled of every kernel that ptxas speaks of, XLA's own among them."""
    for said in log.split(ENTRY)[1:]:
        spills, used = SPILLS.search(said), USED.search(said)
        if spills and used:
            yield said.partition("'")[0], int(used[1]), int(spills[1]) + int(spills[2])


def wrong_targets(texts: Iterable[str], target: str) -> set[str]:
    """The targets of PTX that are not what was asked for; "none" where it names none, or there is none."""
    named = [PTX_TARGET.findall(text) or ["none"] for text in texts]
    return {name for names in named or [["none"]] for name in names} - {target}


def shared_bytes(directory: Path) -> dict[str, int | None]:
    """Of each Pallas kernel, by the name of its entry: what XLA's thunks say of the one route, Mosaic of the other."""
    launched = {name: int(size) for name, size in THUNK.findall(_text(directory, "*.thunk_sequence.txt"))}
    found = {name: launched.get(name) for name in PALLAS.findall(_text(directory, "*.before_optimizations.txt"))}
    for file in directory.glob("*.resources.txt"):
        name = re.sub(r"_\d+\.resources\.txt$", MOSAIC, file.name)
        found[name] = sum(int(size) for size in RESOURCES.findall(file.read_text()))
    return found


def _text(directory: Path, pattern: str) -> str:
    return "\n".join(file.read_text(errors="replace") for file in directory.glob(pattern))


def kernels(directory: Path, log: str, target: str) -> list[Kernel]:
    """Of one case, from what its compilers left. Raises ValueError if that is not a kernel, for the target only."""
    if wrong := wrong_targets((file.read_text() for file in directory.glob("*.ptx")), target):
        raise ValueError(f"PTX is for {', '.join(sorted(wrong))}, not {target}")
    shared = shared_bytes(directory)
    found = [Kernel(name, used, spills, shared[name]) for name, used, spills in entries(log) if name in shared]
    if not found or {kernel.name for kernel in found} != set(shared):
        raise ValueError(f"ptxas speaks of {[kernel.name for kernel in found]}; the kernels are {sorted(shared)}")
    return sorted(found)


def outcomes(names: Iterable[str], code: int, said: str, log: str) -> Iterator[Outcome]:
    """Of each named case, in order, from the compiling process: its exit code, and what it wrote."""
    ended = {line["case"]: line for line in map(json.loads, said.splitlines())}
    parts = (part.partition("\n") for part in log.split(LOG_MARK)[1:])
    logs = {name: text for name, _, text in parts}
    for name in names:
        text = logs.get(name, log)
        if name in ended:
            yield Outcome(name, ended[name]["seconds"], ended[name]["error"], text)
        else:
            end = f"the compiler's exit code was {code}: {reason(text)}"
            yield Outcome(name, 0.0, end if name in logs else f"not reached, as {end}", text)
    if code and all(name in ended and ended[name]["error"] is None for name in names):
        yield Outcome("(all)", 0.0, f"the compiler's exit code was {code}", log)


def reason(log: str) -> str:
    """The last line that says something is wrong, or the last: behind it come the calls that led there."""
    lines = [line for line in log.splitlines() if line.strip()]
    return ([line for line in lines if WRONG.search(line)] or lines or ["no word"])[-1]


def rows(target: str, outcome: Outcome, directory: Path) -> list[Row]:
    """One for every kernel, or for the failure."""
    about, error = {"target": target, "case": outcome.case, "seconds": outcome.seconds}, outcome.error
    if error is None:
        try:
            return [about | kernel._asdict() for kernel in kernels(directory, outcome.log, target)]
        except ValueError as wrong:
            error = str(wrong)
    return [about | {"error": error[:MOST_WORDS]}]


def compiled(target: str, names: list[str], directory: Path) -> list[Row]:
    command = [sys.executable, "-m", "scripts.aot_compile", target, str(directory), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment(), check=False)
    found = outcomes(names, done.returncode, done.stdout, done.stderr)
    return [row for outcome in found for row in rows(target, outcome, directory / outcome.case)]


def summary(found: list[Row]) -> str:
    """The failing cases by name, if any."""
    failed = [f"{row['case']} for {row['target']}" for row in found if "error" in row]
    if failed:
        return f"{len(failed)} of {len({(row['case'], row['target']) for row in found})} failed: {'; '.join(failed)}"
    spilling = sum(row["spilled"] > 0 for row in found)
    return f"{len(found)} kernels compiled, {spilling} of them spill registers"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--target", choices=TARGETS, help="only this one")
    options.add_argument("--case", default="", metavar="NAME", help="only cases with this in their name")
    args = options.parse_args()
    found: list[Row] = []
    for target in [args.target] if args.target else TARGETS:
        names = [case.name for case in CASES if args.case in case.name and target in case.targets]
        with tempfile.TemporaryDirectory() as directory:
            found += compiled(target, names, Path(directory)) if names else []
    if not found:
        options.error(f"no case is named like {args.case!r}; there are {', '.join(case.name for case in CASES)}")
    ok = not any("error" in row for row in found)
    return finish(found, summary(found), ok=ok, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
