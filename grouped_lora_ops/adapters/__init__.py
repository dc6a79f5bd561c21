"""Adapter files and the buffers made of them."""

from .peft import Adapter, LoraModule, Stacked, read_adapter, stack_adapters

__all__ = ["Adapter", "LoraModule", "Stacked", "read_adapter", "stack_adapters"]
