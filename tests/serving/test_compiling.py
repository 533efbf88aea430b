from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rebind.serving.compiling import BackgroundCompiler

if TYPE_CHECKING:
    from rebind.serving.version import ModelVersion


@dataclass(frozen=True)
class Bound:
    weights: str


class Buildable:
    """What of a version the compiler deals with; its build takes until ``may_finish`` is set."""

    def __init__(self) -> None:
        self.name, self.number = "model", 1
        self.may_finish = threading.Event()
        self.graph = SimpleNamespace(build_plan=self._build)
        bound = Bound("weights")
        self.generation = SimpleNamespace(bounds=(bound, bound))
        self.promoted_to: object = None

    def promote(self, _plan: object, bounds: object, expected: object) -> bool:
        assert expected is self.generation
        self.promoted_to = bounds
        return True

    def _build(self, _report: object) -> Any:
        assert self.may_finish.wait(30)
        return SimpleNamespace(key="key", bind=lambda weights: f"plan with {weights}")


def test_version_moves_to_its_plan_while_the_plan_of_another_is_being_built() -> None:
    async def run() -> None:
        compiler = BackgroundCompiler()
        first, second = Buildable(), Buildable()
        builds = [asyncio.create_task(compiler.promote(cast("ModelVersion", version))) for version in (first, second)]
        first.may_finish.set()
        try:
            await asyncio.wait_for(builds[0], 30)
            assert first.promoted_to == ("plan with weights", "plan with weights")
            assert not builds[1].done()
        finally:
            second.may_finish.set()
        await builds[1]

    asyncio.run(run())
