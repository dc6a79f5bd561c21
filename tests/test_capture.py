"""CUDA graphs, warm-up, batch invariance and addresses past 2³¹, on a GPU at real sizes."""

from __future__ import annotations

import pytest
import torch

import grouped_lora_ops as gl

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def batch(tokens, groups=4, slots=6, rank=16, dtype=torch.bfloat16, features=4096, out=1024, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)

    def randn(*size):
        return torch.randn(size, generator=g, device=DEVICE, dtype=dtype)

    return dict(
        x=randn(tokens, groups, features),
        lora_a=randn(slots, rank, features) / features**0.5,
        lora_b=randn(slots, groups, out, rank),
        adapter_ids=torch.randint(-1, slots, (tokens,), generator=g, device=DEVICE),
        scalings=torch.rand(slots, generator=g, device=DEVICE) + 0.5,
        base=randn(tokens, groups, out),
        ranks=torch.randint(1, rank + 1, (slots,), generator=g, device=DEVICE).int(),
    )


def call(t, **changes):
    t = {**t, **changes}
    return gl.delta(
        t["x"], t["lora_a"], t["lora_b"], t["adapter_ids"], t["scalings"],
        base=t["base"], ranks=t["ranks"], plan=t.get("plan"),
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 4, 64, 100, 300, 2000])
@pytest.mark.parametrize("captured", ["zeros", "mixed", "none"])
def test_replays_follow_ids_weights_and_scalings(tokens, captured):
    t = batch(tokens)
    mixed = t["adapter_ids"].clone()
    start = {"zeros": torch.zeros_like(mixed), "mixed": mixed, "none": torch.full_like(mixed, -1)}[captured]
    t["adapter_ids"].copy_(start)
    call(t)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(t)
    other = torch.randint(-1, 6, mixed.shape, device=DEVICE)
    for ids in (mixed, other, torch.full_like(mixed, -1), torch.full_like(mixed, 5), mixed.flip(0)):
        t["adapter_ids"].copy_(ids)
        t["lora_a"].mul_(1.25)
        t["lora_b"].neg_()
        t["scalings"].add_(0.125)
        t["ranks"].copy_(t["ranks"].roll(1))
        graph.replay()
        assert torch.equal(y, call(t))
        assert torch.equal(y[ids < 0], t["base"][ids < 0])


def test_a_plan_made_inside_the_graph_serves_two_layers():
    t, u = batch(3000), batch(3000, seed=1)
    u["adapter_ids"] = t["adapter_ids"]

    def step():
        plan = gl.plan(t["adapter_ids"], 6)
        return call(t, plan=plan), call(u, plan=plan)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    torch.cuda.empty_cache()
    for seed in range(5):
        g = torch.Generator(DEVICE).manual_seed(seed)
        t["adapter_ids"].copy_(torch.randint(-1, 6, (3000,), generator=g, device=DEVICE))
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(outputs, (call(t), call(u))))


def test_a_first_call_inside_a_capture_raises_and_the_capture_can_be_retried():
    t = batch(5, groups=3, rank=48, features=640, out=192)  # sizes that no other test compiles
    with pytest.raises(RuntimeError, match=r"grouped_lora.delta: .*warmup"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(t)
    torch.cuda.synchronize()
    want = call(t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(t)
    graph.replay()
    assert torch.equal(y, want)


def test_nothing_is_compiled_after_warmup():
    from triton import knobs

    shape = gl.Shape(in_features=1280, out_features=320, rank=24, num_slots=5, groups=2)
    assert gl.warmup([shape], tokens=512) > 0
    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw)
    try:
        full = batch(512, groups=2, slots=5, rank=24, features=1280, out=320)
        full["adapter_ids"] = full["adapter_ids"].int()
        for tokens in range(1, 513):
            t = {k: v[:tokens].clone() if k in ("x", "adapter_ids", "base") else v for k, v in full.items()}
            call(t)
            gl.delta_(t["base"], *[t[k] for k in ("x", "lora_a", "lora_b", "adapter_ids", "scalings")], ranks=t["ranks"])
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [16, 32, 64, 128, 160])
@pytest.mark.parametrize("slots", [1, 6, 700])
def test_a_rows_bits_are_its_own(dtype, rank, slots):
    t = batch(8192 if rank < 128 else 3000, rank=rank, slots=slots, dtype=dtype, features=2048, out=512)
    t["ranks"] = None
    full = call(t)
    x = t["x"].detach().requires_grad_()
    grad = torch.randn_like(full)
    args = [t[k] for k in ("lora_a", "lora_b", "adapter_ids", "scalings")]
    (dx,) = torch.autograd.grad(gl.delta(x, *args), x, grad)
    for tokens in (1, 2, 7, 17, 64, 100, 129, 300, 600, 2000):
        rows = slice(t["x"].shape[0] - tokens, None)
        part = {k: v[rows] if k in ("x", "adapter_ids", "base") else v for k, v in t.items()}
        assert torch.equal(call(part), full[rows]), tokens
        assert torch.equal(call(part, plan=gl.plan(part["adapter_ids"], slots)), full[rows]), tokens
        y = gl.expand(
            gl.shrink(part["x"], t["lora_a"], part["adapter_ids"]), t["lora_b"], part["adapter_ids"], t["scalings"],
            base=part["base"],
        )  # fmt: skip
        assert torch.equal(y, full[rows]), tokens
        xp = part["x"].detach().requires_grad_()
        y = gl.delta(xp, t["lora_a"], t["lora_b"], part["adapter_ids"], t["scalings"])
        assert torch.equal(torch.autograd.grad(y, xp, grad[rows])[0], dx[rows]), tokens


def test_ten_thousand_replays_under_programmatic_dependent_launch():
    """Decode's two kernels overlap: the second may read h only when the first is done."""
    t = batch(32, slots=3, rank=64)
    call(t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(t)
    wants = []
    mixes = [torch.randint(-1, 3, (32,), device=DEVICE) for _ in range(8)]
    for ids in mixes:
        t["adapter_ids"].copy_(ids)
        wants.append(call(t))
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(10_000):
        t["adapter_ids"].copy_(mixes[i % 8])
        graph.replay()
        differ += (y != wants[i % 8]).sum()
    assert differ.item() == 0


def test_no_op_waits_for_the_device():
    for tokens in (8, 100, 3000):
        t = batch(tokens)
        leaves = [t[k].requires_grad_() for k in ("x", "lora_a", "lora_b", "base")]
        call(t).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = call(t, plan=gl.plan(t["adapter_ids"], 6))
            torch.autograd.grad(y.sum(), leaves)
            h = gl.shrink(t["x"], t["lora_a"], t["adapter_ids"])
            gl.expand(h, t["lora_b"], t["adapter_ids"], t["scalings"], base=t["base"])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_side_stream_is_followed():
    t = batch(64)
    want = call(t)
    x, zeros = t["x"].clone(), torch.zeros_like(t["x"])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        t["x"].copy_(zeros)
        torch.cuda._sleep(20_000_000)
        t["x"].copy_(x)
        y = call(t)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, want)


@pytest.mark.parametrize("which", ["x", "base", "lora_a", "lora_b"])
def test_offsets_pass_two_to_the_31(which):
    """The third row (slot) lies 2³¹ elements behind the first: an int32 product of index and stride would wrap."""
    t = batch(3, groups=1, slots=3, features=256, out=256, rank=16)
    t["adapter_ids"] = torch.tensor([2, 0, 2], device=DEVICE)
    t["ranks"] = None
    want = call(t)
    small = t[which]
    big = torch.empty_strided(small.shape, (2**30, *small.stride()[1:]), dtype=small.dtype, device=DEVICE)
    big.copy_(small)
    assert torch.equal(call(t, **{which: big}), want)
    if which == "base":
        t["base"] = big
        gl.delta_(big, *[t[k] for k in ("x", "lora_a", "lora_b", "adapter_ids", "scalings")])
        assert torch.equal(big, want)


def test_the_gradient_is_ours_and_deterministic():
    t = batch(3000, rank=24)
    t["ranks"] = t["ranks"].clamp(max=20)
    leaves = [t[k].requires_grad_() for k in ("x", "lora_a", "lora_b", "base")]
    y = call(t)
    assert "grouped_lora" in type(y.grad_fn).__name__ or "GeneratedBackward" in type(y.grad_fn).__name__
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, grad)
    second = torch.autograd.grad(call(t), leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    double = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    x, a, b, base = double
    reference = gl.delta(
        x, a, b, t["adapter_ids"].cpu(), t["scalings"].cpu(), base=base, ranks=t["ranks"].cpu()
    )  # float64: the CPU op
    for got, want in zip(first, torch.autograd.grad(reference, double, grad.double().cpu())):
        error = (got.double().cpu() - want).norm() / want.norm()
        assert error < 4e-3, error  # bf16 rounds to 2⁻⁹


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one():
    t = {k: v.to("cuda:1") for k, v in batch(300).items()}
    want = {k: v.to("cuda:0") for k, v in t.items()}
    assert torch.equal(call(t).cpu(), call(want).cpu())
    with pytest.raises(ValueError, match="lora_a must be on cuda:1 like x; got cuda:0"):
        call(t, lora_a=want["lora_a"])
