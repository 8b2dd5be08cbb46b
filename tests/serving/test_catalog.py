from pathlib import Path

import pytest

from serving.catalog import UnknownModel, find_model, named_models


def shelf(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    return root


def test_a_path_wins_over_the_zoo_and_the_zoo_over_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, demos = shelf(tmp_path / "zoo", "a", "b"), shelf(tmp_path / "demos", "b", "c")
    here = tmp_path / "here"
    (here / "a").mkdir(parents=True)
    assert find_model("a", zoo=zoo, demos=demos) == zoo / "a"
    assert find_model("b", zoo=zoo, demos=demos) == zoo / "b"
    assert find_model("c", zoo=zoo, demos=demos) == demos / "c"
    monkeypatch.chdir(here)
    assert find_model("a", zoo=zoo, demos=demos) == Path("a")


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    zoo = shelf(tmp_path / "zoo", "b", "a")
    with pytest.raises(UnknownModel, match="zoo: a, b; demo models: none"):
        find_model("x", zoo=zoo, demos=tmp_path / "missing")


@pytest.mark.parametrize("name", ["../a", "..", "a/../a", "", "."])
def test_names_on_a_shelf_are_plain_names(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: path == tmp_path)  # no path of that name
    shelf(tmp_path, "a")
    with pytest.raises(UnknownModel):
        find_model(name, zoo=tmp_path, demos=tmp_path)
    assert named_models(tmp_path) == ("a",)


def test_a_demo_model_that_is_not_there_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="make demo"):
        find_model("smollm2", zoo=tmp_path, demos=tmp_path)
    shelf(tmp_path, "smollm2")
    assert find_model("smollm2", zoo=tmp_path / "zoo", demos=tmp_path) == tmp_path / "smollm2"


def test_a_gguf_file_is_to_be_converted_first(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnknownModel, match="tidegate convert"):
        find_model(str(tmp_path / "m.gguf"), zoo=tmp_path, demos=tmp_path)
