"""Weights into a running server, out of a training program: push, stage, patch, roll back, wait, watch, pull.

    client = WeightsClient("http://localhost:8000")
    client.push("policy", model, label="step-1200")

Needs the standard library and numpy. Torch is touched only where torch tensors are passed, or asked for.
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
