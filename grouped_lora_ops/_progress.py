"""A progress bar on a terminal, by tqdm where it is installed; lines of text pass above it."""

from __future__ import annotations

import sys


class Progress:
    """`with Progress(total, "call") as bar: bar.say(…); bar.add(n)`. Without tqdm, or where stderr is no terminal, there is no bar."""

    def __init__(self, total: int, unit: str):
        self.bar = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self.bar = tqdm(total=total, unit=f" {unit}", disable=None, dynamic_ncols=True, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()

    def add(self, count: int = 1) -> None:
        if self.bar is not None:
            self.bar.update(count)

    def what(self, text: str) -> None:
        """What is being done, beside the bar."""
        if self.bar is not None:
            self.bar.set_description(text, refresh=True)

    def say(self, text: str) -> None:
        if self.bar is not None and not self.bar.disable:
            self.bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)
