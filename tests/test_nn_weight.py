"""A parent that multiplies with `.weight` itself (DeepSeek-V4's wo_a): no forward of the module, no hook, and still the delta."""

from __future__ import annotations

import pytest
import torch
from adapter_cases import random_adapter
from tiny_models import CONFIGS
from torch import nn

from grouped_lora_ops import layouts
from grouped_lora_ops import nn as gnn
from grouped_lora_ops.adapters import AdapterBank, plan_bank

V4 = CONFIGS["deepseek_v4"] | {"num_hidden_layers": 1}
LAYOUT = layouts.of(V4)
G, D, N = 2, 32, 12
WAYS = {
    "bsgd,grd->bsgr": lambda x, w: torch.einsum("bsgd,grd->bsgr", x, w.view(G, N, D)),
    "rows last": lambda x, w: torch.einsum("grd,bsgd->bgsr", w.unflatten(0, (G, N)), x).transpose(1, 2),
    "a list": lambda x, w: torch.einsum("tgd, gnd -> tgn", [x.flatten(0, 1), w.reshape(G, -1, D)]).view(2, 5, G, N),
    "bmm": lambda x, w: torch.bmm(x.view(-1, G, D).transpose(0, 1), w.view(G, -1, D).transpose(1, 2)).transpose(0, 1).view(2, 5, G, N),
    "matmul": lambda x, w: (x.transpose(1, 2) @ w.view(G, N, D).mT).transpose(1, 2),
    "permuted": lambda x, w: torch.matmul(x.transpose(1, 2), w.view(G, N, D).permute(0, 2, 1).contiguous()).transpose(1, 2),
}


class Native(nn.Module):
    """V4's own names: layers.0.attn.wo_a, whose forward raises."""

    def __init__(self, multiply=None):
        super().__init__()

        class Never(nn.Linear):
            def forward(self, x):
                raise AssertionError("wo_a is never called")

        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].attn = nn.Module()
        self.layers[0].attn.wo_a, self.multiply = Never(D, G * N, bias=False), multiply

    def forward(self, x):
        return self.multiply(x, self.layers[0].attn.wo_a.weight)


def bank(scaling=0.5):
    made = AdapterBank(plan_bank(LAYOUT, slots=2, rank=3, dtype=torch.float32, selectors=["o_a_proj"]))
    adapter = random_adapter(LAYOUT, ["o_a_proj"], scaling=scaling)
    made.load("a", adapter)
    return made, next(iter(adapter.modules.values()))


@pytest.mark.parametrize("way", WAYS)
def test_the_delta_joins_the_parents_own_product(way):
    model, x = Native(WAYS[way]), torch.randn(2, 5, G, D)
    plain = model(x).detach()
    slots, lora = bank()
    delta = 0.5 * torch.einsum("bsgd,rd,gnr->bsgn", x.double(), lora.lora_a.double(), lora.lora_b.view(G, N, -1).double())
    attached = gnn.attach_bank(model, slots)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), attached.using(["a", None]):
            got = model(x)
        assert torch.equal(got[1], plain[1]) and type(got) is torch.Tensor
        torch.testing.assert_close(got[0].double(), plain[0].double() + delta[0], rtol=1e-5, atol=1e-5)
    attached.detach()
    assert torch.equal(model(x), plain) and type(model.layers[0].attn.wo_a.weight) is nn.Parameter


@pytest.mark.parametrize("way", ["bsgd,grd->bsgr", "bmm"])
def test_gradients_through_a_stand_in(way):
    model, x = Native(WAYS[way]), torch.randn(2, 5, G, D, requires_grad=True)
    attached = gnn.attach_trainable(model, LAYOUT, selectors=["o_a_proj"], rank=3)
    (a, b) = attached.parameters()
    with torch.no_grad():
        b.normal_()
    model(x).square().sum().backward()
    got = [t.grad.clone() for t in (x, a, b)]
    weight = model.layers[0].attn.wo_a.base.weight.detach().view(G, N, D)
    x.grad = a.grad = b.grad = None
    y = torch.einsum("bsgd,gnd->bsgn", x, weight) + torch.einsum("bsgd,rd,gnr->bsgn", x, a, b)
    y.square().sum().backward()
    for g, t in zip(got, (x, a, b)):
        torch.testing.assert_close(g, t.grad, rtol=1e-4, atol=1e-4)


def test_what_would_lose_the_adapter_is_refused():
    model = Native()
    attached = gnn.attach_bank(model, bank()[0])
    w, x = model.layers[0].attn.wo_a.weight, torch.randn(2, 5, G, D)
    grouped = w.view(G, N, D)
    assert (w.shape, w.dtype, w.device.type, w.dim(), w.is_contiguous()) == ((G * N, D), torch.float32, "cpu", 2, True)
    assert w.data_ptr() == model.state_dict()["layers.0.attn.wo_a.weight"].data_ptr() and w.requires_grad
    for use in (
        lambda: w + 1,
        lambda: w.sum(),
        lambda: w[0],
        lambda: w.view(N, G, D),
        lambda: w.view(-1),
        lambda: w.data,
        lambda: torch.cat([w, w]),
        lambda: torch.nn.functional.linear(x, w),  # every group's rows for every group's x
        lambda: grouped @ x.transpose(-1, -2),
        lambda: torch.einsum("bsgd,grd->bsr", x, grouped),  # a sum over groups
        lambda: torch.einsum("bsgd,hrd->bsgr", x, grouped),
        lambda: torch.einsum("...gd,grd->...gr", x, grouped),
        lambda: w.split(N),
    ):
        with pytest.raises(RuntimeError, match="would lose them"):
            use()
    with torch.no_grad():
        attached.detach()
    gnn.attach_bank(model, bank()[0], direct=[])
    assert type(model.layers[0].attn.wo_a.weight) is nn.Parameter


def test_a_plain_linear_read_by_its_parent():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([nn.Module()])
            self.layers[0].self_attn = nn.Module()
            self.layers[0].self_attn.q_a_proj = nn.Linear(32, 16)

        def forward(self, x, how):
            p = self.layers[0].self_attn.q_a_proj
            return how(x, p.weight, p.bias)

    model, x = Parent(), torch.randn(2, 5, 32)
    slots = AdapterBank(plan_bank(LAYOUT, slots=1, rank=3, dtype=torch.float32, selectors=["q_a_proj"]))
    slots.load("a", random_adapter(LAYOUT, ["q_a_proj"]))
    attached = gnn.attach_bank(model, slots, direct=["q_a_proj"])
    with attached.using(["a"]):
        want = model.layers[0].self_attn.q_a_proj(x)
        for how in (
            torch.nn.functional.linear,
            lambda x, w, b: x @ w.t() + b,
            lambda x, w, b: torch.matmul(x, w.T) + b,
            lambda x, w, b: torch.einsum("bsd,nd->bsn", x, w) + b,
        ):
            torch.testing.assert_close(model(x, how), want, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match="mul on the weight"):
            model(x, lambda x, w, b: w * 2)
    plain = torch.nn.functional.linear(x, model.layers[0].self_attn.q_a_proj.base.weight, model.layers[0].self_attn.q_a_proj.bias)
    assert not torch.allclose(want, plain, atol=1e-2)
