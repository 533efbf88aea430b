"""Rebind: an inference server in which a model's compiled plan and its weights are separate things."""

from __future__ import annotations

__version__ = "0.1.0"
