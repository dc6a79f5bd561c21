"""Two processes train under DDP while one of them never has a token: nobody hangs, everybody gets gradients."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.multiprocessing as mp

import grouped_lora_ops as gl

STEPS, G, D, N, R, L = 3, 2, 8, 6, 3, 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = torch.nn.Parameter(torch.randn(L, R, D, generator=generator))
        self.b = torch.nn.Parameter(torch.randn(L, G, N, R, generator=generator))

    def forward(self, x, ids):
        return gl.delta(x, self.a, self.b, ids, torch.ones(L))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, G, D, generator=generator), torch.tensor([0, 1, -1, 0, 1])


def train(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, ids = batch(step)
        if rank == 1:
            x, ids = x[:0], ids[:0]
        optimizer.zero_grad()
        model(x, ids).square().sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        optimizer.step()
    results[rank] = [p.detach().clone().tolist() for p in model.parameters()]
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform == "win32", reason="gloo's file store")
def test_a_rank_without_tokens(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        context = mp.spawn(train, (str(tmp_path / "store"), results), nprocs=2, join=False)
        for _ in range(2):
            context.join(timeout=60)
        for process in context.processes:
            assert not process.is_alive(), "a rank hangs"
        first, second = results[0], results[1]
    assert first == second
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):  # the mean over ranks halves rank 0's gradient
        optimizer.zero_grad()
        (model(*batch(step)).square().sum() / 2).backward()
        optimizer.step()
    for got, want in zip(first, model.parameters()):
        torch.testing.assert_close(torch.tensor(got), want.detach())
