"""csrc/linear.cu on the CPU where one of its blocks takes many tiles in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_linear_csrc as csrc
from expert_cases import build_routes
from linear_cases import case

library, on_cpu = csrc.library, csrc.on_cpu


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("features", [64, 72])
def test_tiles_of_masked_routes_behind_each_other(on_cpu, monkeypatch, features, lora):
    """They have no stages, so that the copies of the last tile that has any must be signalled before."""
    ids = csrc.routes([130, 64, 0], 128 * 8, 1)
    c = build_routes("per expert", experts=3, **csrc.EXPERTS | dict(ids=ids, out=16, features=features))
    csrc.experts(on_cpu, monkeypatch, c, lora=lora)


@pytest.mark.parametrize("features", [64, 72, 136])
def test_tiles_of_one_stage(on_cpu, monkeypatch, features):
    """… and fewer than may be on their way, whether rows are an expert's, sorted, or one row for all; ranks of 0 add none."""
    c = build_routes(
        "per expert",
        experts=3,
        ranks=[0, 0, 0],
        **csrc.EXPERTS | dict(ids=csrc.routes([700, 300], 0, 1), out=16, features=features),
    )
    csrc.experts(on_cpu, monkeypatch, c)
    c, weight, bias = case("plain", **csrc.SIZES | dict(tokens=700, out=16, features=features), ranks=[0, 0, 0])
    csrc.dense(on_cpu, c, weight, bias, sort=True, programs=1)
    csrc.dense(on_cpu, replace(c, x=c.x[:1].expand(700, -1)), weight, bias, programs=1)
