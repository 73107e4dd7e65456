"""What the services write to their logs: one line an event, as JSON or for a person's eyes."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import structlog

from simulator.documents.problems import InputError

FAILED = 1
FIELDS = ("job", "generation", "term", "step", "node", "cause")
"""Every line has these, so that each can be searched for."""

Form = Literal["json", "terminal"]
Standing = Callable[[], Mapping[str, object]]


def begin_log(form: Form, standing: Standing = dict) -> None:
    """Write to standard error from now on.

    ``standing`` says which job, generation, term, step and node it is about, where a line itself
    does not.
    """
    is_json = form == "json"

    def complete(logger: Any, name: str, line: Any) -> Any:
        del logger, name
        known = {field: value for field, value in standing().items() if value is not None}
        return {**dict.fromkeys(FIELDS), **known, **line} if is_json else {**known, **line}

    ends: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if is_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            complete,
            *ends,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(handlers=[_Others()], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


class _Others(logging.Handler):
    """What libraries log in Python's own way becomes a line as ours are."""

    def emit(self, record: logging.LogRecord) -> None:
        log, text = structlog.get_logger(), record.getMessage()
        log.log(record.levelno, text, logger=record.name, exc_info=record.exc_info)


@contextlib.contextmanager
def log_crash() -> Iterator[None]:
    """A bug of ours ends the service with a line as all others; who started it may try again."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        cause = type(error).__name__
        structlog.get_logger().critical("the service failed", cause=cause, exc_info=error)
        raise SystemExit(FAILED) from None
