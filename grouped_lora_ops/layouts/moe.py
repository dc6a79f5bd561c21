"""Mixture-of-experts models with ordinary attention: experts in 3-D parameters, one per projection and layer."""

from __future__ import annotations

from .dense import HEADS, HIDDEN, gated_mlp, gqa
from .facts import ExpertStorage, Layers, Layout, Projection, Shard, Size, Status, every_layer, size

EXPERTS = size("num_experts", "num_local_experts", "n_routed_experts")
MOE_INTERMEDIATE = size("moe_intermediate_size")
ROUTER = "the router's logits are not adapted: no op of this library reads such an adapter"
# peft 0.21 takes any target of these names for the experts' when the model class has fused experts
PEFT_FUSED = ("gate_proj", "up_proj", "down_proj")


def routed_experts(
    owner: str = "mlp.experts",
    intermediate: Size = MOE_INTERMEDIATE,
    layers: Layers = every_layer,
    members: tuple[tuple[str, ...], ...] = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
) -> tuple[Projection, ...]:
    """The routed experts: gate and up in one parameter, down in another."""
    gate, up, down = members
    shared = dict(shard=Shard.EXPERT, experts=EXPERTS, layers=layers)
    return (
        Projection(f"{owner}.gate_up_proj", HIDDEN, intermediate * 2, members=(gate, up), **shared),
        Projection(f"{owner}.down_proj", intermediate, HIDDEN, members=(down,), **shared),
    )


def first_dense(config):
    return range(min(config.get("first_k_dense_replace") or 0, config["num_hidden_layers"]))


def after_dense(config):
    """The MoE layers of a model whose first layers are dense (`moe_layer_freq`: of the others, every so-manieth)."""
    first, frequency = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    return [i for i in range(first, config["num_hidden_layers"]) if i % frequency == 0]


def sparse_steps(config):
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return [i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]


def not_sparse_steps(config):
    sparse = set(sparse_steps(config))
    return [i for i in range(config["num_hidden_layers"]) if i not in sparse]


def of_type(kind: str) -> Layers:
    """The layers that `layer_types` calls kind; a config without it has full attention at every fourth layer."""

    def layers(config):
        types, every = config.get("layer_types"), config.get("full_attention_interval") or 4
        if types is None:
            types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])]
        return [i for i, t in enumerate(types) if t == kind]

    return layers


LINEAR, FULL = of_type("linear_attention"), of_type("full_attention")
KEY_DIM = size("linear_num_key_heads") * size("linear_key_head_dim")
VALUE_DIM = size("linear_num_value_heads") * size("linear_value_head_dim")
KEY_HEADS, VALUE_HEADS = size("linear_num_key_heads"), size("linear_num_value_heads")

GDN = tuple(
    Projection(f"linear_attn.{leaf}", d, n, shard, units=units, out_parts=parts, layers=LINEAR, default=False)
    for leaf, d, n, shard, units, parts in (
        ("in_proj_qkv", HIDDEN, KEY_DIM + KEY_DIM + VALUE_DIM, Shard.COLUMN, KEY_HEADS, (KEY_DIM, KEY_DIM, VALUE_DIM)),
        ("in_proj_z", HIDDEN, VALUE_DIM, Shard.COLUMN, VALUE_HEADS, ()),
        ("in_proj_b", HIDDEN, VALUE_HEADS, Shard.COLUMN, VALUE_HEADS, ()),
        ("in_proj_a", HIDDEN, VALUE_HEADS, Shard.COLUMN, VALUE_HEADS, ()),
        ("out_proj", VALUE_DIM, HIDDEN, Shard.ROW, VALUE_HEADS, ()),
    )
)

LAYOUTS = (
    Layout(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        projections=(*gqa(), *gated_mlp(layers=not_sparse_steps), *routed_experts(layers=sparse_steps)),
        experts=ExpertStorage(),
        refused={"mlp.gate": ROUTER},
        peft_fused=PEFT_FUSED,
        status=Status.VALIDATED,
    ),
    Layout(
        name="glm4_moe",
        model_types=("glm4_moe",),
        projections=(
            *gqa(),
            *gated_mlp(layers=first_dense),
            *routed_experts(layers=after_dense),
            *gated_mlp("mlp.shared_experts", MOE_INTERMEDIATE * size("n_shared_experts", default=1), after_dense),
        ),
        experts=ExpertStorage(),
        refused={"mlp.gate": ROUTER},
        peft_fused=PEFT_FUSED,
        status=Status.VALIDATED,
        notes=("the router weight multiplies down's output",),
    ),
    Layout(
        name="gqa_gdn_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        projections=(
            *gqa(FULL, q_factor=2),
            *GDN,
            *routed_experts(),
            *gated_mlp("mlp.shared_expert", size("shared_expert_intermediate_size")),
        ),
        experts=ExpertStorage(),
        prefixes=("model.layers", "layers", "model.language_model.layers"),
        refused={
            "mlp.gate": ROUTER,
            "mlp.shared_expert_gate": "one gate value a token is not adapted",
            "linear_attn.conv1d": "a convolution is no projection",
        },
        status=Status.STRUCTURAL,
        reason="the gated-delta-net projections are plain linears here; dividing their q, k and v over ranks was not "
        "compared with a running engine",
    ),
    Layout(
        name="gpt_oss",
        model_types=("gpt_oss",),
        projections=(*gqa(), *routed_experts(intermediate=size("intermediate_size"))),
        experts=ExpertStorage(
            transposed=True,
            interleaved=True,
            bias=True,
            activation="swigluoai",
            activation_limit=size("swiglu_limit", default=7),
        ),
        refused={"mlp.router": ROUTER},
        status=Status.VALIDATED,
    ),
)

__all__ = ["EXPERTS", "HEADS", "LAYOUTS", "MOE_INTERMEDIATE", "PEFT_FUSED", "ROUTER", "after_dense", "first_dense", "routed_experts"]
