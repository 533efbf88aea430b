"""Serving: versions, instances, refits, and the one data plane under all front ends."""
