"""Adapter slots: fixed stacked buffers into which adapters are loaded in place while captured graphs keep running."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import instance
from .adapter import Adapter
from .image import BankPlan, fill, views

_WHERE = "grouped_lora_ops.adapters.AdapterBank"


class Slots(NamedTuple):
    """The buffers of one projection or fused family, in the order in which the ops take them. They never move."""

    lora_a: Tensor  # [L, r, D], fused [L, M, r, D], experts [L, E|1, r, D] or [L, E|1, 2, r, D]
    lora_b: Tensor  # [L, N, r], grouped [L, G, N, r], fused [L, ΣN, r], experts [L, E|1, N, r]
    scalings: Tensor  # [L] float32
    ranks: Tensor  # [L] int32
    out_sizes: tuple[int, ...] | None  # of a fused family


def _host_memory(size: int, pinned: bool) -> Tensor:
    """size zero bytes, page-locked if a GPU is to read them.

    They are registered instead of allocated by torch's pinned allocator, which rounds sizes up to a power of two.
    """
    memory = torch.zeros(size, dtype=torch.uint8)
    if pinned:
        cudart, address = torch.cuda.cudart(), memory.data_ptr()
        torch.cuda.check_error(cudart.cudaHostRegister(address, size, 0))
        weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address)
    return memory


@dataclass
class _Entry:
    """An adapter in a slot."""

    slot: int
    pins: int = 0
    ready: bool = False  # the content is there, or on its way on the bank's stream
    uploaded: Any = None  # event after the upload


class AdapterBank:
    """L slots for adapters of a model, with as many more waiting on the host as the plan says.

        plan = plan_bank(layouts.of("path/to/model"), slots=8, rank=64, host_adapters=1000)
        print(plan)                                          # the memory that it takes
        bank = AdapterBank(plan, device="cuda")
        bank.add("a", read_adapter("path/to/a", plan.model)) # checked, and copied to pinned memory
        with bank.using(["a", None]) as slots:               # uploaded, if it is not in a slot; cannot be evicted here
            adapter_ids.copy_(bank.adapter_ids(["a", None]))
            graph.replay()

    `bank[path]` are the buffers of a projection (`Slots`). Their addresses never change: an adapter is written into its
    slot in place, so a captured graph uses whatever is there at replay. What lies past an adapter's rank is zero, as is
    an empty slot, its rank and its scaling: nothing of an earlier adapter can be read.

    Who runs kernels with a slot holds its adapter with `acquire` … `release` (or `using`). A held adapter is never evicted
    or overwritten; of the others the one not held for the longest time goes first. On a GPU uploads run on a stream of
    their own; acquire makes the current stream wait for the upload, and a slot is overwritten only when the work queued
    before its last release is done, so that the host never waits. Do not acquire inside a capture, and capture with
    `capture_error_mode="thread_local"` where other threads load meanwhile.

    All methods may be called from any thread; uploads of different adapters run beside each other, and a second request
    for one that is being loaded waits for it.

    Errors: ValueError for an adapter that does not fit (then nothing has changed), LookupError for an unknown name,
    RuntimeError if every slot, or the host's memory, is taken.
    """

    def __init__(self, plan: BankPlan, device: torch.device | str = "cpu"):
        self.plan = plan
        self._cuda = torch.device(device).type == "cuda"
        count, buffers = plan.slots, len(plan.buffers)
        self._storage = torch.zeros(count, plan.image, dtype=plan.dtype, device=device)
        self.device = self._storage.device
        self._scalings = torch.zeros(buffers, count, device=device)
        self._ranks = torch.zeros(buffers, count, dtype=torch.int32, device=device)
        self._row = torch.zeros(buffers, device=device), torch.zeros(buffers, dtype=torch.int32, device=device)
        images = plan.host_adapters + 1
        pool = _host_memory(images * (plan.slot_bytes + 8 * buffers), self._cuda)
        parts = pool.split([images * plan.slot_bytes, images * buffers * 4, images * buffers * 4])
        self._host = parts[0].view(plan.dtype).view(images, plan.image)
        self._host_scalings, self._host_ranks = (p.view(t).view(images, buffers) for p, t in zip(parts[1:], (torch.float32, torch.int32)))
        self._reading: list[Any] = [None] * images  # event after the last upload from an image
        self._stage = images - 1  # the image that the next adapter is made in; with the staging lock
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()
        self._lock = threading.Condition()
        self._staging, self._queueing = threading.Lock(), threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._free = list(range(count))[::-1]
        self._idle: list[Any] = [None] * count  # event after the last work that used the slot
        self._copies: dict[str, int] = {}  # {name: image on the host}
        self._free_copies = list(range(plan.host_adapters))[::-1]
        self._generations = [0] * count
        self._slots = self._make_slots()

    def _make_slots(self) -> Mapping[str, Slots]:
        found = {}
        for n, (buffer, (a, b)) in enumerate(zip(self.plan.buffers, views(self.plan, self._storage))):
            scalings, ranks = self._scalings[n], self._ranks[n]
            found[buffer.key] = Slots(a, b, scalings, ranks, buffer.out_sizes)
            start = 0
            for m, place in enumerate(buffer.places if buffer.kind == "fused" else ()):  # a member's own view of the family
                size = buffer.out_sizes[m]
                found[place.path] = Slots(a[:, m], b[:, start : start + size], scalings, ranks, None)
                start += size
        return MappingProxyType(found)

    # ---- what is where -------------------------------------------------------------------------------------------------

    def __getitem__(self, path: str) -> Slots:
        if path not in self._slots:
            keys = list(self._slots)
            raise LookupError(f"{_WHERE}: there is no buffer for {path}; there are {', '.join(keys[:3])}, … ({len(keys)}).")
        return self._slots[path]

    @property
    def buffers(self) -> Mapping[str, Slots]:
        """Every buffer by its path; a fused family by its own and, as views, by its members'."""
        return self._slots

    @property
    def resident(self) -> dict[str, int]:
        """{adapter: slot} of those in a slot, the least recently used first."""
        with self._lock:
            return {name: entry.slot for name, entry in self._entries.items() if entry.ready}

    @property
    def waiting(self) -> tuple[str, ...]:
        """The adapters with a copy on the host."""
        with self._lock:
            return tuple(self._copies)

    @property
    def pinned(self) -> dict[str, int]:
        """{adapter: how often it is held}."""
        with self._lock:
            return {name: entry.pins for name, entry in self._entries.items() if entry.pins}

    def generation(self, slot: int) -> int:
        """How often the slot's content has changed."""
        with self._lock:
            return self._generations[slot]

    def adapter_ids(self, names: Sequence[str | None], *, dtype: torch.dtype = torch.int32) -> Tensor:
        """The slot of every name, −1 for None, on the bank's device. The adapters must be held."""
        _several(names)
        with self._lock:
            ids = []
            for name in names:
                entry = self._entries.get(name) if name is not None else None
                if name is not None and (entry is None or not entry.pins):
                    raise LookupError(f"{_WHERE}: {name} is not held; hold it with using([…]) or acquire.")
                ids.append(-1 if entry is None else entry.slot)
        made = torch.tensor(ids, dtype=dtype, pin_memory=self._cuda and len(ids) > 0)
        return made.to(self.device, non_blocking=True)

    # ---- the host ------------------------------------------------------------------------------------------------------

    def add(self, name: str, adapter: Adapter) -> None:
        """Check an adapter and keep a copy on the host, in place of an earlier one of this name.

        An earlier one that is in a slot leaves it; if it is held that is an error.
        """
        if not self.plan.host_adapters:
            raise RuntimeError(f"{_WHERE}: the plan keeps no adapters on the host (host_adapters=0); use load({name!r}, adapter).")
        with self._staging:
            self._fill(adapter)  # an adapter that does not fit changes nothing
            with self._lock:
                self._settle(name)
                self._refuse_held(name, "replace")
                if name not in self._copies and not self._free_copies:
                    raise RuntimeError(
                        f"{_WHERE}: the host holds {len(self._copies)} adapters, which is all that was planned; forget one."
                    )
                self._drop(name)
                free = self._copies[name] if name in self._copies else self._free_copies.pop()
                self._copies[name], self._stage = self._stage, free

    def forget(self, name: str) -> None:
        """Remove an adapter from its slot and from the host."""
        with self._lock:
            self._settle(name)
            if name not in self._entries and name not in self._copies:
                raise LookupError(f"{_WHERE}: there is no adapter {name}.")
            self._refuse_held(name, "forget")
            self._drop(name)
            if name in self._copies:
                self._free_copies.append(self._copies.pop(name))

    # ---- slots ---------------------------------------------------------------------------------------------------------

    def load(self, name: str, adapter: Adapter) -> int:
        """Put an adapter into a slot; into its own, if one of this name is there. Returns the slot. It is not held.

        With host_adapters the adapter is kept on the host too, where it waits if every slot is held (RuntimeError).
        """
        if self.plan.host_adapters:
            slot = self.resident.get(name)
            self.add(name, adapter)
            return self._enter(name, prefer=slot).slot
        with self._staging:
            self._fill(adapter)
            return self._enter(name, image=self._stage).slot

    def unload(self, name: str) -> None:
        """Empty the adapter's slot; a copy on the host stays."""
        with self._lock:
            self._settle(name)
            if name not in self._entries:
                raise LookupError(f"{_WHERE}: {name} is in no slot.")
            self._refuse_held(name, "unload")
            self._drop(name)

    def acquire(self, name: str) -> int:
        """Hold an adapter: it is in a slot, from the host's copy if need be, and stays there. Returns the slot."""
        entry = self._enter(name, hold=True)
        if entry.uploaded is not None:
            torch.cuda.current_stream(self.device).wait_event(entry.uploaded)
        return entry.slot

    def release(self, name: str) -> None:
        """Let go of an adapter; what is queued on the current stream may still use its slot."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.pins:
                raise LookupError(f"{_WHERE}: {name} is not held.")
            if self._cuda:
                event, last = torch.cuda.Event(), self._idle[entry.slot]
                if last is not None:  # users on several streams: this one's end comes after all of them
                    torch.cuda.current_stream(self.device).wait_event(last)
                event.record(torch.cuda.current_stream(self.device))
                self._idle[entry.slot] = event
            entry.pins -= 1
            self._entries.move_to_end(name)

    @contextlib.contextmanager
    def using(self, names: Sequence[str | None]) -> Iterator[dict[str, int]]:
        """Hold several adapters; {name: slot}. None is allowed and means no adapter."""
        _several(names)
        held: dict[str, int] = {}
        try:
            for name in dict.fromkeys(n for n in names if n is not None):
                held[name] = self.acquire(name)
            yield held
        finally:
            for name in held:
                self.release(name)

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _fill(self, adapter: Adapter) -> None:
        """Make the adapter's image in the staging image, with the staging lock."""
        instance("adapters.AdapterBank", "adapter", adapter, Adapter, "as read_adapter makes it")
        n = self._stage
        if self._reading[n] is not None:
            self._reading[n].synchronize()
        fill(self.plan, adapter, self._host[n], self._host_scalings[n], self._host_ranks[n])

    def _settle(self, name: str) -> None:
        """Wait, with the lock, until nobody is loading this adapter."""
        while name in self._entries and not self._entries[name].ready:
            self._lock.wait()

    def _refuse_held(self, name: str, what: str) -> None:
        if name in self._entries and self._entries[name].pins:
            raise RuntimeError(f"{_WHERE}: cannot {what} {name} while it is held ({self._entries[name].pins} times).")

    def _drop(self, name: str) -> None:
        """Empty the slot of an adapter, with the lock."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._write(entry.slot, None)
            self._generations[entry.slot] += 1
            self._free.append(entry.slot)

    def _enter(self, name: str, *, hold: bool = False, image: int | None = None, prefer: int | None = None) -> _Entry:
        """The adapter's entry; if it is in no slot, or an image is given, filled from an image on the host."""
        with self._lock:
            self._settle(name)
            entry, given = self._entries.get(name), image is not None
            if entry is not None and not given:
                entry.pins += hold
                self._entries.move_to_end(name)
                return entry
            if given:
                self._refuse_held(name, "replace")
            elif name in self._copies:
                image = self._copies[name]
            else:
                raise LookupError(f"{_WHERE}: there is no adapter {name}.")
            slot = entry.slot if entry is not None else self._take_slot(name, prefer)
            entry = self._entries[name] = _Entry(slot, pins=int(hold))
            self._entries.move_to_end(name)
        try:
            uploaded = self._write(slot, image)
        except BaseException:
            with self._lock:
                del self._entries[name]
                self._free.append(slot)
                self._generations[slot] += 1
                self._lock.notify_all()
            raise
        with self._lock:
            entry.uploaded, entry.ready = uploaded, True
            self._generations[slot] += 1
            self._lock.notify_all()
        return entry

    def _take_slot(self, wanted: str, prefer: int | None) -> int:
        """A free slot, or the one of the least recently used adapter that nobody holds; with the lock."""
        if not self._free:
            loose = next((name for name, entry in self._entries.items() if entry.ready and not entry.pins), None)
            if loose is None:
                held = ", ".join(list(self._entries)[:8])
                raise RuntimeError(f"{_WHERE}: no slot for {wanted}: all {self.plan.slots} are held ({held}).")
            return self._entries.pop(loose).slot  # what it holds is overwritten as a whole
        if prefer in self._free:
            self._free.remove(prefer)
            return prefer
        return self._free.pop()

    def _write(self, slot: int, image: int | None) -> Any:
        """Fill a slot from an image on the host, or empty it; on a GPU on the bank's stream. Returns the event after it."""
        if not self._cuda:
            self._copy(slot, image)
            return None
        with self._queueing, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if self._idle[slot] is not None:
                self._stream.wait_event(self._idle[slot])
            self._copy(slot, image)
            event = torch.cuda.Event()
            event.record(self._stream)
            if image is not None:
                self._reading[image] = event
            return event

    def _copy(self, slot: int, image: int | None) -> None:
        """Rank 0 first and the true rank last: whoever reads the slot in between, against the rules, gets no delta.

        Nothing is allocated: another thread may be capturing a graph.
        """
        content, scalings, ranks = self._storage[slot], self._scalings[:, slot], self._ranks[:, slot]
        with torch.no_grad():
            ranks.zero_(), scalings.zero_()
            if image is None:
                content.zero_()
                return
            content.copy_(self._host[image], non_blocking=True)
            for target, row, source in zip((scalings, ranks), self._row, (self._host_scalings, self._host_ranks)):
                if self._cuda:  # a copy from the host to a strided target would allocate
                    row.copy_(source[image], non_blocking=True)
                target.copy_(row if self._cuda else source[image])


def _several(names: Sequence[str | None]) -> None:
    """A string is a sequence, too: of one-letter names."""
    if isinstance(names, str):
        raise TypeError(f"{_WHERE}: names must be a list, with a name or None for each; got the string {names!r}.")
