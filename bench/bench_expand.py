"""expand_ (out += scaling · h Bᵀ) alone: which half of a delta costs what."""

import pytest

from .workloads import HALVES

CONTENDERS = ("ours", "reference", "torch")


@pytest.mark.parametrize("case", HALVES, indirect=True, ids=lambda w: w.name)
def test_expand(case, contender, measure_op):
    measure_op()
