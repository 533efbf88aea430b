"""Work in a child process, which may crash, hang or eat memory without harm to the server: compiles, untrusted files.

The parent calls :func:`run_child`; the module that it names calls :func:`serve_child` as its ``__main__``. Between
them:

* the child's stdin is the request, one JSON value;
* a pipe of its own carries the child's JSON lines: ``{"report": text}`` any number of times, then ``{"result": {...}}``
  or ``{"error": {"kind": ..., "message": ...}}``. After that line the child is of no interest and is killed, so a crash
  in the exit handlers of some library spoils nothing;
* stdout and stderr are for whatever compilers print; the end of it goes into the errors.

The child leads a process group, which is killed whole in every case; if the parent dies, the kernel kills the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from rebind.errors import Cancelled, Internal

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

_TAIL_BYTES = 2048
_POLL_S = 0.05
"""How often ``cancelled`` is looked at; everything else is an event."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildFailed(Internal):
    """A child process gave no result. ``output_tail`` is the end of what it printed, at most 2 KiB."""

    def __init__(self, message: str, output_tail: str = "") -> None:
        super().__init__(f"{message}; it last printed: {output_tail}" if output_tail else message)
        self.output_tail = output_tail


class ChildError(ChildFailed):
    """The child's handler raised: ``kind`` is the class name of what it raised, ``message`` its text."""

    def __init__(self, module: str, kind: str, message: str, output_tail: str) -> None:
        super().__init__(f"{module}: {kind}: {message}")
        self.kind = kind
        self.message = message
        self.output_tail = output_tail


class ChildDied(ChildFailed):
    """The child ended without an answer. ``exit_status`` is its exit code, or the negative number of the signal."""

    def __init__(self, module: str, exit_status: int, output_tail: str) -> None:
        super().__init__(f"{module}: the process {_ending(exit_status)} before it had answered", output_tail)
        self.exit_status = exit_status


class ChildTimeout(ChildFailed):
    """The child gave no answer within ``timeout_s``."""

    def __init__(self, module: str, timeout_s: float, output_tail: str) -> None:
        super().__init__(f"{module}: no answer within {timeout_s:g} s; the process was killed", output_tail)
        self.timeout_s = timeout_s


def run_child(
    module: str,
    request: Mapping[str, Any],
    report: Callable[[str], None],
    *,
    timeout_s: float,
    memory_limit_bytes: int | None = None,
    nice: int = 0,
    cancelled: threading.Event | None = None,
) -> dict[str, Any]:
    """Runs ``python -m module`` on ``request`` and returns its result; blocks until then.

    ``request`` and the result are JSON with text keys. ``report`` gets the child's progress lines, in this thread.
    ``memory_limit_bytes`` limits the address space of the child, and of each process that it starts; ``nice`` is added
    to the niceness of this thread. The child sees the modules that an installed ``rebind`` sees, not those of the
    working directory.

    Raises :class:`ChildError`, :class:`ChildDied` or :class:`ChildTimeout` for the three ways to fail (the caller words
    them), plain :class:`ChildFailed` if no process could be started, and :class:`rebind.errors.Cancelled` soon after
    ``cancelled`` is set. In every case, whatever ``report`` raises included, the child's process group is dead then.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            child = _Child(stack, module, request, report)
            _restrict(child.process.pid, memory_limit_bytes, nice)
        except OSError as error:
            raise ChildFailed(f"{module}: cannot start a process: {error}") from error
        while not child.over:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ChildTimeout(module, timeout_s, child.output_tail)
            if cancelled is not None and cancelled.is_set():
                raise Cancelled(f"{module}: the process was ended because its result is no longer wanted")
            child.listen(remaining_s if cancelled is None else min(remaining_s, _POLL_S))
    return child.result()


def serve_child(handler: Callable[[dict[str, Any], Callable[[str], None]], dict[str, Any]]) -> None:
    """The child's side of :func:`run_child`: answers the one request with ``handler(request, report)`` and returns.

    To be called as the module's ``__main__``, before anything slow: from here on the process dies with the thread that
    started it. What ``handler`` raises is sent as its class name and text; its traceback goes to stderr.
    """
    answers, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    os.set_inheritable(answers, False)
    with os.fdopen(answers, "w", encoding="utf-8") as channel:

        def send(line: str) -> None:
            print(line, file=channel, flush=True)

        try:
            result = handler(json.load(sys.stdin), lambda text: send(json.dumps({"report": text})))
            answer = json.dumps({"result": result})
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            traceback.print_exc()
            answer = json.dumps({"error": {"kind": type(error).__name__, "message": str(error) or repr(error)}})
        send(answer)


class _Child:
    """A running child and what it has said so far. ``stack`` ends it, and closes what belongs to it."""

    def __init__(
        self, stack: contextlib.ExitStack, module: str, request: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        self._module = module
        self._report = report
        with contextlib.ExitStack() as theirs:
            self._answers, answers = _pipe(stack, theirs)
            self._printed, printed = _pipe(stack, theirs)
            self.process = _spawn(module, request, answers, printed)
        stack.callback(_end, self.process)
        self._exit = os.pidfd_open(self.process.pid)
        stack.callback(os.close, self._exit)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        for fd in (self._answers, self._printed, self._exit):
            self._selector.register(fd, selectors.EVENT_READ)
        self._output = b""
        self._line = b""
        """The part of an answer's line that has arrived."""
        self._answer: dict[str, Any] | None = None
        self._exited = False

    @property
    def over(self) -> bool:
        """The child has answered, or never will."""
        return self._exited or self._answer is not None

    @property
    def output_tail(self) -> str:
        return self._output.decode(errors="replace").strip()

    def listen(self, timeout_s: float) -> None:
        """Waits for the child to say or do something, and takes note of it."""
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        self._take(self._read(self._answers))
        # After the answers, so that what was printed before the last one is seen.
        self._output = (self._output + self._read(self._printed))[-_TAIL_BYTES:]
        self._exited = self._exit in ready

    def result(self) -> dict[str, Any]:
        """The result, or the failure, of a child that is over and has been ended."""
        if self._answer is None:
            raise ChildDied(self._module, self.process.returncode, self.output_tail)
        if "error" in self._answer:
            error = self._answer["error"]
            raise ChildError(self._module, error["kind"], error["message"], self.output_tail)
        result: dict[str, Any] = self._answer["result"]
        return result

    def _take(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise ChildFailed(f"{self._module}: sent no JSON but {line[:80]!r}", self.output_tail) from error
            if "report" in message:
                self._report(message["report"])
            else:
                self._answer = message

    def _read(self, fd: int) -> bytes:
        """What is there now, up to more than a pipe holds: after the child's exit, one call gets the rest."""
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return b""
        if not data and fd in self._selector.get_map():
            self._selector.unregister(fd)
        return data


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed by these stacks; reading our end does not block."""
    read, write = os.pipe()
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    os.set_blocking(read, False)
    return read, write


def _spawn(module: str, request: Mapping[str, Any], answers: int, printed: int) -> subprocess.Popen[bytes]:
    # The request is a file, not a pipe: nobody has to wait until the child reads it.
    with os.fdopen(os.memfd_create("request"), "w+b") as stdin:
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(answers), str(os.getpid())],
            stdin=stdin,
            stdout=printed,
            stderr=subprocess.STDOUT,
            pass_fds=(answers,),
            # Not a new session: the kernel's autogrouping would make `nice` worthless against the server.
            process_group=0,
            # Compilers report a full disk in the words that the plan cache knows.
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )


def _restrict(pid: int, memory_limit_bytes: int | None, nice: int) -> None:
    """From outside, since code between fork and exec is not safe in a process with threads."""
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here, not worth a file
    if memory_limit_bytes is not None:
        resource.prlimit(pid, resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group, and reaps its leader only then: until that, nobody else can have its number."""
    with process:
        os.killpg(process.pid, signal.SIGKILL)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _ending(exit_status: int) -> str:
    if exit_status >= 0:
        return f"ended with exit code {exit_status}"
    return f"was killed by signal {-exit_status} ({signal.strsignal(-exit_status)})"
