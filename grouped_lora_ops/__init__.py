"""Grouped LoRA operators, exact and fast: fused Triton kernels as torch ops, with a plain-PyTorch reference for each.

Importing the package registers `torch.ops.grouped_lora.*`; the functions here are those ops with documented signatures.
"""

from . import reference
from .plan import ExpertPlanView, PlanView, refill
from .plan import expert_view as expert_plan_view
from .plan import view as plan_view
from .warmup import Shape, warmup
from .warmup_experts import ExpertShape, warmup_experts

from .ops import delta, delta_, expand, expand_, expert_delta, expert_linear, expert_mlp, expert_plan, linear, plan, shrink  # isort: skip  (last: `plan` shadows the module)

__version__ = "0.1.0"

__all__ = [
    "ExpertPlanView",
    "ExpertShape",
    "PlanView",
    "Shape",
    "delta",
    "delta_",
    "expand",
    "expand_",
    "expert_delta",
    "expert_linear",
    "expert_mlp",
    "expert_plan",
    "expert_plan_view",
    "linear",
    "plan",
    "plan_view",
    "reference",
    "refill",
    "shrink",
    "warmup",
    "warmup_experts",
]
