"""csrc/linear.cu behind `linear` and the expert ops: on a GPU its bits, the Triton kernels'; Triton where it cannot be had."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import FORMS, NAN, assert_bits, assert_equal
from conftest import poisoned
from linear_cases import case, check, cuda_choice, random_case
from test_expert_kernels import FORMS as FACTORS
from test_expert_kernels import check_linear, linear_case
from test_expert_kernels import kernels as expert_kernels
from test_expert_mlp_kernels import NAMES, PLACEMENTS, gradients, layer

import grouped_lora_ops as gl
from grouped_lora_ops import cuda, driver, launch_experts, launch_linear
from grouped_lora_ops.launch_linear import CudaConfig
from grouped_lora_ops.ops import linear_cuda, stream_cuda

gpu = pytest.mark.gpu
BF16 = torch.bfloat16
# T, L, D, N, r: one tile and parts of several; a tail of D and of N; more adapters than tiles; pieces of r of 16, 32, 64 and 128
SIZES = ((128, 1, 64, 256, 16), (200, 3, 520, 392, 24), (300, 8, 1024, 512, 64), (513, 40, 264, 264, 128), (1024, 8, 512, 1000, 8))


@pytest.fixture
def written(monkeypatch):
    """What has written each product of `linear` so far, base and delta: "linear" or "stream" of csrc/, or "Triton"."""
    kernels, written = pytest.importorskip("grouped_lora_ops.kernels.linear"), []

    def watch(module, function, what):
        run = getattr(module, function)

        def watched(*args):
            answer = run(*args)
            if answer is not False:
                written.append(what)
            return answer

        monkeypatch.setattr(module, function, watched)

    watch(linear_cuda, "product", "linear")
    watch(stream_cuda, "product", "stream")
    watch(kernels, "linear", "Triton")
    return written


@pytest.fixture
def choose(monkeypatch, written):
    return cuda_choice(monkeypatch)


@pytest.fixture
def both(choose):
    """both(call, taken): what call gives by csrc/linear.cu, which must take so many products, and by Triton's kernels alone."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for sm_90")

    def run(call, taken: int, **how):
        answers = choose(True, **how)
        with poisoned():
            got = call()
        assert answers == [True] * taken
        choose(False)
        with poisoned():
            want = call()
        assert answers == []
        return got, want

    return run


def compare(results, what="") -> None:
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert_bits(got, want, f"{what}, result {i}")


# --- on a GPU: linear ---


def linear(x, weight, a, b, ids, scalings, bias=None, sizes=None, ranks=None, plan=None):
    return gl.linear(x, weight, a, b, ids, scalings, bias=bias, out_sizes=sizes, ranks=ranks, plan=plan)


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_exact(kernels, both, choose, form):
    answers = choose(True)
    for tokens, slots, features, out, rank in SIZES:
        sizes = [out, 136, 8]
        c, weight, bias = case(
            form, tokens=tokens, slots=slots, features=features, out=out, rank=rank, ranks=True, sizes=sizes, device="cuda"
        )
        what = f"{tokens} {slots} {features} {out} {rank}"
        check(kernels, c, weight, bias, what)
        check(kernels, c, weight, None, f"{what} planned", plan=gl.plan(c.ids, slots))
    assert answers == [True] * 2 * len(SIZES)


def dense(form, tokens, slots, features, out, rank, seed=0):
    """(x, weight, a, b, ids, scalings, bias, out_sizes, ranks) of random numbers; NaN past an adapter's rank."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g, device="cuda").to(BF16)

    groups, sizes = (3, [out, 136, 8]) if form == "slices" else (2, None)
    x_axes, out_axes = ((groups,) if form == "wo_a" else ()), (() if form == "plain" else (groups,))
    a_axes, out_axes = ((groups,), ()) if sizes else ((), out_axes)
    columns = sum(sizes) if sizes else out
    a, b = randn(slots, *a_axes, rank, features) * features**-0.5, randn(slots, *out_axes, columns, rank)
    ids = torch.randint(-1, slots, (tokens,), generator=g, device="cuda")
    ranks = torch.randint(1, rank + 1, (slots,), generator=g, device="cuda", dtype=torch.int32)
    past = torch.arange(rank, device="cuda") >= ranks[:, None]
    a.masked_fill_(past.view(slots, *[1] * len(a_axes), rank, 1), NAN)
    b.masked_fill_(past.view(slots, *[1] * (len(out_axes) + 1), rank), NAN)
    scalings = torch.rand(slots, generator=g, device="cuda") + 0.5
    x, weight = randn(tokens, *x_axes, features), randn(*out_axes, columns, features) * features**-0.5
    return x, weight, a, b, ids, scalings, randn(*out_axes, columns), sizes, ranks


whole_or_split = pytest.mark.parametrize("whole", [True, False], ids=["whole shrink", "split shrink"])


@gpu
@whole_or_split
@pytest.mark.parametrize("columns", [256, 128, 64])
@pytest.mark.parametrize("form", ["plain", "wo_a", "shared h", "slices"])
def test_the_bits_of_the_triton_kernels(both, form, columns, whole):
    """y and the gradient of x (W and A transposed, summed over groups that share x), with few blocks for many tiles, too."""
    for i, (tokens, slots, features, out, rank) in enumerate((*SIZES, (1000, 2, 4096, 1024, 16))):
        x, weight, a, b, ids, scalings, bias, sizes, ranks = dense(form, tokens, slots, features, out, rank)
        bias = None if i % 3 == 2 else bias.float() if i % 3 else bias
        args = (weight, a, b, ids, scalings, bias, sizes, ranks, gl.plan(ids, slots) if i % 2 else None)
        grad = torch.randn(tokens, *weight.shape[:-1], device="cuda").to(BF16)

        def call(x=x, args=args, grad=grad):
            leaf = x.detach().requires_grad_()
            y = linear(leaf, *args)
            return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

        compare(both(call, 2, programs=(None, 3)[i % 2], columns=columns, whole=whole), f"{tokens} {slots} {features} {out} {rank}")


@gpu
def test_a_rows_bits_are_its_own(both, choose, written):
    """Up to 64 rows by csrc/stream.cu, from 65 on by csrc/linear.cu, the gradient of x from 128 on, by Triton below; as they come or in
    the plan's order."""
    x, weight, a, b, ids, scalings, bias, _, ranks = dense("wo_a", 1000, 5, 1024, 384, 48)
    grad = torch.randn(1000, 2, 384, device="cuda").to(BF16)

    def run(rows):
        choose(True)
        written.clear()
        leaf = x[rows].requires_grad_()
        y = linear(leaf, weight, a, b, ids[rows], scalings, bias, ranks=ranks)
        return y.detach(), torch.autograd.grad(y, leaf, grad[rows])[0]

    batch = run(slice(None))
    order = torch.randperm(1000, device="cuda")
    for rows, *by in (
        (slice(1, 2), "stream", "Triton"), (slice(0, 7), "stream", "Triton"), (slice(5, 69), "stream", "Triton"),
        (slice(5, 70), "linear", "Triton"), (slice(0, 127), "linear", "Triton"),
        (slice(0, 128), "linear", "linear"), (slice(9, 300), "linear", "linear"), (order, "linear", "linear"),
    ):  # fmt: skip
        for got, want in zip(run(rows), batch):
            assert_bits(got, want[rows], f"rows {rows}")
        assert written == by, f"rows {rows}"
    choose(True)
    parent = linear(x, weight, a[:, :0], b[..., :0], ids, scalings, bias)
    assert_bits(batch[0][ids < 0], parent[ids < 0], "without an adapter")
    assert_bits(linear(x, weight, a, torch.zeros_like(b), ids, scalings, bias, ranks=ranks), parent, "zero adapters")


@gpu
@pytest.mark.parametrize("bad", [float("inf"), NAN], ids=str)
def test_what_is_not_finite_stays_with_its_adapter(both, bad):
    """In B, and in A for the gradient of x: other adapters' rows have the bits that they have without it, its own are Triton's."""
    x, weight, a, b, ids, scalings, bias, _, _ = dense("wo_a", 700, 3, 512, 520, 24)
    a, b = a.nan_to_num(), b.nan_to_num()
    grad = torch.randn(700, 2, 520, device="cuda").to(BF16)
    needs = [True, False, False, False, False]

    def call(a, b):
        y = linear(x, weight, a, b, ids, scalings, bias)
        return y, torch.ops.grouped_lora.linear_backward(grad, x, weight, a, b, ids, scalings, bias, None, None, None, needs)[0]

    clean = both(lambda: call(a, b), 2)[0]
    bad_a, bad_b = a.clone(), b.clone()
    bad_a[0].view(-1)[5:7000:77], bad_b[0].view(-1)[5:7000:77] = bad, -bad
    for which, factors in enumerate(((a, bad_b), (bad_a, b))):
        got, want = (result[which] for result in both(lambda factors=factors: call(*factors), 2))
        assert_bits(got[ids != 0], clean[which][ids != 0], f"other adapters' rows, {which}")
        assert not got[ids == 0].isfinite().all()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7), want.nan_to_num(7)), which


@gpu
@whole_or_split
@pytest.mark.parametrize("tokens", [200, 1000])
def test_replays_follow_ids_and_weights(both, choose, tokens, whole):
    x, weight, a, b, ids, scalings, bias = random_case("cuda", BF16, tokens, 6, 2, 512, 256, 16)
    ranks = torch.full((6,), 16, dtype=torch.int32, device="cuda")

    def change(seed):
        g = torch.Generator(device="cuda").manual_seed(seed)
        ids.copy_(torch.randint(-1, 6, ids.shape, generator=g, device="cuda"))
        ranks.copy_(torch.randint(0, 17, ranks.shape, generator=g, device="cuda"))
        scalings.uniform_(generator=g)
        for t in (x, weight, a, b, bias):
            t.normal_(generator=g)

    replay(choose, change, lambda: linear(x, weight, a, b, ids, scalings, bias, ranks=ranks), whole=whole)


def replay(choose, change, step, off=False, on=True, **how) -> None:
    """50 replays of a captured step with other contents each, against Triton's kernels; off, on: what `choose` is told for these."""
    choose(off)
    wanted = []
    for seed in range(50):
        change(seed)
        wanted.append(step())
    answers = choose(on, **how)
    step()
    captured(change, step, wanted)
    assert answers and all(answers)


def captured(change, step, wanted) -> None:
    """A captured step, replayed with other contents each time, gives what is wanted for them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed, want in enumerate(wanted):
        change(seed)
        graph.replay()
        assert_bits(y, want, f"replay {seed}")


@gpu
@whole_or_split
def test_a_prepared_call_reads_the_tensors_of_its_own_call(both, choose, whole):
    """A tensor map holds an address, which follows the weight and x: as they come, gathered, transposed."""
    for tokens in (200, 1000):
        sets = [dense("wo_a", tokens, 4, 512, 256, 16, seed) for seed in range(4)]
        grads = [torch.randn(tokens, 2, 256, device="cuda").to(BF16) for _ in sets]

        def run(i, sets=sets, grads=grads):
            x, *rest = sets[i]
            with torch.no_grad():
                alone = linear(x, *rest)
            leaf = x.detach().requires_grad_()
            y = linear(leaf, *rest)
            return alone, y.detach(), torch.autograd.grad(y, leaf, grads[i])[0]

        choose(False)
        wanted = [run(i) for i in range(4)]
        answers = choose(True, whole=whole)
        with torch.no_grad():
            for i in (0, 1, 2, 3, 0):
                assert_bits(linear(*sets[i]), wanted[i][0], f"T {tokens}, set {i}")
        assert answers == [True], "four of five are repeated"
        for i in (0, 1, 2, 3, 0):
            compare((run(i), wanted[i]), f"T {tokens}, set {i}")
        assert len(answers) > 1 and all(answers)


@gpu
def test_no_rows_no_launch_and_no_routes_zeros(both, choose):
    answers = choose(True)
    x, weight, a, b, ids, scalings, bias, _, _ = dense("plain", 128, 2, 64, 64, 8)
    assert linear(x[:0], weight, a, b, ids[:0], scalings, bias).shape == (0, 64) and answers == []
    c = experts(200, 4, 5, 128, 144, 3, 16)
    none = torch.full_like(c.ids, -1)
    with poisoned():
        y = c.call(ids=none)
        assert_bits(y, torch.zeros_like(y))
        assert c.call(x=c.x[:0], ids=c.ids[:0], adapters=c.adapters[:0], row_weights=c.row_weights[:0]).shape == (0, 144)
    assert answers == [True]


@gpu
def test_masked_routes_behind_few_others(choose):
    """Tiles without stages on every block behind few that have some, as one rank of many has them: they do not wait for each other."""
    answers = choose(True)
    c = experts(8192, 8, 5, 64, 144, 3, 16)
    few = torch.full_like(c.ids, -1)
    few[:40] = c.ids[:40]
    for ids in (few, c.ids):
        for ranks in (c.ranks, torch.zeros_like(c.ranks)):
            with poisoned():
                y = c.call(ids=ids, ranks=ranks)
            masked = ((ids < 0) | (ids >= 5)).flatten()
            assert_bits(y[masked], torch.zeros_like(y[masked]))
            assert torch.isfinite(y).all()
    assert answers and all(answers), "what is repeated is not asked again"


@gpu
def test_a_damaged_plan_leads_nowhere(both, choose):
    answers = choose(True)
    x, weight, a, b, ids, scalings, bias, _, ranks = dense("plain", 1000, 4, 512, 256, 16)
    c = experts(300, 4, 5, 128, 144, 3, 16)
    plan, routed = gl.plan(ids, 4), gl.expert_plan(c.ids, c.adapters, 5, 3)
    for wrong in (2**30, -(2**30), -1):
        linear(x, weight, a, b, ids, scalings, bias, ranks=ranks, plan=torch.full_like(plan, wrong))
        c.call(plan=torch.full_like(routed, wrong))
    torch.cuda.synchronize()
    assert answers and all(answers)
    got = linear(x, weight, a, b, ids, scalings, bias, ranks=ranks, plan=plan), c.call(plan=routed)
    choose(False)
    compare((got, (linear(x, weight, a, b, ids, scalings, bias, ranks=ranks), c.call())))


@gpu
def test_a_warmup_calls_it(both, choose):
    """Its dummy weights are of a layout that a tensor map can have; linear's bias is there and is not, and the gradient is taken."""
    answers = choose(True)
    gl.warmup([gl.Shape(512, 16, 4, 256, groups=2)], tokens=[300], ops=("linear",), backward=True)
    assert len(answers) >= 3 and all(answers)
    answers = choose(True)
    gl.warmup_experts([gl.ExpertShape(128, 256, 5, 4, 16, 3)], tokens=[300], ops=("expert_linear",))
    assert len(answers) >= 2 and all(answers)


# --- on a GPU: experts ---


def experts(tokens, top_k, count, features, out, slots, rank, factors="whole", shared="", per_route=False, seed=0):
    """expert_linear's arguments of random numbers: masked routes, ids past the last expert, expert 2 without any."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g, device="cuda").to(BF16)

    each, halves = ((2,) if factors == "an A each" else ()), ((2, out // 2) if factors != "whole" else (out,))
    ids = torch.randint(-1, count + 1, (tokens, top_k), generator=g, device="cuda")
    ids[ids == 2] = -1
    c = SimpleNamespace(
        x=randn(tokens * top_k if per_route else tokens, features),
        weight=randn(count, *halves, features) * features**-0.5,
        a=randn(slots, 1 if "a" in shared else count, *each, rank, features) * features**-0.5,
        b=randn(slots, 1 if "b" in shared else count, out, rank),
        ids=ids,
        adapters=torch.randint(-1, slots, (tokens,), generator=g, device="cuda") if slots > 1 else None,
        scalings=torch.rand(slots, generator=g, device="cuda") + 0.5,
        bias=randn(count, out),
        row_weights=torch.rand(tokens * top_k, generator=g, device="cuda"),
        ranks=torch.randint(0, rank + 1, (slots,), generator=g, device="cuda", dtype=torch.int32),
    )

    def call(plan=None, **changed):
        v = {**{k: t for k, t in vars(c).items() if k != "call"}, **changed}
        options = {k: v[k] for k in ("bias", "row_weights", "ranks")}
        return gl.expert_linear(v["x"], v["weight"], v["a"], v["b"], v["ids"], v["adapters"], v["scalings"], plan=plan, **options)

    c.call = call
    return c


@gpu
@pytest.mark.parametrize("form", FACTORS)
def test_experts_exact(both, choose, form):
    answers = choose(True)
    for i, (tokens, top_k, count, features, out, slots, rank, shared) in enumerate(
        ((130, 4, 5, 136, 144, 3, 24, ""), (700, 2, 3, 64, 528, 1, 16, "a"), (300, 3, 40, 72, 272, 2, 64, "b"))
    ):
        options = dict(tokens=tokens, top_k=top_k, experts=count, features=features, out=out, slots=slots, rank=rank, shared=shared)
        c = linear_case(form=form, bias=True, weights=i != 1, ranks=True, per_route=i == 2, halves=("wb", "", "w")[i], **options)
        check_linear(c, f"{form} {i}")
        check_linear(c, f"{form} {i} without LoRA", lora=False)
        if slots > 1:
            check_linear(c, f"{form} {i} planned", plan=gl.expert_plan(c.ids, c.adapters, count, slots))
    assert answers == [True] * 8


@gpu
@pytest.mark.parametrize("factors, shared", [("whole", ""), ("an A each", ""), ("halves of W", ""), ("whole", "a"), ("whole", "b")])
def test_the_bits_of_the_triton_kernels_over_experts(both, factors, shared):
    """y and all gradients; x of tokens and of routes, one adapter and several, rows of an expert from few to thousands."""
    names = ("x", "weight", "a", "b", "bias", "row_weights")
    for tokens, top_k, count, features, out, slots, rank, per_route in (
        (200, 4, 5, 512, 528, 3, 16, False),
        (700, 3, 16, 264, 272, 1, 32, True),
        (2000, 2, 4, 768, 1040, 4, 64, False),
        (600, 4, 300, 256, 256, 2, 128, False),
    ):
        c = experts(tokens, top_k, count, features, out, slots, rank, factors, shared, per_route)
        grad = torch.randn(tokens * top_k, out, device="cuda").to(BF16)

        def call(c=c, grad=grad):
            leaves = {name: getattr(c, name).detach().requires_grad_() for name in names}
            y = c.call(**leaves)
            return y.detach(), *torch.autograd.grad(y, list(leaves.values()), grad)

        compare(both(call, 2), f"{tokens} {count} {slots} {rank}")


@gpu
@pytest.mark.parametrize("router_weight", PLACEMENTS)
def test_the_bits_of_expert_mlp(both, router_weight):
    """y with h1 kept and without, and all ten gradients."""
    generator = torch.Generator().manual_seed(0)
    for activation, tokens, count, hidden, inner, rank in (("swiglu", 300, 4, 264, 136, 16), ("relu2", 900, 8, 128, 256, 64)):
        ids = torch.randint(-1, count + 1, (tokens, 4), generator=generator)
        ids[ids == 2] = -1
        c = layer(
            activation=activation, router_weight=router_weight, tokens=tokens, top_k=4, experts=count, hidden=hidden, inner=inner,
            rank=rank, ids=ids.tolist(),
        )  # fmt: skip

        def call(c=c):
            y, h1, *kept = expert_kernels("mlp_train")(*c.args())
            return y, h1, expert_kernels("mlp")(*c.args()), *gradients(c, h1, [True] * len(NAMES), kept)

        got, want = both(call, 7 if router_weight == "post_down" else 6)
        compare((got, want), activation)
        assert_bits(got[0], got[2], "h1 kept or not")


@gpu
def test_an_experts_adapter_that_is_not_finite_stays_with_its_rows(both):
    c = experts(500, 4, 5, 256, 272, 3, 24)
    slots = c.adapters.repeat_interleave(4)
    clean = both(lambda: (c.call(),), 1)[0][0]
    bad = c.b.clone()
    bad[0, ..., ::9, 1], bad[0, ..., 4] = float("inf"), NAN
    c.ranks[0] = 24
    got, want = (r[0] for r in both(lambda: (c.call(b=bad),), 1))
    assert_bits(got[slots != 0], clean[slots != 0], "other adapters' rows")
    live = (c.ids.flatten() >= 0) & (c.ids.flatten() < 5) & (slots == 0)
    assert not got[live].isfinite().all(1).any()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@gpu
def test_replays_follow_the_routing(both, choose):
    c = experts(400, 4, 8, 256, 272, 3, 16)

    def change(seed):
        other = experts(400, 4, 8, 256, 272, 3, 16, seed=seed)
        for name, t in vars(other).items():
            if isinstance(t, torch.Tensor):
                getattr(c, name).copy_(t)

    replay(choose, change, c.call)


# --- where it cannot be had ---


@pytest.mark.parametrize("missing", ["module", "available", "tensor maps"])
def test_triton_takes_what_it_cannot(kernels, monkeypatch, missing):
    """No cubin, another GPU's empty one, or a driver without tensor maps: the Triton kernel with the tiles that were chosen with it."""
    product, tiles, answers = linear_cuda.product, launch_linear.tiles, []
    module = SimpleNamespace(constant=lambda name, what: int(missing != "available"))
    others, stands_in = cuda.module, None if missing == "module" else module
    monkeypatch.setattr(cuda, "module", lambda op, stem, device: stands_in if stem == "linear" else others(op, stem, device))
    monkeypatch.setattr(driver, "has_tensor_maps", lambda: missing != "tensor maps")
    monkeypatch.setattr(linear_cuda, "product", lambda *args: answers.append(product(*args)) or answers[-1])
    monkeypatch.setattr(
        launch_linear, "linear", lambda p, *how: replace(tiles(p, *how), cuda=CudaConfig(launch_linear.SORTED, 4, 8))
    )
    monkeypatch.setattr(launch_experts, "takes_cuda", lambda p: True)
    monkeypatch.setattr(launch_experts, "ROUTE_LIMIT", 0)
    c, weight, bias = case("wo_a", features=72, out=24, rank=8, ranks=True, device=kernels.device)
    check(kernels, c, weight, bias)
    c = linear_case(features=72, out=24, rank=8, ranks=True, weights=True, bias=True)
    check_linear(c)
    assert answers == [False, False]
    check_linear(linear_case(torch.float16, features=72, out=24, rank=8))
    check_linear(linear_case(features=70, out=24, rank=8))
    assert len(answers) == 2, "fp16 and rows of 140 bytes: it is not asked"


# --- scaling · h in two parts ---


@pytest.mark.parametrize(
    "chunks, rows, groups, rank, div, slots, id_dtype",
    [(1, 5, 1, 16, 1, 1, None), (3, 40, 2, 24, 1, 4, torch.int64), (2, 300, 1, 8, 3, 3, torch.int32), (5, 33, 3, 200, 2, 2, torch.int64)],
)
def test_h_in_two_parts(kernels, chunks, rows, groups, rank, div, slots, id_dtype):
    """high = bf16(s · Σ h), low = bf16(s · Σ h − high); rows without an adapter are not read and not written."""
    from grouped_lora_ops.kernels.halves import halves

    g = torch.Generator().manual_seed(rank)
    h = torch.randn(chunks, rows, groups, rank, generator=g)
    h[0, 0, 0, :3] = torch.tensor([float("inf"), -0.0, 2.0**-140])
    h[1:, 0, 0, :3] = 0.0
    slot = torch.zeros(rows, dtype=torch.int64)
    ids = None
    if id_dtype is not None:
        tokens = -(-rows // div)
        every = torch.randint(-1, slots + 1, (2 * tokens,), generator=g)  # as it happens, a slot that is none, too
        every[0] = slots - 1
        ids = every.to(kernels.device, id_dtype)[::2]
        slot = every[::2].repeat_interleave(div)[:rows]
    live = (slot >= 0) & (slot < slots)
    h[:, ~live] = NAN
    for scalings in (None, torch.rand(slots, generator=g) + 0.5):
        out = torch.full((rows, groups, 2, rank), 7.0, dtype=BF16, device=kernels.device)
        moved = None if scalings is None else scalings.to(kernels.device)
        halves("linear", h.to(kernels.device), out, ids, div, moved, slots, False)
        v = h[0].clone()
        for c in range(1, chunks):
            v += h[c]
        if scalings is not None:
            v *= scalings[slot.clamp(0, slots - 1)][:, None, None]
        high = v.bfloat16()
        low = torch.where(high.float() == v, 0.0, v - high.float()).bfloat16()
        want = torch.where(live[:, None, None, None], torch.stack((high, low), 2), 7.0).to(BF16)
        assert_equal(out.cpu(), want, f"scalings {scalings}")
        assert (low[live] != 0).any() and live.any() and (id_dtype is None or not live.all())
