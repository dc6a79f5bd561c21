"""expert_mlp (a whole layer of experts: gate_up, swiglu, down, weighted sum over k) with LoRA on both projections, beside itself
without LoRA and beside PyTorch's way of the layer.

    pytest bench/bench_expert_mlp.py --contenders ours --bench-json …     all figures, in rows of ours
    pytest bench/bench_expert_mlp.py -k "dsv3-r16 and T64-"               some; with a row for every contender

Rows are those of bench_expert_linear.py. The bar is 1 × PyTorch's base alone at every T.
"""

import pytest

from . import expert_contenders as who
from . import expert_linear_workloads as workloads
from .bench_expert_linear import case, run  # noqa: F401  (case is a fixture)

CONTENDERS = who.NAMES


@pytest.mark.parametrize("case", workloads.EXPERT_MLP, indirect=True, ids=lambda w: w.name)
def test_expert_mlp(case, contender, figure, timer):  # noqa: F811
    run(case, contender, figure, timer)
