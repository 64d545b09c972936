"""Gemma 3's text model (Google, 2025; arXiv:2503.19786): q and k normalised, five local layers to a global one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig
from llmcli.families import Family, gemma2, llama, qwen3
from llmcli.families.qwen2 import FULL, SLIDING

if TYPE_CHECKING:
    from llmcli.layers import Block

EVERY = 6  # every sixth layer is global
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


def block(config: ModelConfig, layer: int) -> Block:
    """Gemma 2's block with normalised queries and keys."""
    return gemma2.sandwich(config, qwen3.attention(config, layer, plus_one=True))


def read(table: dict[str, Any]) -> dict[str, Any]:
    """One set of RoPE parameters a kind of layer, in either spelling, as the global one and a local base."""
    pattern = table.get("sliding_window_pattern", EVERY)
    table = gemma2.read_kinds({key: value for key, value in table.items() if key != "sliding_window_pattern"}, pattern)
    rope = table.pop("rope_parameters", None) or {}
    local = rope.get(SLIDING) or {}
    if local.get("rope_type", "default") != "default":
        table["rope_parameters"] = rope  # a scaled local rotation: refused, for it is not one set of parameters
        return table
    whole = dict(rope.get(FULL) or table.pop("rope_scaling", None) or {})
    whole.setdefault("rope_theta", table.get("rope_theta", GLOBAL_THETA))
    table["rope_parameters"] = whole
    table["rope_local_base_freq"] = local.get("rope_theta", table.get("rope_local_base_freq", LOCAL_THETA))
    return table


def write(config: ModelConfig) -> dict[str, Any]:
    """RoPE's parameters by kind of layer, and the kinds."""
    scaling = config.rope_scaling
    whole = {"rope_type": "default"} if scaling is None else {"rope_type": scaling.type, "factor": scaling.factor}
    return {
        **gemma2.write_kinds(config),
        "rope_parameters": {
            FULL: {**whole, "rope_theta": config.rope_theta},
            SLIDING: {"rope_type": "default", "rope_theta": config.local_rope_theta},
        },
        "rope_scaling": None,
    }


FAMILY = Family(
    name="gemma3",
    hf_model_type="gemma3_text",
    hf_other_types=("gemma3",),
    hf_architecture="Gemma3ForCausalLM",
    tied_in_hf=True,
    weights=(
        *llama.BEFORE,
        *gemma2.NORMS,
        *gemma2.PROJECTIONS,
        *qwen3.QK_NORMS,
        *llama.FEED_FORWARD,
        *llama.AFTER,
    ),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    norm="rms_plus_one",
    block=block,
    keys=gemma2.KEYS | {"local_rope_theta"},
    defaults={
        **gemma2.FAMILY.defaults,
        "rope_theta": GLOBAL_THETA,
        "local_rope_theta": lambda config: LOCAL_THETA if config.window_size else None,
        "window_layers": lambda config: (
            tuple(gemma2.window_layers(config.num_layers, EVERY)) if config.window_size else None
        ),
    },
    hf_fields={**gemma2.HF_FIELDS, "local_rope_theta": "rope_local_base_freq"},
    hf_defaults={
        **gemma2.HF_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": GLOBAL_THETA,
    },
    hf_requires=gemma2.FAMILY.hf_requires,
    hf_writes=gemma2.FAMILY.hf_writes,
    hf_read=read,
    hf_write=write,
)
