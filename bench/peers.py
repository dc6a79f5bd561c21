"""The peers' own kernels, called from wherever their packages are installed; nothing of theirs is kept here.

sglang 0.5.23: the LoRA kernels need only torch and Triton, but importing `sglang` needs all of its
dependencies. Where that import fails, the kernel files are loaded from the installed (or merely unpacked)
package with stand-ins for the few helpers they import, none of which is on the measured path. `pip install
--no-deps sglang==0.5.23` is enough, or an unpacked wheel named with `--peer-path`.

vLLM: `vllm.lora.ops.triton_ops`, imported as it is. Its kernels take one scaling per call, so B is scaled
beforehand.

Metadata (sorted rows, segments, padded routes) is built here, outside the timing, and as tight as the batch
allows: a captured graph of theirs that has to serve any batch would be padded further. Grouped x is shown to
them as [T·G, D] rows with (slot, group) as the segment, as sglang's own change for DeepSeek-V4 does it. Peers
that cannot run a layout have no variant for it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from .contenders import Inputs, Unavailable, flat, flat_b, slices_of
from .workloads import Workload

SGLANG_VERSION = "0.5.23"
_OPS = "sglang.kernels.ops.lora"


# --- loading ---


def _module(name: str, **members) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


class _Flags:
    """Environment flags of a peer that reads them from a module: all off but the named ones."""

    def __init__(self, *on: str):
        self._on = on

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: name in self._on)


class _Struct:
    """`msgspec.Struct` where msgspec is not installed."""

    def __init_subclass__(cls, **options):
        dataclasses.dataclass(**options)(cls)


def _stand_ins(root: Path) -> None:
    """Packages whose `__init__` is not run, and the helpers that the kernel files import."""
    for package in ("", ".kernels", ".kernels.ops", ".kernels.ops.lora"):
        _module(f"sglang{package}", __path__=[str(root.joinpath(*package.split(".")))])
    for package in ("dense", "dense.trtllm_lora_temp", "common"):
        _module(f"{_OPS}.{package}", __path__=[str(root.joinpath("kernels", "ops", "lora", *package.split(".")))])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    _module("sglang.srt", __path__=[])
    _module("sglang.srt.environ", envs=_Flags())
    _module(
        "sglang.srt.utils",
        cached_triton_kernel=lambda key: lambda kernel: kernel,
        get_device_name=lambda: device,
    )
    _module("sglang.srt.lora", __path__=[])
    _module("sglang.srt.lora.utils", LoRABatchInfo=SimpleNamespace)
    _module("sglang.srt.lora.trtllm_lora_temp", __path__=[])
    _module("sglang.srt.lora.trtllm_lora_temp.environ", lora_envs=_Flags("SGLANG_ENABLE_LORA_SHRINK_SPLIT_K"))
    _module("sglang.kernels.jit", __path__=[])
    _module("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: hopper)
    _module(f"{_OPS}.moe", __path__=[])
    _module(f"{_OPS}.moe.virtual_experts", _align_block_size_jit=None)
    if importlib.util.find_spec("msgspec") is None:
        _module("msgspec", Struct=_Struct)


@functools.cache
def sglang() -> SimpleNamespace:
    """The kernels' Python wrappers."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"sglang is not installed (pip install --no-deps sglang=={SGLANG_VERSION})")
    root = Path(next(iter(spec.submodule_search_locations)))
    whole = True
    try:
        importlib.import_module(f"{_OPS}.dense.sgemm_lora_a")
    except ImportError:
        whole = False
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        _stand_ins(root)
    try:
        get = {
            name: importlib.import_module(f"{_OPS}.{name}")
            for name in (
                "dense.sgemm_lora_a",
                "dense.sgemm_lora_b",
                "dense.chunked_sgmv_shrink",
                "dense.chunked_sgmv_expand",
                "common.lora_a",
                "common.lora_b",
                "common.route_view",
            )
        }
    except (ImportError, AttributeError, OSError) as error:
        raise Unavailable(f"sglang's LoRA kernels cannot be loaded: {error!r}") from error
    found = SimpleNamespace(
        root=root,
        triton_a=get["dense.sgemm_lora_a"].sgemm_lora_a_fwd,
        triton_b=get["dense.sgemm_lora_b"].sgemm_lora_b_fwd,
        csgmv_a=get["dense.chunked_sgmv_shrink"].chunked_sgmv_lora_shrink_forward,
        csgmv_b=get["dense.chunked_sgmv_expand"].chunked_sgmv_lora_expand_forward,
        grouped_a=get["common.lora_a"].grouped_lora_a,
        tiles=get["common.lora_a"].shrink_column_tiles,
        grouped_b=get["common.lora_b"].grouped_lora_b,
        per_row_b=get["common.lora_b"].per_row_lora_b,
        geometry=get["common.lora_b"].slice_geometry,
        RouteView=get["common.route_view"].RouteView,
        Kind=get["common.route_view"].RouteViewKind,
    )
    try:  # the split-K, programmatic-launch copy, which sglang keeps behind an environment variable
        found.pdl_a = importlib.import_module(f"{_OPS}.dense.trtllm_lora_temp.sgemm_lora_a").sgemm_lora_a_fwd
        found.pdl_b = importlib.import_module(f"{_OPS}.dense.trtllm_lora_temp.sgemm_lora_b").sgemm_lora_b_fwd
    except (ImportError, AttributeError):
        found.pdl_a = found.pdl_b = None
    if whole:  # its split-K then depends on the environment, like everything of a whole installation
        found.pdl_a = found.pdl_b = None
    return found


@functools.cache
def vllm() -> SimpleNamespace:
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable("vllm is not installed")
    try:
        ops = importlib.import_module("vllm.lora.ops.triton_ops")
        return SimpleNamespace(shrink=ops.lora_shrink, expand=ops.lora_expand, Meta=ops.LoRAKernelMeta)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"vllm's LoRA kernels cannot be imported: {error!r}") from error


def variants(op: str, contender: str, inputs: Inputs) -> dict[str, list[Callable[[], object]]]:
    if op != "delta" or inputs.w.layout == "own_a":
        return {}
    if contender == "vllm":
        return _vllm(vllm(), inputs)
    return _sglang(sglang(), inputs)


# --- sglang ---


@dataclasses.dataclass
class View:
    """A batch as sglang sees it: rows of one width, segments of rows that share an adapter (or an (adapter,
    group))."""

    rows: Tensor  # int64, row numbers sorted by bucket; rows without an adapter are left out
    buckets: Tensor  # int64, the bucket of each of them: slot, or slot·G + group
    groups: int  # buckets per slot
    total: int  # all rows, those without an adapter too

    @classmethod
    def of(cls, inputs: Inputs) -> View:
        w, ids = inputs.w, inputs.shared["adapter_ids"].long()
        if w.layout == "grouped":
            groups, device = w.G, ids.device
            row_ids = ids[:, None].expand(-1, groups).reshape(-1)
            bucket = torch.where(row_ids >= 0, row_ids * groups + torch.arange(groups, device=device).repeat(w.T), -1)
        else:
            groups, bucket = 1, ids
        order = torch.argsort(bucket, stable=True)[int((bucket < 0).sum()) :]
        return cls(order, bucket[order], groups, bucket.numel())

    def segments(self, chunk: int | None = None) -> tuple[list[int], list[int]]:
        """(bucket, length) of every run of rows, cut into chunks."""
        buckets, lengths = [], []
        found, counts = torch.unique_consecutive(self.buckets, return_counts=True)
        for bucket, count in zip(found.tolist(), counts.tolist(), strict=True):
            for start in range(0, count, chunk or count):
                buckets.append(bucket)
                lengths.append(min(chunk or count, count - start))
        return buckets, lengths


def _batch_info(inputs: Inputs, view: View, chunk: int | None) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The metadata of A (a matrix per slot) and of B (a matrix per (slot, group))."""
    w, device = inputs.w, view.rows.device
    buckets, lengths = view.segments(chunk)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0).to(torch.int32)])
    bucket = torch.tensor(buckets, dtype=torch.int32, device=device)
    ranks = inputs.shared["ranks"]
    ranks = torch.full((w.slots,), w.rank, dtype=torch.int32, device=device) if ranks is None else ranks

    def info(groups: int, per_slot: int) -> SimpleNamespace:
        return SimpleNamespace(
            use_cuda_graph=False,
            bs=len(buckets),
            num_segments=len(buckets),
            seg_indptr=starts,
            seg_lens=lens,
            weight_indices=(bucket // groups).contiguous(),
            lora_ranks=ranks.repeat_interleave(per_slot),
            scalings=inputs.shared["scalings"].repeat_interleave(per_slot),
            max_len=chunk or max(lengths),
            permutation=view.rows.to(torch.int32),
        )

    return info(view.groups, 1), info(1, view.groups)


def _operands(t: dict[str, Tensor], w: Workload) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [rows, D], A [L, stack·r, D], B [L·G, N, r] or [L, width, r], out [rows, N] or [rows, width]:
    views."""
    x, a = t["x"].view(-1, w.D), t["lora_a"].view(w.slots, -1, w.D)
    if w.layout == "grouped":
        return x, a, t["lora_b"].view(-1, w.N, w.rank), t["out"].view(-1, w.N)
    return x, a, flat_b(t["lora_b"], w), flat(t["out"], w)


def _sglang(peer: SimpleNamespace, inputs: Inputs) -> dict[str, list[Callable]]:
    w = inputs.w
    view = View.of(inputs)
    if not view.rows.numel():
        return {}
    stack = w.G if w.layout == "stacked" else 1
    offsets = [0] + ([c.stop for c in slices_of(w)] if stack > 1 else [w.N])
    made: dict[str, list[Callable]] = {}

    if stack == 1:  # the triton backend has other kernels for stacked slices
        info_a, info_b = _batch_info(inputs, view, None)

        def triton(t, run_a=peer.triton_a, run_b=peer.triton_b):
            x, a, b, out = _operands(t, w)
            run_b(run_a(x, a, info_a), b, info_b, out)

        made["triton"] = [lambda t=t: triton(t) for t in inputs.sets]
        if peer.pdl_a is not None and view.rows.is_cuda:
            made["triton-pdl"] = [lambda t=t: triton(t, peer.pdl_a, peer.pdl_b) for t in inputs.sets]

    slice_offsets = torch.tensor(offsets, dtype=torch.int32, device=view.rows.device)
    widest = max(end - start for start, end in zip(offsets, offsets[1:]))
    for chunk in (16, 64, 128) if view.total >= 256 else (16,):
        info_a, info_b = _batch_info(inputs, view, chunk)

        def csgmv(t, info_a=info_a, info_b=info_b):
            x, a, b, out = _operands(t, w)
            h = peer.csgmv_a(x, a, info_a, stack)
            peer.csgmv_b(h, b, info_b, slice_offsets, widest, out)

        made[f"csgmv{chunk}"] = [lambda t=t, call=csgmv: call(t) for t in inputs.sets]

    for name, plan in _v2_plans(peer, w).items() if view.rows.is_cuda else ():
        made[f"v2-{name}"] = _v2(peer, inputs, view, plan, tuple(offsets), stack)
    return made


# the peer's own defaults
_A_TILES = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}
_B_TILES = {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 2}


def _v2_plans(peer: SimpleNamespace, w: Workload) -> dict[str, dict]:
    """The row of the peer's own table for this shape, and the ends of its range: split-K 4 and 8 with 16-row
    tiles for decode, 64- and 128-row tiles for prefill."""
    plans = {}
    if w.T <= 512:
        for split, mode in ((4, "serial"), (8, "serial"), (8, "planes")):
            tiles = {**_A_TILES, "SPLIT_K": split, "SPLIT_MODE": mode}
            plans[f"split{split}-{mode}"] = {"block_size": 16, "a_tiles": tiles, "b_tiles": _B_TILES}
    if w.T >= 256:
        for block in (64, 128):
            plans[f"rows{block}"] = {"block_size": block, "a_tiles": _A_TILES, "b_tiles": _B_TILES}
    row = _v2_table_row(peer.root, w, "decode" if w.T <= 512 else "prefill")
    if row:
        plans["table"] = row
    return plans


def _v2_table_row(root: Path, w: Workload, phase: str) -> dict | None:
    path = root / "srt" / "lora" / "dense" / "configs" / "sm90.plans.json"
    if not path.is_file():
        return None
    for row in json.loads(path.read_text())["rows"]:
        bounds = (
            row.get("phase") in (None, phase),
            "linear" in (row.get("kinds") or ["linear"]),
            w.T <= (row.get("max_tokens") or w.T),
            w.rank <= (row.get("max_rank") or w.rank),
            (row.get("min_in_features") or 0) <= w.D <= (row.get("max_in_features") or w.D),
            (row.get("min_out_features") or 0) <= w.width <= (row.get("max_out_features") or w.width),
        )
        if all(bounds):
            spec = row["spec"]
            per_row_b = spec["b_family"] == "per_row"
            if spec["a_family"] != "grouped" or (per_row_b and w.layout == "grouped"):
                return None  # families that have no (slot, group) route
            return spec
    return None


def _v2_route(peer: SimpleNamespace, inputs: Inputs, view: View, block: int):
    """Rows padded to whole blocks per bucket; a padding row is number `total`, beyond the last."""
    w, device = inputs.w, view.rows.device
    found, counts = torch.unique_consecutive(view.buckets, return_counts=True)
    padded = (counts + block - 1) // block * block
    first = padded.cumsum(0) - padded
    inside = torch.arange(view.rows.numel(), device=device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    total = int(padded.sum())
    pairs = torch.full((total,), view.total, dtype=torch.int32, device=device)
    pairs[first.repeat_interleave(counts) + inside] = view.rows.to(torch.int32)
    group_ids = None
    if view.groups > 1:
        group_ids = torch.arange(view.groups, dtype=torch.int32, device=device).expand(w.T, -1).contiguous()
    return peer.RouteView(
        view=peer.Kind.ALIGNED,
        block_size=block,
        token_slots=inputs.shared["adapter_ids"],
        group_ids=group_ids,
        groups_per_slot=view.groups,
        max_loras=w.slots,
        maybe_sorted_pair_ids=pairs,
        maybe_block_bucket_ids=found.repeat_interleave(padded // block).to(torch.int32),
        maybe_num_pairs_post_padded=torch.tensor([total], dtype=torch.int32, device=device),
    )


def _v2(
    peer: SimpleNamespace, inputs: Inputs, view: View, plan: dict, offsets: tuple[int, ...], stack: int
) -> list[Callable]:
    w, device = inputs.w, view.rows.device
    a_tiles, b_tiles, block = plan["a_tiles"], plan["b_tiles"], plan["block_size"]
    route = _v2_route(peer, inputs, view, block)
    split, planes = int(a_tiles.get("SPLIT_K", 1)), a_tiles.get("SPLIT_MODE") == "planes"
    ranks = inputs.shared["ranks"]
    ranks = torch.full((w.slots,), w.rank, dtype=torch.int32, device=device) if ranks is None else ranks
    scalings, width = inputs.shared["scalings"], stack * w.rank
    bridge = torch.empty(view.total, width, dtype=w.dtype, device=device)
    partial = counters = None
    if split > 1:
        partial = torch.empty(split, view.total, width, dtype=torch.float32, device=device)
        n_tiles = peer.tiles(int(a_tiles["BLOCK_SIZE_N"]), width, stack, False)[1]
        counters = torch.zeros(route.sorted_pair_ids.numel() // block * n_tiles, dtype=torch.int32, device=device)
    geometry = peer.geometry(offsets, int(b_tiles["BLOCK_SIZE_N"]), device)
    per_row_b = plan.get("b_family") == "per_row"
    raw = peer.RouteView(
        view=peer.Kind.RAW,
        block_size=1,
        token_slots=inputs.shared["adapter_ids"],
        group_ids=None,
        groups_per_slot=1,
        max_loras=w.slots,
    )

    def call(t):
        x, a, b, out = _operands(t, w)
        peer.grouped_a(
            x, a, bridge, route, config=a_tiles, pair_input=True, lora_ranks=ranks, stack=stack, partial=partial,
            counters=counters, weight_div=view.groups,
        )  # fmt: skip
        h, count = (partial, split) if split > 1 and planes else (bridge, 1)
        expand, rows = (peer.per_row_b, raw) if per_row_b else (peer.grouped_b, route)
        expand(
            h, b, out, rows, geometry=geometry, config=b_tiles, add_inplace=True, zero_sentinel=False, lora_ranks=ranks,
            scalings=scalings, planes=count,
        )  # fmt: skip

    return [lambda t=t: call(t) for t in inputs.sets]


# --- vLLM ---


def _vllm(peer: SimpleNamespace, inputs: Inputs) -> dict[str, list[Callable]]:
    w, s = inputs.w, inputs.shared
    if w.layout == "grouped" or s["ranks"] is not None or w.dtype == torch.float32:
        return {}
    device = s["adapter_ids"].device
    meta = peer.Meta.make(w.slots, w.T, device=device)
    meta.prepare_tensors(s["adapter_ids"])
    try:
        args = meta.meta_args(w.T, True)
    except TypeError:  # before there was a choice to specialise on the number of active adapters
        args = meta.meta_args(w.T)
    h = torch.empty(w.G, w.T, w.rank, dtype=torch.float32, device=device)

    def prepared(t):
        out, scaled = flat(t["out"], w), flat_b(t["lora_b"], w) * s["scalings"].to(w.dtype)[:, None, None]
        a = [t["lora_a"][:, g].contiguous() for g in range(w.G)] if w.layout == "stacked" else [t["lora_a"]]
        b = [scaled[:, c].contiguous() for c in slices_of(w)]

        def call():
            peer.shrink(t["x"], a, h, *args, 1.0)
            peer.expand(h, b, out, *args, add_inputs=True)

        return call

    return {"": [prepared(t) for t in inputs.sets]}
