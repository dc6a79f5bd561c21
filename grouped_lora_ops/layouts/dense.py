"""Dense models: attention with grouped queries, and a gated MLP."""

from __future__ import annotations

from .facts import Layers, Layout, Projection, Shard, Size, Status, every_layer, size

HIDDEN = size("hidden_size")
HEADS = size("num_attention_heads")
KV_HEADS = size("num_key_value_heads", default=HEADS)
HEAD_DIM = size("head_dim", default=HIDDEN.floor(HEADS))
INTERMEDIATE = size("intermediate_size")


def gqa(layers: Layers = every_layer, q_factor: int = 1) -> tuple[Projection, ...]:
    """q, k, v and o of `self_attn`; q_factor 2: q carries a gate beside every head."""
    shared = dict(shard=Shard.COLUMN, family="qkv_proj", layers=layers)
    q_out = HEADS * HEAD_DIM * q_factor if q_factor > 1 else HEADS * HEAD_DIM
    return (
        Projection("self_attn.q_proj", HIDDEN, q_out, units=HEADS, **shared),
        Projection("self_attn.k_proj", HIDDEN, KV_HEADS * HEAD_DIM, units=KV_HEADS, **shared),
        Projection("self_attn.v_proj", HIDDEN, KV_HEADS * HEAD_DIM, units=KV_HEADS, **shared),
        Projection("self_attn.o_proj", HEADS * HEAD_DIM, HIDDEN, Shard.ROW, units=HEADS, layers=layers),
    )


def gated_mlp(
    owner: str = "mlp",
    intermediate: Size = INTERMEDIATE,
    layers: Layers = every_layer,
    aliases: tuple[tuple[str, ...], ...] = ((), (), ()),
) -> tuple[Projection, ...]:
    """gate, up and down of an MLP, dense or always on beside the experts."""
    shared = dict(shard=Shard.COLUMN, family="gate_up_proj", layers=layers)
    gate, up, down = aliases
    return (
        Projection(f"{owner}.gate_proj", HIDDEN, intermediate, aliases=gate, **shared),
        Projection(f"{owner}.up_proj", HIDDEN, intermediate, aliases=up, **shared),
        Projection(f"{owner}.down_proj", intermediate, HIDDEN, Shard.ROW, aliases=down, layers=layers),
    )


LAYOUTS = (
    Layout(
        name="gqa_dense",
        model_types=("llama", "qwen3", "mistral", "qwen2"),
        projections=(*gqa(), *gated_mlp()),
        prefixes=("model.layers", "layers", "model.language_model.layers", "language_model.model.layers"),
        status=Status.VALIDATED,
    ),
)
