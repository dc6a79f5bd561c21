"""AdapterBank: slots in place, eviction and pinning, adapters that wait on the host, threads; graphs on a GPU."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import replace

import pytest
import torch
from adapter_cases import random_adapter
from tiny_models import CONFIGS

import grouped_lora_ops as gl
from grouped_lora_ops import layouts
from grouped_lora_ops.adapters import AdapterBank, LoraModule, plan_bank
from grouped_lora_ops.layouts import Share

LLAMA, V4, MOE = (layouts.of(CONFIGS[name]) for name in ("llama", "deepseek_v4", "qwen3_moe"))
Q = "model.layers.0.self_attn.q_proj"


def bank_of(model=LLAMA, selectors=("q_proj", "o_proj"), slots=3, rank=4, dtype=torch.float32, device="cpu", **options):
    return AdapterBank(plan_bank(model, slots=slots, rank=rank, dtype=dtype, selectors=selectors, **options), device)


def adapter_of(seed, model=LLAMA, selectors=("q_proj", "o_proj"), **options):
    return random_adapter(model, selectors, seed=seed, **options)


def delta(bank, path, x, slots):
    """What the ops make of a buffer, for one row per slot."""
    b = bank[path]
    ids = torch.tensor(slots, device=bank.device)
    return gl.delta(x, b.lora_a, b.lora_b, ids, b.scalings, ranks=b.ranks, out_sizes=b.out_sizes)


def direct(lora, x):
    return lora.scaling * (x.double() @ lora.lora_a.double().T) @ lora.lora_b.double().T


def poison(bank):
    bank._storage.fill_(torch.nan)


def test_memory_is_stated_before_it_is_allocated():
    plan = plan_bank(V4, slots=5, rank=8, host_adapters=7)
    bank = AdapterBank(plan)
    held = (bank._storage, bank._scalings, bank._ranks)
    assert plan.device_bytes == sum(t.nbytes for t in held)
    assert plan.host_bytes == sum(t.nbytes for t in (bank._host, bank._host_scalings, bank._host_ranks))
    assert str(plan).startswith("5 slots of 0.1 MiB (rank 8, bfloat16, 40 buffers): 0.") and str(plan).endswith(" on the host")
    with pytest.raises(ValueError, match=r"the bank must fit in 0\.1 MiB; it needs 5 slots of"):
        plan_bank(V4, slots=5, rank=8, max_bytes=100_000)
    full = plan_bank(layouts.of(V4_FLASH), slots=8, rank=16, selectors=["self_attn.o_a_proj"])
    # 43 layers of A [16, 4096] and B [8, 1024, 16]; everything is aligned as it is
    assert full.slot_bytes == 43 * (16 * 4096 + 8 * 1024 * 16) * 2


V4_FLASH = dict(
    model_type="deepseek_v4",
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    moe_intermediate_size=2048,
)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"slots": 0}, "slots must be an integer of at least 1; got 0"),
        ({"rank": 0}, "rank must be an integer of at least 1; got 0"),
        ({"host_adapters": -1}, "host_adapters must be an integer of at least 0; got -1"),
        ({"dtype": torch.int8}, "dtype must be a floating-point dtype; got torch.int8"),
        ({"share": Share(tp=4)}, "tp must divide the 2 heads"),
    ],
)
def test_plans_that_cannot_be(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan_bank(LLAMA, **{"slots": 2, "rank": 4} | options)


def test_buffers_are_views_that_start_where_vector_loads_do():
    bank = bank_of(dtype=torch.bfloat16, rank=3)
    for slots in bank.buffers.values():
        for t in (slots.lora_a, slots.lora_b):
            assert t.untyped_storage().data_ptr() == bank._storage.untyped_storage().data_ptr()
            assert all(t[l].data_ptr() % 64 == bank._storage.data_ptr() % 64 and t[l].is_contiguous() for l in range(3))
        assert slots.scalings.is_contiguous() and slots.ranks.is_contiguous()


def test_dense_and_grouped_deltas():
    selectors = ["q_a_proj", "o_a_proj", "o_b_proj"]
    bank = bank_of(V4, selectors)
    poison(bank)
    adapters = [adapter_of(n, V4, selectors, rank=n + 1, scaling=0.5 + n) for n in range(3)]
    slots = [bank.load(str(n), adapter) for n, adapter in enumerate(adapters)]
    assert sorted(slots) == [0, 1, 2]
    for path in adapters[0].modules:
        p = V4.locate(path).projection
        x = torch.randn(3, *((p.groups,) if p.groups else ()), p.in_features)
        y = delta(bank, path, x, slots)
        for n, adapter in enumerate(adapters):
            lora = adapter.modules[path]
            if p.groups:
                b = lora.lora_b.view(p.groups, p.out_features, -1)
                want = torch.stack([direct(LoraModule(lora.lora_a, b[g], n + 1, lora.scaling), x[n, g]) for g in range(p.groups)])
            else:
                want = direct(lora, x[n])
            torch.testing.assert_close(y[n].double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("adapter_each", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_expert_deltas(each, adapter_each, shared):
    selectors = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    bank = bank_of(MOE, selectors, rank=6, gate_up_each=each, shared_outer=shared)
    poison(bank)
    adapter = adapter_of(1, MOE, selectors, each=adapter_each, shared_outer=shared)
    slot = bank.load("a", adapter)
    x_of = {path: torch.randn(4, MOE.locate(path).projection.in_features) for path in adapter.experts}
    for path, expert in adapter.experts.items():
        b, x = bank[path], x_of[path]
        y = gl.expert_delta(
            x, b.lora_a, b.lora_b, torch.arange(4)[:, None], torch.full((4,), slot), b.scalings, ranks=b.ranks
        )
        for e in range(4):
            torch.testing.assert_close(y[e].double(), expert.delta(e) @ x[e].double(), rtol=1e-5, atol=1e-4)


def test_fused_families_and_their_members_views():
    bank = bank_of(LLAMA, ["q_proj", "v_proj"], fused=True)
    poison(bank)
    adapter = adapter_of(1, LLAMA, ["q_proj", "v_proj"])
    q, v = (f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qv")
    modules = dict(adapter.modules)
    modules[v] = replace(modules[v], lora_a=modules[v].lora_a[:1], lora_b=modules[v].lora_b[:, :1], rank=1, scaling=0.2)
    slot = bank.load("a", replace(adapter, modules=modules))
    x = torch.randn(1, 32)
    y = delta(bank, "model.layers.0.self_attn.qkv_proj", x, [slot])[0].split([32, 16, 16])
    torch.testing.assert_close(y[0].double(), direct(modules[q], x)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y[2].double(), direct(modules[v], x)[0], rtol=1e-5, atol=1e-5)
    assert not y[1].any()
    assert torch.equal(delta(bank, v, x, [slot])[0], y[2])
    assert bank[v].lora_b.untyped_storage().data_ptr() == bank._storage.untyped_storage().data_ptr()


def test_a_ranks_share():
    adapter = random_adapter(V4, seed=3)
    whole = AdapterBank(plan_bank(V4, slots=1, rank=3, dtype=torch.float32))
    whole.load("a", adapter)
    for rank in range(2):
        part = AdapterBank(plan_bank(V4, slots=1, rank=3, dtype=torch.float32, share=Share(2, rank, 2, rank)))
        part.load("a", adapter)
        for path, slots in part.buffers.items():
            p = V4.locate(path).projection
            cut = p.part(Share(2, rank, 2, rank))
            a, b = whole[path].lora_a, whole[path].lora_b
            if p.experts:
                a, b = a[:, cut.experts], b[:, cut.experts]
            elif p.groups:
                b = b[:, cut.groups]
            else:
                a, b = a[..., cut.columns], torch.cat([b[:, r] for r in cut.rows], 1)
            assert torch.equal(slots.lora_a, a) and torch.equal(slots.lora_b, b)


def test_nothing_of_an_earlier_adapter_is_left():
    """Rank 4 after rank 64 would be: a slot's tail, its absent modules, and the slot after unloading are zero."""
    bank = bank_of(rank=64, slots=1)
    poison(bank)
    bank.load("big", adapter_of(1, rank=64))
    slot = bank.load("small", adapter_of(2, selectors=["q_proj"], rank=4))  # evicts big
    assert bank.resident == {"small": 0}
    o = bank["model.layers.0.self_attn.o_proj"]
    assert not o.lora_a.any() and not o.lora_b.any() and o.ranks[slot] == 0 and o.scalings[slot] == 0
    q = bank[Q]
    assert not q.lora_a[slot, 4:].any() and not q.lora_b[slot, :, 4:].any() and q.ranks[slot] == 4
    x = torch.randn(1, 32)
    without_ranks = gl.delta(x, q.lora_a, q.lora_b, torch.tensor([slot]), q.scalings)
    torch.testing.assert_close(without_ranks, delta(bank, Q, x, [slot]), rtol=1e-5, atol=1e-6)
    bank.unload("small")
    assert not bank._storage.any() and not bank._ranks.any() and not bank._scalings.any()


def test_addresses_never_change_and_a_slot_is_swapped_in_place():
    bank = bank_of(slots=2)
    before = {path: [t.data_ptr() for t in slots[:4]] for path, slots in bank.buffers.items()}
    first = bank.load("a", adapter_of(1))
    bank.load("b", adapter_of(2))
    old, generation = bank[Q].lora_a[first].clone(), bank.generation(first)
    assert bank.load("a", adapter_of(3, rank=2)) == first  # into its own slot
    assert bank.generation(first) == generation + 1
    assert not torch.equal(bank[Q].lora_a[first], old) and bank[Q].ranks[first] == 2
    bank.unload("b"), bank.load("c", adapter_of(4)), bank.load("d", adapter_of(5))
    assert before == {path: [t.data_ptr() for t in slots[:4]] for path, slots in bank.buffers.items()}


def test_the_least_recently_used_goes_first_and_held_ones_stay():
    bank = bank_of(slots=3)
    for n, name in enumerate("abc"):
        bank.load(name, adapter_of(n))
    bank.acquire("a"), bank.release("a")
    assert list(bank.resident) == ["b", "c", "a"]
    bank.acquire("b")
    bank.load("d", adapter_of(4))
    assert list(bank.resident) == ["a", "b", "d"]
    bank.acquire("a"), bank.acquire("d"), bank.acquire("d")
    assert bank.pinned == {"a": 1, "b": 1, "d": 2}
    before = bank._storage.clone()
    with pytest.raises(RuntimeError, match=r"no slot for e: all 3 are held \(b, a, d\)"):
        bank.load("e", adapter_of(5))
    for act in (lambda: bank.unload("d"), lambda: bank.forget("d"), lambda: bank.load("d", adapter_of(6))):
        with pytest.raises(RuntimeError, match=r"cannot (unload|forget|replace) d while it is held \(2 times\)"):
            act()
    assert torch.equal(bank._storage, before)
    bank.release("d"), bank.release("d"), bank.load("e", adapter_of(5))
    assert list(bank.resident) == ["b", "a", "e"]


def test_ids_and_names():
    bank = bank_of()
    bank.load("a", adapter_of(1)), bank.load("b", adapter_of(2))
    with bank.using(["b", None, "b", "a"]) as slots:
        assert bank.adapter_ids(["b", None, "a", "b"]).tolist() == [slots["b"], -1, slots["a"], slots["b"]]
        assert bank.adapter_ids([None], dtype=torch.int64).dtype == torch.int64 and bank.adapter_ids([]).shape == (0,)
        assert bank.pinned == {"a": 1, "b": 1}
    assert bank.pinned == {}
    for act, sentence in (
        (lambda: bank.adapter_ids(["a"]), "a is not held; hold it with using"),
        (lambda: bank.acquire("x"), "there is no adapter x"),
        (lambda: bank.release("a"), "a is not held"),
        (lambda: bank.unload("x"), "x is in no slot"),
        (lambda: bank.forget("x"), "there is no adapter x"),
        (lambda: bank["model.layers.0.self_attn.k_proj"], "there is no buffer for model.layers.0.self_attn.k_proj"),
    ):
        with pytest.raises(LookupError, match=sentence):
            act()
    with pytest.raises(LookupError, match="there is no adapter x"):
        with bank.using(["a", "x"]):
            pass
    for act in (lambda: bank.adapter_ids("ab"), lambda: bank.using("ab").__enter__()):
        with pytest.raises(TypeError, match="names must be a list, with a name or None for each; got the string 'ab'"):
            act()
    with pytest.raises(TypeError, match="adapter must be Adapter, as read_adapter makes it; got str"):
        bank.load("c", "path/to/c")
    assert bank.pinned == {}


def test_what_does_not_fit_changes_nothing():
    bank = bank_of(MOE, ["q_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"], shared_outer=True, dtype=torch.float16)
    before = bank._storage.clone(), bank._ranks.clone()
    adapter = random_adapter(MOE, ["q_proj", "k_proj", "mlp.experts.gate_up_proj"], rank=5)
    q = f"{Q[:-6]}q_proj"
    modules = dict(adapter.modules)
    modules[q] = replace(modules[q], lora_b=modules[q].lora_b[:-1])
    huge = "model.layers.1.self_attn.q_proj"
    modules[huge] = LoraModule(torch.full((2, 32), 1e6), torch.ones(32, 2), 2, 1.0)
    with pytest.raises(ValueError) as error:
        bank.load("a", replace(adapter, modules=modules))
    assert str(error.value).split("\n  - ") == [
        "grouped_lora_ops.adapters.AdapterBank: the adapter does not fit; nothing was loaded:",
        "model.layers.0.self_attn.k_proj: the bank has no buffer for it.",
        "model.layers.1.self_attn.k_proj: the bank has no buffer for it.",
        f"{q}: B must be [32, 5]; got [31, 5].",
        f"{q}: rank must be at most the bank's 4; got 5.",
        f"{huge}: a factor is not finite in float16.",
        "model.layers.1.mlp.experts.gate_up_proj: rank must be at most the bank's 4; got 5.",
    ]
    with pytest.raises(ValueError, match="the bank shares A among all experts; the adapter has one for each"):
        bank.load("a", random_adapter(MOE, ["mlp.experts.gate_up_proj"]))
    assert torch.equal(bank._storage, before[0]) and torch.equal(bank._ranks, before[1]) and bank.resident == {}


def test_a_copy_that_fails_leaves_an_empty_slot(monkeypatch):
    bank = bank_of(slots=1, host_adapters=2)
    bank.add("a", adapter_of(1)), bank.add("b", adapter_of(2))
    bank.acquire("a"), bank.release("a")
    real = bank._copy
    monkeypatch.setattr(bank, "_copy", lambda *args: (_ for _ in ()).throw(RuntimeError("the device is gone")))
    with pytest.raises(RuntimeError, match="the device is gone"):
        bank.acquire("b")
    assert bank.resident == {} and bank.pinned == {}
    monkeypatch.setattr(bank, "_copy", real)
    assert bank.acquire("b") == 0 and bank[Q].ranks.tolist() == [3]


def test_adapters_wait_on_the_host():
    bank = bank_of(slots=2, host_adapters=5)
    adapters = {str(n): adapter_of(n, rank=1 + n % 4) for n in range(5)}
    for name, adapter in adapters.items():
        bank.add(name, adapter)
    assert bank.waiting == tuple("01234") and bank.resident == {}
    with pytest.raises(RuntimeError, match="the host holds 5 adapters, which is all that was planned; forget one"):
        bank.add("5", adapter_of(5))
    x, draw = torch.randn(2, 32), random.Random(0)
    for _ in range(30):
        names = draw.sample(list(adapters), 2)
        with bank.using(names) as slots:
            y = delta(bank, Q, x, [slots[n] for n in names])
            for row, name in enumerate(names):
                want = direct(adapters[name].modules[Q], x[row])
                torch.testing.assert_close(y[row].double(), want, rtol=1e-5, atol=1e-5)
    adapters["3"] = adapter_of(33)
    bank.add("3", adapters["3"])  # in place of the earlier one, in a slot or not
    bank.forget("4")
    assert set(bank.waiting) == set("0123")
    bank.load("6", adapter_of(6))
    assert "6" in bank.resident and "6" in bank.waiting
    slot = bank.acquire("3")
    torch.testing.assert_close(delta(bank, Q, x[:1], [slot])[0].double(), direct(adapters["3"].modules[Q], x[0]), rtol=1e-5, atol=1e-5)
    bank.release("3"), bank.unload("3")
    assert "3" in bank.waiting and "3" not in bank.resident
    with pytest.raises(RuntimeError, match=r"the plan keeps no adapters on the host \(host_adapters=0\); use load\('a', adapter\)"):
        bank_of().add("a", adapter_of(1))


def constant(value, model=LLAMA):
    """An adapter whose delta on q_proj is value in every feature, for an x of ones."""
    places = model.places(["q_proj", "o_proj"])
    modules = {}
    for place in places:
        p = place.projection
        a, b = torch.zeros(1, p.in_features), torch.full((p.total_out, 1), float(value))
        a[0, 0] = 1
        modules[place.path] = LoraModule(a, b, 1, 1.0)
    return replace(random_adapter(model, ["q_proj"]), modules=modules)


def run_threads(bank, rounds, x, check, names=12):
    """Two loader threads replace and forget adapters beside a decode loop that holds some; returns what went wrong."""
    wrong: list[str] = []
    done = threading.Event()

    def guard(work):
        def run():
            try:
                work()
            except Exception as error:
                wrong.append(repr(error))
                done.set()

        return threading.Thread(target=run)

    def loader(seed):
        draw = random.Random(seed)

        def work():
            while not done.is_set():
                n = draw.randrange(names)
                try:
                    if draw.random() < 0.2:
                        bank.unload(str(n))
                    else:
                        bank.add(str(n), constant(n + 1))
                except (LookupError, RuntimeError):
                    pass  # held just now, or in no slot

        return work

    def decode():
        draw = random.Random(7)
        for _ in range(rounds):
            chosen = [str(n) for n in draw.sample(range(names), 3)]
            with bank.using(chosen) as slots:
                check([slots[n] for n in chosen], [int(n) + 1 for n in chosen], x, wrong)
        done.set()

    for n in range(names):
        bank.add(str(n), constant(n + 1))
    threads = [guard(loader(1)), guard(loader(2)), guard(decode), guard(decode)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    return wrong


def test_loader_threads_beside_decode_loops():
    bank = bank_of(slots=6, host_adapters=12, rank=2)
    poison(bank)

    def check(slots, values, x, wrong):
        for path in (Q, "model.layers.1.self_attn.o_proj"):
            y = delta(bank, path, x, slots)
            if not torch.equal(y, torch.tensor(values)[:, None].expand_as(y).float()):
                wrong.append(f"{slots} {values} {y[:, 0].tolist()}")

    assert run_threads(bank, 150, torch.ones(3, 32), check) == []
    assert bank.pinned == {} and sorted([*bank.resident.values(), *bank._free]) == list(range(6))


def test_two_threads_that_want_the_same_adapter_load_it_once(monkeypatch):
    bank, copies, both = bank_of(host_adapters=1), [], threading.Barrier(2)
    bank.add("a", adapter_of(1))
    real = bank._copy

    def slow(slot, image):
        copies.append(slot)
        threading.Event().wait(0.05)
        real(slot, image)

    monkeypatch.setattr(bank, "_copy", slow)
    found = []

    def work():
        both.wait()
        slot = bank.acquire("a")
        found.append((slot, int(bank[Q].ranks[slot])))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(copies) == 1 and found == [(copies[0], 3)] * 2 and bank.pinned == {"a": 2}


def test_kernels_read_slots_where_they_lie(kernels):
    """The stride over slots is the image's length: no kernel may take buffers for contiguous."""
    bank = bank_of(V4, ["o_a_proj", "o_b_proj"], rank=4, device=kernels.device)
    poison(bank)
    for n in range(3):
        bank.load(str(n), adapter_of(n, V4, ["o_a_proj", "o_b_proj"], rank=n + 2))
    ids = torch.tensor([2, -1, 0, 1, 2], dtype=torch.int32, device=kernels.device)
    for leaf, shape in (("o_a_proj", (5, 2, 32)), ("o_b_proj", (5, 24))):
        b = bank[f"model.layers.0.self_attn.{leaf}"]
        x = torch.randint(-3, 4, shape, device=kernels.device).float()
        operands = b.lora_a.round().contiguous(), b.lora_b.round().contiguous()
        for buffer, values in zip((b.lora_a, b.lora_b), operands):
            buffer.copy_(values)  # small integers: every order of summation gives the same bits
        y = kernels.delta(x, b.lora_a, b.lora_b, ids, b.scalings, None, None, b.ranks)
        want = gl.reference.delta(x.cpu(), *(o.cpu() for o in operands), ids.cpu(), b.scalings.cpu(), ranks=b.ranks.cpu())
        assert torch.equal(y.cpu(), want)


# ---- streams, with stand-ins for them --------------------------------------------------------------------------------------


class FakeCuda:
    """Streams and events that write down what is queued, in place of torch.cuda's; copies happen at once."""

    def __init__(self, bank, monkeypatch):
        self.log, self.events = [], 0
        self.current = self.Stream(self, "main")
        bank._cuda, bank._stream = True, self.Stream(self, "uploads")
        for name, stand_in in (
            ("Event", lambda: self.Event(self)),
            ("current_stream", lambda device: self.current),
            ("stream", self.on),
            ("device", lambda device: contextlib.nullcontext()),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        copy, fill = bank._copy, bank._fill
        monkeypatch.setattr(bank, "_copy", lambda *args: (self.log.append(f"{self.current.name}: copy {args}"), copy(*args)))
        monkeypatch.setattr(bank, "_fill", lambda adapter: (fill(adapter), self.log.append("host: fill"))[0])

    class Stream:
        def __init__(self, cuda, name):
            self.cuda, self.name = cuda, name

        def wait_event(self, event):
            self.cuda.log.append(f"{self.name}: wait {event.number}")

    class Event:
        def __init__(self, cuda):
            self.cuda = cuda

        def record(self, stream):
            self.number = self.cuda.events
            self.cuda.events += 1
            self.cuda.log.append(f"{stream.name}: record {self.number}")

        def synchronize(self):
            self.cuda.log.append(f"host: wait {self.number}")

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


def test_what_waits_for_what(monkeypatch):
    """An upload waits for the work before its slot's last release, users for the upload, the host's image for its reader."""
    bank = bank_of(slots=1)
    cuda = FakeCuda(bank, monkeypatch)
    bank.load("a", adapter_of(1))
    bank.acquire("a")
    bank.acquire("a")
    bank.release("a")
    with cuda.on(cuda.Stream(cuda, "other")):
        bank.release("a")
    bank.load("b", adapter_of(2))
    bank.unload("b")
    assert cuda.log == [
        "host: fill",
        "uploads: copy (0, 0)",
        "uploads: record 0",
        "main: wait 0",
        "main: wait 0",
        "main: record 1",  # the first release
        "other: wait 1",
        "other: record 2",  # the second one comes after both
        "host: wait 0",  # the image is free again
        "host: fill",
        "uploads: wait 2",
        "uploads: copy (0, 0)",
        "uploads: record 3",
        "uploads: wait 2",
        "uploads: copy (0, None)",
        "uploads: record 4",
    ]


def test_an_image_on_the_host_is_not_overwritten_while_it_is_read(monkeypatch):
    bank = bank_of(slots=2, host_adapters=1)
    cuda = FakeCuda(bank, monkeypatch)
    bank.add("a", adapter_of(1))  # made in image 1; image 0 is the next one's
    bank.acquire("a"), bank.release("a")
    bank.add("a", adapter_of(2))  # made in 0, while 1 may still be read
    assert "host: wait 0" not in cuda.log
    bank.add("a", adapter_of(3))  # made in 1
    assert cuda.log[-2:] == ["host: wait 0", "host: fill"]


# ---- on a GPU --------------------------------------------------------------------------------------------------------------


def captured(bank, x, ids):
    """A graph of q_proj's delta for the ids in a static buffer, and its result."""
    b = bank[Q]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gl.delta(x, b.lora_a, b.lora_b, ids, b.scalings, ranks=b.ranks)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = gl.delta(x, b.lora_a, b.lora_b, ids, b.scalings, ranks=b.ranks)
    return graph, y


@pytest.mark.gpu
def test_a_captured_graph_follows_swaps():
    bank = bank_of(slots=2, host_adapters=4, device="cuda")
    assert bank._host.is_pinned()
    x, ids = torch.ones(3, 32, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    graph, y = captured(bank, x, ids)
    for n in range(4):
        bank.add(str(n), constant(n + 1))
    draw = random.Random(0)
    for _ in range(50):
        names = draw.sample("0123", 2)
        with bank.using(names):
            ids.copy_(bank.adapter_ids([names[0], None, names[1]]))
            graph.replay()
            got = y.clone()
        assert got[:, 0].tolist() == [int(names[0]) + 1, 0, int(names[1]) + 1]
    with bank.using(["0"]):
        ids.copy_(bank.adapter_ids(["0"] * 3))
        graph.replay()
        assert y.eq(1).all()
    bank.add("0", constant(9))
    with bank.using(["0"]):
        ids.copy_(bank.adapter_ids(["0"] * 3))
        graph.replay()
        assert y.eq(9).all()


@pytest.mark.gpu
def test_a_slot_in_use_is_overwritten_only_afterwards():
    """The host runs ahead of the GPU: the upload of the next adapter waits on the device for the work before it."""
    bank = bank_of(slots=1, host_adapters=2, device="cuda")
    bank.add("0", constant(1)), bank.add("1", constant(2))
    x, ids = torch.ones(3, 32, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    graph, y = captured(bank, x, ids)
    results = []
    for n in range(20):
        with bank.using([str(n % 2)]):
            torch.cuda._sleep(2_000_000)  # a millisecond or so before the slot is read
            graph.replay()
            results.append(y.clone())
    assert [int(r[0, 0]) for r in results] == [1, 2] * 10


@pytest.mark.gpu
def test_loader_threads_beside_a_captured_decode_loop():
    bank = bank_of(slots=6, host_adapters=12, rank=2, device="cuda")
    x, ids = torch.ones(3, 32, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    graph, y = captured(bank, x, ids)
    replaying = threading.Lock()

    def check(slots, values, x, wrong):
        with replaying:
            ids.copy_(torch.tensor(slots, dtype=torch.int32))
            graph.replay()
            if y[:, 0].tolist() != values:
                wrong.append(f"{slots} {values} {y[:, 0].tolist()}")

    assert run_threads(bank, 150, x, check) == []
