"""plan: what a batch pays once, before the deltas of all its layers. Its time is in no delta's figure."""

import pytest

from .workloads import PLANS

CONTENDERS = ("ours", "reference", "torch")


@pytest.mark.parametrize("case", PLANS, indirect=True, ids=lambda w: w.name)
def test_plan(case, contender, measure_op):
    measure_op()
