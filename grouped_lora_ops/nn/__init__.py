"""Modules: adapters on a model's own layers, for serving from a bank's slots and for training.

    attached = nn.attach_bank(model, bank)                     # every projection that the bank has buffers for
    with attached.using(["first", None]):                      # one name a sequence; None: no adapter
        model(input_ids)
    attached.detach()                                          # the model as it was

    attached = nn.attach_trainable(model, layouts.of(model.config), rank=16, alpha=32)
    optimizer = torch.optim.AdamW(attached.parameters())
    write_adapter(path, attached.adapter(), attached.layout, base=...)
"""

from .attach import Attached, attach_bank, attach_trainable
from .experts import ExpertsLora
from .factors import LoraFactors
from .linear import LoraLinear
from .routing import Routing

__all__ = [
    "Attached",
    "ExpertsLora",
    "LoraFactors",
    "LoraLinear",
    "Routing",
    "attach_bank",
    "attach_trainable",
]
