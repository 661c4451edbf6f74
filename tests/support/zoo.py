"""Tiny configs of many architectures: what each needs beyond the common sizes."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

WINDOW: Config = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
SCALES: Config = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}
DELTA: Config = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
MLA: Config = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
}
MAMBA2: Config = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
}

SERVED: dict[str, Config] = {
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 1.0, "sliding_window": 16, "sliding_window_pattern": 2},
    "dots1": EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "ernie4_5": {"use_bias": False},
    "falcon_h1": {},
    "gemma": {},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 16, "sliding_window_pattern": 2},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "gpt2": {"n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 512, "n_ctx": 512, "layer_norm_epsilon": 1e-5},
    "gpt_oss": EXPERTS | WINDOW,
    "granite": SCALES,
    "hunyuan_v1_dense": {"rope_scaling": None, "use_qk_norm": True},
    "internlm2": {"bias": False},
    "internlm3": {"bias": False, "qkv_bias": False},
    "llama": WINDOW,
    "mamba": {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4, "use_conv_bias": True, "use_bias": False},
    "mamba2": MAMBA2
    | {"num_heads": 4, "head_dim": 32, "state_size": 8, "time_step_limit": (0.0, 1e6), "time_step_rank": 4}
    | {"layer_norm_epsilon": 1e-5},
    "mimo": {"num_nextn_predict_layers": 1},
    "mixtral": EXPERTS,
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phi3": {"original_max_position_embeddings": 512},
    "phimoe": EXPERTS | {"original_max_position_embeddings": 512},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_5": DELTA,
    "qwen3_next": DELTA
    | EXPERTS
    | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}
    | {"partial_rotary_factor": 0.5},
    "seed_oss": {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    "smollm3": {},
    "stablelm": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "starcoder2": {"norm_epsilon": 1e-5},
}
"""Architectures whose tokens are mlx-lm's own, and what their configs add."""

REFUSED: dict[str, Config] = {
    "deepseek_v3": EXPERTS | MLA,
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16},
}
"""Architectures whose attention cannot read rows where they lie: refused when loaded."""
