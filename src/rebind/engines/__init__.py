"""Engines: what compiles and runs plans.

* :mod:`rebind.engines.contract`: what an engine, a graph, a plan and a bound plan are;
* :mod:`rebind.engines.registry`: which engines there are, and which one a model is for;
* one package or module for each engine.
"""
