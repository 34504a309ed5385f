"""Benchmarks: each runs as ``python -m benchmarks.NAME`` and ends with one JSON line of figures."""
