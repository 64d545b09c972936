"""A Hugging Face `config.json` read as a config of ours, and the other way.

What changes the computation and is not computed here is refused by name; what changes nothing is passed over.
Source of every rule: transformers' own configuration classes and `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from llmcli import families
from llmcli.config import ModelConfig, parse
from llmcli.errors import ConfigError
from llmcli.families import Family

PRIVATE = "llmcli-"
"""The prefix of `model_type` for what Hugging Face's format cannot say: other tools refuse it instead of misreading."""

# What only a private type may hold, written under the key "llmcli".
_PRIVATE_KEYS = ("scale_embeddings", "bias", "head_bias", "head_size", "hidden_dim")

# Any value but these asks for a computation that no family here has.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_sliding_window": (None, False, True),
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
    "no_rope_layers": (None, []),
    "query_pre_attn_scalar": (None,),
}


class HfConfig(msgspec.Struct, frozen=True):
    """What a config.json says. `tie_flag` is None when it is silent; `config` then holds the family's default."""

    config: ModelConfig
    tie_flag: bool | None
    notes: tuple[str, ...] = ()


def is_hf(table: dict[str, Any]) -> bool:
    """Whether a table of keys is a Hugging Face config rather than one of ours."""
    return "model_type" in table or "architectures" in table


def read(table: dict[str, Any], source: str) -> HfConfig:
    """A `config.json`'s table as a complete config. Raises ConfigError naming `source`, the key and its value."""
    notes: list[str] = []
    outer, inner = table, table.get("text_config")
    if isinstance(inner, dict):
        table = inner
        notes.append(f"the language model is described under text_config of a {outer.get('model_type')!r} config")
    family = _family(table if "model_type" in table else outer, source)
    table = family.hf_read(table)
    _refuse_unsupported(table, family, source)

    values: dict[str, Any] = {"family": family.name}
    spelled: dict[str, str] = {}
    for ours, theirs in family.hf_fields.items():
        spellings = (theirs,) if isinstance(theirs, str) else theirs
        found = [key for key in spellings if key in table]
        default = family.hf_defaults.get(ours)
        if isinstance(default, bool) and len({bool(table.get(key, default)) for key in spellings}) > 1:
            given = ", ".join(f"{key} = {msgspec.json.encode(table.get(key, default)).decode()}" for key in spellings)
            raise ConfigError(f"{source}: {given}: llmcli has one switch for all of them", "They must agree.")
        if found:
            values[ours], spelled[ours] = table[found[0]], found[0]
        elif default is not None:
            values[ours] = default
        if values.get(ours) is None:  # null means what the family computes from the other sizes
            values.pop(ours, None)
    if "dropout" in values and values["dropout"] is not None:
        values["dropout"] = min(values["dropout"], 0.99) if isinstance(values["dropout"], float) else values["dropout"]
    if family.hf_defaults.get("scale_embeddings"):
        values["scale_embeddings"] = True
    if "rope_theta" in family.keys:
        values |= _rope(table, family, source)
    values.setdefault("bias", family.defaults.get("bias"))
    values["head_bias"] = False

    tie_flag = _tie_flag(outer, table, source, notes)
    values["tie_word_embeddings"] = family.tied_in_hf if tie_flag is None else tie_flag
    private = outer.get("llmcli") if str(outer.get("model_type", "")).startswith(PRIVATE) else None
    if isinstance(private, dict):
        values |= private
    try:
        return HfConfig(families.complete(parse(values, ModelConfig, source), source), tie_flag, tuple(notes))
    except ConfigError as error:
        message = error.message
        for ours, theirs in spelled.items():
            message = message.replace(f"{source}: {ours}:", f"{source}: {theirs} = {table[theirs]!r}:")
        raise ConfigError(message, error.hint) from None


def _family(table: dict[str, Any], source: str) -> Family:
    model_type = str(table.get("model_type", ""))
    bare = model_type.removeprefix(PRIVATE)
    architectures = table.get("architectures")
    for name in families.names():
        family = families.get(name)
        types = (family.hf_model_type, *family.hf_other_types)
        if bare in (*types, name if model_type.startswith(PRIVATE) else None):
            return family
        if not model_type and isinstance(architectures, list) and family.hf_architecture in architectures:
            return family
    known = ", ".join(families.get(name).hf_model_type for name in families.names())
    said = f"model_type '{model_type}'" if model_type else "no model_type"
    raise ConfigError(f"{source}: {said}: not a family that llmcli knows", f"Known model types: {known}.")


def _refuse_unsupported(table: dict[str, Any], family: Family, source: str) -> None:
    read = set(family.hf_fields.values())
    for key, supported in (_REFUSED | dict(family.hf_requires)).items():
        if key not in read and key in table and table[key] not in supported:
            means = " or ".join(msgspec.json.encode(value).decode() for value in supported)
            raise ConfigError(
                f"{source}: {key} = {table[key]!r} changes the computation and is not supported for {family.name}",
                f"llmcli computes {means}.",
            )
    if table.get("quantization_config"):
        quantised = table["quantization_config"]
        method = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{source}: quantization_config: the weights are quantised ({method})",
            "llmcli reads unquantised weights (float32, bfloat16, float16); look for the original checkpoint.",
        )
    kinds = table.get("layer_types")
    if isinstance(kinds, list):
        window = table.get("sliding_window") is not None and "window_size" in family.keys
        wanted = "sliding_attention" if window else "full_attention"
        if other := sorted({str(kind) for kind in kinds} - {wanted}):
            raise ConfigError(
                f"{source}: layer_types has {', '.join(other)}: every layer of {family.name} here is {wanted}",
                "Mixed kinds of layers are not supported for this family.",
            )
    layers = str(family.hf_fields["num_layers"])
    if table.get(layers) == 0 and not _is_private(table):
        raise ConfigError(
            f"{source}: {layers} = 0: Hugging Face's models still apply a final norm there, llmcli's do not",
            f'A model without layers is written with model_type "{PRIVATE}{family.name}".',
        )


def _is_private(table: dict[str, Any]) -> bool:
    return str(table.get("model_type", "")).startswith(PRIVATE)


def _tie_flag(outer: dict[str, Any], inner: dict[str, Any], source: str, notes: list[str]) -> bool | None:
    """`tie_word_embeddings`, the nested config's before the outer one's; None when neither says."""
    flags = []
    for table in (inner, outer):
        flag = table.get("tie_word_embeddings")
        if flag is not None and not isinstance(flag, bool):
            raise ConfigError(f"{source}: tie_word_embeddings = {flag!r}: neither true nor false")
        flags.append(flag)
    if flags[0] is not None and flags[1] is not None and flags[0] != flags[1]:
        notes.append(
            f"text_config says tie_word_embeddings = {str(flags[0]).lower()}, the outer config the opposite: "
            "the nested one holds"
        )
    return flags[0] if flags[0] is not None else flags[1]


def _rope(table: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """rope_theta and rope_scaling from either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    given = table.get("rope_parameters") or table.get("rope_scaling") or {}
    key = "rope_parameters" if table.get("rope_parameters") else "rope_scaling"
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(
            f"{source}: {key} = {given!r}: not one set of RoPE parameters for all layers",
            "Parameters that differ by kind of layer are not supported for this family.",
        )
    theta = given.get("rope_theta", table.get("rope_theta"))
    values: dict[str, Any] = {"rope_theta": family.hf_defaults["rope_theta"] if theta is None else theta}
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{source}: {key}: partial_rotary_factor = {given['partial_rotary_factor']!r} is not supported"
        )
    if kind in (None, "default"):
        return values
    known = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }
    if kind not in known:
        raise ConfigError(
            f"{source}: {key}: RoPE of type {kind!r} is not supported", f"Supported: default, {', '.join(known)}."
        )
    scaling = {"type": kind, **{name: given[name] for name in ("factor", *known[kind]) if given.get(name) is not None}}
    if kind != "linear":
        original = table.get("original_max_position_embeddings", given.get("original_max_position_embeddings"))
        scaling["original_max_position_embeddings"] = original or table.get(
            "max_position_embeddings", family.hf_defaults["max_position_embeddings"]
        )
    required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
    if missing := [name for name in required[kind] if name not in scaling]:
        raise ConfigError(f"{source}: {key}: RoPE of type {kind!r} needs {' and '.join(missing)}")
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if kind == "yarn" and mscale and all_dim and "attention_factor" not in scaling:
        per_unit = 0.1 * math.log(max(scaling["factor"], 1.0))
        scaling["attention_factor"] = (per_unit * mscale + 1) / (per_unit * all_dim + 1)
    return values | {"rope_scaling": scaling}


def write(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` of a complete config, for weights stored as `dtype` ("float32", "bfloat16", ...).

    Its `model_type` is Hugging Face's where transformers computes the same, else private (`llmcli-<family>`).
    """
    family = families.get(config.family)
    table: dict[str, Any] = {
        "model_type": family.hf_model_type,
        "architectures": [family.hf_architecture],
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
        "torch_dtype": dtype,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # a reader's default may lie outside V
        **family.hf_writes,
    }
    for ours, theirs in family.hf_fields.items():
        for key in (theirs,) if isinstance(theirs, str) else theirs:
            if not key.startswith("_"):
                table[key] = getattr(config, ours)
    if "rope_theta" in family.keys:
        scaling = msgspec.to_builtins(config.rope_scaling) if config.rope_scaling else {"type": "default"}
        scaling["rope_type"] = scaling.pop("type")
        table["rope_theta"] = config.rope_theta
        table["rope_parameters"] = {"rope_theta": config.rope_theta, **scaling}
        if config.rope_scaling:
            table["rope_scaling"] = scaling
    table |= family.hf_write(config)
    if config.num_layers == 0 or private_reasons(config):
        table["model_type"] = PRIVATE + family.name
        table["architectures"] = ["Llmcli" + family.hf_architecture]
        table["llmcli"] = {key: getattr(config, key) for key in _PRIVATE_KEYS}
    return table


def private_reasons(config: ModelConfig) -> list[str]:
    """Why Hugging Face's format cannot say what a complete config means; empty when it can."""
    family = families.get(config.family)
    reasons = []
    if config.num_layers == 0:
        reasons.append("it has no layers, and transformers would still apply a final norm")
    if config.head_bias:
        reasons.append("its output projection has a bias")
    if config.scale_embeddings != bool(family.hf_defaults.get("scale_embeddings")):
        reasons.append("its embeddings are " + ("scaled" if config.scale_embeddings else "not scaled"))
    if "bias" not in family.hf_fields and config.bias != family.defaults["bias"]:
        reasons.append("its layers have no biases")
    if "hidden_dim" not in family.hf_fields and config.hidden_dim != 4 * config.embed_dim:
        reasons.append("its feed-forward width is not four times embed_dim")
    return reasons
