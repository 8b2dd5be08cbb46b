from typing import get_type_hints

import msgspec
import pytest

from serving.config import Config


def test_every_field_says_what_it_is() -> None:
    for section in msgspec.structs.fields(Config):
        assert section.type.__doc__
        for name, hint in get_type_hints(section.type, include_extras=True).items():
            metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
            assert any(meta.description for meta in metas), f"{section.name}.{name}"


def test_nobody_writes_into_a_config() -> None:
    with pytest.raises(AttributeError):
        Config().server.port = 1  # type: ignore[misc]
