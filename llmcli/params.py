"""Counting parameters from the families' tables: shapes multiplied, nothing allocated."""

from __future__ import annotations

from math import prod

import msgspec

from llmcli import families
from llmcli.config import ModelConfig


class ParameterCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many numbers a model holds. `total` is as configured; `active` is what one token passes through."""

    family: str
    tie_word_embeddings: bool
    total: int
    total_tied: int
    total_untied: int
    saved_by_tying: int
    embedding: int
    parts: dict[str, int]
    active: int


def count(config: ModelConfig) -> ParameterCount:
    """The parameters of a model, tied and untied. Raises ConfigError for an impossible config.

    In a mixture of experts all weights but the experts' are active, and of the experts the chosen share; the
    embedding counts whole (arXiv:2401.04088 counts Mixtral 8x7B so: 12.9 of 46.7 billion).
    """
    config = families.complete(config)
    parts = _parts(config)
    total = sum(parts.values())
    other = sum(_parts(flip_tie(config)).values())
    tied, untied = (total, other) if config.tie_word_embeddings else (other, total)
    experts = parts.get("experts", 0)
    chosen = experts * (config.top_k_experts or 0) // (config.num_experts or 1)
    return ParameterCount(
        family=config.family,
        tie_word_embeddings=config.tie_word_embeddings,
        total=total,
        total_tied=tied,
        total_untied=untied,
        saved_by_tying=untied - tied,
        embedding=parts["embedding"],
        parts=parts,
        active=total - experts + chosen,
    )


def flip_tie(config: ModelConfig) -> ModelConfig:
    """The same model with the output tied where it was not, or in a matrix of its own where it was tied."""
    return families.complete(
        msgspec.structs.replace(config, tie_word_embeddings=not config.tie_word_embeddings, head_bias=None)
    )


def _parts(config: ModelConfig) -> dict[str, int]:
    parts: dict[str, int] = {}
    for tensor in families.get(config.family).tensors(config):
        parts[tensor.part] = parts.get(tensor.part, 0) + prod(tensor.shape)
    return parts
