from typing import Any

from scripts.bench_peers import figure, ratios


def rows(*rates: float, foreign: float = 0.0) -> list[dict[str, Any]]:
    return [{"requests_per_s": rate, "foreign_cores": foreign, "ttft_p95_ms": 10.0} for rate in rates]


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
