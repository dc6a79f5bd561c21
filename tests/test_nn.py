"""Modules on a small model of our own: what they compute, what they leave alone, and what they refuse."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from adapter_cases import random_adapter
from torch import nn
from toy_model import CONFIG, Toy, merged

from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import AdapterBank, plan_bank, read_adapter

LAYOUT = layouts.of(CONFIG)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products: two threads that wait for each other on a busy machine took 50 s for what one does in 1 s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bank_of(*adapters, slots=None, rank=4, dtype=torch.float32, **options):
    bank = AdapterBank(plan_bank(LAYOUT, slots=slots or len(adapters) + 1, rank=rank, dtype=dtype, **options))
    for n, adapter in enumerate(adapters):
        bank.load(f"a{n}", adapter)
    return bank


def inputs(batch=3, length=5, dtype=torch.float32, seed=3):
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("model_fused", [False, True])
@pytest.mark.parametrize("bank_fused", [False, True])
def test_every_sequence_gets_its_own_adapter(model_fused, bank_fused):
    if model_fused and not bank_fused:
        return  # refused, see below
    model, x = Toy(fused=model_fused), inputs()
    adapters = [random_adapter(LAYOUT, rank=r, scaling=s, seed=r) for r, s in ((3, 0.2), (4, 0.1))]
    wants = [merged(model, LAYOUT, a)(x) for a in adapters] + [model(x)]
    attached = gnn.attach_bank(model, bank_of(*adapters, fused=bank_fused))
    with torch.no_grad(), attached.using(["a1", None, "a0"]):
        got = model(x)
    for row, which in enumerate((1, 2, 0)):
        torch.testing.assert_close(got[row], wants[which][row], rtol=1e-4, atol=1e-4)
        assert which == 2 or not torch.allclose(got[row], wants[2][row], atol=1e-2)
    with attached.using(["a0", None, "a1"] * 5):  # a token each
        got = model(x)
    flat = [w.flatten(0, 1) for w in wants]
    for t in range(15):
        torch.testing.assert_close(got.flatten(0, 1)[t], flat[(0, 2, 1)[t % 3]][t], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_no_adapter_and_a_zero_one_change_no_bit(dtype, grad):
    model, x = Toy().to(dtype), inputs(dtype=dtype)
    want = model(x)
    adapter = random_adapter(LAYOUT, scaling=0.5)
    for lora in adapter.modules.values():
        lora.lora_b.zero_()
    attached = gnn.attach_bank(model, bank_of(adapter, dtype=dtype))
    with torch.set_grad_enabled(grad):
        for names in ([None], ["a0"], ["a0", None, "a0"]):
            with attached.using(names):
                assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)  # behind using: nobody has an adapter


def test_it_holds_references_and_detaches_cleanly():
    model = Toy()
    model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    before = dict(model.named_parameters()), dict(model.state_dict()), dict(model.named_modules())
    attached = gnn.attach_bank(model, bank_of(random_adapter(LAYOUT)))
    after = dict(model.named_parameters()), dict(model.state_dict())
    assert list(after[0]) == list(before[0]) and all(after[0][k] is p for k, p in before[0].items())
    assert list(after[1]) == list(before[1]) and all(after[1][k].data_ptr() == t.data_ptr() for k, t in before[1].items())
    wrapped = model.layers[0].self_attn.q_proj
    assert isinstance(wrapped, gnn.LoraLinear) and wrapped.weight is before[0]["layers.0.self_attn.q_proj.weight"]
    assert (wrapped.in_features, wrapped.out_features, wrapped.bias is None) == (32, 32, False)
    model.load_state_dict({k: t + 1 for k, t in before[1].items()})
    model.double().eval()
    assert wrapped.base.weight is wrapped.weight and wrapped.base.weight.dtype == torch.float64 and not wrapped.base.training
    model.train()
    assert wrapped.base.training
    attached.detach()
    attached.detach()
    assert dict(model.named_modules()) == before[2]
    assert not before[0]["layers.0.self_attn.q_proj.weight"].requires_grad
    assert all(p.requires_grad for k, p in model.named_parameters() if "0.self_attn.q_proj.weight" not in k)


def test_hooks_of_the_base_fire_and_copies_are_independent_of_the_original():
    model, x, fired = Toy(), inputs(), []
    model.layers[1].mlp.down_proj.register_forward_hook(lambda *args: fired.append(1))
    bank = bank_of(random_adapter(LAYOUT, scaling=0.2))
    attached = gnn.attach_bank(model, bank)
    twin = copy.deepcopy(model)
    slots = twin.layers[0].self_attn.q_proj.factors.slots
    assert slots.lora_a.data_ptr() == bank["model.layers.0.self_attn.q_proj"].lora_a.data_ptr()  # no second bank
    with attached.using(["a0"]):
        got = model(x)
        assert fired == [1] and torch.equal(twin(x), got)
        with torch.no_grad():
            twin.layers[0].self_attn.q_proj.weight.zero_()
        assert torch.equal(model(x), got) and not torch.equal(twin(x), got)
        assert twin.layers[0].self_attn.q_proj.base.weight is twin.layers[0].self_attn.q_proj.weight


def test_one_report_lists_what_does_not_fit_and_nothing_changes():
    model = Toy(fused=True)
    with pytest.raises(ValueError, match="nothing was attached") as error:
        gnn.attach_bank(model, bank_of(random_adapter(LAYOUT)))
    assert str(error.value).count("needs buffers made with fused=True") == 2 * 5
    model = Toy()
    del model.layers[1].mlp.down_proj
    model.layers[0].mlp.down_proj = nn.Linear(8, 32)
    model.layers[0].self_attn.o_proj.bfloat16(), model.layers[1].self_attn.o_proj.bfloat16()
    modules = dict(model.named_modules())
    with pytest.raises(ValueError) as error:
        gnn.attach_bank(model, bank_of(random_adapter(LAYOUT)))
    assert str(error.value).split("\n  - ")[1:] == [
        "model.layers.0.mlp.down_proj: weight must be [32, 40] for these adapters; got [32, 8].",
        "model.layers.1.mlp.down_proj: the model has no such module.",
        "model.layers.0.self_attn.o_proj and 1 more: the bank must be bfloat16 like the weight (plan_bank(…, dtype=torch.bfloat16)); got float32.",
    ]
    assert dict(model.named_modules()) == modules
    model = Toy()
    attached = gnn.attach_trainable(model, LAYOUT, selectors=["q_proj"])
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj has adapters attached already"):
        gnn.attach_bank(model, bank_of(random_adapter(LAYOUT)))
    attached.detach()
    with pytest.raises(ValueError, match="one for each of 2 slots"):
        gnn.attach_trainable(model, LAYOUT, slots=2, rank=[1, 2, 3])
    with pytest.raises(ValueError, match='experts must be None, "parent" or "fused"'):
        gnn.attach_trainable(model, LAYOUT, experts="eager")
    with pytest.raises(RuntimeError, match="in no bank"), attached.using(["a0"]):
        pass


def test_an_adapter_in_use_on_a_weight_that_was_sliced_is_refused_and_an_idle_one_passes():
    model = Toy()
    attached = gnn.attach_bank(model, bank_of(random_adapter(LAYOUT)))
    module = model.layers[0].mlp.down_proj
    module.base.weight = nn.Parameter(module.weight[:, :20].clone())  # as a context-parallel decode may hold it
    half = torch.randn(3, 20)
    want = half @ module.weight.t()
    with attached.using([None]):
        torch.testing.assert_close(module(half), want)
    with attached.using(["a0"]), pytest.raises(RuntimeError, match=r"an adapter is in use, but weight must be \[32, 40\]"):
        module(half)
    attached.routing.set(torch.tensor([-1]))
    torch.testing.assert_close(module(half), want)


# ---- training ------------------------------------------------------------------------------------------------------------


def integers(shape, seed, low=-2, high=3):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


def two_jobs(model, **options):
    attached = gnn.attach_trainable(model, LAYOUT, slots=2, rank=[2, 4], alpha=[4, 4], **options)
    with torch.no_grad():
        for n, p in enumerate(attached.parameters()):
            p.copy_(integers(p.shape, n, -1, 2))
    return attached


def test_each_job_has_the_gradients_that_it_has_alone():
    """Small integers: every sum is exact, so jobs must not differ by a bit from themselves alone."""
    linear, x, grad = Toy().layers[0].self_attn.q_proj, integers((4, 3, 32), 1), integers((4, 3, 32), 2)

    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Module()])
            self.layers[0].self_attn = nn.Module()
            self.layers[0].self_attn.q_proj = linear

    one = layouts.of(CONFIG | {"num_hidden_layers": 1})
    with torch.no_grad():
        linear.weight.copy_(integers(linear.weight.shape, 5)), linear.bias.zero_()
    model = Only()
    attached = gnn.attach_trainable(model, one, slots=3, rank=[2, 4, 3], alpha=[4, 4, 3], selectors=["q_proj"])
    with torch.no_grad():
        for n, p in enumerate(attached.parameters()):
            p.copy_(integers(p.shape, n, -1, 2))
    attached.routing.set([0, 1, 0, -1])
    model.layers[0].self_attn.q_proj(x).backward(grad)
    together = [[p.grad.clone() for p in attached.parameters(slot)] for slot in range(3)]
    assert all(g.any() for job in together[:2] for g in job) and not any(g.any() for g in together[2])
    for job, rows in ((0, [0, 2]), (1, [1])):
        for p in attached.parameters():
            p.grad = None
        attached.routing.set([job])
        model.layers[0].self_attn.q_proj(x[rows]).backward(grad[rows])
        assert all(torch.equal(a, p.grad) for a, p in zip(together[job], attached.parameters(job)))
        a, b = attached.parameters(job)
        own_x, own_grad, scaling = x[rows].flatten(0, 1), grad[rows].flatten(0, 1), (2.0, 1.0)[job]
        assert torch.equal(b.grad, scaling * own_grad.t() @ (own_x @ a.t()))
        assert torch.equal(a.grad, scaling * (own_grad @ b).t() @ own_x)


@pytest.mark.parametrize("fused", [False, True])
def test_training_freezes_the_base_and_names_nothing_twice(fused):
    model, x = Toy(fused=fused), inputs()
    base = list(model.state_dict())
    attached = two_jobs(model, fused=fused)
    state = model.state_dict()
    assert set(base) < set(state) and all(".lora." in k for k in set(state) - set(base))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(names) == len(attached.parameters()) == len(set(state) - set(base)) and all(".lora." in n for n in names)
    addresses = [t.data_ptr() for t in state.values()]
    assert len(addresses) == len(set(addresses))
    attached.routing.set([0, 1, 0])
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in attached.parameters())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    twin = Toy(fused=fused)
    other = gnn.attach_trainable(twin, LAYOUT, slots=2, rank=[2, 4], alpha=[4, 4], fused=fused)
    twin.load_state_dict(state)
    other.routing.set([0, 1, 0])
    assert torch.equal(twin(x), model(x))
    attached.detach()
    assert list(model.state_dict()) == base and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("model_fused, fused", [(False, False), (True, True), (False, True)])
def test_what_a_slot_learned_is_an_adapter(model_fused, fused):
    model, x = Toy(fused=model_fused), inputs()
    attached = two_jobs(model, fused=fused)
    with torch.no_grad():
        for p in attached.parameters():
            p.mul_(0.1)
    for slot in range(2):
        adapter = attached.adapter(slot)
        assert list(adapter.modules) == [p.path for p in LAYOUT.places()] and adapter.rank == (2, 4)[slot]
        attached.routing.set([slot])
        got = model(x)
        attached.detach()
        torch.testing.assert_close(got, merged(model, LAYOUT, adapter)(x), rtol=1e-4, atol=1e-4)
        served = gnn.attach_bank(model, bank_of(adapter, fused=fused))
        with served.using(["a0"]):
            assert torch.equal(model(x), got)
        served.detach()
        model = Toy(fused=model_fused)
        attached = two_jobs(model, fused=fused)
        attached.load(adapter, 1)  # into a larger rank, too
        attached.routing.set([1])
        torch.testing.assert_close(model(x), got, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for p in attached.parameters():
                p.mul_(0.1)
    with pytest.raises(ValueError, match="rank must be at most the bank's 2; got 3"):
        attached.load(random_adapter(LAYOUT, rank=3), 0)


def test_float32_masters_take_part_rounded_and_get_float32_gradients():
    model, x = Toy().bfloat16(), inputs(dtype=torch.bfloat16)
    attached = gnn.attach_trainable(model, LAYOUT, rank=4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for f in attached.factors:
            assert f.a[0].abs().max() <= f.a[0].shape[-1] ** -0.5 and f.a[0].std() > 0.4 * f.a[0].shape[-1] ** -0.5
            assert not f.b[0].any()
            f.b[0].normal_(generator=torch.Generator().manual_seed(2))
    y = model(x)
    y.float().square().sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.any() for p in attached.parameters())
    adapter = attached.adapter()
    attached.detach()
    with gnn.attach_bank(model, bank_of(adapter, dtype=torch.bfloat16)).using(["a0"]):
        assert torch.equal(model(x), y)


def test_autocast_and_checkpointing():
    model, x = Toy(), inputs()
    attached = two_jobs(model)
    attached.routing.set([0, 1, -1])

    def gradients(run):
        for p in attached.parameters():
            p.grad = None
        run().float().square().sum().backward()
        return [p.grad for p in attached.parameters()]

    with torch.autocast("cpu", torch.bfloat16):
        assert model.layers[0].self_attn.q_proj(x).dtype == torch.bfloat16
        y = model(x)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients(lambda: y))
    plain = gradients(lambda: model(x))
    again = gradients(lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_ids_set_for_the_next_batch_do_not_disturb_a_backward():
    model, x = Toy(), inputs()
    attached = two_jobs(model)
    attached.routing.set([0])
    first = model(x)
    attached.routing.set([1])
    second = model(x)
    first.sum().backward()
    assert all(p.grad.any() for p in attached.parameters(0)[1:2]) and not any(p.grad.any() for p in attached.parameters(1))
    second.sum().backward()
    assert any(p.grad.any() for p in attached.parameters(1))


@pytest.mark.parametrize("batch", [3, 40])
def test_an_evaluation_in_inference_mode_comes_first(batch):
    """What is kept between calls must serve a backward later."""
    model, x = Toy(), inputs(batch)
    attached = gnn.attach_trainable(model, LAYOUT, rank=2)
    with torch.inference_mode():
        attached.routing.set([0])
        want = model(x)
        attached.prepare(15, "cpu")
    y = model(x)
    y.sum().backward()
    assert torch.equal(want, y) and all(p.grad is not None for p in attached.parameters())
    attached.routing.set([-1])
    assert (attached.prepare(15, "cpu") == -1).all()


def test_training_is_compiled_whole():
    model, x = Toy(), inputs()
    attached = two_jobs(model)
    attached.routing.set([0, 1, -1])
    attached.prepare(15, "cpu")
    model(x).sum().backward()
    want = [p.grad.clone() for p in attached.parameters()]
    for p in attached.parameters():
        p.grad = None
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch._dynamo.reset()
    for p, g in zip(attached.parameters(), want):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch, ids", [(3, [-1]), (0, [0, 1]), (0, [])])
def test_jobs_without_tokens_get_gradients_of_zeros(batch, ids):
    """Data-parallel reductions wait for every gradient: none may be missing on a rank without tokens."""
    model = Toy()
    attached = two_jobs(model)
    attached.routing.set(ids)
    model(inputs(batch)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in attached.parameters())


def test_the_meta_device():
    with torch.device("meta"):
        model = Toy()
    attached = gnn.attach_trainable(model, LAYOUT, rank=2)
    assert all(p.is_meta for p in model.parameters()) and all(p.is_meta for p in attached.parameters())
    assert model(torch.empty(2, 3, 32, device="meta")).shape == (2, 3, 32)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)
    attached.reset_parameters(torch.Generator().manual_seed(0))
    assert attached.factors[0].a[0].any() and not attached.factors[0].b[0].any()
    model(inputs()).sum().backward()
    assert all(p.grad is not None for p in attached.parameters())


def test_what_the_readme_shows(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n([^`]*attached\.using[^`]*)```", readme)
    model, bank = Toy(), AdapterBank(plan_bank(LAYOUT, slots=2, rank=4, dtype=torch.float32))
    bank.load("first", random_adapter(LAYOUT, scaling=0.2))
    x = inputs(2)
    plain, before = model(x), list(model.state_dict())
    names = dict(torch=torch, model=model, bank=bank, x=x, layout=LAYOUT, batches=[x] * 3, new_path=tmp_path / "new")
    exec(block, names)
    assert torch.equal(names["y"][1], plain[1]) and not torch.allclose(names["y"][0], plain[0], atol=1e-2)
    read = read_adapter(tmp_path / "new", LAYOUT)
    assert sorted(read.modules) == sorted(p.path for p in LAYOUT.places()) and read.rank == 8
    names["attached"].detach()
    assert list(model.state_dict()) == before and torch.equal(model(x), plain)


# ---- routing -------------------------------------------------------------------------------------------------------------


def test_fixed_tensors_are_written_in_place():
    routing = gnn.Routing(3, [-1])
    cpu = torch.device("cpu")
    ids = routing.prepare(300, "cpu")
    address, (_, plan) = ids.data_ptr(), routing.rows(300, cpu)
    assert (ids == -1).all() and plan is not None
    routing.set([2, -1, 0])
    assert routing.prepare(300, cpu) is ids and ids.data_ptr() == address
    assert ids.tolist() == [2] * 100 + [-1] * 100 + [0] * 100
    assert torch.equal(plan, torch.ops.grouped_lora.plan(ids, 3)) and routing.rows(300, cpu)[1] is plan
    routing.set([0] * 7)  # 7 does not divide 300: nobody gets another's adapter
    assert (ids == -1).all() and torch.equal(plan, torch.ops.grouped_lora.plan(ids, 3))
    assert routing.rows(14, cpu)[0].tolist() == [0] * 14 and routing.rows(14, cpu)[1] is None
    assert routing.active
    routing.clear()
    assert not routing.active
    routing.set(torch.tensor([1, -1]))
    assert routing.active and routing.rows(4, cpu)[0].tolist() == [1, 1, -1, -1]
    assert routing.rows(0, cpu)[0].tolist() == []


def test_what_routing_refuses(monkeypatch):
    routing = gnn.Routing(2)
    cpu = torch.device("cpu")
    with pytest.raises(RuntimeError, match="no ids were set"):
        routing.rows(4, cpu)
    with pytest.raises(ValueError, match=r"ids must be in -1 … 1; got 2"):
        routing.set([0, 2])
    for bad in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"ids must be int32 or int64 \[n\]"):
            routing.set(bad)
    routing.set([0, 1, 0])
    with pytest.raises(ValueError, match="must divide the batch's 4 tokens; got 3"):
        routing.rows(4, cpu)
    for sequences, tokens in ((1, 6), (3, 6), (6, 12)):  # a sequence each, or half of the ids' number
        assert len(routing.rows(tokens, cpu, sequences)[0]) == tokens
    with pytest.raises(ValueError, match="an id for each of the batch's 2 sequences .*; got 3"):
        routing.rows(6, cpu, 2)  # these rows are known already
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"call prepare\(6, device\) before it"):
        routing.rows(6, torch.device("cuda", 0))


def test_an_id_never_goes_on_in_the_next_sequence():
    """Two ids for three sequences of four tokens divide the twelve tokens, too."""
    model = Toy()
    attached = gnn.attach_bank(model, bank_of(random_adapter(LAYOUT)))
    x = torch.randn(3, 4, 32)
    with attached.using(["a0", None]), pytest.raises(ValueError, match="each of the batch's 3 sequences .*; got 2"):
        model(x)
    with attached.using(["a0", None]):
        assert model(x.view(2, 6, 32)).shape == (2, 6, 32) and model(x[:2, :1]).shape == (2, 1, 32)


def test_what_is_no_model_no_bank_and_no_layout():
    model, bank = Toy(), bank_of(random_adapter(LAYOUT))
    for call, sentence in (
        (lambda: gnn.attach_bank(bank, model), "attach_bank: model must be Module, the model itself; got AdapterBank"),
        (lambda: gnn.attach_bank(model, "b"), "attach_bank: bank must be AdapterBank, of the plan of this model; got str"),
        (lambda: gnn.attach_trainable(model, "m"), r"attach_trainable: layout must be Model, as layouts\.of\(.*; got str"),
    ):
        with pytest.raises(TypeError, match=sentence):
            call()
    assert "linears and 0 experts of Toy, served from a bank" in repr(gnn.attach_bank(model, bank))


def test_a_captured_step_reads_the_fixed_ids():
    """What a graph replays is what the modules read at capture: here the same tensors, written between two runs."""
    model, x = Toy(), inputs()
    attached = gnn.attach_bank(model, bank_of(random_adapter(LAYOUT, scaling=0.2)))
    ids = attached.prepare(15, "cpu")
    seen = []
    module, run = model.layers[0].self_attn.q_proj, gnn.linear.delta_

    def spy(out, rows, a, b, adapter_ids, *rest, **options):
        seen.append(adapter_ids)
        return run(out, rows, a, b, adapter_ids, *rest, **options)

    gnn.linear.delta_ = spy
    try:
        with torch.no_grad():
            plain = module(x)  # nobody has an adapter, but a graph must hold the op
            with attached.using(["a0"]):
                adapted = module(x)
    finally:
        gnn.linear.delta_ = run
    assert len(seen) == 2 and all(s is ids for s in seen) and not torch.equal(plain, adapted)


def test_ids_inside_ids():
    model, x = Toy(), inputs(2)
    attached = gnn.attach_bank(model, bank_of(*(random_adapter(LAYOUT, scaling=0.2, seed=s) for s in range(2))))
    fixed = attached.prepare(10, "cpu")
    with torch.no_grad(), attached.using(["a0", None]) as outer:
        want = model(x)
        with attached.using(["a1"]) as inner:
            assert not torch.equal(model(x), want) and fixed.tolist() == [inner["a1"]] * 10
        assert torch.equal(model(x), want) and fixed.tolist() == [outer["a0"]] * 5 + [-1] * 5
    assert fixed.tolist() == [-1] * 10 and not attached.routing.active


def test_a_whole_graph_is_compiled_once():
    """torch.compile: no break, and no recompile for other ids."""
    model, x = Toy(), inputs()
    attached = gnn.attach_bank(model, bank_of(random_adapter(LAYOUT, scaling=0.2)))
    attached.prepare(15, "cpu")
    torch._dynamo.reset()
    compiled, results = torch.compile(model, fullgraph=True, backend="aot_eager"), []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for names in (["a0"], ["a0", None, "a0"], [None], ["a0"] * 15):
            with attached.using(names):
                results.append(compiled(x))
                torch.testing.assert_close(results[-1], model(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(results[0], results[1]) and torch.equal(results[0], results[3])
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 300])
def test_a_graph_of_the_modules_follows_ids_and_adapters(tokens):
    """One captured step; other ids, then another adapter in the same slot: each replay equals the eager call, bit for bit."""
    model = Toy().to("cuda", torch.bfloat16)
    adapters = [random_adapter(LAYOUT, scaling=0.2, seed=s) for s in range(3)]
    bank = AdapterBank(plan_bank(LAYOUT, slots=2, rank=4, dtype=torch.bfloat16, host_adapters=3), device="cuda")
    for n, adapter in enumerate(adapters):
        bank.add(f"a{n}", adapter)
    attached = gnn.attach_bank(model, bank)
    attached.prepare(tokens, "cuda")
    x = torch.zeros(4, tokens // 4, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        with attached.using(["a0", None, "a1", "a0"]):
            model(x)  # kernels are compiled
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = model(x)
        seen = []
        for names in (["a0", None, "a1", "a0"], [None], ["a1"], ["a2", "a1", None, None]):
            x.copy_(inputs(4, tokens // 4, torch.bfloat16))
            with attached.using(names):
                graph.replay()
                want = model(x)
                assert torch.equal(y, want)
            seen.append(y.clone())
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])
