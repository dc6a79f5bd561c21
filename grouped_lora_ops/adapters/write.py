"""Adapters to disk, fail-closed: what cannot be read back as it was leaves no directory that looks finished."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch

from .._checks import dtype_name
from ..layouts import Model, Place, Sized
from .adapter import Adapter, Base, ExpertModule, LoraModule, report
from .collective import Together
from .config import CONFIG, TENSORS
from .forms import FORMS, make
from .read import COMPLETE, STAMP, file_hash, read_directory

_WHERE = "grouped_lora_ops.adapters.write_adapter"
_MODEL_FILES = ("config.json", "model.safetensors*", "model-*.safetensors", "pytorch_model*.bin", "*.gguf")


def write_adapter(
    path: str | os.PathLike,
    adapter: Adapter,
    model: Model,
    *,
    base: Base,
    form: str = "peft",
    layers: Sequence[int] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    everywhere: bool = False,
) -> None:
    """Write an adapter so that it can be loaded, or raise: there is nothing in between.

    form "peft": what peft ≥ 0.19.1 reads, experts as pairs for their 3-D parameters. "experts": a pair for every expert,
    as models with a module per expert and most serving engines have them. "serving": that, with one rank and one scaling
    (other scalings are multiplied into B, smaller ranks padded with zeros), since some engines read no patterns; absent
    members of families that engines fuse are zero; factors that all experts share are written once, as [1, …].

    base pins the adapter to its base model; a revision or a hash is needed, a name alone pins nothing. Only adapter
    factors are ever written, never a merged weight. layers: the layers that were adapted, where it is not all of them.

    The steps: check everything; remove `.complete`; write to a temporary place in the directory, fsync, rename; read the
    files back and compare bit for bit; write `.complete` with their hashes, last. A reader that finds our stamp without
    `.complete` refuses the directory. A directory that holds a model is refused.

    group: a torch.distributed process group all of whose ranks call this together. The first one writes, or with
    everywhere each (to a path of its own). Failures of all ranks are gathered after every step; then all raise the same
    RuntimeError.

    Errors (without a group): ValueError that lists everything wrong with the adapter (no factors, layers missing, names or
    shapes that are not the model's, NaN or Inf), before anything is touched; OSError where the disk fails; RuntimeError if
    what was read back differs.
    """
    path, together = Path(path), Together(_WHERE, group)
    writes = everywhere or together.rank == 0
    made = together.step("the check", lambda: _check(path, adapter, model, base, form, layers))
    if everywhere:
        together.step("the check", lambda: _check_own_place(together.gather((socket.gethostname(), str(path.resolve())))))
    tensors, config = made
    stamp = {"format": 1, "base": asdict(base), "form": form, "expert_order": "rank-major", "expert_swapped": False}
    temporary: list[Path] = []
    try:
        together.step("writing", lambda: writes and _write(path, tensors, config, stamp, temporary))
        together.step("renaming", lambda: writes and _rename(path, temporary[0]))
        together.step("reading back", lambda: writes and _compare(path, tensors, adapter, model, form))
        together.step("the marker", lambda: writes and _mark(path))
    finally:
        for directory in temporary:
            shutil.rmtree(directory, ignore_errors=True)


def base_hash(directory: str | os.PathLike) -> str:
    """A hash of a model directory that any other weights, or another configuration, change.

    SHA-256 over config.json and, for every *.safetensors file in the order of names: its name, size, header, and 64 KiB at
    65 places spread over it. Training changes every block of a weight, so sampling finds it; a terabyte takes seconds.
    """
    import hashlib

    directory, digest = Path(directory), hashlib.sha256()
    files = sorted(directory.glob("*.safetensors"))
    if not (directory / "config.json").is_file() or not files:
        raise FileNotFoundError(f"grouped_lora_ops.adapters.base_hash: {directory} must hold config.json and *.safetensors.")
    digest.update((directory / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with open(file, "rb") as stream:
            head = stream.read(8)
            digest.update(head + stream.read(min(int.from_bytes(head, "little"), size)))
            block, last = 1 << 16, max(size - (1 << 16), 0)
            for k in range(65):
                stream.seek(last * k // 64)
                digest.update(stream.read(block))
    return digest.hexdigest()


def _check(path: Path, adapter: Adapter, model: Model, base: Base, form: str, layers):
    """The tensors and the configuration to write; one error for everything that is wrong."""
    problems: list[str] = []
    if form not in FORMS:
        problems.append(f"form must be one of {', '.join(FORMS)}; got {form!r}.")
    if not isinstance(base, Base) or not base.name or not (base.revision or base.sha256):
        problems.append("base must be a Base with a name, and a revision or a hash (sha256=base_hash(model folder)): a name alone pins nothing.")
    if path.exists() and not path.is_dir():
        problems.append(f"{path} is a file.")
    held = [file.name for pattern in _MODEL_FILES for file in (path.glob(pattern) if path.is_dir() else ())]
    if held:
        problems.append(f"{path} holds a model ({', '.join(sorted(set(held))[:3])}): an adapter is written beside it, not into it.")
    if not adapter.modules and not adapter.experts:
        problems.append("the adapter holds no factors.")
    for name, lora in adapter.modules.items():
        _check_shapes(name, lora, model, problems)
    for name, expert in adapter.experts.items():
        _check_expert(name, expert, model, problems)
    if not problems:
        _check_complete(adapter, model, layers, problems)
    made = None
    if not problems:
        try:
            made = make(adapter, model, base, form)
            for name, tensor in made[0].items():
                if not tensor.isfinite().all():
                    problems.append(f"{name} holds NaN or Inf.")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise report(f"write_adapter: {path}: nothing was written:", problems)
    return made


def _place(name: str, model: Model, problems: list[str]) -> Sized | None:
    place = model.locate(name)
    if isinstance(place, Place) and place.path == name and place.form in ("module", "stack"):
        return place.projection
    problems.append(f"{name} {place if isinstance(place, str) else 'is not the layout’s own name of a projection'}.")
    return None


def _check_shapes(name: str, lora: LoraModule, model: Model, problems: list[str]) -> None:
    p = _place(name, model, problems)
    if p is None:
        return
    want = [lora.rank, p.in_features], [p.total_out, lora.rank]
    _check_factors(name, (lora.lora_a, lora.lora_b), want, lora, problems)
    if p.experts is not None:
        problems.append(f"{name} is an expert parameter, not a module.")


def _check_expert(name: str, expert: ExpertModule, model: Model, problems: list[str]) -> None:
    p = _place(name, model, problems)
    if p is None:
        return
    if p.experts is None:
        problems.append(f"{name} is no expert parameter.")
        return
    counts = [len(f) if f.dim() and len(f) in (1, p.experts) else p.experts for f in (expert.lora_a, expert.lora_b)]
    a = [counts[0], *([2] if expert.each and p.gated else []), expert.rank, p.in_features]
    _check_factors(name, (expert.lora_a, expert.lora_b), (a, [counts[1], p.out_features, expert.rank]), expert, problems)


def _check_factors(name, factors, want, lora, problems) -> None:
    for kind, factor, shape in zip("AB", factors, want):
        if list(factor.shape) != shape:
            problems.append(f"{name}: {kind} must be {shape}; got {list(factor.shape)}.")
        elif factor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            problems.append(f"{name}: {kind} must be bfloat16, float16, float32 or float64; got {dtype_name(factor.dtype)}.")
        elif not factor.isfinite().all():
            problems.append(f"{name}: {kind} holds NaN or Inf.")
    if not isinstance(lora.scaling, (int, float)) or not abs(lora.scaling) < float("inf"):
        problems.append(f"{name}: scaling must be a finite number; got {lora.scaling!r}.")


def _check_complete(adapter: Adapter, model: Model, layers, problems: list[str]) -> None:
    """A projection that is adapted in one layer is adapted in all of those that it has and that were trained."""
    if layers is None:
        layers = adapter.config.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers
    have = {*adapter.modules, *adapter.experts}
    adapted = {model.locate(name).projection.path for name in have}
    for place in model.places([p.path for p in model.projections if p.path in adapted]):
        if place.path not in have and (not layers or place.layer in layers):
            problems.append(f"{place.path} is missing, though {place.projection.path} is adapted in other layers.")


def _check_own_place(places: list[tuple[str, str]]) -> None:
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise ValueError(f"ranks that all write need paths of their own; {twice[0][1]} is that of several.")


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # directories cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, tensors, config, stamp, temporary: list[Path]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / COMPLETE).unlink(missing_ok=True)
    _sync(path)
    directory = Path(tempfile.mkdtemp(prefix=".writing-", dir=path))  # in path: a rename never crosses a file system
    temporary.append(directory)
    safetensors.torch.save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    for name, value in ((CONFIG, config), (STAMP, stamp)):
        (directory / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.chmod(directory / TENSORS, (directory / CONFIG).stat().st_mode)  # safetensors makes files that only the owner reads
    for name in (TENSORS, CONFIG, STAMP):
        _sync(directory / name)


def _rename(path: Path, directory: Path) -> None:
    for name in (STAMP, CONFIG, TENSORS):  # the stamp first: from here on a reader asks for the marker
        os.replace(directory / name, path / name)
    _sync(path)


def _compare(path: Path, tensors, adapter: Adapter, model: Model, form: str) -> None:
    """What is on disk is what was meant, bit for bit; and reading it gives this adapter."""
    found = safetensors.torch.load_file(path / TENSORS)
    different = [name for name in {*found, *tensors} if name not in found or name not in tensors or not _same(found[name], tensors[name])]
    if different:
        raise RuntimeError(f"{_WHERE}: {len(different)} tensors differ when read back, {sorted(different)[0]} first.")
    back = read_directory(path, model, finished=False)
    if form == "serving":
        return  # one rank and one scaling: the factors are others by intent
    for name, lora in adapter.modules.items():
        other = back.modules.get(name)
        if other is None or not _same_module(lora, other):
            raise RuntimeError(f"{_WHERE}: {name} differs when read back.")
    for name, expert in adapter.experts.items():
        other = back.experts.get(name)
        if other is None or not _same_expert(expert, other, form):
            raise RuntimeError(f"{_WHERE}: {name} differs when read back.")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.detach().cpu().contiguous().view(torch.uint8))


def _same_module(a, b) -> bool:
    scalings = torch.tensor([a.scaling, b.scaling], dtype=torch.float32)
    return a.rank == b.rank and bool(scalings[0] == scalings[1]) and _same(b.lora_a, a.lora_a) and _same(b.lora_b, a.lora_b)


def _same_expert(a: ExpertModule, b: ExpertModule, form: str) -> bool:
    a = a.with_one_a() if form == "peft" else a
    if form != "peft" and b.each and not a.each:
        a = a.with_an_a_each()
    expanded = [f.expand(max(len(f), len(g)), *f.shape[1:]) for f, g in ((a.lora_a, b.lora_a), (a.lora_b, b.lora_b))]
    return _same_module(LoraModule(*expanded, a.rank, a.scaling), b)


def _mark(path: Path) -> None:
    hashes = {name: file_hash(path / name) for name in (CONFIG, STAMP, TENSORS)}
    made = path / f".writing-{os.getpid()}{COMPLETE}"
    try:
        made.write_text(json.dumps({"sha256": hashes}, indent=2) + "\n", encoding="utf-8")
        _sync(made)
        os.replace(made, path / COMPLETE)
    finally:
        made.unlink(missing_ok=True)
    _sync(path)
