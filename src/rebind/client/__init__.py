"""The client: changes the weights of models on a running server from a training program.

    client = WeightsClient("http://localhost:8000")
    client.push("policy", model, label="step-1200")

Needs numpy only; accepts torch's tensors and modules where torch is installed. Raises errors of :mod:`rebind.errors`.
"""

from __future__ import annotations

from rebind.client.asynchronous import AsyncStage, AsyncWeightsClient
from rebind.client.results import GenerationRecord, Pulled, SlotInfo, Update, WeightsInfo
from rebind.client.synchronous import Stage, WeightsClient

__all__ = [
    "AsyncStage",
    "AsyncWeightsClient",
    "GenerationRecord",
    "Pulled",
    "SlotInfo",
    "Stage",
    "Update",
    "WeightsClient",
    "WeightsInfo",
]
