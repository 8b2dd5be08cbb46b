"""The table that --dry-run prints."""

from serving.batch import Bucket, Kind
from serving.engine.footprint import Footprint, ProgramCost


def test_sums_and_one_line_a_bucket() -> None:
    costs = (
        ProgramCost(Bucket(Kind.SCORE, 4, 32, 0), 1.5, 3_000_000),
        ProgramCost(Bucket(Kind.DECODE, 16, 1, 64), 2.0, 1_000_000),
    )
    lines = Footprint(10_000_000, 500_000, 1000, 2049, 32, costs).render().splitlines()
    assert lines[1].split() == ["score", "4", "32", "0", "3.0", "1.50"]
    assert lines[2].split() == ["decode", "16", "1", "64", "1.0", "2.00"]
    assert lines[4].split()[2:] == ["2.0", "MB", "2049", "pages", "of", "1000", "bytes"]
    assert lines[5].split() == ["one", "request", "0.0", "MB", "32", "pages", "at", "most"]
    assert lines[-1] == "in all                15.5 MB, 2 buckets, 3.5 s of compiling"
