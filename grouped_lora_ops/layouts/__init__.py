"""What models look like to an adapter: one declaration an architecture, and what follows from it.

    model = layouts.of("path/to/model")            # its config.json
    print(layouts.preflight("path/to/model"))      # what is supported, what is missing
"""

from .facts import ExpertStorage, Layout, MissingKey, Projection, Shard, Size, Status, size
from .model import Buffer, Fused, Model, Part, Place, Share, Sized
from .registry import Preflight, UnstableLayout, known, of, preflight, read_config, register, unregister

__all__ = [
    "Buffer",
    "ExpertStorage",
    "Fused",
    "Layout",
    "MissingKey",
    "Model",
    "Part",
    "Place",
    "Preflight",
    "Projection",
    "Share",
    "Shard",
    "Size",
    "Sized",
    "Status",
    "UnstableLayout",
    "known",
    "of",
    "preflight",
    "read_config",
    "register",
    "size",
    "unregister",
]
