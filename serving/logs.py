"""Logging set-up: text for people or one JSON object a line, on standard error.

Nothing here ever sees a header or a body: an access line is made of the fields that `transport.middleware` names.
"""

import json
import logging
from typing import Any, TextIO

from .config import LogConfig

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a line; `extra` fields become keys."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _KNOWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: half a surrogate pair does no harm


class TextFormatter(logging.Formatter):
    """Time, level, message, then the extra fields as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = " ".join(f"{key}={value}" for key, value in vars(record).items() if key not in _KNOWN)
        line = super().formatMessage(record)
        return f"{line} {extra}" if extra else line


def set_up_logging(config: LogConfig, stream: TextIO) -> logging.Handler:
    """Attach a handler to the logger "tidegate", under which all of serving logs; returns it."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if config.form == "json" else TextFormatter())
    logger = logging.getLogger("tidegate")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(config.level.upper())
    return handler
