"""A user's program for a type checker: test_package.py runs mypy --strict on it. It is not run."""

import torch
from torch import Tensor

import grouped_lora_ops as gl
from grouped_lora_ops import layouts, nn
from grouped_lora_ops.adapters import AdapterBank, Base, plan_bank, read_adapter, stack_adapters, write_adapter

ids, scalings, ranks = torch.tensor([0, 1]), torch.ones(2), torch.tensor([4, 4], dtype=torch.int32)
x, a, b = torch.ones(2, 8), torch.ones(2, 4, 8), torch.ones(2, 6, 4)

plan: Tensor = gl.plan(ids, 2)
h: Tensor = gl.shrink(x, a, ids, ranks=ranks, plan=plan)
y: Tensor = gl.expand(h, b, ids, scalings, base=None, out_sizes=[2, 4])
y = gl.delta(x, a, b, ids, scalings, base=y)
gl.delta_(y, x, a, b, ids, scalings)
gl.expand_(y, h, b, ids, scalings)
y = gl.linear(x, torch.ones(6, 8), a, b, ids, scalings, bias=torch.ones(6))
y = gl.reference.delta(x, a, b, ids, scalings)
gl.refill(plan, ids, 2)
rows: Tensor = gl.plan_view(plan, 2).rows

routes = torch.zeros(2, 1, dtype=torch.int64)
plan = gl.expert_plan(routes, None, 4, 2)
ends: Tensor = gl.expert_plan_view(plan, 2, 4, 2).ends
weight, ea, eb = torch.ones(4, 6, 8), torch.ones(2, 4, 4, 8), torch.ones(2, 1, 6, 4)
y = gl.expert_delta(x, ea, eb, routes, None, scalings, row_weights=torch.ones(2))
y = gl.expert_linear(x, weight, None, None, routes, None, None)
y = gl.expert_mlp(
    x, routes, torch.ones(2, 1), weight, torch.ones(4, 8, 3), None, None, None, None, None, None,
    activation="swiglu", activation_limit=7.0, router_weight="post_down",
)  # fmt: skip

calls: int = gl.warmup([gl.Shape(in_features=8, out_features=6, rank=4, num_slots=2)], tokens=range(1, 9))
calls += gl.warmup_experts([gl.ExpertShape(hidden=8, inner=3, num_experts=4, top_k=1, rank=4, num_slots=2)])

model = layouts.of("model")
print(layouts.preflight("model"))
adapter = read_adapter("adapter", model)
bank = AdapterBank(plan_bank(model, slots=8, rank=16), device="cpu")
bank.add("first", adapter)
with bank.using(["first"]):
    adapter_ids: Tensor = bank.adapter_ids(["first", None])
a, b, scalings, ranks = stack_adapters([adapter], "model.layers.0.self_attn.o_proj", dtype=torch.bfloat16)
write_adapter("new", adapter, model, base=Base("org/model", revision="8f3c"))

module: torch.nn.Module = torch.nn.Linear(8, 6)
attached = nn.attach_bank(module, bank)
with attached.using(["first", None]):
    module(x)
attached.detach()
trained = nn.attach_trainable(module, model, rank=8, alpha=16)
torch.optim.AdamW(trained.parameters(), lr=1e-3)
write_adapter("new", trained.adapter(), model, base=Base("org/model"))
