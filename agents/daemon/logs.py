"""The services' logs: one line per event, as JSON or for a terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TextIO

import structlog

from agents.daemon.journal import Journal, is_journal
from simulator.documents.problems import InputError

FAILED = 1
MINUTE_S = 60.0
LINES_MAX = 10
"""Lines a minute from one place in a library, so that a flood of errors does not fill the disk."""
FIELDS = ("job", "generation", "term", "step", "node", "cause")
"""Fields of every line in JSON, so that each can be searched for."""

LogForm = Literal["json", "terminal"]
StandingFields = Callable[[], Mapping[str, object]]


def begin_log(form: LogForm, standing: StandingFields = dict) -> None:
    """Log to standard error from now on.

    ``standing`` returns the fields that lines do not set themselves: job, generation, term, step,
    node.
    """
    is_json = form == "json"

    def complete(logger: Any, name: str, line: Any) -> Any:
        del logger, name
        known = {field: value for field, value in standing().items() if value is not None}
        return {**dict.fromkeys(FIELDS), **known, **line} if is_json else {**known, **line}

    factory: Any
    ends: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if is_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    if is_journal(sys.stderr.fileno()):
        render, factory = ends.pop(), lambda *_: Journal()
        ends.append(lambda logger, name, line: _for_journal(render(logger, name, {**line}), line))
    else:
        factory = partial(LineWriter, sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            complete,
            *ends,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=factory,
    )
    logging.basicConfig(handlers=[_Others()], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


def _for_journal(text: str, line: Mapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Return what ``Journal.msg`` is called with."""
    fields = {field: line[field] for field in FIELDS if line.get(field) is not None}
    return (text,), {"level": line["level"], "fields": fields}


class LineWriter:
    """A logger for structlog that writes lines to a file, or loses them where that is full."""

    def __init__(self, file: TextIO, *_: object) -> None:
        self._file = file

    def msg(self, text: str) -> None:
        """Write a line; neither a full disk nor a closed pipe may end the service."""
        with contextlib.suppress(OSError):
            self._file.write(f"{text}\n")
            self._file.flush()

    debug = info = warning = warn = error = critical = fatal = exception = msg


class _Others(logging.Handler):
    """Forwards what libraries log through ``logging``: few lines a minute from each place."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}
        """By place in a library: when the present minute began, and the lines since."""

    def emit(self, record: logging.LogRecord) -> None:
        place, now = (record.pathname, record.lineno), time.monotonic()
        begun, lines = self._lines.get(place, (now, 0))
        if now - begun >= MINUTE_S:
            begun, lines = now, 0
        self._lines[place] = begun, lines + 1
        if lines >= LINES_MAX:
            return
        log, text = structlog.get_logger(), record.getMessage()
        if lines == LINES_MAX - 1:
            text += " (further lines of this kind are left out for a minute)"
        log.log(record.levelno, text, logger=record.name, exc_info=record.exc_info)


@contextlib.contextmanager
def log_crash() -> Iterator[None]:
    """Log an unexpected exception as critical and exit with 1; systemd restarts the service."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        cause = type(error).__name__
        structlog.get_logger().critical("the service crashed", cause=cause, exc_info=error)
        raise SystemExit(FAILED) from None
