"""Tiny randomised Hugging Face models of every family, written to disk by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {"vocab_size": 64, "max_position_embeddings": 64}
ROPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **SIZES,
}
GPT = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (transformers.OpenAIGPTConfig, GPT),
    "gpt2": (transformers.GPT2Config, GPT),
    "llama": (transformers.LlamaConfig, ROPE),
    "mistral": (transformers.MistralConfig, {**ROPE, "sliding_window": 9, "head_dim": 8}),
    "mixtral": (transformers.MixtralConfig, {**ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": (transformers.GemmaConfig, {**ROPE, "num_key_value_heads": 1, "head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, ROPE),
    "qwen3": (transformers.Qwen3Config, {**ROPE, "head_dim": 8}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**ROPE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            **ROPE,
            "head_dim": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {**ROPE, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 3, "sliding_window_pattern": 2},
    ),
    "phi3": (transformers.Phi3Config, {**ROPE, "pad_token_id": 0}),
    "olmo2": (transformers.Olmo2Config, ROPE),
    "smollm3": (transformers.SmolLM3Config, {**ROPE, "no_rope_layer_interval": 2, "pad_token_id": 0}),
}
FAMILIES = tuple(CONFIGS)


def make(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of `family` with every parameter drawn at random (norms and biases too), saved in `folder`.

    The spread is wide enough that a swap of any two tensors moves the logits by more than a parity test allows.
    """
    kind, sizes = CONFIGS[family]
    config = kind(**{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return save_randomised(model.to(dtype), folder, seed)


def save_randomised(model: Any, folder: Path, seed: int = 0) -> Any:
    """Draw every parameter of a model at random, and save it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.4, generator=generator))
    model.save_pretrained(folder)
    return model
