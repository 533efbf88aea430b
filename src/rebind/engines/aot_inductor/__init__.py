"""The AOTInductor engine: torch.export archives, compiled to plans that take their weights as arguments.

A plan is the flat graph ``f(weights, inputs) -> outputs`` of the archive, so binding other weights is the choice of
another list of pointers. Reading an archive needs no torch; ``torch`` is imported by the first plan.
"""

from __future__ import annotations

from rebind.engines.aot_inductor.engine import ENGINE

__all__ = ["ENGINE"]
