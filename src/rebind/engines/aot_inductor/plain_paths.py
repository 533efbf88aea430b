"""Paths that may stand in a compiler's command line as they are.

torch (2.13) puts the directories of its libraries, and of its cache, unquoted into the commands that it then splits at
white space: with a space in one of them, no plan is ever linked. Here such a directory gets a second name.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path


def plain_path(path: str) -> str:
    """``path`` itself if a shell takes it as one word, else another name of the file or directory, which is there.

    That name is good in this process and in those that it starts, until this one ends: it is that of a file descriptor
    which stays open, so there is nothing to clean up, even if we are killed.
    """
    if shlex.quote(path) == path:
        return path
    return f"/proc/{os.getpid()}/fd/{os.open(path, os.O_PATH | os.O_CLOEXEC)}"


def import_from_plain_paths() -> None:
    """What is imported from now on has a plain path in its ``__file__``."""
    sys.path[:] = [plain_path(entry) if entry and Path(entry).is_dir() else entry for entry in sys.path]
