"""The error tree: every failure that a client or an operator can see.

    RebindError            UNKNOWN
    ├── Internal           INTERNAL
    │   ├── CompileForbidden   a plan had to be built while REBIND_FORBID_COMPILE=1
    │   ├── CompileFailed      the compiler ran and gave no trustworthy plan
    │   └── StorageFailed      the disk or memory did not take what had to be stored
    │       └── MemoryExceeded     weights do not fit into memory
    ├── NotFound           NOT_FOUND
    ├── InvalidArgument    INVALID_ARG
    │   ├── InputRefused       one of a graph's inputs
    │   ├── DigestMismatch     a change was meant for other weights than those that serve
    │   └── Faulty             several faults of one subject, reported together
    │       ├── ConfigInvalid      config.pbtxt
    │       ├── RepositoryInvalid  the files of a model directory
    │       ├── ModelInvalid       a plan source (model.pt2, ...)
    │       └── WeightsRefused     a weights file or push
    ├── Unavailable        UNAVAILABLE
    │   ├── Conflict           not while something else goes on
    │   ├── WaitTimeout        what was waited for did not come in time
    │   └── WeightsPending     a version that has no weights yet
    ├── Unsupported        UNSUPPORTED
    ├── AlreadyExists      ALREADY_EXISTS
    └── Cancelled          CANCELLED

The codes are Triton's (``TRITONSERVER_Error_Code``); each front end owns one table that maps them to its statuses.
Errors of engines and libraries are translated into this tree at the border of the module that calls them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Code(enum.Enum):
    """Triton's error codes; the value is how Triton spells the code in front of a message."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class RebindError(Exception):
    """Base of all errors that carry a code; ``str(error)`` is the message for people."""

    code: ClassVar[Code] = Code.UNKNOWN

    @property
    def status_text(self) -> str:
        """The message with its code in front, as Triton prints a status (``Invalid argument: ...``)."""
        return f"{self.code.value}: {self}"


class Internal(RebindError):
    """A failure inside the server or a model."""

    code = Code.INTERNAL


class CompileForbidden(Internal):
    """A plan would have to be built, but ``REBIND_FORBID_COMPILE=1`` is set."""


class CompileFailed(Internal):
    """The compiler failed, or its plan did not agree with eager execution."""


class StorageFailed(Internal):
    """A disk or a memory limit did not take what had to be stored."""


class MemoryExceeded(StorageFailed):
    """Weights need ``needed_bytes`` where ``free_bytes`` are: of the server's limit, or (None) of the machine's."""

    def __init__(self, needed_bytes: int, free_bytes: int, limit_bytes: int | None = None) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.limit_bytes = limit_bytes
        of = "" if limit_bytes is None else f" of the limit of {limit_bytes} bytes (--weights-memory-limit)"
        super().__init__(f"the weights need {needed_bytes} bytes of memory, {free_bytes} are available{of}")


class NotFound(RebindError):
    """What the request names does not exist."""

    code = Code.NOT_FOUND


class InvalidArgument(RebindError):
    """The request, file or flag is wrong; the message says what, where, and what to do."""

    code = Code.INVALID_ARG


class InputRefused(InvalidArgument):
    """Input number ``position`` of a graph does not fit it. ``name`` is the graph's: who knows another rewords it."""

    def __init__(self, position: int, name: str, problem: str) -> None:
        self.position = position
        self.problem = problem
        super().__init__(f"input '{name}': {problem}")


class DigestMismatch(InvalidArgument):
    """A conditional change of weights (``If-Match``) found others serving: ``digest``."""

    def __init__(self, subject: str, expected: str, digest: str) -> None:
        self.digest = digest
        super().__init__(f"{subject}: the weights that serve have the digest '{digest}', not '{expected}'")


class Unavailable(RebindError):
    """It exists but cannot be used now."""

    code = Code.UNAVAILABLE


class Conflict(Unavailable):
    """What is asked for collides with something that goes on, or has gone on meanwhile."""


class WaitTimeout(Unavailable):
    """What the client waited for did not come in the time that it gave."""


class WeightsPending(Unavailable):
    """A version without weights: it answers after the first push."""

    def __init__(self, model: str, version: int) -> None:
        super().__init__(
            f"model '{model}' version {version} is not at ready state: WEIGHTS_PENDING (it has no weights, push some)"
        )


class Unsupported(RebindError):
    """It is well-formed, but this server (or this build of it) does not do it."""

    code = Code.UNSUPPORTED


class AlreadyExists(RebindError):
    """What is to be created is there already."""

    code = Code.ALREADY_EXISTS


class Cancelled(RebindError):
    """The client or the server gave the request up."""

    code = Code.CANCELLED


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: where it is, what is wrong, and what to do about it (may be empty)."""

    where: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}; {self.remedy}" if self.remedy else text


class Faulty(InvalidArgument):
    """Everything that is wrong with one subject, in one report.

    ``subject`` names the thing (a path, a model); ``faults`` has at least one entry.
    """

    def __init__(self, subject: str, faults: Sequence[Fault]) -> None:
        self.subject = subject
        self.faults = tuple(faults)
        lines = [str(fault) for fault in self.faults]
        if len(lines) == 1:
            super().__init__(f"{subject}: {lines[0]}")
        else:
            super().__init__(f"{subject}: {len(lines)} faults: " + " | ".join(lines))


def as_rebind_error(error: BaseException) -> RebindError:
    """``error`` itself if it is of this tree; else a defect, as :class:`Internal` with the name of its class."""
    return error if isinstance(error, RebindError) else Internal(f"{type(error).__name__}: {error}")


Error = TypeVar("Error", bound=BaseException)


def without_frames(error: Error) -> Error:
    """``error`` itself, after it and those behind it have let go of the frames that they came through.

    A traceback keeps all that was local there, such as weights of gigabytes, for as long as anybody keeps the error;
    and where a future or a task was local that has the error, that is until a garbage collection.
    """
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        link.__traceback__ = None
        links.append(link)
        link = link.__cause__ or link.__context__
    return error


class ConfigInvalid(Faulty):
    """A model configuration that cannot be used."""


class RepositoryInvalid(Faulty):
    """Files of a model directory that contradict each other or the layout rules."""


class ModelInvalid(Faulty):
    """A plan source that cannot be read, or that its engine cannot serve."""


class WeightsRefused(Faulty):
    """Weights that do not fit the slots of a plan, or a weights file that is damaged."""
