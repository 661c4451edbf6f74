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

YARN: Config = {
    "type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONGROPE: Config = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0] * 4,
    "original_max_position_embeddings": 512,
}
MINICPM: Config = {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1}
MOST_EXPERTS: Config = EXPERTS | {
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": True,
    "rope_scaling": None,
}

SERVED: dict[str, Config] = {
    "apertus": {"post_norm": False, "qk_norm": True, "hidden_act": "xielu", "mlp_bias": False, "attention_bias": False}
    | {"rope_scaling": None, "rope_traditional": False},
    "bailing_moe": EXPERTS
    | {"num_shared_experts": 1, "first_k_dense_replace": 1, "use_bias": False, "use_qkv_bias": False},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 1.0, "sliding_window": 16, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": EXPERTS
    | {"n_shared_experts": 1, "moe_layer_freq": 1, "first_k_dense_replace": 1, "attention_bias": False},
    "deepseek_v2": EXPERTS
    | MLA
    | {"topk_method": "greedy", "moe_layer_freq": 1, "rope_scaling": YARN, "attention_bias": False},
    "dots1": EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": EXPERTS
    | {"use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
    | {"moe_num_shared_experts": 1, "moe_layer_interval": 1},
    "exaone": {"num_layers": 2, "layer_norm_epsilon": 1e-5},
    "exaone4": {"sliding_window": None, "sliding_window_pattern": None, "rope_scaling": None},
    "falcon_h1": {},
    "gemma": {},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 16, "sliding_window_pattern": 2},
    "glm": {"attention_bias": False},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe": MOST_EXPERTS,
    "gpt2": {"n_head": 4, "n_embd": 64, "n_layer": 2, "n_positions": 512, "n_ctx": 512, "layer_norm_epsilon": 1e-5},
    "gpt_neox": {"layer_norm_eps": 1e-5, "use_parallel_residual": True, "rotary_pct": 0.5, "rotary_emb_base": 10000},
    "gpt_oss": EXPERTS | WINDOW,
    "granite": SCALES,
    "granitemoe": SCALES | EXPERTS,
    "granitemoehybrid": SCALES
    | EXPERTS
    | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8}
    | {"mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 64, "mamba_conv_bias": True}
    | {"mamba_proj_bias": False, "shared_intermediate_size": 32, "position_embedding_type": "rope"}
    | {"time_step_limit": (0.0, 1e6)},
    "helium": {"attention_bias": False, "mlp_bias": False},
    "hunyuan": EXPERTS
    | {"attention_bias": False, "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True}
    | {"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}, "use_cla": False, "cla_share_factor": 2},
    "hunyuan_v1_dense": {"rope_scaling": None, "use_qk_norm": True},
    "internlm2": {"bias": False},
    "internlm3": {"bias": False, "qkv_bias": False},
    "jamba": EXPERTS
    | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    | {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "mamba_proj_bias": False}
    | {"mamba_conv_bias": True, "num_experts": 2},
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
        "num_heads": 4,
    },
    "llama": WINDOW,
    "llama4_text": {"intermediate_size_mlp": 96, "rope_scaling": None, "attention_bias": False}
    | {"no_rope_layers": [1, 0], "use_qk_norm": True},
    "mamba": {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4, "use_conv_bias": True, "use_bias": False},
    "mamba2": MAMBA2
    | {"num_heads": 4, "head_dim": 32, "state_size": 8, "time_step_limit": (0.0, 1e6), "time_step_rank": 4}
    | {"layer_norm_epsilon": 1e-5},
    "mimo": {"num_nextn_predict_layers": 1},
    "minicpm": MINICPM,
    "minicpm3": MINICPM | MLA | {"q_lora_rank": 16, "rope_scaling": LONGROPE},
    "minimax": EXPERTS
    | {"shared_intermediate_size": 32, "scoring_func": "sigmoid", "rotary_dim": 8, "use_qk_norm": True},
    "ministral3": {"rope_parameters": YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
    "mixtral": EXPERTS,
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "nemotron_h": MAMBA2
    | {"hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "attention_bias": False, "mlp_bias": False}
    | {"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "time_step_limit": (0.0, 1e6)},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmo_hybrid": DELTA
    | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "attention_bias": False}
    | {"linear_use_gate": True, "linear_allow_neg_eigval": True},
    "olmoe": EXPERTS,
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 1.5],
        "ffn_with_glu": True,
        "normalize_qk_projections": True,
        "share_input_output_layers": True,
    },
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phi3": {"original_max_position_embeddings": 512},
    "phimoe": EXPERTS | {"original_max_position_embeddings": 512},
    "qwen": {"kv_channels": 16, "layer_norm_epsilon": 1e-5, "intermediate_size": 192, "no_bias": True},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3": {},
    "qwen3_5": DELTA,
    "qwen3_moe": EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_next": DELTA
    | EXPERTS
    | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}
    | {"partial_rotary_factor": 0.5},
    "recurrent_gemma": {"attention_bias": False, "conv1d_width": 4, "attention_window_size": 32}
    | {"block_types": ["recurrent", "attention"], "lru_width": 64, "logits_soft_cap": 30.0}
    | {"embeddings_scale_by_sqrt_dim": True},
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False},
    "smollm3": {},
    "solar_open": MOST_EXPERTS | {"partial_rotary_factor": 1.0},
    "stablelm": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "starcoder2": {"norm_epsilon": 1e-5},
    "telechat3": {},
    "youtu_llm": MLA | {"rope_interleave": True, "attention_bias": False, "q_lora_rank": 16},
}
"""Architectures whose tokens are mlx-lm's own, and what their configs add."""

REFUSED: dict[str, Config] = {
    "deepseek_v3": EXPERTS | MLA,
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 512, "multi_query": True}
    | {"layer_norm_epsilon": 1e-5},
    "kimi_linear": EXPERTS
    | MLA
    | {"model_max_length": 512, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_renormalize": True}
    | {"moe_router_activation_func": "sigmoid", "num_expert_group": 1}
    | {
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "kda_layers": [1],
            "full_attn_layers": [2],
            "short_conv_kernel_size": 4,
        }
    },
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_num_heads": 4}
    | {"mamba_step": 2, "mamba_chunk_size": 64, "mamba_enabled": True},
    "plamo3": {},
}
"""Architectures whose code computes on cached keys itself, or wants one position a batch: refused when loaded."""
