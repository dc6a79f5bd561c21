"""Two GPUs: `torchrun --nproc-per-node 2 -m bench.distributed`; `__main__` says what it does."""
