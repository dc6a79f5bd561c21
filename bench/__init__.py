"""Benchmarks: `pytest bench` measures, `python -m grouped_lora_ops report` draws the results and writes the
README's tables. See bench/NOTES.md."""
