"""A process with a child that hangs; prints the child's reports: its number, then that of the process it started."""

from __future__ import annotations

from rebind.plans.build import run_child

from .builder import say

if __name__ == "__main__":
    run_child("tests.plans.children", {"do": "hang"}, say, timeout_s=1000)
