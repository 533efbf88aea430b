"""Clients that never stop asking."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from tests.server import PATIENCE_S, Answer, Client, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.life.models import Inputs


class Traffic:
    """Threads that ask one model for one thing after another while the context lasts, and keep what they get.

    ``answers`` are pairs of a position in ``requests`` and the answer; ``failures`` is everything else that happened.
    """

    def __init__(
        self,
        server: ServerProcess,
        model: str,
        requests: Sequence[Inputs],
        *,
        threads: int = 3,
        version: int | None = None,
    ) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self.failures: list[Exception] = []
        self._server = server
        self._model = model
        self._requests = requests
        self._version = version
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._ask, args=(first,)) for first in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_for(len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Returns after that many further answers, or at a failure."""
        with self._changed:
            target = len(self.answers) + more
            assert self._changed.wait_for(lambda: len(self.answers) >= target or self.failures, PATIENCE_S)

    def _ask(self, position: int) -> None:
        with Client(self._server.port) as client:
            while not self._stopping:
                position = (position + 1) % len(self._requests)
                try:
                    answer = client.infer(self._model, self._requests[position], self._version)
                except Exception as error:  # noqa: BLE001 - the test says that there are none
                    self._keep(error)
                    return
                self._keep((position, answer))

    def _keep(self, result: tuple[int, Answer] | Exception) -> None:
        with self._changed:
            if isinstance(result, Exception):
                self.failures.append(result)
            else:
                self.answers.append(result)
            self._changed.notify_all()
