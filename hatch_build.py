"""Build hook: the protobuf modules of the gRPC services are generated, not committed (hatchling calls it)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCES = "src/rebind/grpc"
"""Where the ``.proto`` files lie, and what is generated from them."""


class ProtobufHook(BuildHookInterface[Any]):
    """Runs protoc for wheels and for editable installs; a source distribution has the ``.proto`` files only."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - part of the call
        """hatchling: before the files of a wheel are collected."""
        if self.target_name != "wheel":
            return
        for proto in sorted(Path(self.root, _SOURCES).glob("*.proto")):
            for output in _generate(proto):
                build_data["artifacts"].append(f"/{output.relative_to(self.root)}")


def _generate(proto: Path) -> list[Path]:
    """Writes ``x_pb2.py`` and ``x_pb2.pyi`` beside ``x.proto``."""
    outputs = [proto.with_name(f"{proto.stem}_pb2{suffix}") for suffix in (".py", ".pyi")]
    # Beside each other and renamed, as a process may import the modules while they are written again.
    draft = proto.with_name(f".{proto.stem}.{os.getpid()}")
    draft.mkdir()
    try:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"--proto_path={proto.parent}",
                f"--python_out={draft}",
                f"--pyi_out={draft}",
                proto.name,
            ],
            check=True,
        )
        for output in outputs:
            (draft / output.name).replace(output)
    finally:
        for rest in draft.iterdir():
            rest.unlink()
        draft.rmdir()
    return outputs
