"""Two processes train a layer under DDP, of which the second never has a token: nobody hangs, everybody gets gradients."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

STEPS = 3
Step = Callable[[torch.nn.Module, int, bool], torch.Tensor]  # (model, number, whether tokens are left out) → loss


def _train(model, step: Step, empty: bool, share: float, lr: float, clip: float | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for number in range(STEPS):
        optimizer.zero_grad()
        (step(model, number, empty) * share).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def _rank(rank: int, store: str, results, make, step: Step, lr: float, clip: float | None) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(make())
    _train(model, step, rank == 1, 1.0, lr, clip)
    results[rank] = [p.detach().tolist() for p in model.parameters()]
    del model
    leave()


def leave() -> None:
    """End a rank whose work is done. An interpreter that takes itself apart beside threads of DDP's and gloo's has been aborted by one of
    them now and then ("terminate called without an active exception")."""
    torch.distributed.destroy_process_group()
    os._exit(0)


def check(folder, make: Callable[[], torch.nn.Module], step: Step, *, lr: float, clip: float | None = None, **tolerance) -> None:
    """Both ranks end with the parameters that one process has whose gradients are halved, as the mean over ranks does."""
    with mp.Manager() as manager:
        results = manager.dict()
        context = mp.spawn(_rank, (str(folder / "store"), results, make, step, lr, clip), nprocs=2, join=False)
        for _ in range(2):
            context.join(timeout=60)
        for process in context.processes:
            assert not process.is_alive(), "a rank hangs"
        first, second = results[0], results[1]
    assert first == second
    model = make()
    _train(model, step, False, 0.5, lr, clip)
    for got, want in zip(first, model.parameters()):
        torch.testing.assert_close(torch.tensor(got), want.detach(), **tolerance)
