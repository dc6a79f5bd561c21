"""Forward and backward of a layer of experts with LoRA, its base frozen, against autograd over PyTorch's own way: sort, gather,
`grouped_mm`, scatter.

    pytest bench/bench_expert_train.py --bench-json …                      all rows
    pytest bench/bench_expert_train.py -k "qwen3-30b-mlp and r16-S1" …     some

`expert_delta` over gate_up and over down, `expert_mlp`: what has gradients is said in `expert_train_workloads`. One CUDA graph
holds the steps (where none of torch's ways can be captured, its row's `method` says that they ran eagerly, and ours is compared by
`eager_us`); `us` is forward and backward, `forward_us` the forward alone (in training: with all that it keeps), `peak_mib` what
one eager step allocates at its worst moment beyond its inputs. A row of ours also has `times_torch` (the bar, `times_bar`, is
0.5: half of torch's time) and `given_us`, the step with the plan given, of which it otherwise makes its own twice.
"""

from functools import cached_property

import pytest
import torch

import grouped_lora_ops as glo

from . import expert_train_contenders as who
from . import expert_train_workloads as workloads
from . import measure
from .bench_expert_linear import free_bytes
from .conftest import shortlist

CONTENDERS = who.NAMES


class Trained:
    """One workload: its sets, made when first asked for, whether our op gets it right, what torch took."""

    def __init__(self, w: workloads.Trained, device: torch.device, tiny: bool):
        self.w, self.device, self.tiny = w, device, tiny
        self.shared = workloads.deltas.shared_inputs(w, device)
        self.torch_us = self.torch_eager_us = None

    @cached_property
    def sets(self) -> list[dict]:
        """As many as read more than the L2 holds, two at most; half of the free memory is for the check and the steps."""
        free, size = free_bytes(self.device), workloads.bytes_per_set(self.w)
        count = measure.sets_for(workloads.cost(self.w)[0], most=2)
        if free is not None and size > free / 2:
            pytest.skip(f"{size / 1e9:.0f} GB of tensors, and as much for the check, do not fit this GPU")
        return [workloads.random_set(self.w, self.device, seed) for seed in range(count)]

    @cached_property
    def mismatch(self) -> str | None:
        """None where y and all gradients of ours have the exact answer's bits, without a plan and with one; else what differs."""
        t, grad = workloads.integer_set(self.w, self.device), workloads.grad_of(self.w, self.device, integers=True)
        want = workloads.exact_answer(self.w, t, self.shared, grad)
        for plan in (None, self.plan()):
            names = ("y", *workloads.leaves(self.w))
            for name, mine, right in zip(names, self.way(plan).step(t, grad)(), want, strict=True):
                if mine.dtype != right.dtype or not torch.equal(mine, right):
                    what = name if name == "y" else f"the gradient of {name}"
                    where = "" if plan is None else ", plan given"
                    return f"{what} differs in {int((mine != right).sum())} of {right.numel()} entries{where}"
        return None

    def way(self, plan=None) -> who.Way:
        return who.our_way(self.w, self.shared, plan)

    def plan(self) -> torch.Tensor:
        return glo.expert_plan(self.shared["expert_ids"], self.shared["adapter_ids"], self.w.experts, self.w.slots)


def check(layer: Trained, ways: dict[str, who.Way], t: dict, grad: torch.Tensor) -> None:
    """y and the gradients of each of torch's ways, within a tolerance of ours."""
    want = layer.way().step(layer.sets[0], grad)()
    for name, way in ways.items():
        y, *grads = way.step(t, grad)()
        found = (y, *way.in_order(grads))
        for part, mine, right in zip(("y", *workloads.leaves(layer.w)), found, want, strict=True):
            assert mine.shape == right.shape, f"{name}: {part} is {list(mine.shape)}"
            mine, right = mine.detach().float(), right.detach().float()
            error = float((mine - right).abs().max() / right.abs().max())
            assert error < 5e-2, f"torch's {name}: {part} is off by {error:.3g} of the largest value"


@pytest.fixture(scope="module")
def case(request, device):
    tiny = request.config.getoption("--tiny")
    layer = Trained(request.param.tiny() if tiny else request.param, device, tiny)
    yield layer
    layer.__dict__.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.mark.parametrize("case", workloads.TRAINING, indirect=True, ids=lambda w: w.name)
def test_train(case, contender, figure, timer):
    w = case.w
    ways = who.ways(contender, w, case.shared)
    if not ways:
        pytest.skip(f"{contender} has no way to train {w.name}")
    if contender == "ours" and case.mismatch:
        pytest.fail(f"exactness gate, training on {w.name}: {case.mismatch}: no figure from a wrong kernel")
    grad = workloads.grad_of(w, case.device)
    sets = [next(iter(ways.values())).prepared(t) for t in case.sets]
    if contender == "torch":
        check(case, ways, sets[0], grad)
    steps = {name: [way.step(t, grad) for t in sets] for name, way in ways.items()}
    dropped, able = {} if contender == "torch" else None, dict(steps)
    tried = shortlist(timer, able, dropped)
    captured = bool(able)
    if not captured:  # no graph can hold any of torch's ways: eager steps between two events, ours compared so, too
        tried = {name: timer.eager_us(calls) for name, calls in steps.items()}
    best = min(tried, key=tried.__getitem__) if tried else next(iter(steps))
    calls, forwards = steps[best], [ways[best].only_forward(t) for t in sets]
    more = {"variant": best, "variants": tried, "dropped": dropped, "sets": len(sets)}
    rest = measure.rests(w)

    def after(us: float) -> dict:
        found = {"forward_us": timer.graph_us(forwards, rest=rest) if captured else timer.eager_us(forwards)}
        found |= {"peak_mib": timer.peak_mib(calls[0]), "eager_us": timer.eager_us(calls)}
        if contender == "torch":
            return found
        found["given_us"] = timer.graph_us([case.way(case.plan()).step(t, grad) for t in sets], rest=rest)
        if case.torch_us or case.torch_eager_us:
            times = us / case.torch_us if case.torch_us else found["eager_us"] / case.torch_eager_us
            found |= {"times_bar": workloads.TIMES_TORCH, "times_torch": times}
        return found

    if captured:
        us = figure(w, "expert_train", contender, timer.graph(calls, rest=rest), after=after, **more)
    else:
        more["method"] = measure.METHOD_EAGER
        us = figure(w, "expert_train", contender, lambda: timer.eager_us(calls, rounds=1), rounds=3, after=after, **more)
    if contender == "torch":
        case.torch_us, case.torch_eager_us = (us, None) if captured else (None, us)
