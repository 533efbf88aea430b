"""The TorchScript engine: ``model.pt`` files, whose modules get their weights set from outside.

A plan is the file's module without weights. Binding copies the tree of modules, which share their code, and sets every
weight of the copy to memory of the weight store, so that any number of weight sets serve side by side. Reading a file
that a child process has examined before needs no torch; ``torch`` is imported by the first plan.
"""

from __future__ import annotations

from rebind.engines.torchscript.engine import ENGINE

__all__ = ["ENGINE"]
