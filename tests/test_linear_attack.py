"""csrc/linear.cu on the CPU where its warps could wait for each other: blocks that take many tiles, warps far behind."""

from __future__ import annotations

import re
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


def test_a_slow_fetching_warp_behind_many_adapters(tmp_path, monkeypatch):
    """It brings nothing of LoRA's stages, yet the ring may not go round without it: a parity names every other phase."""
    header = (csrc.ROOT / "tests/hopper_on_cpu.h").read_text()
    drawn = "for (u32 &speed : speeds) speed = chances[draw() % 4];"
    assert header.count(drawn) == 1
    (tmp_path / "hopper_on_cpu.h").write_text(
        header.replace(drawn, drawn + " speeds[10] = 1000;").replace(
            '"cuda_on_cpu.h"', f'"{csrc.ROOT}/tests/cuda_on_cpu.h"'
        )
    )
    one_kernel = re.compile(r"^KERNEL\((?!linear_bf16_256,).*$", re.MULTILINE)  # the others would only be compiled
    text = csrc.translated(lambda text: one_kernel.sub("", text))
    slow = text.replace(str(csrc.ROOT / "tests/hopper_on_cpu.h"), str(tmp_path / "hopper_on_cpu.h"))
    assert slow != text
    monkeypatch.setattr(csrc, "translated", lambda *change: slow)
    on_cpu = csrc.OnCpu(csrc.compiled(tmp_path), monkeypatch)
    c, weight, bias = case("plain", **csrc.SIZES | dict(tokens=128, slots=8, features=8, out=8, rank=64))
    csrc.dense(on_cpu, c, weight, bias, programs=1, pdl=False)
    on_cpu.close()
