"""Measurements: `python -m bench` runs all, `python -m bench.NAME` one; results in bench/results/."""
