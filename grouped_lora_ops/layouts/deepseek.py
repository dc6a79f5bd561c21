"""DeepSeek's models and those built like them: multi-head latent attention, and V4's grouped output projection."""

from __future__ import annotations

from .dense import HEADS, HIDDEN, gated_mlp
from .facts import ExpertStorage, Layout, Projection, Shard, Status, size
from .moe import MOE_INTERMEDIATE, PEFT_FUSED, ROUTER, after_dense, first_dense, routed_experts

Q_RANK, KV_RANK = size("q_lora_rank"), size("kv_lora_rank")
NOPE, ROPE, V_DIM = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
Q_OUT = HEADS * (NOPE + ROPE)


def low_rank_q(config):
    return config.get("q_lora_rank") is not None


def plain_q(config):
    return config.get("q_lora_rank") is None


MLA = (
    Projection("self_attn.q_proj", HIDDEN, Q_OUT, Shard.COLUMN, units=HEADS, when=plain_q),
    Projection("self_attn.q_a_proj", HIDDEN, Q_RANK, Shard.REPLICATED, family="fused_qkv_a_proj_with_mqa", when=low_rank_q),
    Projection("self_attn.q_b_proj", Q_RANK, Q_OUT, Shard.COLUMN, units=HEADS, when=low_rank_q),
    Projection("self_attn.kv_a_proj_with_mqa", HIDDEN, KV_RANK + ROPE, Shard.REPLICATED, family="fused_qkv_a_proj_with_mqa"),
    Projection("self_attn.kv_b_proj", KV_RANK, HEADS * (NOPE + V_DIM), Shard.COLUMN, units=HEADS),
    Projection("self_attn.o_proj", HEADS * V_DIM, HIDDEN, Shard.ROW, units=HEADS),
)
MLA_MOE = (
    *MLA,
    *gated_mlp(layers=first_dense),
    *routed_experts(layers=after_dense),
    *gated_mlp("mlp.shared_experts", MOE_INTERMEDIATE * size("n_shared_experts", default=1), after_dense),
)

# V4: 64 heads of 512 in G = 8 groups (Flash), 128 in 16 (Pro): D = 4096 in, N = 1024 out, of each group
GROUPS, GROUP_OUT, HEAD_DIM = size("o_groups"), size("o_lora_rank"), size("head_dim")
V4_ATTENTION = tuple(
    # the attention gathers the sequence once, on entry
    Projection(f"self_attn.{leaf}", d, n, shard, aliases=(alias,), default=True, whole_sequence=True, **facts)
    for leaf, alias, d, n, shard, facts in (
        ("q_a_proj", "wq_a", HIDDEN, Q_RANK, Shard.REPLICATED, dict(family="fused_wqa_wkv")),
        ("q_b_proj", "wq_b", Q_RANK, HEADS * HEAD_DIM, Shard.COLUMN, dict(units=HEADS)),
        ("kv_proj", "wkv", HIDDEN, HEAD_DIM, Shard.REPLICATED, dict(family="fused_wqa_wkv")),
        ("o_a_proj", "wo_a", HEADS * HEAD_DIM // GROUPS, GROUP_OUT, Shard.GROUPED_COLUMN, dict(groups=GROUPS)),
        ("o_b_proj", "wo_b", GROUPS * GROUP_OUT, HIDDEN, Shard.ROW, dict(units=GROUPS)),
    )
)
INDEXER = "the indexer and the compressors own projections of the same leaf names; they choose tokens and are not adapted"

LAYOUTS = (
    Layout(
        name="mla_moe",
        model_types=("deepseek_v3",),
        projections=MLA_MOE,
        experts=ExpertStorage(),
        refused={"mlp.gate": ROUTER},
        peft_fused=PEFT_FUSED,
        status=Status.VALIDATED,
    ),
    Layout(
        name="kimi_k2",
        model_types=("kimi_k2", "kimi_k25"),
        projections=MLA_MOE,
        experts=ExpertStorage(),
        prefixes=("model.layers", "layers", "model.language_model.layers", "language_model.model.layers"),
        refused={"mlp.gate": ROUTER},
        peft_fused=PEFT_FUSED,
        status=Status.STRUCTURAL,
        reason="DeepSeek-V3's layout under another name; no checkpoint of it was read",
    ),
    Layout(
        name="deepseek_v4",
        model_types=("deepseek_v4",),
        projections=(
            *V4_ATTENTION,
            *routed_experts(),
            *gated_mlp(
                "mlp.shared_experts",
                MOE_INTERMEDIATE * size("n_shared_experts", default=1),
                aliases=(("w1",), ("w3",), ("w2",)),
            ),
        ),
        experts=ExpertStorage(activation_limit=size("swiglu_limit", default=10)),
        owners={"self_attn": ("attn",), "mlp": ("ffn",)},
        refused={"mlp.gate": ROUTER, "self_attn.compressor": INDEXER, "self_attn.indexer": INDEXER},
        status=Status.VALIDATED,
        notes=("transformers applies the router weight after down; Megatron-style implementations before it",),
    ),
)
