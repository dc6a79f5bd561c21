"""Steps that every rank of a process group takes together: if one fails anywhere, it fails everywhere, alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Together:
    """Runs one step after another. With a group, ranks tell each other how a step went before anyone raises, so that
    every rank raises the same RuntimeError, which lists every rank's failure, and none waits for the others."""

    def __init__(self, where: str, group=None):
        self.where, self.group = where, group

    @property
    def rank(self) -> int:
        return 0 if self.group is None else _distributed().get_rank(self.group)

    def gather(self, value) -> list:
        """One small object of every rank, in rank order."""
        if self.group is None:
            return [value]
        dist = _distributed()
        found: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def step(self, what: str, action: Callable[[], T]) -> T:
        if self.group is None:
            return action()
        result, error = None, None
        try:
            result = action()
        except BaseException as caught:  # the other ranks must hear of an interrupt too
            error = caught
        failures = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        if any(failures):
            listed = "".join(f"\n  - rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise RuntimeError(f"{self.where}: {what} failed:{listed}") from error
        return result


def _distributed():
    import torch.distributed as dist

    return dist
