"""What holds for the whole house: who may import what, what an import costs, and the launch choice."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest
import torch
from cases import build

import grouped_lora_ops as gl
from grouped_lora_ops import launch
from grouped_lora_ops.ops import common

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grouped_lora_ops"
ROOMS = {  # what a room may import of ours; arrows point down
    "reference": {"reference", "launch_experts"},
    "kernels": {"launch", "launch_experts", "launch_linear", "kernels", "driver"},
    "ops": {"_library", "_checks", "_checks_experts", "reference", "launch", "launch_experts", "launch_linear", "kernels", "ops",
            "cuda", "driver"},  # fmt: skip
    "cuda.py": {"_builds", "driver"},
    "driver.py": {"_launcher"},
    "_builds.py": set(),
    "launch.py": set(),
    "launch_experts.py": {"launch"},
    "launch_linear.py": {"launch"},
    "_library.py": set(),
    "_checks.py": set(),
    "_checks_experts.py": {"_checks", "launch_experts"},
    "plan.py": {"_checks", "ops", "launch_experts"},
    "warmup.py": {"launch", "ops"},
    "warmup_experts.py": {"ops", "warmup"},
    "layouts": {"layouts"},
    "adapters": {"adapters", "layouts", "_checks"},
    "nn": {"_checks", "nn", "ops", "plan", "adapters", "layouts", "reference"},
    "sharding.py": {"ops", "adapters", "layouts"},
    "report": {"report"},
    "_progress.py": set(),
    "timing.py": set(),
    "tune": {"tune", "_progress", "cuda", "launch", "ops", "reference", "timing", "__version__"},
    "warmup_model.py": {"_progress", "layouts", "warmup", "warmup_experts"},
    "selfcheck.py": {"ops", "plan"},
    "doctor.py": {"_builds", "cuda", "driver", "launch", "selfcheck", "__version__"},
}


def imports_of_ours(path: Path):
    """The rooms a file imports, by absolute and by relative imports."""
    inside = path.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name.split(".") for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [(node.module or "").split(".")]
        elif isinstance(node, ast.ImportFrom):
            base = list(inside[: len(inside) - node.level]) + (node.module.split(".") if node.module else [])
            names = [["grouped_lora_ops", *(base or [a.name])] for a in node.names]
        else:
            continue
        for parts in names:
            if parts[0] == "grouped_lora_ops" and len(parts) > 1:
                yield parts[1]
            assert parts[0] not in ("tests", "bench", "examples"), path


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room):
    path = PACKAGE / room
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        assert set(imports_of_ours(file)) <= ROOMS[room], file


def test_contributing_md_names_every_room_and_arrows_point_up_its_table():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Rooms")[1].split("## Style")[0]
    rows = [re.findall(r"`([\w/.]+)`", row) for row in re.findall(r"^\| (`[^|]*) \|", text, flags=re.M)]
    row_of = {name.rstrip("/").removesuffix(".py"): i for i, row in enumerate(rows) for name in row}
    entries = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert entries - {"__init__", "csrc", "cubins"} <= set(row_of)
    assert all((PACKAGE / name).exists() or (ROOT / name).exists() for row in rows for name in row)
    for room, imported in ROOMS.items():
        assert all(row_of[name] <= row_of[room.removesuffix(".py")] for name in imported - {"_launcher", "__version__"}), room


def test_an_import_needs_neither_triton_nor_a_gpu():
    code = "import sys, grouped_lora_ops; sys.exit('triton' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_ops_are_registered_once_and_only_in_the_library():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "_library.py":
            assert "torch.library.Library" not in path.read_text() and "custom_op" not in path.read_text(), path
    dense = ("plan", "shrink", "expand", "expand_", "delta", "delta_", "linear")
    for name in (*dense, "expert_plan", "expert_delta", "expert_linear", "expert_mlp"):
        op = getattr(torch.ops.grouped_lora, name).default
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert callable(getattr(gl, name)) and callable(getattr(gl.reference, name))
        assert getattr(gl, name).__doc__


def test_every_op_makes_its_tensors_device_the_current_one(monkeypatch):
    """Kernels launch on the current device: each implementation for CUDA, forward and backward, first makes it that of its tensors."""

    class Entered(Exception):
        pass

    def device_of(t):
        raise Entered

    monkeypatch.setattr(common, "device_of", device_of)
    registered = []
    for path in sorted((PACKAGE / "ops").glob("*.py")):
        module = importlib.import_module(f"grouped_lora_ops.ops.{path.stem}")
        registered += [getattr(module, name) for name in re.findall(r"define\(.*?\bcuda=(\w+)", path.read_text(), re.DOTALL)]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("grouped_lora::")]
    assert len(registered) == len(set(registered)) == len(names) > 10
    for implementation in registered:
        with pytest.raises(Entered):
            implementation(torch.zeros(1))


def problems(count, seed=0):
    draw = random.Random(seed)
    for _ in range(count):
        yield launch.Problem(
            arch=draw.choice(["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_123"]),
            sms=draw.choice([1, 20, 132, 148]),
            itemsize=draw.choice([2, 4]),
            tokens=int(2 ** draw.uniform(0, 18)),
            groups=draw.choice([1, 2, 4, 8, 16]),
            in_features=draw.choice([1, 100, 2048, 4096, 7168, 18432]),
            out_features=draw.choice([1, 127, 1024, 4096]),
            rank=draw.randint(1, 512),
            slots=draw.choice([1, 2, 8, 64, 1024]),
            stacked=draw.choice([False, True]),
        )


def test_every_problem_gets_a_configuration():
    for p in problems(3000):
        config = launch.delta(p)
        assert (config.fused is None) == (config.shrink is not None) == (config.expand is not None)
        launch.wgrad(p, p.in_features), launch.plan(p.tokens, p.slots)
        for part in (config.fused, config.shrink):
            if part is not None:
                assert part.chunk % part.block_k == 0
                assert part.chunk * part.chunks >= p.in_features
        if config.fused is not None:
            assert p.rank <= config.fused.rank_block


def test_what_fixes_a_rows_bits_does_not_depend_on_the_batch():
    for p in problems(300):
        for tokens in (1, 64, 129, 5000, 100_000):
            for slots in (1, 8, 1024):
                q = launch.replace(p, tokens=tokens, slots=slots)
                config = launch.delta(q)
                parts = [c for c in (config.fused, config.shrink) if c is not None]
                assert {(c.chunk, c.chunks) for c in parts} == {(launch.chunk_of(p.in_features), launch.chunks_of(p.in_features))}
                blocks = [c.rank_block for c in (config.fused, config.expand) if c is not None]
                assert set(blocks) == {launch.rank_block(p.rank, p.itemsize)}


def test_tile_count_bounds_what_any_ids_make():
    draw = random.Random(1)
    for _ in range(500):
        tokens, slots, block = draw.randint(1, 400), draw.randint(1, 40), draw.choice([16, 32, 64, 128])
        spread = draw.choice([1, slots])
        counts = [0] * (slots + 1)
        for _ in range(tokens):
            counts[draw.randint(slots + 1 - spread, slots)] += 1
        made = sum(launch.cdiv(c, block) for c in counts)
        assert made <= launch.tile_count(block, tokens, slots, False)


def test_a_launch_table_comes_first_and_may_not_change_bits(tmp_path, monkeypatch):
    p = launch.Problem("sm_90", 132, 2, 1024, 4, 4096, 1024, 64, 8)
    table = tmp_path / "table.json"
    monkeypatch.setenv("GROUPED_LORA_TABLE", str(table))
    launch.table.cache_clear()
    try:
        table.write_text('{"delta": [{"when": {"work": [4096, 4096]}, "split": false, "shrink": {"block_m": 32}, "expand": {"loop": 2}}]}')
        config = launch.delta(p)
        assert config.shrink.block_m == 32 and config.expand.loop == 2
        assert config.shrink.tiles == launch.tile_count(32, 1024, 8, False)
        launch.table.cache_clear()
        table.write_text('{"delta": [{"when": {}, "split": false, "shrink": {"chunk": 512}, "expand": {}}]}')
        with pytest.raises(ValueError, match=r"must not change \['chunk'\]"):
            launch.delta(p)
        for rule, why in (
            ('{"when": {}, "split": true, "shrink": {"merge": 3}, "expand": {}}', "must merge 1, 2, 4 or 8 groups"),
            ('{"when": {}, "cuda": {"kernel": [16, 64, 1, 128, 3]}}', "must ask for a kernel of csrc/delta.cu"),
            ('{"when": {}, "cuda": {"kernel": [16, 64, 1]}}', "must ask for a kernel of csrc/delta.cu"),
        ):
            launch.table.cache_clear()
            table.write_text(f'{{"delta": [{rule}]}}')
            with pytest.raises(ValueError, match=why):
                launch.delta(p)
        launch.table.cache_clear()
        table.unlink()
        with pytest.raises(ValueError, match="GROUPED_LORA_TABLE must name a file"):
            launch.delta(p)
    finally:
        monkeypatch.undo()
        launch.table.cache_clear()


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("op", ["delta", "delta_", "shrink", "expand", "linear"])
def test_groups_cost_no_launch_no_tile_and_no_square(monkeypatch, op, tokens):
    """As many launches as for one group, G times their programs at most; memory grows as G does, not as G²."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("without a GPU the interpreter stands in for one")
    gpu = fake_gpu.install(monkeypatch, "ctypes")
    gpu.quiet, gpu.run_kernel = True, lambda seen, parameters: None  # recorded, not run
    run = importlib.import_module(f"grouped_lora_ops.ops.{op.rstrip('_')}")
    implementation = run._cuda_ if op.endswith("_") else run._cuda
    launches, elements = {}, {}
    for groups in (1, 2, 4, 8):
        c = build("wo_a", groups=groups, tokens=tokens, features=64, out=32, rank=8, poison=False)
        h, weight = torch.zeros(tokens, groups, 8), torch.zeros(groups, 32, 64, dtype=c.x.dtype)
        args = {
            "delta": (*c.factors, c.base),
            "delta_": (c.base, *c.factors),
            "shrink": (c.x, c.a, c.ids),
            "expand": (h, c.b, c.ids, c.scalings),
            "linear": (c.x, weight, *c.factors[1:]),
        }[op]
        implementation.table.clear()
        gpu.launches.clear()
        implementation(*args)
        implementation(*args)
        (held,) = implementation.table.values()
        launches[groups] = [math.prod(seen.grid) for seen in gpu.launches]
        elements[groups] = sum(math.prod(shape) for shape, *_ in held.made)
    assert launches[1] and len({len(found) for found in launches.values()}) == 1
    if tokens == 3:  # else a plan is made, too
        assert len(launches[1]) <= {"shrink": 1, "expand": 1}.get(op, 2)
    for one, *more in zip(*launches.values()):
        assert all(programs <= groups * one for groups, programs in zip((2, 4, 8), more))
    assert elements[8] - elements[4] == 2 * (elements[4] - elements[2])


def test_no_op_needs_torchs_grouped_product(monkeypatch):
    """Which GPUs and versions have torch's grouped product differs: everything runs without it, forward and backward."""

    def absent(*args, **kwargs):
        raise RuntimeError("no grouped product here")

    for place, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"), (torch, "_scaled_grouped_mm")):
        if hasattr(place, name):
            monkeypatch.setattr(place, name, absent)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make = functools.partial(torch.ones, device=device)
    x, ids, weights = make(3, 8), torch.tensor([[0, 1], [2, -1], [1, 1]], device=device), make(3, 2)
    pairs = [make(2, 3, 4, 8), make(2, 3, 12, 4), make(2, 3, 4, 6), make(2, 3, 8, 4)]
    tensors = [t.requires_grad_() for t in (x, weights, make(3, 12, 8), make(3, 8, 6), *pairs)]
    x, weights, w_gate_up, w_down, *pairs = tensors
    adapters, scalings = torch.tensor([0, 1, -1], device=device), make(2)
    gl.expert_mlp(x, ids, weights, w_gate_up, w_down, *pairs, adapters, scalings).sum().backward()
    assert all(t.grad.any() for t in tensors)
    gl.expert_linear(x, w_gate_up, *pairs[:2], ids, adapters, scalings).sum().backward()
    gl.expert_delta(x, *pairs[:2], ids, adapters, scalings).sum().backward()
