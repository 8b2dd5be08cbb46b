import io
import json
import logging

import pytest

from serving.config import LogConfig
from serving.logs import set_up_logging

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_json_lines_have_the_extra_fields_as_keys() -> None:
    out = io.StringIO()
    set_up_logging(LogConfig(form="json"), out)
    logging.getLogger("tidegate.http").info("%s done", "it", extra={"ms": 1.5, "odd": "\ud800"})
    line = json.loads(out.getvalue())
    assert (line["message"], line["level"], line["ms"], line["odd"]) == ("it done", "info", 1.5, "\ud800")


def test_text_lines_show_them_too_and_levels_are_kept() -> None:
    out = io.StringIO()
    set_up_logging(LogConfig(level="warning"), out)
    logging.getLogger("tidegate").info("no")
    logging.getLogger("tidegate").warning("yes", extra={"id": "r1"})
    assert out.getvalue().rstrip().endswith("yes id=r1")
    assert "no" not in out.getvalue().split()


def test_exceptions_are_one_json_line() -> None:
    out = io.StringIO()
    set_up_logging(LogConfig(form="json"), out)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("tidegate").exception("failed")
    assert "ValueError: x" in json.loads(out.getvalue())["exception"]


def test_setting_up_twice_does_not_double_the_lines() -> None:
    out = io.StringIO()
    for _ in range(2):
        set_up_logging(LogConfig(), out)
    logging.getLogger("tidegate").info("once")
    assert out.getvalue().count("once") == 1
