"""README's "Serve a model of your own", run as it is written, but for the port."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SECTION = (
    (ROOT / "README.md").read_text(encoding="utf-8").partition("## Serve a model of your own")[2].partition("\n## ")[0]
)
SCRIPTS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", SECTION, re.DOTALL))
EXPORT_AND_SERVE, TRAIN_AND_PUBLISH = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)


class Reader:
    """Someone who types what README says, in an empty directory."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._directory = directory
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(directory / "cache"),
        }
        for name, text in SCRIPTS.items():
            (directory / name).write_text(self._on_port(text), encoding="utf-8")

    def types(self, line: str) -> str:
        """Runs a line to its end and returns what it prints."""
        return subprocess.run(
            line,
            shell=True,
            cwd=self._directory,
            env=self._environment,
            check=True,
            timeout=60,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    @contextmanager
    def serving(self, line: str) -> Iterator[None]:
        """Keeps a line running that starts a server, from when it is ready."""
        command = [*line.split(), "--http-port", str(self._port), "--compile", "never"]
        command += ["--grpc-port", "0", "--metrics-port", "0"]
        with subprocess.Popen(command, cwd=self._directory, env=self._environment) as server:
            try:
                self._await_ready(server)
                yield
            finally:
                server.terminate()
            assert server.wait(30) == 0

    def asks_until(self, line: str, pattern: str) -> str:
        """Asks until the answer matches, as one does who waits for new weights; pytest's timeout ends a vain wait."""
        while not re.search(pattern, answer := self.types(line)):
            pass
        return answer

    def _await_ready(self, server: subprocess.Popen[bytes]) -> None:
        while server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v2/health/ready") as reply:
                    assert reply.status == 200
                    return
            except urllib.error.URLError:
                time.sleep(0.05)  # the port is not open before the models are loaded
        pytest.fail("the server ended before it was ready")

    def _on_port(self, text: str) -> str:
        assert text.count("localhost:8000") <= 1
        return text.replace("localhost:8000", f"localhost:{self._port}")


@pytest.mark.timeout(180)
def test_readme_serves_a_model_and_its_next_weights(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    export, serve = EXPORT_AND_SERVE.strip().splitlines()
    train, publish, ask = TRAIN_AND_PUBLISH.strip().splitlines()
    reader.types(export)
    with reader.serving(serve):
        first = reader.types(ask)
        assert "'weights_generation': 1}" in first
        reader.types(train)
        reader.types(publish)
        second = reader.asks_until(ask, "'weights_generation': 2")
        assert "'weights_label': 'step-1200'" in second
        assert first.partition("{")[0] != second.partition("{")[0], "new weights give another answer"
