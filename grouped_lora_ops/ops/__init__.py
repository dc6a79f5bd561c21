"""The ops: importing this package registers `torch.ops.grouped_lora.*`.

Triton is imported when the first CUDA tensor arrives (or the interpreter is asked for), so that a CPU-only machine
without it can use the library.
"""

from .delta import delta, delta_
from .expand import expand, expand_
from .expert_delta import expert_delta
from .expert_linear import expert_linear
from .expert_mlp import expert_mlp
from .expert_plan import expert_plan
from .linear import linear
from .plan import plan
from .shrink import shrink

__all__ = [
    "delta",
    "delta_",
    "expand",
    "expand_",
    "expert_delta",
    "expert_linear",
    "expert_mlp",
    "expert_plan",
    "linear",
    "plan",
    "shrink",
]
