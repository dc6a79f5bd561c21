"""Every formula of the library in plain PyTorch: the specification, the CPU implementation and the tests' oracle.

`grouped_lora_ops.reference.<op>` has the signature and the rounding points of the op of the same name. Sums run in
float32 (float64 where the operands are float64), the result is rounded once.
"""

from .delta import delta, delta_, delta_backward
from .expand import expand, expand_, expand_backward
from .expert_delta import expert_delta, expert_delta_backward
from .expert_linear import expert_linear, expert_linear_backward
from .expert_mlp import expert_mlp, expert_mlp_backward, expert_mlp_train
from .expert_plan import expert_plan
from .linear import linear, linear_backward
from .plan import plan
from .shrink import shrink, shrink_backward
from .wgrad import wgrad

__all__ = [
    "delta",
    "delta_",
    "delta_backward",
    "expand",
    "expand_",
    "expand_backward",
    "expert_delta",
    "expert_delta_backward",
    "expert_linear",
    "expert_linear_backward",
    "expert_mlp",
    "expert_mlp_backward",
    "expert_mlp_train",
    "expert_plan",
    "linear",
    "linear_backward",
    "plan",
    "shrink",
    "shrink_backward",
    "wgrad",
]
