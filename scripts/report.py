"""How every benchmark of scripts/ reports: rows as a table or as JSON, the figure last, the floor as exit code."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """With --json, which all of them take."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print a list of objects, one a row, instead of a table")
    return made


def finish(rows: Sequence[Row], figure: str, *, ok: bool, as_json: bool) -> int:
    """Print the rows, then the figure; 0 where the stated floor is kept, else 1."""
    if as_json:
        print(json.dumps(list(rows), indent=1))
        return 0 if ok else 1
    for row in rows:
        print("  ".join(f"{name}={_short(value)}" for name, value in row.items()))
    print(figure + ("" if ok else "  <- MISSED"))
    return 0 if ok else 1


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
