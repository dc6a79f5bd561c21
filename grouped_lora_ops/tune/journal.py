"""What was measured so far, a line of JSON a point, beside the table: a second run goes on where the first one ended."""

from __future__ import annotations

import json
from pathlib import Path


class Journal:
    """The first line says what was measured on; the others are {"point": name, …}. A line that was cut off is measured again.

    ValueError where the file is of another GPU or of other versions, whose figures do not compare.
    """

    def __init__(self, path: Path, head: dict):
        self.path, self.results = path, {}
        lines = _lines(path)
        if lines:
            if lines[0] != head:
                differ = sorted(key for key in {*lines[0], *head} if lines[0].get(key) != head.get(key))
                was = ", ".join(f"{key} {lines[0].get(key)}" for key in differ)
                raise ValueError(f"{path} was measured with {was}; delete it, or name another --out.")
            self.results = {line["point"]: line for line in lines[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in [head, *self.results.values()]))

    def add(self, point: str, result: dict) -> None:
        line = {"point": point, **result}
        self.results[point] = line
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict]:
    """The whole lines of a journal; none where there is no file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # cut off
    return found
