"""Qwen 2 and 2.5 (Alibaba, 2024; arXiv:2407.10671): LLaMA's block with biases on q, k, v; the small ones tied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig
from llmcli.families import Family, llama

if TYPE_CHECKING:
    from llmcli.layers import Block

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(table: dict[str, Any]) -> dict[str, Any]:
    """A window only where `use_sliding_window` says so: in the layers of `layer_types`, or past `max_window_layers`."""
    table = dict(table)
    used, kinds = table.pop("use_sliding_window", False), table.pop("layer_types", None)
    first = table.pop("max_window_layers", 28)
    if not used or table.get("sliding_window") is None:
        table["sliding_window"] = None
    elif isinstance(kinds, list):
        table["_window_layers"] = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
    else:
        table["_window_layers"] = list(range(first, table.get("num_hidden_layers", llama.HF_DEFAULTS["num_layers"])))
    return table


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_windows`."""
    kinds = [SLIDING if config.window_of(layer) else FULL for layer in range(config.num_layers)]
    return {"use_sliding_window": config.window_size is not None, "layer_types": kinds}


def block(config: ModelConfig, layer: int) -> Block:
    """LLaMA's block; q, k and v have biases, the attention's output has none."""
    from llmcli.layers import Attention, Block, GatedFeedForward, rms_norm

    return Block(
        attention_norm=rms_norm(config),
        attention=Attention(config, layer, output_bias=False),
        feed_forward_norm=rms_norm(config),
        feed_forward=GatedFeedForward(config, activation="silu", bias=False),
        dropout=config.dropout,
    )


KEYS = frozenset({"num_kv_heads", "head_size", "rope_theta", "rope_scaling", "window_size", "window_layers"})
HF_DEFAULTS = {
    **llama.HF_DEFAULTS,
    "vocab_size": 151936,
    "num_kv_heads": 32,
    "hidden_dim": 22016,
    "max_position_embeddings": 32768,
    "window_size": 4096,
}

FAMILY = Family(
    name="qwen2",
    hf_model_type="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    tied_in_hf=False,
    weights=(
        *llama.BEFORE,
        *(weight for weight in llama.ATTENTION if weight.name != "blocks.{i}.attention.output.bias"),
        *llama.FEED_FORWARD,
        *llama.AFTER,
    ),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    block=block,
    keys=KEYS,
    defaults={**llama.DEFAULTS, "bias": True, "head_bias": False},
    hf_fields={**llama.HF_FIELDS, "window_size": "sliding_window", "window_layers": "_window_layers"},
    hf_defaults=HF_DEFAULTS,
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
    hf_read=read_windows,
    hf_write=write_windows,
)
