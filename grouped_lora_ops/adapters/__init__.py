"""Adapter files and the buffers made of them."""

from .adapter import Adapter, Base, ExpertModule, LoraModule
from .read import read_adapter
from .stack import Stacked, stack_adapters
from .write import base_hash, write_adapter

__all__ = [
    "Adapter",
    "Base",
    "ExpertModule",
    "LoraModule",
    "Stacked",
    "base_hash",
    "read_adapter",
    "stack_adapters",
    "write_adapter",
]
