"""Types of columns: the narrowest that holds every value, and nothing lost."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.offline.columns import Type, find_columns, typed
from serving.offline.source import open_source


@given(st.lists(st.sampled_from(Type), min_size=1, max_size=6))
def test_joining_does_not_depend_on_order(kinds: list[Type]) -> None:
    forward, backward = kinds[0], kinds[-1]
    for kind in kinds[1:]:
        forward = forward.join(kind)
    for kind in reversed(kinds[:-1]):
        backward = backward.join(kind)
    assert forward is backward


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-20", "0"], Type.INT),
        (["1", "2.5", "1e-3"], Type.FLOAT),
        (["1", ""], Type.INT),
        (["007"], Type.TEXT),
        (["nan"], Type.TEXT),
        (["1e999"], Type.TEXT),
        (["9999999999999999999"], Type.TEXT),
        ([" 1"], Type.TEXT),
        (["", ""], Type.EMPTY),
    ],
)
def test_csv_fields(tmp_path: Path, values: list[str], kind: Type) -> None:
    path = tmp_path / "a.csv"
    path.write_text("k,v\n" + "".join(f"0,{v}\n" for v in values))
    assert find_columns(open_source(path)) == {"k": Type.INT, "v": kind}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "null"], Type.INT),
        (["1", "2.5"], Type.FLOAT),
        (["true", "false"], Type.BOOL),
        (["true", "1"], Type.TEXT),
        (['"1"', "1"], Type.TEXT),
        (["[1]"], Type.TEXT),
        (["36893488147419103232"], Type.TEXT),
    ],
)
def test_json_values(tmp_path: Path, values: list[str], kind: Type) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"v":{v}}}\n' for v in values))
    assert find_columns(open_source(path)) == {"v": kind}


def test_values_take_their_columns_type() -> None:
    columns = {"i": Type.INT, "f": Type.FLOAT, "t": Type.TEXT, "b": Type.BOOL, "e": Type.EMPTY}
    assert typed({"i": "3", "f": "1", "t": {"k": 1}, "b": True, "e": ""}, columns) == {
        "i": 3, "f": 1.0, "t": '{"k": 1}', "b": True, "e": None,
    }  # fmt: skip
    assert typed({"i": "", "t": ""}, columns) == {"i": None, "f": None, "t": "", "b": None, "e": None}
