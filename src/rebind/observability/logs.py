"""Logs in Triton's two formats (spec 05 section 3), over the standard library's logger ``rebind``.

Every module logs with ``logging.getLogger(__name__)``; what is shown, and where, is decided here once. Triton's
levels map so:

====================  ======================  ==============
Triton                here                    letter, stream
====================  ======================  ==============
LOG_ERROR             ``ERROR``, ``CRITICAL``  E, stderr
LOG_WARNING           ``WARNING``             W, stderr
LOG_INFO              ``INFO``                I, stdout
LOG_VERBOSE(n)        ``verbose_level(n)``    I, stdout
====================  ======================  ==============
"""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rebind.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"
"""Environment variable; ``0`` prints messages as they are instead of JSON-quoted."""

# What moves the cursor, ends a line, or cannot be encoded; json.dumps leaves most of it as it is.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class LogFormat(enum.Enum):
    """Values of ``--log-format`` and of ``log_format`` in the logging protocol."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, where and how: Triton's ``--log-*`` flags with their defaults.

    ``verbose`` is the highest verbose level shown, 0 for none; it does not depend on ``info``.
    ``file`` None logs to stdout and stderr; a file is appended to and takes everything.
    """

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = LogFormat.DEFAULT
    file: Path | None = None

    def shows(self, level: int) -> bool:
        """Whether a record of this level is printed."""
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        if level >= logging.INFO:
            return self.info
        return level >= self._lowest_verbose

    @property
    def threshold(self) -> int:
        """The level below which the logger need not even make a record."""
        return min(logging.INFO, self._lowest_verbose)

    @property
    def _lowest_verbose(self) -> int:
        return verbose_level(self.verbose) if self.verbose > 0 else logging.INFO


def verbose_level(verbosity: int) -> int:
    """The logging level of Triton's verbose level ``verbosity`` (1, 2, ...): 1 is ``DEBUG``, higher ones lie below."""
    return max(1, logging.DEBUG + 1 - verbosity)


class TritonFormatter(logging.Formatter):
    """Lines of the form ``I1130 15:28:01.000123 4711 server.py:45] "message"``, in UTC.

    The message, with its traceback if the record has one, is a JSON string, so that a record is one line whatever is in
    it; a table (:func:`log_table`) stands raw below an empty message.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self._quotes = environ.get(ESCAPE_VARIABLE) != "0"

    def format(self, record: logging.LogRecord) -> str:
        table: str | None = getattr(record, "table", None)
        if table is not None:
            return f"{self.prefix(record)}] \n{table}"
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return f"{self.prefix(record)}] {quoted(message) if self._quotes else message}"

    def prefix(self, record: logging.LogRecord) -> str:
        """Everything in front of ``]``."""
        stamp = f"{_utc(record):%m%d %H:%M:%S.%f}"
        return f"{_letter(record)}{stamp} {record.process} {record.filename}:{record.lineno}"


class Iso8601Formatter(TritonFormatter):
    """The same with ``2026-11-30T15:28:01Z I 4711 server.py:45]`` in front."""

    def prefix(self, record: logging.LogRecord) -> str:
        stamp = f"{_utc(record):%Y-%m-%dT%H:%M:%SZ}"
        return f"{stamp} {_letter(record)} {record.process} {record.filename}:{record.lineno}"


_FORMATTERS = {LogFormat.DEFAULT: TritonFormatter, LogFormat.ISO8601: Iso8601Formatter}


def configure(settings: LogSettings) -> None:
    """Makes the logger ``rebind`` log as ``settings`` say, instead of as before; may be called at any time.

    Raises :class:`rebind.errors.InvalidArgument` when the log file cannot be opened; then nothing has changed.
    """
    formatter = _FORMATTERS[settings.format]()
    handlers = list(_handlers(settings))
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.addFilter(lambda record: settings.shows(record.levelno))
    logger = logging.getLogger("rebind")
    before, logger.handlers = logger.handlers, handlers
    for handler in before:
        handler.close()
    logger.setLevel(settings.threshold)
    logger.propagate = False


def _handlers(settings: LogSettings) -> Iterable[logging.Handler]:
    if settings.file is not None:
        yield _file_handler(settings.file)
        return
    below_warning = logging.StreamHandler(sys.stdout)
    below_warning.addFilter(lambda record: record.levelno < logging.WARNING)
    yield below_warning
    from_warning = logging.StreamHandler(sys.stderr)
    from_warning.setLevel(logging.WARNING)
    yield from_warning


def _file_handler(path: Path) -> logging.Handler:
    try:
        return logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        problem = f"--log-file {path} cannot be opened: {error.strerror}"
        raise InvalidArgument(f"{problem}; name a file in a directory that exists and is writable") from error


def log_table(logger: logging.Logger, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Logs a table as Triton's start-up does (``Model | Version | Status``): raw, below an empty message."""
    logger.info("", extra={"table": format_table(columns, rows)}, stacklevel=2)


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with rules of ``-`` and ``+``, each row on one line, and an empty line at the end."""
    cells = [[_one_line(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "+" + "".join("-" * (width + 2) + "+" for width in widths)
    head, *body = [_table_row(row, widths) for row in cells]
    return "\n".join([rule, head, rule, *body, rule, ""])


def _table_row(row: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"| {cell:<{width}} " for cell, width in zip(row, widths, strict=True)) + "|"


def quoted(text: str) -> str:
    """``text`` as a JSON string without line breaks, control characters or anything that UTF-8 cannot encode."""
    return _escape_unprintable(json.dumps(text, ensure_ascii=False))


def _one_line(text: str) -> str:
    return _escape_unprintable(" ".join(text.split()))


def _escape_unprintable(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _letter(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "E"
    return "W" if record.levelno >= logging.WARNING else "I"


def _utc(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, tz=UTC)
