"""csrc/stream.cu behind `linear`: on a GPU its bits, the Triton kernels'; Triton where it cannot be had."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import FORMS, NAN, assert_bits
from conftest import poisoned
from linear_cases import case, check, check_scaled, random_scaled, scaled_case
from test_linear_cuda import captured, dense, linear, replay

import grouped_lora_ops as gl
from grouped_lora_ops import cuda, driver, launch_linear
from grouped_lora_ops.ops import common, prepared, stream_cuda

gpu = pytest.mark.gpu
BF16 = torch.bfloat16
# L, D, N, r: boxes larger than the tensor; a tail of D and of N; one stage and more than the ring has; more adapters than rows;
# pieces of r of 16 and 32
SIZES = (
    (2, 8, 8, 8),
    (1, 64, 256, 16),
    (3, 520, 392, 24),
    (8, 1024, 512, 64),
    (40, 264, 264, 8),
    (100, 4096, 1024, 40),
)
# how it is launched: as it is chosen, and otherwise
WAYS = {
    "chosen": lambda c: c,
    "two stages": lambda c: replace(c, stages=2, x_stages=2, late=False),
    "one adapter at once": lambda c: replace(c, adapters=min(c.adapters, 1), next_early=False),
    "late": lambda c: replace(c, late=True, adapters=min(c.adapters, 4)),
    "wide": lambda c: replace(c, block_n=64, stages=4, x_stages=3, adapters=min(c.adapters, 4)) if c.rows == 64 else c,
}


@pytest.fixture
def choose(monkeypatch):
    """choose("late"): csrc/stream.cu takes every product that it can, in this way; None: none. Returns what its
    launches have answered since."""
    chosen, product, answers = {name: getattr(launch_linear, name) for name in ("linear", "scaled")}, stream_cuda.product, []

    def apply(way: str | None) -> list:
        for name, choice in chosen.items():

            def changed(p, *how, choice=choice):
                c = choice(p, *how)
                return replace(c, stream=None if way is None or c.stream is None else WAYS[way](c.stream))

            monkeypatch.setattr(launch_linear, name, changed)
        common.configured.cache_clear()
        prepared.forget()
        answers.clear()
        return answers

    monkeypatch.setattr(stream_cuda, "product", lambda *args: answers.append(product(*args)) or answers[-1])
    yield apply
    common.configured.cache_clear()
    prepared.forget()


@pytest.fixture
def both(choose):
    """both(call, way): what call, one product, gives by csrc/stream.cu and by Triton's kernels alone."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90")

    def run(call, way="chosen"):
        answers = choose(way)
        with poisoned():
            got = call()
        assert answers == [True]
        choose(None)
        with poisoned():
            want = call()
        assert answers == []
        return got, want

    return run


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_exact(kernels, both, choose, form):
    answers = choose("chosen")
    for tokens in (1, 7, 16, 17, 64):
        for slots, features, out, rank in SIZES:
            what, sizes = f"{tokens} {slots} {features} {out} {rank}", [out, 136, 8]
            shape = dict(tokens=tokens, slots=slots, features=features, out=out, rank=rank)
            c, weight, bias = case(form, **shape, ranks=True, sizes=sizes, device="cuda")
            check(kernels, c, weight, bias, what)
            check(kernels, c, weight, None, f"{what} planned", plan=gl.plan(c.ids, slots))
    assert answers == [True] * 2 * 5 * len(SIZES)


@gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["plain", "wo_a", "shared h", "slices"])
def test_the_bits_of_the_triton_kernels(both, form, way):
    for i, tokens in enumerate((1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64)):
        slots, features, out, rank = SIZES[i % len(SIZES)]
        x, weight, a, b, ids, scalings, bias, sizes, ranks = dense(form, tokens, slots, features, out, rank, i)
        ids = ids.int() if i % 2 else torch.where(ids == 0, 2**32 + 1, ids)
        bias = None if i % 3 == 2 else bias.float() if i % 3 else bias
        got, want = both(lambda x=x, rest=(weight, a, b, ids, scalings, bias, sizes, ranks): linear(x, *rest), way)
        assert_bits(got, want, f"{tokens} {slots} {features} {out} {rank}")


E8M0 = pytest.mark.parametrize("e8m0", [False, True], ids=["float32 scales", "e8m0 scales"])


def scaled_problem(tokens, e8m0, **shape):
    """(x, e4m3 weight, a, b, ids, scalings, bias, scales)."""
    x, weight, scale, *rest = random_scaled("cuda", tokens=tokens, e8m0=e8m0, **shape)
    return x, weight, *rest, scale


@gpu
@E8M0
@pytest.mark.parametrize("form", FORMS)
def test_exact_with_e4m3(kernels, both, choose, form, e8m0):
    answers = choose("chosen")
    shapes = ((2, 16, 8, 8), (1, 128, 256, 16), (3, 528, 392, 24), (8, 1024, 512, 64), (40, 272, 264, 8), (100, 4096, 1024, 40))
    for tokens in (1, 7, 16, 17, 64):
        for slots, features, out, rank in shapes:
            c, weight, scale, bias = scaled_case(
                form, e8m0=e8m0, tokens=tokens, slots=slots, features=features, out=out, rank=rank, ranks=True,
                sizes=[out // 64 * 64, 192, 8], device="cuda",
            )  # fmt: skip
            check_scaled(kernels, c, weight, scale, bias, f"{tokens} {slots} {features} {out} {rank}")
    assert answers == [True] * 5 * len(shapes)


@gpu
@E8M0
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_the_triton_kernels_with_e4m3(both, way, e8m0):
    for i, tokens in enumerate((1, 2, 8, 15, 16, 17, 33, 64)):
        slots, features, out, rank = ((2, 400, 136, 16), (5, 4096, 264, 64), (40, 1040, 512, 24))[i % 3]
        shape = dict(features=features, out=out, slots=slots, rank=rank, groups=4)
        x, weight, a, b, ids, scalings, bias, scale = scaled_problem(tokens, e8m0, **shape)

        def call(rest=(x, weight, a, b, ids, scalings, bias), scale=scale):
            return torch.ops.grouped_lora.linear(*rest, None, None, None, scale)

        got, want = both(call, way)
        assert_bits(got, want, f"{tokens} {slots} {features} {out} {rank}")


@gpu
@E8M0
def test_every_number_of_rows_of_e4m3(both, choose, e8m0):
    """Up to 64 (128 where two blocks of rows are one wave) by csrc/stream.cu, behind them by others: with the same bits. Zero adapters
    leave the base's."""
    for groups, out, most in ((4, 384, 64), (1, 4096, 128)):
        x, weight, a, b, ids, scalings, bias, scale = scaled_problem(300, e8m0, features=1040, out=out, slots=5, rank=48, groups=groups)

        def run(rows, a, b, rest=(x, weight, ids, scalings, bias, scale)):
            x, weight, ids, scalings, bias, scale = rest
            return torch.ops.grouped_lora.linear(x[rows], weight, a, b, ids[rows], scalings, bias, None, None, None, scale)

        choose("chosen")
        batch, parent = run(slice(0, 300), a, b), run(slice(0, 300), a[:, :0], b[..., :0])
        assert_bits(batch[ids < 0], parent[ids < 0], "without an adapter")
        for tokens in (*range(1, 20), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200):
            answers = choose("chosen")
            rows = slice(tokens % 7, tokens % 7 + tokens)
            assert_bits(run(rows, a, b), batch[rows], f"T = {tokens}")
            assert_bits(run(rows, a, b * 0), parent[rows], f"zero adapters, T = {tokens}")
            assert_bits(run(rows, a[:, :0], b[..., :0]), parent[rows], f"without LoRA, T = {tokens}")
            assert bool(answers) == (tokens <= most) and all(answers)


def check_rows(choose, problem, counts, most):
    """A row's bits are its own, whatever the others are; without LoRA, and of zero adapters, they are the base's. csrc/stream.cu takes
    up to `most` rows."""
    x, weight, a, b, ids, scalings, bias, _, ranks = problem
    choose("chosen")
    batch = linear(x, weight, a, b, ids, scalings, bias, ranks=ranks)
    last = max(counts)
    parent = linear(x[:last], weight, a[:, :0], b[..., :0], ids[:last], scalings, bias)
    for tokens in counts:
        answers = choose("chosen")
        rows = slice(tokens % 7, tokens % 7 + tokens)
        got = linear(x[rows], weight, a, b, ids[rows], scalings, bias, ranks=ranks)
        assert_bits(got, batch[rows], f"T = {tokens}")
        base = linear(x[:tokens], weight, a, torch.zeros_like(b), ids[:tokens], scalings, bias, ranks=ranks)
        assert_bits(base, parent[:tokens], f"zero adapters, T = {tokens}")
        assert bool(answers) == (tokens <= most) and all(answers)
    assert_bits(batch[:last][ids[:last] < 0], parent[ids[:last] < 0], "without an adapter")


@gpu
def test_every_number_of_rows(both, choose):
    check_rows(choose, dense("wo_a", 200, 5, 1024, 384, 48), range(1, 65), 64)


@gpu
def test_two_blocks_of_rows(both, choose):
    """From 65 to 128 rows where W has columns for half of the multiprocessors; behind them csrc/linear.cu, with rows that end anywhere."""
    counts = (65, 66, 72, 80, 81, 100, 127, 128, 129, 137, 200, 255, 257, 300)
    check_rows(choose, dense("plain", 400, 5, 512, 4096, 48), counts, 128)


@gpu
@pytest.mark.parametrize("bad", [float("inf"), NAN], ids=str)
@pytest.mark.parametrize("tokens", [8, 64])
def test_what_is_not_finite_stays_with_its_adapter(both, bad, tokens):
    x, weight, a, b, ids, scalings, bias, _, _ = dense("wo_a", tokens, 3, 512, 520, 24)
    a, b = a.nan_to_num(), b.nan_to_num()
    clean = both(lambda: linear(x, weight, a, b, ids, scalings, bias))[0]
    worse = b.clone()
    worse[0].view(-1)[5:7000:77] = bad
    got, want = both(lambda: linear(x, weight, a, worse, ids, scalings, bias))
    assert_bits(got[ids != 0], clean[ids != 0], "other adapters' rows")
    assert not got[ids == 0].isfinite().all()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@gpu
@pytest.mark.parametrize("tokens", [4, 64])
@pytest.mark.parametrize("lora", [True, False])
def test_replays_follow_ids_and_weights(both, choose, tokens, lora):
    """50 replays of two calls one after the other, the second of the first's result, so that each starts beside the one ahead."""
    x, weight, a, b, ids, scalings, _, _, _ = dense("plain", tokens, 6, 512, 512, 16)
    ranks = torch.full((6,), 16, dtype=torch.int32, device="cuda")
    rank = 16 if lora else 0

    def change(seed):
        g = torch.Generator(device="cuda").manual_seed(seed)
        ids.copy_(torch.randint(-1, 6, ids.shape, generator=g, device="cuda"))
        ranks.copy_(torch.randint(0, 17, ranks.shape, generator=g, device="cuda"))
        scalings.uniform_(generator=g)
        for t in (x, weight, a, b):
            t.normal_(generator=g).mul_(512**-0.25)

    def step():
        y = linear(x, weight, a[:, :rank], b[..., :rank], ids, scalings, ranks=ranks.clamp(max=rank))
        return linear(y, weight, a[:, :rank], b[..., :rank], ids, scalings, ranks=ranks.clamp(max=rank))

    replay(choose, change, step, off=None, on="chosen")


@gpu
@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_a_chain_of_ops_that_start_beside_one_another(both, choose, tokens):
    """Each reads what the one ahead writes, in memory that is used again and again: as with the GPU idle between any two."""
    x, weight, a, b, ids, scalings, _, _, _ = dense("plain", tokens, 6, 512, 512, 16)
    experts, wide = torch.empty(8, 512, 512, dtype=BF16, device="cuda"), torch.empty(6, 8, 16, 512, dtype=BF16, device="cuda")
    tall, route = torch.empty(6, 8, 512, 16, dtype=BF16, device="cuda"), torch.zeros(tokens, 2, dtype=torch.int64, device="cuda")
    small = torch.randn(512, 512, device="cuda").mul_(512**-0.25).to(torch.float8_e4m3fn)
    scale = torch.ones(4, 4, device="cuda").to(torch.float8_e8m0fnu)

    def change(seed):
        g = torch.Generator(device="cuda").manual_seed(seed)
        ids.copy_(torch.randint(-1, 6, ids.shape, generator=g, device="cuda"))
        route.copy_(torch.randint(0, 8, route.shape, generator=g, device="cuda"))
        scalings.uniform_(generator=g)
        for t in (x, weight, a, b, experts, wide, tall):
            t.normal_(generator=g).mul_(512**-0.25)

    def step(between):
        y = linear(x, weight, a, b, ids, scalings)
        between()
        gl.delta_(y, x, a, b, ids, scalings)
        between()
        y = linear(y, weight, a[:, :0], b[..., :0], ids, scalings)
        between()
        y = linear(y, weight, a, b, ids, scalings)
        between()
        y = gl.expert_linear(y, experts, wide, tall, route, ids, scalings)
        between()
        y = gl.linear(y[::2], small, a, b, ids, scalings, weight_scale=scale)
        between()
        y = linear(y, weight, a, b, ids, scalings)
        between()
        return gl.delta(y, a, b, ids, scalings, base=y)

    choose("chosen")
    wanted = []
    for seed in range(40):
        change(seed)
        wanted.append(step(torch.cuda.synchronize))
    captured(change, lambda: step(lambda: None), wanted)


@gpu
def test_a_prepared_call_reads_the_tensors_of_its_own_call(both, choose):
    """A tensor map holds an address, which follows the weight and x."""
    for tokens in (8, 64):
        sets = [dense("wo_a", tokens, 4, 512, 256, 16, seed) for seed in range(4)]
        choose(None)
        wanted = [linear(*arguments) for arguments in sets]
        answers = choose("chosen")
        for i in (0, 1, 2, 3, 0):
            assert_bits(linear(*sets[i]), wanted[i], f"T {tokens}, set {i}")
        assert answers == [True], "four of five are repeated"
        scaled = [scaled_problem(tokens, True, features=512, out=256, slots=4, rank=16) for _ in range(3)]
        for i, one in enumerate(scaled):
            one[1].view(torch.uint8).bitwise_xor_(i)
        choose(None)
        calls = [(*rest, None, None, None, scale) for *rest, scale in scaled]
        wanted = [torch.ops.grouped_lora.linear(*rest) for rest in calls]
        answers = choose("chosen")
        with torch.inference_mode():
            for i in (0, 1, 2, 0):
                assert_bits(torch.ops.grouped_lora.linear(*calls[i]), wanted[i], f"e4m3, T {tokens}, set {i}")
        assert answers == [True]


@pytest.mark.parametrize("missing", ["module", "available", "tensor maps"])
def test_triton_takes_what_it_cannot(kernels, monkeypatch, choose, missing):
    """No cubin, another GPU's empty one, or a driver without tensor maps: the Triton kernel with the tiles that were chosen with it."""
    tiles = launch_linear.tiles
    config = launch_linear.StreamConfig(16, 32, 3, 2, 3, False, True)
    answers = choose("chosen")
    others = cuda.module
    module = SimpleNamespace(constant=lambda name, what: int(missing != "available"))
    stands_in = None if missing == "module" else module
    monkeypatch.setattr(
        cuda, "module", lambda op, stem, device: stands_in if stem == "stream" else others(op, stem, device)
    )
    monkeypatch.setattr(driver, "has_tensor_maps", lambda: missing != "tensor maps")
    monkeypatch.setattr(launch_linear, "linear", lambda p, *how: replace(tiles(p, *how), stream=config))
    c, weight, bias = case("wo_a", features=72, out=24, rank=8, ranks=True, tokens=12, device=kernels.device)
    check(kernels, c, weight, bias)
    assert answers == [False]
    c, weight, bias = case("wo_a", features=70, out=24, rank=8, ranks=True, tokens=12, device=kernels.device)
    check(kernels, c, weight, bias)
    assert len(answers) == 1, "rows of 140 bytes: it is not asked"
