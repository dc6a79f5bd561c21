"""Adapter files and the buffers made of them."""

from .adapter import Adapter, Base, ExpertModule, LoraModule
from .bank import AdapterBank, Slots
from .image import BankPlan, plan_bank
from .read import read_adapter
from .stack import Stacked, stack_adapters
from .write import base_hash, write_adapter

__all__ = [
    "Adapter",
    "AdapterBank",
    "BankPlan",
    "Base",
    "ExpertModule",
    "LoraModule",
    "Slots",
    "Stacked",
    "base_hash",
    "plan_bank",
    "read_adapter",
    "stack_adapters",
    "write_adapter",
]
