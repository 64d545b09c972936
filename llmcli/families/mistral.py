"""Mistral (Mistral AI, 2023; arXiv:2310.06825): LLaMA's block with grouped key/value heads and a sliding window."""

from __future__ import annotations

from llmcli.families import Family, llama

FAMILY = Family(
    name="mistral",
    hf_model_type="mistral",
    hf_architecture="MistralForCausalLM",
    tied_in_hf=False,
    weights=(*llama.BEFORE, *llama.ATTENTION, *llama.FEED_FORWARD, *llama.AFTER),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    block=llama.block,
    keys=frozenset({"num_kv_heads", "head_size", "rope_theta", "rope_scaling", "window_size"}),
    defaults={**llama.DEFAULTS, "bias": False, "head_bias": False},
    hf_fields={**llama.HF_FIELDS, "window_size": "sliding_window"},
    hf_defaults={
        **llama.HF_DEFAULTS,
        "num_kv_heads": 8,
        "hidden_dim": 14336,
        "max_position_embeddings": 131072,
        "window_size": 4096,
    },
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
)
