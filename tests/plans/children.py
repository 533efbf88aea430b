"""The child's side of test_build: ``request["do"]`` names what happens in the child."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from rebind.errors import Fault, ModelInvalid
from rebind.plans.build import serve_child

from .builder import say

if TYPE_CHECKING:
    from collections.abc import Callable

    Report = Callable[[str], None]


def echo(request: dict[str, Any], report: Report) -> dict[str, Any]:
    report("first")
    report("second ☃")
    return {"echoed": request["value"]}


def raise_model_invalid(request: dict[str, Any], report: Report) -> dict[str, Any]:
    raise ModelInvalid("model.pt2", [Fault("archive", "is not a zip file")])


def raise_without_text(request: dict[str, Any], report: Report) -> dict[str, Any]:
    raise KeyError


def return_no_json(request: dict[str, Any], report: Report) -> dict[str, Any]:
    return {"value": object()}


def segfault(request: dict[str, Any], report: Report) -> dict[str, Any]:
    say("about to crash")
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def exit_silently(request: dict[str, Any], report: Report) -> dict[str, Any]:
    sys.exit(3)


def crash_after_answer(request: dict[str, Any], report: Report) -> dict[str, Any]:
    atexit.register(os.abort)
    return {"fine": True}


def print_garbage(request: dict[str, Any], report: Report) -> dict[str, Any]:
    say('{"result": {"forged": true}}')
    os.write(1, b"\xff\xfe not text\n")
    subprocess.run(["echo", "a compiler's opinion"], check=True)
    return {"fine": True}


def print_much_and_die(request: dict[str, Any], report: Report) -> dict[str, Any]:
    for number in range(20_000):
        say(f"line {number}")
    say("the last words")
    os._exit(1)


def send_garbage(request: dict[str, Any], report: Report) -> dict[str, Any]:
    os.write(int(sys.argv[1]), b"no json\n")
    signal.pause()
    return {}


def answer_at_length(request: dict[str, Any], report: Report) -> dict[str, Any]:
    return {"text": "x" * request["length"]}


def hang(request: dict[str, Any], report: Report) -> dict[str, Any]:
    report(str(os.getpid()))
    report(str(subprocess.Popen(["sleep", "1000"]).pid))
    signal.pause()
    return {}


def allocate(request: dict[str, Any], report: Report) -> dict[str, Any]:
    return {"length": len(bytearray(request["nbytes"]))}


def describe_process(request: dict[str, Any], report: Report) -> dict[str, Any]:
    return {
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "address_space": resource.getrlimit(resource.RLIMIT_AS),
        "leads_group": os.getpgid(0) == os.getpid(),
        "path": sys.path,
    }


def handle(request: dict[str, Any], report: Report) -> dict[str, Any]:
    answer: dict[str, Any] = globals()[request["do"]](request, report)
    return answer


if __name__ == "__main__":
    serve_child(handle)
