"""What serves one model: the Language for its text and the Engine for its tokens. Made by `loading`."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from .engine.engine import Engine
from .engine.footprint import Footprint
from .pipeline.language import Language


@dataclass(frozen=True, slots=True)
class Backend:
    """`num_compiles`: programs built so far; `footprint`: what the warm engine takes. The engine is not started."""

    language: Language
    engine: Engine
    num_compiles: Callable[[], int]
    footprint: Callable[[], Footprint]


def example_request(language: Language) -> tuple[str, str]:
    """A path and a body that this model answers: for the line that `serve` prints."""
    if language.default_template is None:
        return "/v1/completions", json.dumps({"prompt": "Hello", "max_tokens": 16})
    template = language.templates[language.default_template]
    row = dict(template.example) or dict.fromkeys(template.columns, 0)
    return "/v1/score", json.dumps({"inputs": [{"features": row}]}, separators=(",", ":"))
