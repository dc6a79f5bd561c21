"""Benchmarks: `pytest bench` measures, `python -m bench.report` writes the README's tables. See
bench/NOTES.md."""
