"""Tiny configurations of every architecture that has a layout, as a config.json would hold them."""

from __future__ import annotations

COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, head_dim=8)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
GROUPED_ROUTER = dict(n_group=1, topk_group=1, first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, **MOE)
MLA = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
MLA |= dict(GROUPED_ROUTER, num_key_value_heads=4, intermediate_size=40)

CONFIGS = {
    "llama": COMMON | dict(model_type="llama", intermediate_size=40),
    "qwen3": COMMON | dict(model_type="qwen3", intermediate_size=40),
    "qwen3_moe": COMMON | MOE | dict(model_type="qwen3_moe", intermediate_size=40, num_experts=4, mlp_only_layers=[0]),
    "glm4_moe": COMMON | GROUPED_ROUTER | dict(model_type="glm4_moe", intermediate_size=40),
    "deepseek_v3": COMMON | MLA | dict(model_type="deepseek_v3"),
    "gpt_oss": COMMON
    | dict(model_type="gpt_oss", intermediate_size=24, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_5_moe_text": COMMON
    | MOE
    | dict(
        model_type="qwen3_5_moe_text",
        num_hidden_layers=4,
        num_experts=4,
        shared_expert_intermediate_size=40,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "deepseek_v4": COMMON
    | MOE
    | dict(
        model_type="deepseek_v4",
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=12,
        n_routed_experts=4,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        qk_rope_head_dim=4,
    ),
}
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"] | dict(model_type="kimi_k2")


def real_models():
    """Skip unless a transformers is there whose classes are the ones that layouts describe."""
    import pytest

    return pytest.importorskip("transformers", minversion="5.24", reason="transformers ≥ 5.24 is not installed")


def transformers_config(name: str):
    """The same configuration as transformers builds it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = dict(CONFIGS[name])
    return CONFIG_MAPPING["deepseek_v3" if name == "kimi_k2" else config.pop("model_type")](**config)


def transformers_model(name: str, device: str = "cpu", **changes):
    """The real model class with random weights, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    config = transformers_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).eval()
