"""Launch configurations of `delta_` to try for a problem, each as the rule of a launch table that asks for it.

A rule is what `launch.table` documents, without its `when`; `config_of` lets `launch.delta` itself apply it, so what is measured
is what the table will give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import launch
from ..ops import common, prepared

CHOICE = launch.delta  # the library's own


@contextlib.contextmanager
def _table(rules: list[dict]) -> Iterator[None]:
    before = launch.table
    launch.table = lambda arch: {"delta": rules}
    try:
        yield
    finally:
        launch.table = before


def config_of(rule: dict, p: launch.Problem) -> launch.DeltaConfig:
    """What `launch.delta` makes of p with this rule in its table."""
    with _table([{"when": {}, **rule}]):
        return CHOICE(p)


def closed_form(p: launch.Problem) -> launch.DeltaConfig:
    """What `launch.delta` chooses without any table."""
    with _table([]):
        return CHOICE(p)


def use(config: launch.DeltaConfig | None) -> None:
    """Make the op take config (None: its own choice); what it remembers of an earlier choice goes."""
    launch.delta = CHOICE if config is None else lambda p: config
    common.configured.cache_clear()
    prepared.forget()


def shrinks(p: launch.Problem) -> list[tuple[dict, bool]]:
    """(changes, split over D) to try."""
    block = launch.rank_block(p.rank, p.itemsize)
    rows = p.tokens / min(p.tokens, p.slots)
    if p.tokens <= 64:
        tiles = (
            (16, 128, 2, 4), (16, 128, 4, 4), (16, 64, 2, 8), (32, 128, 2, 4), (32, 128, 4, 4), (64, 128, 4, 4),
            (64, 128, 8, 4), (64, 64, 4, 6), (64, 64, 4, 8),
        )  # fmt: skip
        found = [
            (dict(block_m=16, block_r=r, block_k=k, num_warps=w, num_stages=s), True)
            for r, k, w, s in tiles
            if r <= block
        ]
        if launch.shrink(p, True).merge > 1:  # else what is not said about merging is the closed form's
            taller = [(dict(block_m=32, block_r=16, block_k=128, num_warps=w, num_stages=4), True) for w in (2, 4)]
            found += taller + [(tile | {"merge": 1}, split) for tile, split in found]
        return found
    tiles = (
        (16, 64, 4, 6, True), (16, 128, 4, 4, True), (32, 64, 4, 5, True), (32, 128, 4, 3, True), (64, 64, 4, 3, True), (64, 64, 4, 4, True),
        (64, 128, 4, 2, True), (128, 64, 4, 3, True), (128, 64, 8, 4, True), (128, 64, 8, 3, True), (16, 128, 4, 5, False), (32, 128, 4, 3, False),
        (32, 128, 4, 4, False), (64, 64, 4, 5, False), (64, 128, 4, 3, False), (128, 64, 8, 4, False), (128, 64, 4, 3, False),
    )  # fmt: skip
    return [
        (dict(block_m=m, block_r=block, block_k=k, num_warps=w, num_stages=s), split)
        for m, k, w, s, split in tiles
        if m <= max(16, 2 * rows) and not (p.tokens >= 8192 and m == 16)
    ]


def expands(p: launch.Problem) -> list[dict]:
    rows = p.tokens / min(p.tokens, p.slots)
    if p.tokens <= 64:
        tiles = (
            (16, 32, 1, 1, 1), (16, 32, 2, 1, 1), (16, 64, 2, 1, 1), (16, 64, 4, 1, 1), (16, 128, 4, 1, 1),
            (16, 128, 8, 1, 1), (16, 128, 4, 2, 2), (16, 128, 4, 4, 3),
        )  # fmt: skip
    else:
        tiles = (
            (16, 128, 4, 1, 1), (16, 128, 4, 4, 3), (16, 128, 4, 8, 3), (32, 128, 4, 1, 1), (32, 128, 4, 2, 2),
            (32, 128, 4, 4, 3), (32, 128, 4, 8, 3), (64, 128, 4, 1, 1), (64, 128, 4, 2, 2), (64, 128, 4, 4, 3),
            (64, 64, 4, 8, 4), (64, 128, 4, 8, 3), (128, 64, 8, 8, 3), (128, 128, 8, 4, 2), (128, 64, 4, 8, 3),
            (128, 128, 8, 8, 3),
        )  # fmt: skip
    return [
        dict(block_m=m, block_n=n, num_warps=w, loop=loop, num_stages=s)
        for m, n, w, loop, s in tiles
        if m <= max(16, 2 * rows)
    ]


def fuseds(p: launch.Problem) -> list[dict]:
    """The one-launch kernel keeps h whole in registers: a rank of one block only."""
    if p.tokens < 1024 or p.rank > 128:
        return []
    rows = p.tokens / min(p.tokens, p.slots)
    tiles = (
        (16, 128, 128, 4, 4, 3), (16, 128, 128, 4, 3, 4), (32, 128, 128, 4, 3, 3), (32, 64, 128, 4, 3, 4),
        (64, 64, 64, 4, 4, 3), (64, 64, 64, 4, 4, 4), (64, 128, 64, 4, 4, 3), (64, 64, 128, 4, 3, 4),
        (128, 64, 64, 8, 3, 3), (128, 64, 64, 4, 3, 3), (128, 32, 64, 4, 3, 4), (64, 32, 64, 4, 4, 4),
        (32, 64, 128, 4, 2, 4),
    )  # fmt: skip
    return [
        dict(block_m=m, block_n=n, block_k=k, num_warps=w, num_stages=s, n_stages=ns)
        for m, n, k, w, s, ns in tiles
        if m <= 2 * rows
    ]


def cudas(p: launch.Problem) -> list[dict]:
    """csrc/delta.cu, which is made for a few rows."""
    if p.tokens > 16:
        return []
    merges = (False, True) if p.shared_a and p.groups in (2, 4, 8) else (False,)
    made = [
        dict(kernel=list(k), merge=merge, spread=spread)
        for k in launch.CUDA_KERNELS
        for merge in merges
        for spread in (1, 2, 4)
    ]
    return [
        c
        for c in made
        if p.rank <= c["kernel"][1] <= max(16, 2 * launch.power_of_2(p.rank)) and launch.cuda(p, **c) is not None
    ]


def two(shrink: tuple[dict, bool], expand: dict) -> tuple[str, dict]:
    """(label, rule) of two launches."""
    return f"two {shrink} {expand}", {"split": shrink[1], "shrink": shrink[0], "expand": expand}


def rules(p: launch.Problem, best: tuple[dict, bool] | None = None, middle: dict | None = None) -> dict[str, dict]:
    """Without `best`: every shrink with one expand (`middle`); with it: every expand behind that shrink."""
    if best is not None:
        return dict(two(best, e) for e in expands(p))
    middle = middle or middles(p)[0]
    return dict(two(s, middle) for s in shrinks(p))


def one_launch(p: launch.Problem, cuda: bool) -> dict[str, dict]:
    """The rules of one launch: Triton's fused kernel and, with `cuda`, csrc/delta.cu."""
    found: dict[str, dict] = {f"fused {c}": {"fused": c} for c in fuseds(p)}
    if cuda:
        found |= {f"cuda {c}": {"cuda": c} for c in cudas(p)}
    return found


def middles(p: launch.Problem) -> list[dict]:
    """The expands, a common one first: with which shrinks are compared. Where a GPU cannot run that one, the next serves."""
    every = expands(p)
    first = min(5, len(every) - 1)
    return [every[first], *every[:first], *every[first + 1 :]]


def best_shrink(p: launch.Problem, times: dict[str, float]) -> tuple[dict, bool] | None:
    """The shrink of the fastest rule of two launches among {label: µs}."""
    timed = {label: us for label, us in times.items() if label.startswith("two ")}
    if not timed:
        return None
    fastest = min(timed, key=timed.__getitem__)
    return next(s for s in shrinks(p) if fastest.startswith(f"two {s} "))
