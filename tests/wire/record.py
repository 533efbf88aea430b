"""Records what the real tritonserver answers; nothing in the test run needs it.

`python -m tests.wire.record repository DIR` writes the models for its Python backend. Start the server of the wheel
`nvidia-pytriton==0.7.0` on them, with `--model-control-mode=explicit --load-model=*`; then
`python -m tests.wire.record answers PORT` asks it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.http.wire import Client
from tests.wire.models import ECHOES
from tests.wire.requests import ASKS, put

RECORD = Path(__file__).with_name("triton_2_51.json")

_MODEL = """\
import json

import triton_python_backend_utils as backend


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.pairs = [(i["name"], o["name"]) for i, o in zip(config["input"], config["output"])]

    def execute(self, requests):
        return [backend.InferenceResponse([self.echo(request, *pair) for pair in self.pairs]) for request in requests]

    def echo(self, request, input, output):
        return backend.Tensor(output, backend.get_input_tensor_by_name(request, input).as_numpy().copy())
"""


def write_python_repository(directory: Path) -> None:
    for name, model in ECHOES.items():
        version = directory / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL)
        (directory / name / "config.pbtxt").write_text(f'backend: "python"\n{model.config}')


def record(port: int) -> None:
    answers = {}
    for ask in ASKS:
        with Client(port) as client:
            answers[ask.name] = asdict(put(client, ask))
    RECORD.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["repository", directory]:
            write_python_repository(Path(directory))
        case ["answers", port]:
            record(int(port))
        case _:
            raise SystemExit(__doc__)
