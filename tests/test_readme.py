"""What README.md shows works as it stands."""

import importlib
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch._dynamo.testing
from adapter_cases import random_adapter
from toy_model import CONFIG, Toy

import grouped_lora_ops as gl
from grouped_lora_ops import layouts

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


SHOWN = {  # a word of every example: the test that runs it
    "gl.delta_(base": "test_the_usage_example_runs_and_means_what_it_says",
    "gl.expert_mlp(": "test_the_expert_example_runs_and_leaves_rows_without_an_adapter_alone",
    "stack_adapters(": "test_the_adapter_example_runs",
    "layouts.preflight": "test_the_layout_example_runs",
    "attached.using": "test_nn.py's test_what_the_readme_shows",
    "layouts.Share(": "test_the_parallel_example_runs",
    "torch.cuda.graph(": "test_the_captured_loop",
    "torch.compile(": "test_the_compiled_example_compiles_once",
}


def test_every_example_is_run():
    assert sorted(BLOCKS) == sorted(block(word) for word in SHOWN)
    for name in SHOWN.values():
        assert name in globals() or name.startswith("test_nn.py")


def block(word):
    """The one example that contains word."""
    (found,) = [text for text in BLOCKS if word in text]
    return found


def test_the_usage_example_runs_and_means_what_it_says():
    torch.manual_seed(0)
    names = {}
    exec(block("gl.delta_(base"), names)
    x, a, b, adapter_ids, scalings = (names[name] for name in ("x", "a", "b", "adapter_ids", "scalings"))
    delta = torch.zeros(7, 32)
    for t, l in enumerate(adapter_ids.tolist()):
        if l >= 0:
            delta[t] = scalings[l] * (b[l] @ (a[l] @ x[t]))
    torch.testing.assert_close(gl.delta(x, a, b, adapter_ids, scalings), delta)
    assert names["xg"].shape == (7, 4, 64) and names["y"].shape == (7, 48)


def test_the_expert_example_runs_and_leaves_rows_without_an_adapter_alone():
    torch.manual_seed(0)
    names = {}
    exec(block("gl.delta_(base") + block("gl.expert_mlp("), names)
    assert names["y"].shape == (7, 64)
    torch.manual_seed(0)
    parent = {}
    exec(
        block("gl.delta_(base")
        + re.sub(
            r"gate_up_a, gate_up_b, down_a, down_b, (?=adapter_ids)",
            "None, None, None, None, ",
            block("gl.expert_mlp("),
        ),
        parent,
    )
    none = names["adapter_ids"] < 0
    assert torch.equal(names["y"][none], parent["y"][none]) and not torch.equal(names["y"], parent["y"])


def test_the_adapter_example_runs(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_a_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.o_a_proj.lora_{}.weight"
    factors = {name.format("A"): torch.ones(2, 16), name.format("B"): torch.ones(8 * 3, 2)}
    safetensors.torch.save_file(factors, path / "adapter_model.safetensors")
    names = {"torch": torch, "paths": [path], "device": "cpu"}
    exec(block("stack_adapters("), names)
    assert names["lora_b"].shape == (1, 4, 3, 2)


def test_the_layout_example_runs(tmp_path):
    (tmp_path / "model").mkdir()
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=16, q_lora_rank=16, o_groups=2)
    sizes |= dict(o_lora_rank=12, n_routed_experts=4, moe_intermediate_size=24)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"} | sizes))
    path = tmp_path / "adapter"
    path.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_a_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.o_a_proj.lora_{}.weight"
    factors = {name.format("A"): torch.ones(2, 32), name.format("B"): torch.ones(2 * 12, 2)}
    safetensors.torch.save_file(factors, path / "adapter_model.safetensors")
    names = {"model_path": tmp_path / "model", "path": path, "new_path": tmp_path / "new", "device": "cpu"}
    exec(block("layouts.preflight"), names)
    assert names["adapter_ids"].tolist() == [names["bank"].resident["first"], -1, names["bank"].resident["first"]]
    assert names["ranks"].tolist().count(2) == 1 and (tmp_path / "new" / ".complete").is_file()


def test_the_parallel_example_runs():
    """In a group of one process; tests/test_sharding.py has two."""
    layout, model, x = layouts.of(CONFIG), Toy(), torch.randn(2, 5, 32)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    names = dict(torch=torch, model=model, layout=layout, x=x, adapter=random_adapter(layout), device="cpu", dtype=torch.float32)
    try:
        exec(block("layouts.Share("), names | dict(tp=1, tp_rank=0, group=torch.distributed.group.WORLD), shown := {})
    finally:
        torch.distributed.destroy_process_group()
    assert shown["share"] == layouts.Share(tp=1) and shown["bank"].resident == {"first": 0}
    assert all(p.grad is not None for p in shown["trained"].parameters())
    assert sorted(shown["part"].modules) == sorted(p.path for p in layout.places())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_captured_loop(monkeypatch, device):
    """On the CPU a graph is one that runs its calls at once and counts its replays."""
    torch.manual_seed(0)
    names = {}
    exec(block("gl.delta_(base"), names)
    mixes = [torch.tensor([i % 4 - 1 for i in range(start, start + 7)]) for start in range(3)]
    names |= dict(device=device, mixes=mixes)
    before = {n: names[n].clone() for n in ("x", "a", "b", "adapter_ids", "scalings", "base")}
    ids = [*mixes]
    if device == "cpu":
        replays = []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))
        monkeypatch.setattr(torch.cuda, "graph", nullcontext)
        ids = [before["adapter_ids"]]
    exec(block("torch.cuda.graph("), names)
    assert device != "cpu" or len(replays) == len(mixes)
    want = before["base"].to(device)
    for mix in ids:
        gl.delta_(want, *(before[n].to(device) for n in ("x", "a", "b")), mix.to(device, torch.int32), before["scalings"].to(device))
    assert torch.equal(names["out"], want) and names["adapter_ids"].tolist() == mixes[-1].tolist()


def test_the_compiled_example_compiles_once(monkeypatch):
    torch.manual_seed(0)
    names = {}
    exec(block("gl.delta_(base"), names)
    counter, compiler = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: compiler(*args, **{**kw, "backend": counter}))
    torch._dynamo.reset()
    ids = torch.tensor([0, 2, -1, 1, 1, 0, 2, 0, 1])
    names["batches"] = [(torch.randn(n, 64), ids[:n]) for n in (7, 9, 3)]
    exec(block("torch.compile("), names)
    assert counter.frame_count == 1
    assert all(names[n].grad.any() for n in "ab")
    torch._dynamo.reset()


def shown_commands() -> list[str]:
    """The lines that start our own command line, by their subcommands."""
    (text,) = [text for text in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.S) if "grouped_lora_ops doctor" in text]
    return [line.split("python -m grouped_lora_ops ")[1] for line in text.splitlines()]


def test_the_commands_run(tmp_path, monkeypatch, capsys):
    """As they are shown; without a GPU warmup and tune say that there is nothing to do, and list what they would."""
    run = importlib.import_module("grouped_lora_ops.__main__")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    result = next((ROOT / "bench" / "results").rglob("*plan.json")).read_text()
    for name in ("bench/results/plan.json", "new.json", "old.json"):
        (tmp_path / name).write_text(result)
    (tmp_path / "path" / "to" / "model").mkdir(parents=True)
    sizes = dict(model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40)
    (tmp_path / "path" / "to" / "model" / "config.json").write_text(json.dumps(sizes))
    commands = shown_commands()
    assert {command.split()[0] for command in commands} == set(run.COMMANDS)
    for command in commands:
        arguments = command.split()
        if arguments[0] in ("warmup", "tune"):
            if not torch.cuda.is_available():
                assert run.main(arguments) == 1 and "there is no NVIDIA GPU" in capsys.readouterr().err
            arguments.append("--list")
        assert run.main(arguments) == 0, command
    assert (tmp_path / "report" / "index.html").is_file()


def test_environment_variables_and_commands_exist():
    files = [ROOT / "setup.py", *(ROOT / "grouped_lora_ops").rglob("*.py")]
    package = "".join(p.read_text(encoding="utf-8") for p in files)
    named = set(re.findall(r"GROUPED_LORA_[A-Z_]+", TEXT))
    assert named == set(re.findall(r"GROUPED_LORA_[A-Z_]+", package))
    for command in re.findall(r"^python3 bootstrap\.py (?!-)(\S+)", TEXT, flags=re.M):
        assert (ROOT / command).is_file()


def test_every_op_is_in_the_table_with_its_arguments():
    for name in ("delta", "delta_", "linear", "shrink", "expand", "expand_", "plan", "expert_plan"):
        (row,) = re.findall(rf"^\| `{name}\(([^)]*)\)`", TEXT, flags=re.M)
        schema = getattr(torch.ops.grouped_lora, name).default._schema
        shown = [argument.split("=")[0] for argument in row.split(", ") if argument not in ("*", "…")]
        arguments = [argument.name for argument in schema.arguments]
        assert shown == (arguments if "…" not in row else arguments[: len(shown)])
