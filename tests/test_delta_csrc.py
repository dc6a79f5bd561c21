"""csrc/delta.cu behind `delta` and `delta_`: exact, with the Triton kernels' bits, whatever the guess."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import FORMS, NAN, assert_bits, build
from test_delta import check

from grouped_lora_ops import launch
from grouped_lora_ops.ops import delta_cuda

HOW = ["cuda", "cuda split2", "cuda merged", "cuda spread", "cuda early", "cuda crowded", "cuda crowded merged"]
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture
def launches(monkeypatch):
    """How many calls reached the CUDA kernel."""
    seen, run = [], delta_cuda.delta

    def counted(*args):
        done = run(*args)
        seen.append(done)
        return done

    monkeypatch.setattr(delta_cuda, "delta", counted)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
@halves
@pytest.mark.parametrize("form", FORMS)
def test_exact(kernels, force, launches, form, dtype, how):
    force(how)
    for tokens, slots, features, out, rank in (
        (1, 1, 1024, 128, 16),
        (7, 3, 64, 8, 8),
        (37, 4, 1304, 392, 48),
        (130, 40, 520, 264, 24),
        (250, 2, 136, 64, 128),
    ):
        c = build(
            form, dtype, tokens=tokens, slots=slots, features=features, out=out, rank=rank, ranks=True, device="cuda"
        )
        check(kernels, c, f"{tokens} {slots} {features} {out} {rank}", base=False)
    assert all(launches) and (launches or form not in ("plain", "wo_a", "shared input"))


@pytest.mark.gpu
@halves
@pytest.mark.parametrize("features", [4096, 7168, 520])
def test_the_bits_of_the_triton_kernels(force, launches, dtype, features):
    generator = torch.Generator(device="cuda").manual_seed(0)
    for tokens, slots, rank in (
        (1, 1, 16),
        (16, 1, 64),
        (40, 3, 64),
        (64, 64, 128),
        (256, 8, 32),
        (900, 1, 64),
        (700, 3, 16),
    ):
        x = torch.randn(tokens, 4, features, generator=generator, device="cuda").to(dtype)
        a = (torch.randn(slots, rank, features, generator=generator, device="cuda") * features**-0.5).to(dtype)
        b, base = (
            torch.randn(*s, generator=generator, device="cuda").to(dtype)
            for s in ((slots, 4, 1000, rank), (tokens, 4, 1000))
        )
        ids = torch.randint(-1, slots, (tokens,), generator=generator, device="cuda")
        x[ids < 0] = NAN
        scalings = torch.rand(slots, generator=generator, device="cuda") + 0.5
        ranks = torch.randint(1, rank + 1, (slots,), generator=generator, device="cuda", dtype=torch.int32)
        args = (x, a, b, ids, scalings)
        force("split")
        want = torch.ops.grouped_lora.delta(*args, base, None, ranks)
        alone = torch.ops.grouped_lora.delta(*args)
        for how in HOW:
            force(how)
            assert_bits(torch.ops.grouped_lora.delta(*args, base, None, ranks), want, f"{how} {tokens} {slots} {rank}")
            assert_bits(torch.ops.grouped_lora.delta(*args), alone, f"{how} {tokens} {slots} {rank} without base")
            out = base.clone()
            torch.ops.grouped_lora.delta_(out, *args, None, ranks)
            assert_bits(out, want, f"{how} {tokens} {slots} {rank} in place")
    assert launches and all(launches)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["cuda", "cuda merged", "cuda early", "cuda crowded"])
def test_a_chain_of_calls_reads_what_the_call_before_wrote(force, launches, how):
    """Each call starts before the one ahead has ended; its x, and the ids it guessed from, are written meanwhile."""
    force(how)
    torch.manual_seed(0)
    slots, layers = 5, 24
    x = torch.randn(4, 4, 1024, device="cuda").bfloat16()
    a = (torch.randn(layers, slots, 16, 1024, device="cuda") / 32).bfloat16()
    b = (torch.randn(layers, slots, 4, 1024, 16, device="cuda") / 4).bfloat16()
    scalings, ids, other = torch.ones(slots, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda"), None

    def chain(sync: bool):
        y = x
        for layer in range(layers):
            y = torch.ops.grouped_lora.delta(y, a[layer], b[layer], ids, scalings)
            if sync:
                torch.cuda.synchronize()
            ids.copy_((ids + y[:, 0, 0].view(torch.int16).long()) % (slots + 1) - 1)
        return y

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(False)
    for seed in range(20):
        torch.manual_seed(seed)
        start = torch.randint(-1, slots, (4,), device="cuda")
        ids.copy_(start)
        want = chain(True)
        ids.copy_(start)
        graph.replay()
        assert_bits(got, want, f"seed {seed}")
    assert launches and all(launches) and other is None


@pytest.mark.gpu
def test_ten_thousand_replays_follow_the_ids(force, launches):
    force("cuda")
    torch.manual_seed(0)
    slots, tokens, steps = 8, 16, 10000
    x, base = (
        torch.randn(tokens, 4, 4096, device="cuda").bfloat16(),
        torch.randn(tokens, 4, 1024, device="cuda").bfloat16(),
    )
    a, b = (
        (torch.randn(slots, 64, 4096, device="cuda") / 64).bfloat16(),
        torch.randn(slots, 4, 1024, 64, device="cuda").bfloat16(),
    )
    scalings = torch.rand(slots, device="cuda")
    every = torch.stack(
        [
            torch.ops.grouped_lora.delta(x, a, b, torch.full((tokens,), i, device="cuda"), scalings, base)
            for i in range(slots)
        ]
        + [base]
    )
    ids, choices = (
        torch.zeros(tokens, dtype=torch.int32, device="cuda"),
        torch.randint(-1, slots, (steps, tokens), dtype=torch.int32, device="cuda"),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.grouped_lora.delta(x, a, b, ids, scalings, base)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(steps):
        ids.copy_(choices[step])
        graph.replay()
        want = every[choices[step].long() % (slots + 1), torch.arange(tokens, device="cuda")]
        differing += (y.view(torch.int16) != want.view(torch.int16)).sum()
    assert differing.item() == 0 and launches and all(launches)


def layouts(dtype=torch.bfloat16):
    x, a, b = (
        torch.empty(3, 2, 64, dtype=dtype),
        torch.empty(4, 1, 16, 64, dtype=dtype),
        torch.empty(4, 2, 24, 16, dtype=dtype),
    )
    return dict(x=x, a=a, b=b, base=None, out=torch.empty(3, 2, 24, dtype=dtype), sizes=None)


def test_layouts_it_takes():
    assert delta_cuda.fits(**layouts())
    wide = torch.empty(3, 2, 80, dtype=torch.bfloat16)
    assert delta_cuda.fits(**{**layouts(), "x": wide[..., 8:72]})
    assert delta_cuda.fits(**{**layouts(), "out": torch.empty(3, 2, 32, dtype=torch.bfloat16), "sizes": (8, 24)})


@pytest.mark.parametrize(
    "change",
    [
        dict(x=torch.empty(3, 2, 80, dtype=torch.bfloat16)[..., 1:65]),  # rows that start at 2 bytes
        dict(x=torch.empty(3, 2, 65, dtype=torch.bfloat16)[..., :64]),
        dict(x=torch.empty(3, 64, 2, dtype=torch.bfloat16).transpose(1, 2)),
        dict(a=torch.empty(4, 1, 64, 16, dtype=torch.bfloat16).transpose(2, 3)),
        dict(b=torch.empty(4, 2, 24, 15, dtype=torch.bfloat16)),  # rows of b at 2 bytes
        dict(out=torch.empty(3, 2, 20, dtype=torch.bfloat16)),  # rows of out in no whole vectors
        dict(base=torch.empty(3, 2, 25, dtype=torch.bfloat16)[..., :24]),
        dict(out=torch.empty(3, 2, 24, dtype=torch.bfloat16), sizes=(4, 20)),
        dict(out=torch.empty(3, 2, 72, dtype=torch.bfloat16), sizes=(8,) * 9),
        dict(x=torch.empty(3, 1, 64, dtype=torch.bfloat16)),  # one h for two groups
    ],
    ids=range(10),
)
def test_layouts_it_leaves_to_triton(change):
    assert not delta_cuda.fits(**{**layouts(), **change})


def test_the_choice_names_kernels_that_exist():
    import re

    from grouped_lora_ops import _builds, cuda

    text = (_builds.sources(cuda.PACKAGE) / "delta.cu").read_text()
    found = re.findall(r"^ +DELTA\(E, (\d+), (\d+), (\d+), (\d+), (\d+), \d+, \d+\)", text, re.MULTILINE)
    assert sorted(tuple(map(int, f)) for f in found) == sorted(launch.CUDA_KERNELS)
    for tokens in (1, 5, 8, 16, 256, 1024, 5000):
        for rank in (1, 16, 17, 64, 65, 200):
            for groups, slots in ((1, 1), (4, 8), (32, 64)):
                config = launch.delta(launch.Problem("sm_90", 132, 2, tokens, groups, 4096, 1024, rank, slots)).cuda
                if config is not None:
                    assert config.ranks >= rank and tuple(map(int, config.kernel.split("_"))) in launch.CUDA_KERNELS


def test_only_measured_gpus_get_it():
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        assert launch.delta(launch.Problem(arch, 108, 2, 1, 4, 4096, 1024, 16, 1)).cuda is None


@pytest.mark.parametrize(
    "change",
    [dict(itemsize=4), dict(rank=17), dict(tokens=257), dict(shared_a=False), dict(groups=3)],
    ids=str,
)
def test_a_rule_cannot_ask_for_what_a_kernel_cannot_do(change, monkeypatch):
    rule = {"when": {}, "cuda": {"kernel": [16, 16, 1, 128], "merge": True}}
    monkeypatch.setattr(launch, "table", lambda arch: {"delta": [rule]})
    p = launch.Problem("sm_90", 132, 2, 200, 4, 4096, 1024, 16, 8, True)
    assert launch.delta(p).cuda.merged == 4
    assert launch.delta(replace(p, **change)).cuda is None
