"""Flags of Triton's that are not there yet (spec 05 section 5, spec 02 section 7)."""

from __future__ import annotations

from typing import Any

import typer

from rebind.cli.switch import SwitchCommand

_ABSENT = (
    "--allow-client-shm",
    "--allow-cpu-metrics",
    "--allow-gpu-metrics",
    "--allow-sagemaker",
    "--allow-vertex-ai",
    "--backend-directory",
    "--buffer-manager-thread-count",
    "--cache-directory",
    "--cuda-memory-pool-byte-size",
    "--cuda-virtual-address-size",
    "--enable-peer-access",
    "--grpc-",
    "--host-policy",
    "--http-header-forward-pattern",
    "--http-restricted-api",
    "--http-thread-count",
    "--metrics-",
    "--min-supported-compute-capability",
    "--model-config-name",
    "--model-load-gpu-limit",
    "--model-load-retry-count",
    "--model-namespacing",
    "--pinned-memory-pool-byte-size",
    "--rate-limit",
    "--repoagent-directory",
    "--response-cache-byte-size",
    "--reuse-grpc-port",
    "--reuse-http-port",
    "--sagemaker-",
    "--strict-model-config",
    "--trace-",
    "--vertex-ai-",
)
"""Beginnings of their names; a flag that is there wins over one."""


class AbsentFlag(typer.TyperException):
    """A flag of Triton's that is not there yet; wrong usage, as an unknown flag is."""

    exit_code = 2


class ServeCommand(SwitchCommand):
    """A command with Triton's flags, that knows those of them which it lacks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses the flags that are not there yet, since near matches of theirs would mislead; goes on as usual."""
        there = {name for parameter in self.params for name in parameter.opts}
        for argument in args:
            name = argument.partition("=")[0]
            if name.startswith(_ABSENT) and name not in there:
                raise AbsentFlag(
                    f"{name} is a flag of Triton's for a part that is not there yet in rebind; leave it out"
                )
        return super().parse_args(ctx, args)
