"""What the examples share: a model for the server, the server as a child process, a question with Triton's client."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from torch import nn

START_TIMEOUT_S = 60.0
STARTED = re.compile(r"Started HTTPService at (\S+:\d+)")


def export(module: nn.Module, example: torch.Tensor, path: Path, max_batch_size: int) -> None:
    """Writes the graph of a module with one input, and its weights of now, as version 1 of the model at ``path``.

    This is done once; from then on only weights change. Outputs are called by the keys of the dictionary that
    ``forward`` returns.
    """
    (path / "1").mkdir(parents=True)
    (path / "config.pbtxt").write_text(f"max_batch_size: {max_batch_size}\n")
    batch = torch.export.Dim("batch", min=1, max=max_batch_size)
    program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path / "1" / "model.pt2")


@contextmanager
def serving(repository: Path, *flags: str) -> Iterator[str]:
    """Runs ``rebind serve`` on a free port until the context is left; yields its ``host:port`` when it is ready.

    Raises ``RuntimeError`` with the server's log when it does not start.
    """
    command = [sys.executable, "-m", "rebind.cli", "serve", f"--model-repository={repository}", *flags]
    only_http = ["--http-address=127.0.0.1", "--http-port=0", "--allow-grpc=false", "--allow-metrics=false"]
    with tempfile.NamedTemporaryFile(prefix="rebind-", suffix=".log") as log:
        server = subprocess.Popen([*command, *only_http], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _address(server, Path(log.name))
        finally:
            server.terminate()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    # The port is opened when the models are loaded, so a server that listens is ready.
    deadline = time.monotonic() + START_TIMEOUT_S
    while (started := STARTED.search(log.read_text())) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return started[1]


def ask(
    client: triton.InferenceServerClient, model: str, tensor: npt.NDArray[Any], **parameters: int
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The model's outputs for its one input, and the parameters of the answer: which weights gave it."""
    # An input has this name unless config.pbtxt gives it another one. Tensors travel as bytes.
    given = triton.InferInput("INPUT__0", tensor.shape, np_to_triton_dtype(tensor.dtype))
    given.set_data_from_numpy(tensor)
    answer = client.infer(model, [given], parameters=parameters)
    response = answer.get_response()
    return {output["name"]: answer.as_numpy(output["name"]) for output in response["outputs"]}, response["parameters"]
