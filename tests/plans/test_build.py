from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rebind.errors import Cancelled, Internal
from rebind.plans.build import ChildDied, ChildError, ChildFailed, ChildTimeout, run_child

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "tests.plans.children"


def ignore(line: str) -> None:
    """A report that nobody reads."""


def run(
    do: str, report: Callable[[str], None] = ignore, *, timeout_s: float = 30, limits: Any = None, **request: Any
) -> dict[str, Any]:
    return run_child(MODULE, {"do": do, **request}, report, timeout_s=timeout_s, **(limits or {}))


def is_dead(pidfd: int) -> bool:
    """Waits for the process of ``pidfd`` to end; a process that lives on fails the test instead of hanging it."""
    ended, _, _ = select.select([pidfd], [], [], 10)
    os.close(pidfd)
    return bool(ended)


def open_descriptors() -> set[str]:
    """What this process has open, by number (the one that reads the directory excluded)."""
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_result_and_reports_arrive_in_order() -> None:
    lines: list[str] = []
    assert run("echo", lines.append, value={"n": [1, 2.5, None, "ü"]}) == {"echoed": {"n": [1, 2.5, None, "ü"]}}
    assert lines == ["first", "second ☃"]


def test_request_larger_than_a_pipe_reaches_the_child() -> None:
    value = "x" * 1_000_000
    assert run("echo", value=value) == {"echoed": value}


def test_result_larger_than_a_pipe_reaches_the_parent() -> None:
    assert run("answer_at_length", length=3_000_000) == {"text": "x" * 3_000_000}


def test_what_the_handler_raises_keeps_its_class_name_and_text() -> None:
    with pytest.raises(ChildError) as caught:
        run("raise_model_invalid")
    assert caught.value.kind == "ModelInvalid"
    assert caught.value.message == "model.pt2: archive: is not a zip file"
    assert "raise_model_invalid" in caught.value.output_tail  # the traceback
    assert isinstance(caught.value, Internal)


def test_error_without_text_still_says_what_it_was() -> None:
    with pytest.raises(ChildError) as caught:
        run("raise_without_text")
    assert (caught.value.kind, caught.value.message) == ("KeyError", "KeyError()")


def test_result_that_is_no_json_is_the_childs_error() -> None:
    with pytest.raises(ChildError, match="not JSON serializable"):
        run("return_no_json")


def test_crash_names_the_signal_and_the_last_output() -> None:
    with pytest.raises(ChildDied, match=r"signal 11 \(Segmentation fault\).*about to crash") as caught:
        run("segfault")
    assert caught.value.exit_status == -signal.SIGSEGV
    assert caught.value.output_tail == "about to crash"


def test_exit_without_an_answer_is_an_error() -> None:
    with pytest.raises(ChildDied, match="exit code 3") as caught:
        run("exit_silently")
    assert caught.value.exit_status == 3


def test_unknown_module_is_an_error_that_names_it() -> None:
    with pytest.raises(ChildDied, match=r"No module named .*absent_module"):
        run_child("absent_module", {}, ignore, timeout_s=30)


def test_crash_after_the_answer_does_not_spoil_it() -> None:
    assert run("crash_after_answer") == {"fine": True}


def test_garbage_on_stdout_is_not_taken_for_an_answer() -> None:
    assert run("print_garbage") == {"fine": True}


def test_much_output_is_drained_and_its_end_kept() -> None:
    with pytest.raises(ChildDied) as caught:
        run("print_much_and_die")
    assert caught.value.output_tail.endswith("line 19999\nthe last words")
    assert len(caught.value.output_tail) <= 2048


def test_garbage_in_place_of_an_answer_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="sent no JSON but b'no json'"):
        run("send_garbage")


def test_timeout_ends_a_child_that_hangs() -> None:
    with pytest.raises(ChildTimeout, match=r"no answer within 0\.5 s") as caught:
        run("hang", timeout_s=0.5)
    assert caught.value.timeout_s == 0.5


def test_cancel_kills_the_child_and_what_it_started() -> None:
    cancelled = threading.Event()
    pidfds: list[int] = []

    def watch(line: str) -> None:
        pidfds.append(os.pidfd_open(int(line)))
        if len(pidfds) == 2:
            cancelled.set()

    with pytest.raises(Cancelled):
        run("hang", watch, limits={"cancelled": cancelled})
    assert [is_dead(pidfd) for pidfd in pidfds] == [True, True]


def test_cancel_from_another_thread_ends_a_running_child() -> None:
    cancelled, started = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def work() -> None:
        try:
            run("hang", lambda line: started.set(), limits={"cancelled": cancelled})
        except Cancelled as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    cancelled.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(caught) == 1


def test_report_that_raises_ends_the_child() -> None:
    pidfds: list[int] = []

    def fail(line: str) -> None:
        pidfds.append(os.pidfd_open(int(line)))
        raise LookupError(line)

    with pytest.raises(LookupError):
        run("hang", fail)
    assert is_dead(pidfds[0])


def test_death_of_the_parent_kills_the_child() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.plans.hanging_parent"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child, grandchild = int(parent.stdout.readline()), int(parent.stdout.readline())
        pidfd = os.pidfd_open(child)
        parent.kill()
        assert is_dead(pidfd)
    os.kill(grandchild, signal.SIGKILL)  # only the child itself is bound to the parent's life


def test_child_of_a_parent_that_is_gone_does_not_start() -> None:
    read, write = os.pipe()
    not_my_parent = 1 if os.getpid() != 1 else 2
    child = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, str(write), str(not_my_parent)],
        input=b'{"do": "echo", "value": 1}',
        pass_fds=(write,),
        check=False,
    )
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)
    assert child.returncode == 1


def test_memory_limit_stops_the_child_alone() -> None:
    limits = {"memory_limit_bytes": 1 << 30}
    with pytest.raises(ChildError) as caught:
        run("allocate", nbytes=2 << 30, limits=limits)
    assert caught.value.kind == "MemoryError"
    assert run("allocate", nbytes=1 << 20, limits=limits) == {"length": 1 << 20}


def test_child_is_nice_limited_and_in_a_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = run("describe_process", limits={"nice": 7, "memory_limit_bytes": 1 << 32})
    assert process["niceness"] == os.getpriority(os.PRIO_PROCESS, 0) + 7
    assert process["core"] == [0, 0]
    assert process["address_space"] == [1 << 32, 1 << 32]
    assert process["leads_group"]
    assert not {"", str(tmp_path)} & set(process["path"])


def test_no_file_descriptor_is_left_behind() -> None:
    before = open_descriptors()
    run("echo", value=1)
    for do in ("segfault", "raise_model_invalid", "send_garbage"):
        with pytest.raises(ChildFailed):
            run(do)
    assert open_descriptors() == before
