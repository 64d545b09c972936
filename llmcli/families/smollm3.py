"""SmolLM3 (Hugging Face, 2025): LLaMA's block, tied, without RoPE in every fourth layer (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from llmcli.config import ModelConfig
from llmcli.families import Family, llama, qwen2

EVERY = 4


def read(table: dict[str, Any]) -> dict[str, Any]:
    """`no_rope_layers` (1 where a layer does turn) or its interval, as the layers without RoPE; windows as Qwen 2's."""
    table = dict(table)
    layers = table.get("num_hidden_layers", 36)
    turns, every = table.pop("no_rope_layers", None), table.pop("no_rope_layer_interval", EVERY)
    if turns is None:
        turns = [(layer + 1) % every != 0 for layer in range(layers)]
    table["_nope_layers"] = [layer for layer, turning in enumerate(turns) if not turning]
    if not table.get("use_sliding_window"):
        table.pop("layer_types", None)
    elif table.get("layer_types") is None:
        table["layer_types"] = [qwen2.FULL if turning else qwen2.SLIDING for turning in turns]
    return qwen2.read_windows(table)


def write(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read`."""
    turns = [int(config.rope_of(layer) is not None) for layer in range(config.num_layers)]
    return {**qwen2.write_windows(config), "no_rope_layers": turns}


FAMILY = Family(
    name="smollm3",
    hf_model_type="smollm3",
    hf_architecture="SmolLM3ForCausalLM",
    tied_in_hf=True,
    weights=llama.FAMILY.weights,
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    block=llama.block,
    keys=qwen2.KEYS | {"bias", "nope_layers"},
    defaults={
        **llama.DEFAULTS,
        "rope_theta": 2e6,
        "nope_layers": lambda config: tuple(range(EVERY - 1, config.num_layers, EVERY)),
        "bias": False,
        "head_bias": False,
    },
    hf_fields={**qwen2.FAMILY.hf_fields, "nope_layers": "_nope_layers", "bias": ("attention_bias", "mlp_bias")},
    hf_defaults={
        **llama.HF_DEFAULTS,
        "vocab_size": 128256,
        "embed_dim": 2048,
        "num_layers": 36,
        "num_heads": 16,
        "num_kv_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "bias": False,
    },
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
    hf_read=read,
    hf_write=write,
)
