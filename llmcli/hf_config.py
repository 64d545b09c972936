"""A Hugging Face `config.json` read as a config of ours, and the other way.

What changes the computation and is not computed here is refused by name; what changes nothing is passed over.
Source of every rule: transformers' own configuration classes and `modeling_rope_utils`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from llmcli import families
from llmcli.config import WRITING, ModelConfig, parse
from llmcli.errors import ConfigError, clip, listing
from llmcli.families import Family

PRIVATE = "llmcli-"
"""The prefix of `model_type` for what Hugging Face's format cannot say: other tools refuse it instead of misreading."""

REPAIR = "Correct config.json, or get the checkpoint's own again."
"""What to do about a config.json that makes no sense."""

# What only a private type may hold, written under the key "llmcli".
_PRIVATE_KEYS = ("scale_embeddings", "bias", "head_bias", "head_size", "hidden_dim")

# Any value but these asks for a computation that a family which does not read the key lacks.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
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

# transformers takes these for the same (its attribute_map): read where the family's own spelling is absent.
_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_local_experts": "num_experts",
}

_MAX_LAYERS = 10_000


class HfConfig(msgspec.Struct, frozen=True):
    """What a config.json says. `tie_flag` is None when it is silent; `config` then holds the family's default.

    `wrapped` says that the language model is one part of a larger one (images, sound) and stood under text_config.
    """

    config: ModelConfig
    tie_flag: bool | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    wrapped: bool = False


def is_hf(table: dict[str, Any]) -> bool:
    """Whether a table of keys is a Hugging Face config rather than one of ours."""
    return "model_type" in table or "architectures" in table


def read(table: dict[str, Any], source: str) -> HfConfig:
    """A `config.json`'s table as a complete config. Raises ConfigError naming `source`, the key and its value."""
    try:
        return _read(table, source)
    except ConfigError as error:
        raise ConfigError(error.message, REPAIR if error.hint in ("", WRITING) else error.hint) from None


def _read(table: dict[str, Any], source: str) -> HfConfig:
    notes: list[str] = []
    warnings: list[str] = []
    outer, inner = table, table.get("text_config")
    if isinstance(inner, dict):
        table = inner
        said = clip(repr(outer.get("model_type")))
        notes.append(f"the language model is described under text_config of a {said} config")
    _refuse_quantised(outer, source)
    _refuse_quantised(table, source)
    family = _family(table if "model_type" in table else outer, source)
    table = _respelled(table, family, source)
    _refuse_unsupported(table, family, source)

    values: dict[str, Any] = {"family": family.name}
    spelled: dict[str, str] = {}
    for ours, theirs in family.hf_fields.items():
        spellings = (theirs,) if isinstance(theirs, str) else theirs
        found = [key for key in spellings if key in table]
        default = family.hf_defaults.get(ours)
        if isinstance(default, bool) and len({bool(table.get(key, default)) for key in spellings}) > 1:
            raise ConfigError(
                f"{source}: {_given(table, spellings, default)}: llmcli has one switch for all of them",
                "They must agree.",
            )
        if ours == "dropout" and len({clip(repr(table[key])) for key in found}) > 1:
            notes.append(
                f"{_given(table, found)}: llmcli has one dropout and takes the first, which only training uses"
            )
        if found:
            values[ours], spelled[ours] = table[found[0]], found[0]
        elif default is not None:
            values[ours] = default
        if values.get(ours) is None:  # null means what the family computes from the other sizes
            values.pop(ours, None)
    if values.get("dropout") in (1, 1.0):  # all dropped: possible for transformers, and of no use for training
        values["dropout"] = 0.99
    if family.hf_defaults.get("scale_embeddings"):
        values["scale_embeddings"] = True
    if "rope_theta" in family.keys:
        values |= _rope(table, family, source)
    values.setdefault("bias", family.defaults.get("bias"))
    values["head_bias"] = False

    tie_flag = _tie_flag(outer, table, source, warnings)
    values["tie_word_embeddings"] = family.tied_in_hf if tie_flag is None else tie_flag
    if _is_private(outer):
        values |= _private(outer, source)
    scaling = values.get("rope_scaling")
    for ours, value in [*values.items(), *(scaling.items() if isinstance(scaling, dict) else ())]:
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{source}: {spelled.get(ours, ours)} is not a finite number", "Repair config.json.")
    try:
        config = families.complete(parse(values, ModelConfig, source), source)
    except ConfigError as error:
        raise ConfigError(_in_their_words(error.message, source, spelled, table), error.hint) from None
    return HfConfig(config, tie_flag, tuple(notes), tuple(warnings), wrapped=isinstance(inner, dict))


def _given(table: dict[str, Any], keys: Iterable[str], default: Any = None) -> str:
    return ", ".join(f"{key} = {clip(json.dumps(table.get(key, default)))}" for key in keys)


def _in_their_words(message: str, source: str, spelled: dict[str, str], table: dict[str, Any]) -> str:
    """A complaint about our keys as one about the keys that config.json has."""
    text = message.removeprefix(f"{source}: ")
    for ours, theirs in spelled.items():
        if text.startswith(f"{ours}: "):
            text = f"{theirs} = {clip(repr(table[theirs]))}: {text.removeprefix(f'{ours}: ')}"
        text = re.sub(rf"\b{ours}\b", theirs, text)
    return f"{source}: {text}"


def _respelled(table: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """The table in the spelling that the family's `hf_fields` read."""
    table = dict(table)
    own = {key for theirs in family.hf_fields.values() for key in ((theirs,) if isinstance(theirs, str) else theirs)}
    for key, alias in _ALIASES.items():
        meant = key in own and alias in table and alias not in own
        if meant and table.setdefault(key, table[alias]) != table[alias]:
            raise ConfigError(f"{source}: {_given(table, (key, alias))}: two spellings that disagree")
    for key in ("num_hidden_layers", "n_layer", "max_window_layers"):  # whatever counts them needs a count
        value = table.get(key, 0)
        if value is not None and (type(value) is not int or not 0 <= value <= _MAX_LAYERS):
            raise ConfigError(
                f"{source}: {key} = {clip(repr(value))}: not a number of layers", f"From 0 to {_MAX_LAYERS:,}."
            )
    try:
        return family.hf_read(table)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"{source}: values that do not fit a {family.name} model ({clip(str(error))})") from None


def _family(table: dict[str, Any], source: str) -> Family:
    model_type = clip(str(table.get("model_type", "")))
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
    read = {key for theirs in family.hf_fields.values() for key in ((theirs,) if isinstance(theirs, str) else theirs)}
    for key, supported in (_REFUSED | dict(family.hf_requires)).items():
        if key not in read and key in table and table[key] not in supported:
            means = " or ".join(msgspec.json.encode(value).decode() for value in supported)
            raise ConfigError(
                f"{source}: {_given(table, [key])} changes the computation and is not supported for {family.name}",
                f"llmcli computes {means}.",
            )
    kinds = table.get("layer_types")
    if isinstance(kinds, list):
        window = table.get("sliding_window") is not None and "window_size" in family.keys
        wanted = "sliding_attention" if window else "full_attention"
        if other := sorted({clip(str(kind)) for kind in kinds} - {wanted}):
            raise ConfigError(
                f"{source}: layer_types has {listing(other)}: every layer of {family.name} here is {wanted}",
                "Mixed kinds of layers are not supported for this family.",
            )
    layers = str(family.hf_fields["num_layers"])
    if table.get(layers) == 0 and not _is_private(table):
        raise ConfigError(
            f"{source}: {layers} = 0: Hugging Face's models still apply a final norm there, llmcli's do not",
            f'A model without layers is written with model_type "{PRIVATE}{family.name}".',
        )


def _refuse_quantised(table: dict[str, Any], source: str) -> None:
    for key in ("quantization_config", "compression_config"):
        if said := table.get(key):
            method = said.get("quant_method", "an unnamed method") if isinstance(said, dict) else said
            raise ConfigError(
                f"{source}: {key}: the weights are quantised ({clip(str(method))})",
                "llmcli reads unquantised weights (float32, bfloat16, float16); look for the original checkpoint.",
            )


def _private(table: dict[str, Any], source: str) -> dict[str, Any]:
    """What a config of a private type says in our words."""
    said = table.get("llmcli", {})
    if not isinstance(said, dict) or not said.keys() <= set(_PRIVATE_KEYS):
        raise ConfigError(f"{source}: llmcli = {clip(repr(said))}", f"Known keys: {', '.join(_PRIVATE_KEYS)}.")
    return said


def _is_private(table: dict[str, Any]) -> bool:
    return str(table.get("model_type", "")).startswith(PRIVATE)


def _tie_flag(outer: dict[str, Any], inner: dict[str, Any], source: str, warnings: list[str]) -> bool | None:
    """`tie_word_embeddings`, the nested config's before the outer one's; None when neither says."""
    flags = []
    for table in (inner, outer):
        flag = table.get("tie_word_embeddings")
        if flag is not None and not isinstance(flag, bool):
            raise ConfigError(f"{source}: tie_word_embeddings = {clip(repr(flag))}: neither true nor false")
        flags.append(flag)
    if flags[0] is not None and flags[1] is not None and flags[0] != flags[1]:
        warnings.append(
            f"text_config says tie_word_embeddings = {str(flags[0]).lower()}, the outer config the opposite: "
            "the nested one holds"
        )
    return flags[0] if flags[0] is not None else flags[1]


_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("beta_fast", "beta_slow", "attention_factor", "truncate")),
}
"""For each type of RoPE's scaling the numbers that it needs, and those it may have."""


def _rope(table: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """rope_theta and rope_scaling from either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    spellings = [key for key in ("rope_parameters", "rope_scaling") if table.get(key)]
    read = [_one_rope(key, table, family, source) for key in spellings]
    if len(read) == 2 and read[0] != read[1]:
        raise ConfigError(f"{source}: rope_parameters and rope_scaling disagree", "Keep the one that is right.")
    return read[0] if read else _one_rope("rope_parameters", table, family, source)


def _one_rope(key: str, table: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    given = table.get(key) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(
            f"{source}: {key} = {clip(repr(given))}: not one set of RoPE parameters for all layers",
            "Parameters that differ by kind of layer are not supported for this family.",
        )
    theta = given.get("rope_theta", table.get("rope_theta"))
    values: dict[str, Any] = {"rope_theta": family.hf_defaults["rope_theta"] if theta is None else theta}
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        said = clip(repr(given["partial_rotary_factor"]))
        raise ConfigError(f"{source}: {key}: partial_rotary_factor = {said} is not supported for {family.name}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in (None, "default"):
        return values
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ConfigError(
            f"{source}: {key}: RoPE of type {clip(repr(kind))} is not supported",
            f"Supported: default, {', '.join(_SCALINGS)}.",
        )
    needed, optional = _SCALINGS[kind]
    numbers = {name: given[name] for name in (*needed, *optional) if given.get(name) is not None}
    if missing := [name for name in needed if name not in numbers]:
        raise ConfigError(f"{source}: {key}: RoPE of type {kind!r} needs {' and '.join(missing)}")
    scales = {name: given[name] for name in ("mscale", "mscale_all_dim") if given.get(name)}
    for name, value in (numbers | scales).items():
        if name != "truncate" and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise ConfigError(f"{source}: {key}: {name} = {clip(repr(value))}: not a positive number")
    if kind != "linear":
        original = table.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        numbers["original_max_position_embeddings"] = original or table.get(
            "max_position_embeddings", family.hf_defaults["max_position_embeddings"]
        )
    if kind == "yarn" and len(scales) == 2 and "attention_factor" not in numbers:
        per_unit = 0.1 * math.log(max(numbers["factor"], 1.0))
        numbers["attention_factor"] = (per_unit * scales["mscale"] + 1) / (per_unit * scales["mscale_all_dim"] + 1)
    if kind == "yarn" and values["rope_theta"] == 1:
        raise ConfigError(f"{source}: {key}: rope_theta = 1 leaves yarn no frequencies to tell apart")
    return values | {"rope_scaling": {"type": kind, **numbers}}


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
