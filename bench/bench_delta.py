"""delta_ (out += scaling · (x Aᵀ) Bᵀ) on every dense row of the tables, and beyond: names start with `extra`
there."""

import pytest

from .contenders import NAMES
from .workloads import DENSE

CONTENDERS = NAMES


@pytest.mark.parametrize("case", DENSE, indirect=True, ids=lambda w: w.name)
def test_delta(case, contender, measure_op):
    measure_op()
