"""What is read out of what compilers say; nothing is compiled here, make aot does that."""

import json
from pathlib import Path

import pytest

from scripts.aot_cases import CASES, TARGETS
from scripts.aot_kernels import Outcome, entries, kernels, outcomes, rows, summary, wrong_targets

LOG = """\
I1201 01:21:16.022281 30256 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
I1201 01:21:16.5 30257 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas warning : Registers are spilled to local memory in function 'decode', 80 bytes spill stores, 24 bytes spill loads
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    8 bytes stack frame, 80 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
I1201 01:21:17.1 30258 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'window_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for window_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 153 registers, used 2 barriers, 1 bytes smem
"""
DUMPED = {
    "module_0001.jit_f.before_optimizations.txt": (
        'ROOT %y = custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
        'backend_config={debug = false, ir = "ML\\EFR, name = \\"no\\"", name = "decode", num_warps = 4 : i32}'
    ),
    "module_0001.jit_f.thunk_sequence.txt": (
        "001: kCustomKernel [source] loop_fusion grid: [2, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes\n"
        "002: kCustomKernel [sink] decode grid: [2, 16, 1] threads: [128, 1, 1]  shared_memory: 40960 bytes\n"
    ),
    "module_0001.jit_f.1.ptx": "// LLVM\n.version 9.0\n.target sm_90a\n.address_size 64\n",
    "window_0.ptx": ".version 9.0\n.target sm_90a, debug\n",
    "window_0.resources.txt": "Resources(smem_scratch_bytes=51200, tmem_scratch_cols=0)",
}


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    for name, text in DUMPED.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_ptxas_says_registers_and_spills_of_each_entry() -> None:
    assert list(entries(LOG)) == [("loop_fusion", 10, 0), ("decode", 255, 104), ("window_mosaic_gpu_kernel", 153, 0)]
    assert list(entries("ptxas info : Compiling entry function 'cut' for 'sm_80'\n")) == []


def test_kernels_are_those_of_both_routes_and_none_of_xlas_own(dumped: Path) -> None:
    assert kernels(dumped, LOG, "sm_90a") == [
        ("decode", 255, 104, 40960),
        ("window_mosaic_gpu_kernel", 153, 0, 51200),
    ]


def test_ptx_of_another_target_or_of_none_is_wrong() -> None:
    assert not wrong_targets([".target sm_80\n", ".version 9\n.target sm_80, debug\n"], "sm_80")
    assert wrong_targets([".target sm_80\n", ".target sm_90a\n"], "sm_80") == {"sm_90a"}
    assert wrong_targets([".target sm_90\n"], "sm_90a") == {"sm_90"}
    assert wrong_targets(["// .target sm_80\n"], "sm_80") == {"none"}
    assert wrong_targets([], "sm_80") == {"none"}


def test_a_case_is_its_kernels_and_fails_without_them(dumped: Path) -> None:
    case = Outcome("op/case", 1.5, None, LOG)
    assert [row["name"] for row in rows("sm_90a", case, dumped)] == ["decode", "window_mosaic_gpu_kernel"]
    assert rows("sm_80", case, dumped) == [
        {"target": "sm_80", "case": "op/case", "seconds": 1.5, "error": "PTX is for sm_90a, not sm_80"}
    ]
    (row,) = rows("sm_90a", case._replace(log=""), dumped)
    assert row["error"] == "ptxas speaks of []; the kernels are ['decode', 'window_mosaic_gpu_kernel']"


def test_a_compilers_death_is_put_down_to_the_case_it_was_at() -> None:
    trace = "F12 error_handler.cc:44] *** Begin stack trace ***\n*** End stack trace ***\n"
    log = f"start\n=== case a/1\nfine\n=== case a/2\nLLVM ERROR: Cannot select\n{trace}"
    said = json.dumps({"case": "a/1", "seconds": 0.5, "error": None})
    good, died, missing = outcomes(["a/1", "a/2", "a/3"], -6, said, log)
    assert good == ("a/1", 0.5, None, "fine\n")
    assert (died.case, died.error) == ("a/2", "the compiler's exit code was -6: LLVM ERROR: Cannot select")
    assert missing.error is not None
    assert missing.error.startswith("not reached, as the compiler's exit code was -6")


def test_an_exit_code_counts_where_no_case_failed() -> None:
    said = json.dumps({"case": "a/1", "seconds": 0.5, "error": None})
    assert [outcome.error for outcome in outcomes(["a/1"], 0, said, "")] == [None]
    assert [outcome.case for outcome in outcomes(["a/1"], 1, said, "")] == ["a/1", "(all)"]
    said = json.dumps({"case": "a/1", "seconds": 0.5, "error": "ValueError: no"})
    assert [outcome.error for outcome in outcomes(["a/1"], 1, said, "")] == ["ValueError: no"]


def test_the_summary_names_what_failed_and_counts_what_spills() -> None:
    good = {"target": "sm_80", "case": "a/1", "spilled": 8}
    assert summary([good, good | {"spilled": 0}]) == "2 kernels compiled, 1 of them spill registers"
    bad = {"target": "sm_80", "case": "a/2", "error": "ValueError: no"}
    assert summary([good, bad]) == "1 of 2 failed: a/2 for sm_80"


def test_cases_have_names_of_their_own_and_known_targets() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(set(case.targets) <= set(TARGETS) for case in CASES)
