from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from benchmarks import models

if TYPE_CHECKING:
    from benchmarks.harness import Prepared


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    """The stack of 10 MB as TorchScript and as an archive, with two weights files."""
    directory, parameters = tmp_path_factory.mktemp("benchmark"), {"DISABLE_CUDNN": "true"}
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch.jit.script
        return models.write("stack_10mb", directory, ("torchscript", "archive"), weight_sets=2, parameters=parameters)
