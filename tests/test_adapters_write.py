"""Writing adapters: what is written is read back as it was, by us and by peft, or nothing that looks finished is left."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import warnings
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import torch.multiprocessing as mp
from adapter_cases import CONFIG, PREFIX, TENSORS, assert_same_deltas, ours, random_adapter, theirs
from tiny_models import CONFIGS, real_models, transformers_model
from two_ranks import leave

from grouped_lora_ops import layouts
from grouped_lora_ops.adapters import Base, LoraModule, base_hash, read, read_adapter, write, write_adapter
from grouped_lora_ops.adapters.forms import alpha_of, uniform

BASE = Base("org/model", revision="abc123")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", ["peft", "experts", "serving"])
def test_round_trip(name, form, tmp_path):
    model = layouts.of(CONFIGS[name])
    adapter = random_adapter(model, dtype=torch.bfloat16)
    write_adapter(tmp_path / "a", adapter, model, base=BASE, form=form)
    back = read_adapter(tmp_path / "a", model, base=BASE)
    assert_same_deltas(ours(back, model), ours(adapter, model))
    assert back.base == BASE
    tensors = [t for m in (*back.modules.values(), *back.experts.values()) for t in (m.lora_a, m.lora_b)]
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    again = tmp_path / "b"
    write_adapter(again, back, model, base=BASE, form=form)
    for file in (TENSORS, CONFIG):
        assert (again / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    assert sorted(f.name for f in again.iterdir()) == sorted([CONFIG, TENSORS, "grouped_lora_ops.json", ".complete"])


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in ("kimi_k2",)])
def test_peft_loads_what_is_written(name, tmp_path):
    """Every projection of every architecture, with ranks and scalings of their own, into the real model class."""
    peft = pytest.importorskip("peft", minversion="0.19.1")
    real_models()
    model = layouts.of(CONFIGS[name])
    adapter = random_adapter(model)
    modules, experts = dict(adapter.modules), dict(adapter.experts)
    path = next(p for p in modules if p.endswith(("o_proj", "o_b_proj")))
    lora = modules[path]
    modules[path] = LoraModule(lora.lora_a[:2], lora.lora_b[:, :2], 2, 1 / 3)
    if experts:
        path = next(iter(experts))
        experts[path] = replace(experts[path], scaling=0.3)
    adapter = replace(adapter, modules=modules, experts=experts)
    write_adapter(tmp_path, adapter, model, base=BASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(transformers_model(name), tmp_path)
    assert not [w for w in caught if "missing" in str(w.message) or "unexpected" in str(w.message)]
    assert_same_deltas(ours(adapter, model), theirs(loaded), 1e-6)


@pytest.mark.parametrize("form", ["peft", "experts", "serving"])
@pytest.mark.parametrize("kind", ["one A", "block-diagonal"])
def test_one_a_for_gate_and_up(form, kind, tmp_path):
    """Where B is block-diagonal a pair for each half has half the rank; else both get the same A."""
    model = layouts.of(CONFIGS["qwen3_moe"])
    adapter = random_adapter(model, rank=4, each=kind != "one A")
    adapter = replace(adapter, experts={path: m.with_one_a() for path, m in adapter.experts.items()})
    write_adapter(tmp_path, adapter, model, base=BASE, form=form)
    back = read_adapter(tmp_path, model)
    assert_same_deltas(ours(back, model), ours(adapter, model))
    ranks = {m.rank for path, m in back.experts.items() if "gate_up" in path}
    assert ranks == {8 if kind != "one A" and form == "peft" else 4}


def test_shared_factors(tmp_path):
    """One for all experts: kept as [1, …] in the serving form, repeated in the others; the same deltas in all."""
    model = layouts.of(CONFIGS["qwen3_moe"])
    adapter = random_adapter(model, shared_outer=True)
    for form in ("peft", "experts", "serving"):
        write_adapter(tmp_path / form, adapter, model, base=BASE, form=form)
        back = read_adapter(tmp_path / form, model)
        assert_same_deltas(ours(back, model), ours(adapter, model))
        counts = {len(m.lora_a) if "gate_up" in path else len(m.lora_b) for path, m in back.experts.items()}
        assert counts == {1} if form == "serving" else counts == {4}
    shapes = {k: list(v.shape) for k, v in safetensors.torch.load_file(tmp_path / "serving" / TENSORS).items()}
    owner = f"{PREFIX}model.layers.1.mlp.experts"
    assert shapes[f"{owner}.gate_proj.lora_A.weight"] == [1, 3, 32] and shapes[f"{owner}.gate_proj.lora_B.weight"] == [4, 24, 3]
    assert shapes[f"{owner}.down_proj.lora_A.weight"] == [4, 3, 24] and shapes[f"{owner}.down_proj.lora_B.weight"] == [1, 32, 3]


def test_serving_form_has_whole_families_one_rank_and_one_scaling(tmp_path):
    """Engines that fuse q/k/v and know no patterns compute alpha/r · B A: what they make of it is the adapter."""
    model = layouts.of(CONFIGS["llama"])
    adapter = random_adapter(model, ["v_proj", "o_proj"])
    modules = dict(adapter.modules)
    path = "model.layers.1.self_attn.o_proj"
    modules[path] = LoraModule(modules[path].lora_a[:2], modules[path].lora_b[:, :2], 2, 0.1)
    adapter = replace(adapter, modules=modules)
    write_adapter(tmp_path, adapter, model, base=BASE, form="serving")
    config, tensors = json.loads((tmp_path / CONFIG).read_text()), safetensors.torch.load_file(tmp_path / TENSORS)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 2.25, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    found = {}
    for key in tensors:
        if "lora_A" in key:
            a, b = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
            assert len(a) == b.shape[1] == 3
            found[key.removeprefix(PREFIX).removesuffix(".lora_A.weight")] = config["lora_alpha"] / config["r"] * (b @ a)
    for layer in range(2):
        for leaf in "qk":
            assert not found.pop(f"model.layers.{layer}.self_attn.{leaf}_proj").any()
    assert_same_deltas(found, ours(adapter, model), 1e-6)


def test_uniform_scalings_keep_the_dtype_where_that_is_exact():
    model = layouts.of(CONFIGS["llama"])
    adapter = random_adapter(model, ["o_proj"], dtype=torch.bfloat16)
    (first, one), (second, other) = adapter.modules.items()
    for scaling, dtype in ((0.375, torch.bfloat16), (0.3, torch.float32)):
        made = uniform(replace(adapter, modules={first: one, second: replace(other, scaling=scaling)}))
        assert made.modules[second].lora_b.dtype == dtype and made.modules[second].scaling == 0.75


@pytest.mark.parametrize("rank", [1, 3, 7, 8, 13, 48])
@pytest.mark.parametrize("rslora", [False, True])
def test_alphas_give_scalings_back(rank, rslora):
    generator = torch.Generator().manual_seed(rank)
    divisor = rank**0.5 if rslora else rank
    for _ in range(200):
        scaling = float(torch.rand((), generator=generator, dtype=torch.float64)) * 64 / divisor
        alpha = alpha_of(scaling, rank, rslora)
        assert torch.tensor(alpha / divisor, dtype=torch.float32) == torch.tensor(scaling, dtype=torch.float32)
    for alpha in (1, 16, 12.5):
        assert alpha_of(alpha / divisor, rank, rslora) / divisor == alpha / divisor


def test_rslora_adapters_keep_their_scaling(tmp_path):
    model = layouts.of(CONFIGS["llama"])
    adapter = random_adapter(model, rank=6, scaling=11 / 6**0.5)
    write_adapter(tmp_path, adapter, model, base=BASE)
    scalings = {m.scaling for m in read_adapter(tmp_path, model).modules.values()}
    assert torch.tensor(list(scalings)).tolist() == [torch.tensor(11 / 6**0.5).item()]


def problems_of(adapter, model, path, **options):
    before = sorted(f.name for f in path.iterdir()) if path.is_dir() else None
    with pytest.raises(ValueError) as error:
        write_adapter(path, adapter, model, **{"base": BASE} | options)
    head, *problems = str(error.value).split("\n  - ")
    assert head == f"grouped_lora_ops.adapters.write_adapter: {path}: nothing was written:"
    assert before == (sorted(f.name for f in path.iterdir()) if path.is_dir() else None)
    return problems


def test_what_is_not_written(tmp_path):
    model, path = layouts.of(CONFIGS["qwen3_moe"]), tmp_path / "a"
    good = random_adapter(model)
    assert problems_of(replace(good, modules={}, experts={}), model, path) == ["the adapter holds no factors."]
    q, down = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.down_proj"
    without = replace(good, modules={k: v for k, v in good.modules.items() if k != q})
    assert problems_of(without, model, path) == [f"{q} is missing, though self_attn.q_proj is adapted in other layers."]
    write_adapter(tmp_path / "layers", random_adapter(model, ["q_proj"]), model, base=BASE)
    one_layer = replace(good, modules={k: v for k, v in good.modules.items() if ".1." in k})
    assert problems_of(one_layer, model, path)
    write_adapter(tmp_path / "one", one_layer, model, base=BASE, layers=[1])
    bad = dict(good.modules)
    bad[q] = replace(bad[q], lora_a=bad[q].lora_a[:, :5], lora_b=bad[q].lora_b.clone().index_fill_(0, torch.tensor(3), torch.nan))
    bad["model.layers.0.self_attn.r_proj"] = bad["layers.0.self_attn.k_proj"] = bad[q]
    bad["model.layers.0.self_attn.v_proj"] = replace(good.modules["model.layers.0.self_attn.v_proj"], scaling=float("nan"))
    experts = dict(good.experts)
    experts[down] = replace(experts[down], lora_b=experts[down].lora_b[:2])
    assert problems_of(replace(good, modules=bad, experts=experts), model, path) == [
        "model.layers.0.self_attn.v_proj: scaling must be a finite number; got nan.",
        f"{q}: A must be [3, 32]; got [3, 5].",
        f"{q}: B holds NaN or Inf.",
        "model.layers.0.self_attn.r_proj is no projection of qwen3_moe.",
        "layers.0.self_attn.k_proj is not the layout’s own name of a projection.",
        f"{down}: B must be [4, 32, 3]; got [2, 32, 3].",
    ]
    assert problems_of(good, model, path, form="merged") == ["form must be one of peft, experts, serving; got 'merged'."]
    pin = "base must be a Base with a name, and a revision or a hash (sha256=base_hash(model folder)): a name alone pins nothing."
    for base in (Base("org/model"), Base("", "abc"), "org/model"):
        assert problems_of(good, model, path, base=base) == [pin]
    path.write_text("")
    assert problems_of(good, model, path) == [f"{path} is a file."]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_an_adapter_is_not_written_into_a_model(name, tmp_path):
    (tmp_path / name).write_text("{}")
    model = layouts.of(CONFIGS["llama"])
    (problem,) = problems_of(random_adapter(model), model, tmp_path)
    assert problem == f"{tmp_path} holds a model ({name}): an adapter is written beside it, not into it."


@pytest.fixture
def written(tmp_path):
    model = layouts.of(CONFIGS["llama"])
    write_adapter(tmp_path / "a", random_adapter(model, ["q_proj"]), model, base=BASE)
    return tmp_path / "a", model


def read_problems(path, model, **options):
    with pytest.raises(ValueError) as error:
        read_adapter(path, model, **options)
    return str(error.value).split("\n  - ")[1:]


def test_the_marker(written):
    path, model = written
    hashes = json.loads((path / ".complete").read_text())["sha256"]
    assert sorted(hashes) == sorted([CONFIG, TENSORS, "grouped_lora_ops.json"])
    config = (path / CONFIG).read_text()
    (path / CONFIG).write_text(config.replace('"lora_alpha": 2.25', '"lora_alpha": 2.5'))
    assert read_problems(path, model) == [f"{CONFIG} is not the file that .complete was written for: its hash differs."]
    (path / CONFIG).write_text(config)
    read_adapter(path, model)
    tensors = (path / TENSORS).read_bytes()
    (path / TENSORS).write_bytes(tensors[:-1] + bytes([tensors[-1] ^ 1]))
    assert read_problems(path, model) == [f"{TENSORS} is not the file that .complete was written for: its hash differs."]
    (path / TENSORS).write_bytes(tensors)
    marker = (path / ".complete").read_text()
    for text in ("{}", '{"sha256": []}'):
        (path / ".complete").write_text(text)
        assert read_problems(path, model) == [f".complete must hold the hashes of {CONFIG} and {TENSORS}."]
    (path / ".complete").write_text("{")
    assert read_problems(path, model)[0].startswith(".complete is not readable JSON: ")
    (path / ".complete").unlink()
    assert read_problems(path, model) == [".complete is missing: the export that wrote grouped_lora_ops.json was not finished."]
    (path / ".complete").write_text(marker)
    (path / "grouped_lora_ops.json").unlink()
    assert read_problems(path, model) == ["grouped_lora_ops.json is missing, but .complete names it."]
    (path / ".complete").write_text("")  # another tool's empty marker
    read_adapter(path, model)


def test_a_directory_that_is_written_to_while_it_is_read(written, monkeypatch):
    path, model = written
    real = read._read_tensors

    def slow(file, problems):
        tensors = real(file, problems)
        write_adapter(path, random_adapter(model, ["q_proj"], seed=1), model, base=BASE)
        return tensors

    monkeypatch.setattr(write, "read_directory", lambda *args, **options: random_adapter(model, ["q_proj"], seed=1))
    monkeypatch.setattr(read, "_read_tensors", slow)
    assert read_problems(path, model) == ["the directory was written to while it was read."]


@pytest.mark.skipif(sys.platform == "win32", reason="file modes")
def test_files_are_as_readable_as_others(written):
    modes = {file.stat().st_mode & 0o777 for file in written[0].iterdir()}
    (written[0] / "other").write_text("")
    assert modes == {(written[0] / "other").stat().st_mode & 0o777}


def test_the_pin(written, tmp_path):
    path, model = written
    assert read_adapter(path, model, base=Base("org/model", "abc123", "f" * 64)).base == BASE
    assert read_problems(path, model, base=Base("org/model", "other")) == [
        "the adapter belongs to another base: revision abc123, not other."
    ]
    assert read_problems(path, model, base=Base("org/tuned", "abc123")) == [
        "the adapter belongs to another base: name org/model, not org/tuned."
    ]
    config = json.loads((path / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "abc123")
    write_adapter(tmp_path / "b", read_adapter(path, model), model, base=Base("org/model", sha256="a" * 64))
    read_adapter(tmp_path / "b", model, base=Base("/a/copy", sha256="a" * 64))
    assert read_problems(tmp_path / "b", model, base=Base("org/model", sha256="b" * 64))[0].startswith(
        "the adapter belongs to another base: sha256 aaa"
    )


def test_base_hash(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold config.json and \*.safetensors"):
        base_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    weights = {"w": torch.randn(1000, 700), "v": torch.randn(300, 300)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    seen = [base_hash(tmp_path)]
    assert base_hash(tmp_path) == seen[0]
    weights["v"] += 1e-3
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    seen.append(base_hash(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    seen.append(base_hash(tmp_path))
    os.rename(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    seen.append(base_hash(tmp_path))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("step", ["_write", "_sync", "_rename", "_compare", "_mark"])
def test_a_failure_leaves_nothing_that_looks_finished(step, written, monkeypatch):
    """Over a finished export: the marker goes first, and comes back only when everything is in place."""
    path, model = written
    new = random_adapter(model, ["q_proj"], seed=1)
    real = getattr(write, step)
    calls = []

    def fails(*args):
        calls.append(args)
        if step != "_sync" or len(calls) > 1:
            if step in ("_write", "_rename"):
                real(*args)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(write, step, fails)
    with pytest.raises(OSError, match="No space left"):
        write_adapter(path, new, model, base=BASE)
    assert not (path / ".complete").exists() and not list(path.glob(".writing-*"))
    assert ".complete is missing: the export that wrote grouped_lora_ops.json was not finished." in read_problems(path, model)
    monkeypatch.undo()
    write_adapter(path, new, model, base=BASE)
    assert_same_deltas(ours(read_adapter(path, model), model), ours(new, model))


def test_what_differs_when_read_back_is_an_error(tmp_path, monkeypatch):
    model = layouts.of(CONFIGS["llama"])
    real = write.safetensors.torch.save_file

    def flips(tensors, file, **options):
        real({k: (v + 1 if k == min(tensors) else v) for k, v in tensors.items()}, file, **options)

    monkeypatch.setattr(write.safetensors.torch, "save_file", flips)
    with pytest.raises(RuntimeError, match=r"1 tensors differ when read back, base_model\.model\.model\.layers\.0"):
        write_adapter(tmp_path / "a", random_adapter(model), model, base=BASE)
    assert not (tmp_path / "a" / ".complete").exists()


def test_minus_zero_and_small_numbers_come_back(tmp_path):
    model = layouts.of(CONFIGS["llama"])
    adapter = random_adapter(model, ["q_proj"])
    for m in adapter.modules.values():
        m.lora_b[0] = -0.0
        m.lora_a[0] = torch.finfo(torch.float32).tiny / 8
    write_adapter(tmp_path, adapter, model, base=BASE)
    for path, m in read_adapter(tmp_path, model).modules.items():
        assert torch.equal(m.lora_b.view(torch.int32), adapter.modules[path].lora_b.view(torch.int32))


# ---- several ranks -------------------------------------------------------------------------------------------------------


TWO_RANKS = {  # what both ranks raise, after "RuntimeError: grouped_lora_ops.adapters.write_adapter: "
    "one writes": None,
    "everyone writes": None,
    "full disk": r"writing failed:\n  - rank 1: .*(File too large|No space)",
    "bad adapter": r"the check failed:\n  - rank 1: ValueError: .*nothing was written:\n  - the adapter holds no factors",
    "same path": r"the check failed:\n  - rank 0: ValueError: ranks that all write need paths of their own; .*shared",
    "interrupt": r"renaming failed:\n  - rank 1: KeyboardInterrupt",
    "again": None,
}


def _write_on_rank(rank, root, case):
    import resource

    model, limits, rename = layouts.of(CONFIGS["llama"]), resource.getrlimit(resource.RLIMIT_FSIZE), write._rename
    adapter, everywhere = random_adapter(model), case != "one writes"
    path = os.path.join(root, case, "shared" if case in ("one writes", "same path") else f"rank{rank}")
    try:
        if rank == 1 and case == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        elif rank == 1 and case == "bad adapter":
            adapter = replace(adapter, modules={})
        elif rank == 1 and case == "interrupt":
            write._rename = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt())
        write_adapter(path, adapter, model, base=BASE, group=torch.distributed.group.WORLD, everywhere=everywhere)
        return "written"
    except (RuntimeError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        write._rename = rename
        torch.distributed.barrier()  # nobody was left behind in a collective


def _rank(rank, store, root, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results[rank] = {case: _write_on_rank(rank, root, case) for case in TWO_RANKS}
    leave()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    if sys.platform == "win32":
        pytest.skip("gloo's file store, resource limits")
    root = tmp_path_factory.mktemp("ranks")
    with mp.Manager() as manager:
        results = manager.dict()
        context = mp.spawn(_rank, (str(root / "store"), str(root), results), nprocs=2, join=False)
        for _ in range(2):
            context.join(timeout=30)
        hanging = [p for p in context.processes if p.is_alive()]
        for process in hanging:
            process.kill()
        assert not hanging, "a rank hangs"
        return root, results[0], results[1]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks(case, two_ranks):
    """Two processes: whatever happens on one, both end alike, and what was not finished does not look finished."""
    root, model = two_ranks[0] / case, layouts.of(CONFIGS["llama"])
    first, second = (results[case] for results in two_ranks[1:])
    if TWO_RANKS[case] is None:
        assert first == second == "written"
        names = ["shared"] if case == "one writes" else ["rank0", "rank1"]
        assert sorted(f.name for f in root.iterdir()) == names
        for name in names:
            assert_same_deltas(ours(read_adapter(root / name, model), model), ours(random_adapter(model), model))
        return
    assert not list(root.glob("*/.complete")) and not list(root.glob("*/.writing-*"))
    if case == "interrupt":
        assert second == "KeyboardInterrupt: "
        second = first
    assert first == second and first.startswith("RuntimeError: grouped_lora_ops.adapters.write_adapter: ")
    assert re.search(TWO_RANKS[case], first), first
    assert "rank 0" not in first or case == "same path"
