from __future__ import annotations

import json
import logging
import os
import re
from typing import TYPE_CHECKING

import pytest

from rebind.errors import InvalidArgument
from rebind.observability.logs import (
    Iso8601Formatter,
    LogFormat,
    LogSettings,
    TritonFormatter,
    configure,
    format_table,
    log_table,
    verbose_level,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CREATED = 1796052481.000123  # 2026-11-30 15:28:01.000123 UTC


def record(message: str, level: int = logging.INFO, *args: object) -> logging.LogRecord:
    made = logging.LogRecord("rebind.server", level, "/src/rebind/server.py", 45, message, args, None)
    made.created = CREATED
    made.process = 4711
    return made


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger `rebind`, put back as it was."""
    rebind = logging.getLogger("rebind")
    before = (rebind.handlers[:], rebind.level, rebind.propagate)
    yield logging.getLogger("rebind.server")
    for handler in rebind.handlers:
        handler.close()
    rebind.handlers, rebind.level, rebind.propagate = before
    rebind.setLevel(before[1])


@pytest.fixture
def utc_plus_nine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_default_format_is_triton_s_line(utc_plus_nine: None) -> None:
    line = TritonFormatter({}).format(record("successfully loaded '%s'", logging.INFO, "digits"))
    assert line == "I1130 15:28:01.000123 4711 server.py:45] \"successfully loaded 'digits'\""


def test_iso8601_format_is_triton_s_line(utc_plus_nine: None) -> None:
    line = Iso8601Formatter({}).format(record("hello", logging.WARNING))
    assert line == '2026-11-30T15:28:01Z W 4711 server.py:45] "hello"'


@pytest.mark.parametrize(
    ("level", "letter"),
    [
        (logging.CRITICAL, "E"),
        (logging.ERROR, "E"),
        (logging.WARNING, "W"),
        (logging.INFO, "I"),
        (logging.DEBUG, "I"),
        (verbose_level(3), "I"),
    ],
)
def test_letter_names_the_level(level: int, letter: str) -> None:
    assert TritonFormatter({}).format(record("x", level))[0] == letter


@pytest.mark.parametrize(
    "message",
    [
        'say "x"\nand\tleave',
        "\x1b[31mred\x7f",
        "line\u2028separator",
        "größer 模型",
        "undecodable \udc80 name",
        "back\\slash",
    ],
)
def test_message_is_one_line_of_json_that_reads_back(message: str) -> None:
    line = TritonFormatter({}).format(record("%s", logging.INFO, message))
    text = line.partition("] ")[2]
    assert json.loads(text) == message
    assert text.isprintable()
    assert text.encode()


def test_letters_of_other_languages_are_not_escaped() -> None:
    assert TritonFormatter({}).format(record("größer 模型")).endswith('"größer 模型"')


def test_escape_variable_zero_prints_the_message_as_it_is() -> None:
    line = TritonFormatter({"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"}).format(record('a "b"'))
    assert line.endswith('45] a "b"')


def test_traceback_stays_inside_the_quoted_message() -> None:
    failed = record("cannot load", logging.ERROR)
    try:
        raise ValueError("bad \u2028 bytes")
    except ValueError as error:
        failed.exc_info = (ValueError, error, error.__traceback__)
    line = TritonFormatter({}).format(failed)
    assert "\n" not in line
    text = json.loads(line.partition("] ")[2])
    assert text.startswith("cannot load\nTraceback")
    assert text.endswith("ValueError: bad \u2028 bytes")


def test_info_goes_to_stdout_and_warnings_and_errors_to_stderr(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogSettings())
    logger.info("one")
    logger.warning("two")
    logger.error("three")
    logger.debug("four")
    out, err = capsys.readouterr()
    assert [line.rpartition("] ")[2] for line in out.splitlines()] == ['"one"']
    assert [line.rpartition("] ")[2] for line in err.splitlines()] == ['"two"', '"three"']
    pattern = rf"I\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} test_logs\.py:\d+\] \"one\"\n"
    assert re.fullmatch(pattern, out)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (LogSettings(info=False), ["warning", "error"]),
        (LogSettings(warning=False), ["info", "error"]),
        (LogSettings(error=False), ["info", "warning"]),
        (LogSettings(verbose=1), ["verbose 1", "info", "warning", "error"]),
        (LogSettings(verbose=2), ["verbose 2", "verbose 1", "info", "warning", "error"]),
        (LogSettings(verbose=1, info=False), ["verbose 1", "warning", "error"]),
        (LogSettings(info=False, warning=False, error=False), []),
    ],
)
def test_switches_choose_what_is_written_to_the_file(
    logger: logging.Logger, tmp_path: Path, settings: LogSettings, shown: list[str]
) -> None:
    file = tmp_path / "server.log"
    configure(LogSettings(settings.verbose, settings.info, settings.warning, settings.error, settings.format, file))
    logger.log(verbose_level(2), "verbose 2")
    logger.log(verbose_level(1), "verbose 1")
    logger.info("info")
    logger.warning("warning")
    logger.error("error")
    assert [json.loads(line.partition("] ")[2]) for line in file.read_text().splitlines()] == shown


def test_log_file_is_appended_to_and_takes_everything(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.log"
    file.write_text("kept\n")
    configure(LogSettings(file=file, format=LogFormat.ISO8601))
    logger.error("größer \udc80")
    kept, line = file.read_text(encoding="utf-8").splitlines()
    assert kept == "kept"
    assert re.fullmatch(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ E \d+ test_logs\.py:\d+\] "größer \\udc80"', line)
    assert capsys.readouterr() == ("", "")


def test_configuring_again_replaces_the_former_settings(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.log"
    configure(LogSettings(file=file))
    configure(LogSettings())
    logger.info("once")
    assert file.read_text() == ""
    assert capsys.readouterr().out.count("once") == 1


def test_log_file_that_cannot_be_opened_is_refused_and_changes_nothing(
    logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogSettings())
    file = tmp_path / "no such directory" / "server.log"
    with pytest.raises(InvalidArgument, match=rf"--log-file {re.escape(str(file))} cannot be opened: No such file"):
        configure(LogSettings(file=file))
    logger.info("still here")
    assert "still here" in capsys.readouterr().out


def test_records_do_not_reach_the_root_logger(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    configure(LogSettings())
    logger.info("not twice")
    assert not caplog.records


TABLE = """\
+--------+---------+-------------------------------+
| Model  | Version | Status                        |
+--------+---------+-------------------------------+
| digits | 1       | READY                         |
| größe  | 12      | UNAVAILABLE: first \\u001b[31m |
+--------+---------+-------------------------------+
"""


def test_table_has_one_line_for_each_row_and_no_control_characters() -> None:
    rows = [("digits", "1", "READY"), ("größe", "12", "UNAVAILABLE: first\n  \x1b[31m")]
    assert format_table(("Model", "Version", "Status"), rows) == TABLE


def test_empty_table_has_its_head() -> None:
    assert format_table(("Backend", "Path"), []).splitlines() == [
        "+---------+------+",
        "| Backend | Path |",
        "+---------+------+",
        "+---------+------+",
    ]


def test_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        format_table(("Option", "Value"), [("server_id",)])


def test_logged_table_stands_raw_below_the_line_of_its_caller(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogSettings())
    log_table(logger, ("Option", "Value"), [("server_id", 'a"b')])
    head, *table = capsys.readouterr().out.split("\n")
    assert re.fullmatch(r"I.* test_logs\.py:\d+\] ", head)
    assert table == [
        "+-----------+-------+",
        "| Option    | Value |",
        "+-----------+-------+",
        '| server_id | a"b   |',
        "+-----------+-------+",
        "",
        "",
    ]
