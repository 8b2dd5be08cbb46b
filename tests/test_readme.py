"""README stays true of the tree: every module is in it, and nothing that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels_pallas", "model", "quant", "serving", "scripts")


def listed() -> set[str]:
    """Paths of the tree section: a line with a directory, then its files, indented further."""
    tree = (ROOT / "README.md").read_text().split("\n## The tree\n")[1].split("\n## ")[0]
    paths, directory = set(), ""
    for line in tree.splitlines():
        if match := re.match(r"^ {4}(\S+)/ ", line + " "):
            directory = match[1]
        elif match := re.match(r"^ {6}(\S+\.py) ", line):
            paths.add(f"{directory}/{match[1]}")
    return paths


def test_the_tree_lists_every_module():
    files = (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if path.name != "__init__.py")
    assert listed() == {path.relative_to(ROOT).as_posix() for path in files}


def test_commands_named_in_the_text_exist():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"python -m scripts\.(\w+)", text)):
        assert (ROOT / "scripts" / f"{name}.py").is_file(), name
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^    )make (\w+)", text, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
