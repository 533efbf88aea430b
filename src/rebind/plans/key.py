"""The plan key: a digest over everything that the generated code depends on.

Two processes that compute the same parts get the same key, in any run and on any machine; a part that differs gives
another key, so a plan is never run on a target that it was not built for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_LENGTH = 32
"""Hexadecimal digits of a plan key (128 bits)."""

_DOMAIN = b"rebind plan key 1\n"
_CPUINFO = Path("/proc/cpuinfo")
_FEATURE_LINE = re.compile(r"^(flags|Features)\s*:(.*)$", re.MULTILINE)
_CODE_FEATURES = {
    # Vector, matrix and bit-manipulation extensions, which compilers use without being asked ("-march=native").
    # x86:
    "flags": re.compile(r"sse|ssse|pni$|avx|amx|fma|f16c|bmi|abm$|popcnt|movbe|gfni|vaes|vpclmulqdq|apx"),
    # Arm:
    "Features": re.compile(r"neon|vfp|fp$|fphp|fcma|asimd|sve|sme|bf16|i8mm|atomics|jscvt|dotprod"),
}
"""What to keep of the line of that name in ``/proc/cpuinfo``; the kernel's spelling."""


def plan_key(parts: Mapping[str, str]) -> str:
    """The key of the plan that ``parts`` describe: :data:`KEY_LENGTH` lower-case hexadecimal digits.

    The order of ``parts`` is irrelevant. Names and values are hashed with their lengths, so no two mappings share a key
    by moving text between neighbours.
    """
    digest = blake3(_DOMAIN)
    for name in sorted(parts):
        for text in (name, parts[name]):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()[:KEY_LENGTH]


@functools.cache
def package_version(name: str) -> str:
    """The version of an installed package, e.g. ``torch``, as a part of a plan key. Looked up once in a process."""
    return importlib.metadata.version(name)


@functools.cache
def target_parts() -> Mapping[str, str]:
    """What generated code depends on in this machine, as parts of a plan key. Looked up once in a process.

    ``machine`` (``x86_64``), ``isa`` (see :func:`code_features`), ``libc`` (``glibc 2.36``). The kernel's version and
    the number, name and clock of the processors are left out: code does not depend on them.
    """
    cpuinfo = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    return {"machine": platform.machine(), "isa": " ".join(code_features(cpuinfo)), "libc": _libc()}


def code_features(cpuinfo: str) -> tuple[str, ...]:
    """The processor features in the text of ``/proc/cpuinfo`` that change generated code, sorted.

    Only those that every processor has: a thread may run on any of them.
    """
    processors = [
        {feature for feature in text.split() if _CODE_FEATURES[name].match(feature)}
        for name, text in _FEATURE_LINE.findall(cpuinfo)
    ]
    return tuple(sorted(set.intersection(*processors))) if processors else ()


def _libc() -> str:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):  # not glibc
        version = None
    return version or " ".join(platform.libc_ver()).strip() or "unknown"
