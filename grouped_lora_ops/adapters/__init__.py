"""Adapter files and the buffers made of them."""

from .adapter import Adapter, Base, ExpertModule, LoraModule
from .read import read_adapter
from .stack import Stacked, stack_adapters

__all__ = ["Adapter", "Base", "ExpertModule", "LoraModule", "Stacked", "read_adapter", "stack_adapters"]
