"""What sailord writes to its log: one line an event, as JSON or for a person's eyes."""

from __future__ import annotations

import sys
from typing import Any

import structlog

from sailord.config import LogFormat

FIELDS = ("job", "generation", "term", "step", "node", "cause")
"""Every line has these, so that each can be searched for."""


def begin_log(form: LogFormat) -> None:
    """Write to standard error from now on."""
    shape: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _complete if form == "json" else _as_it_is,
            structlog.processors.format_exc_info,
            shape,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _complete(logger: Any, name: str, line: Any) -> Any:
    del logger, name
    return {**dict.fromkeys(FIELDS), **line}


def _as_it_is(logger: Any, name: str, line: Any) -> Any:
    del logger, name
    return line
