"""Two processes train an expert layer under DDP while one of them has no tokens: nobody hangs, everybody gets gradients."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.multiprocessing as mp

import grouped_lora_ops as gl

STEPS, T, K, E, H, INNER, R, L = 3, 5, 2, 4, 8, 6, 3, 2
SHAPES = {
    "gate_up_a": (L, 1, R, H),
    "gate_up_b": (L, E, 2 * INNER, R),
    "down_a": (L, E, R, INNER),
    "down_b": (L, 1, H, R),
    "router": (E, H),
}


class Layer(torch.nn.Module):
    """A router that is trained too, frozen experts, LoRA on both projections."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=g)))
        self.w_gate_up, self.w_down = torch.randn(E, 2 * INNER, H, generator=g), torch.randn(E, H, INNER, generator=g)

    def forward(self, x, adapter_ids, masked):
        weights, ids = (x @ self.router.t()).softmax(-1).topk(K)
        ids = torch.where(masked[:, None], -1, ids)
        factors = (self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)
        return gl.expert_mlp(
            x, ids, weights, self.w_gate_up, self.w_down, *factors, adapter_ids, torch.ones(L), router_weight="post_down"
        )


def batch(step: int, empty: str | None):
    g = torch.Generator().manual_seed(step)
    x, adapters, masked = torch.randn(T, H, generator=g), torch.tensor([0, 1, -1, 0, 1]), torch.zeros(T, dtype=torch.bool)
    if empty == "no tokens":
        return x[:0], adapters[:0], masked[:0]
    return (x, adapters, ~masked) if empty == "all masked" else (x, adapters, masked)


def train(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        empty = None if rank == 0 else ("no tokens", "all masked")[step % 2]
        optimizer.zero_grad()
        model(*batch(step, empty)).square().sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    results[rank] = [p.detach().tolist() for p in model.parameters()]
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):  # the mean over ranks halves rank 0's gradient
        optimizer.zero_grad()
        (model(*batch(step, None)).square().sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for got, want in zip(first, model.parameters()):
        torch.testing.assert_close(torch.tensor(got), want.detach(), rtol=1e-4, atol=1e-5)
