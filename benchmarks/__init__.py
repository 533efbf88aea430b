"""Measurements of what Rebind promises, each a module to run: ``python -m benchmarks.refit``."""
