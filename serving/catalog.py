"""Which directory a model's name means: a path, else a model of the zoo, else one of the user's demo models."""

from collections.abc import Iterator, Mapping
from pathlib import Path

DEMOS: Mapping[str, str] = {"smollm2": "make demo"}  # name -> the command that puts it on the shelf


class UnknownModel(ValueError):
    """No directory goes by that name; the message lists what there is."""


def find_model(name: str, *, zoo: Path, demos: Path) -> Path:
    """zoo: the directory of models that ship with tidegate. demos: where demo models are put. Raises UnknownModel."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UnknownModel(f"{name} is a file: a GGUF becomes a directory with `tidegate convert {name} DIR`")
    for shelf in (zoo, demos):
        if name in named_models(shelf):
            return shelf / name
    if name in DEMOS:
        raise UnknownModel(f"the demo model {name!r} is not in {demos} yet: `{DEMOS[name]}` puts it there")
    shown = {"zoo": zoo, "demo models": demos}
    lists = "; ".join(f"{title}: {', '.join(named_models(shelf)) or 'none'}" for title, shelf in shown.items())
    raise UnknownModel(f"there is no model {name!r}: give a directory, or one of these names. {lists} (in {demos})")


def named_models(shelf: Path) -> tuple[str, ...]:
    """Directories that hold a model's config, sorted; never anything outside `shelf`."""
    return tuple(sorted(_names(shelf))) if shelf.is_dir() else ()


def _names(shelf: Path) -> Iterator[str]:
    for entry in shelf.iterdir():
        if (entry / "config.json").is_file():
            yield entry.name
