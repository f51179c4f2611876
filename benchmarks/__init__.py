"""Measurements, each a command: `python -m benchmarks.NAME`. Ratios are of one run; nothing here is a test."""
