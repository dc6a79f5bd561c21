"""`python -m grouped_lora_ops COMMAND …`: reports, a doctor, and kernels prepared or tuned ahead of time.

A command's module is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {  # command: (module, what it does)
    "report": ("report", "draw benchmark results, compare them with earlier ones, write the README's tables"),
    "doctor": ("doctor", "check this machine: versions, GPU, kernels, cache, and every op on exact numbers"),
    "warmup": ("warmup_model", "compile and load the kernels of a model's shapes before they are needed"),
    "tune": ("tune", "measure launch configurations and write a launch table for this GPU"),
}
PROG = "python -m grouped_lora_ops"


def overview() -> str:
    lines = [f"usage: {PROG} COMMAND …", "", *(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())]
    return "\n".join([*lines, "", f"{PROG} COMMAND --help says more."])


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        from . import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"{PROG}: there is no command {name!r}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    command = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
    parser = argparse.ArgumentParser(
        prog=f"{PROG} {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    options = parser.parse_args(rest)
    try:
        return command.run(options)
    except BrokenPipeError:  # piped into head
        sys.stdout = None
        return 1
    except (OSError, ValueError) as error:
        print(f"{PROG} {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
