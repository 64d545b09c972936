"""A model family is a bill of materials: for every tensor our name, Hugging Face's name, and its shape in words.

Each file of this folder is one family and is found by its name; there is no list to keep in step.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from llmcli.config import ModelConfig
from llmcli.errors import ConfigError

if TYPE_CHECKING:
    from llmcli.layers import Block

Norm = Literal["layer", "rms", "rms_plus_one"]
"""`rms_plus_one` multiplies by 1 + w and starts from w = 0 (Gemma)."""


@dataclass(frozen=True)
class Weight:
    """One line of a family's table; `{i}` stands for the layer and `{e}` for the expert.

    `shape` is ours, rows first: (out, in) for a matrix. `transposed` says that the file holds (in, out), as GPT-2's
    Conv1D does. `fused` are the sizes along the output axis of a file tensor that several of ours share, and `part`
    says which of them is this one. `stacked` says that the file's tensor has one more axis in front, the experts.
    A tensor exists `when` those fields of the config are neither zero, false nor absent, and `unless_tied`.
    """

    name: str
    hf_name: str
    shape: str
    transposed: bool = False
    fused: str = ""
    part: int = 0
    stacked: bool = False
    when: str = ""
    unless_tied: bool = False


@dataclass(frozen=True)
class Tensor:
    """One tensor of one model: a line of the table with numbers for words.

    In the file it is `hf_name` of shape `hf_shape`; ours are the rows `start : start + shape[0]` of its output axis,
    in expert `expert` when the file stacks them.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    transposed: bool
    start: int
    expert: int | None
    layer: int | None
    part: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that distinguishes one family from the others."""

    name: str
    hf_model_type: str
    hf_architecture: str
    tied_in_hf: bool
    """What transformers takes for `tie_word_embeddings` when config.json does not say."""
    weights: tuple[Weight, ...]
    alternatives: tuple[Weight, ...] = ()
    """Lines by which a file may hold the same tensors under other names or in another layout."""
    ignorable: tuple[str, ...] = ()
    """Names of file tensors that carry nothing learned: causal masks, rotary tables."""
    norm: Norm = "rms"
    """The kind of the norm behind the last block; its blocks choose theirs, and `costs` takes them for the same."""
    final_norm: bool = True
    """Whether a norm stands behind the last block."""
    learned_positions: bool = False
    """Whether a row for each position is looked up and added."""
    block: Callable[[ModelConfig, int], Block]
    """block(config, layer): imports layers inside, so that counting never imports torch."""
    keys: frozenset[str] = frozenset()
    """The optional keys of a config that mean something in this family."""
    defaults: Mapping[str, Any]
    """What a config of ours means by a key it leaves out; a callable is given the config."""
    hf_fields: Mapping[str, str | tuple[str, ...]]
    """Our key -> theirs; of several spellings any is read, and all are written.

    A name that begins with an underscore is none of theirs: `hf_read` puts it there, and it is not written.
    """
    hf_defaults: Mapping[str, Any]
    """What transformers takes for a field (in our words) that config.json leaves out."""
    hf_requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that change the computation, with the values that mean what is computed here; others are refused."""
    hf_writes: Mapping[str, Any] = field(default_factory=dict)
    """Fields written beside the mapped ones, because a reader's default could differ."""
    hf_other_types: tuple[str, ...] = ()
    """Further model types of the same family: wrappers that hold it under `text_config`."""
    hf_read: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """config.json's table in the spelling that `hf_fields` reads, for what a renaming cannot say."""
    hf_write: Callable[[ModelConfig], dict[str, Any]] = field(default=lambda config: {})
    """The inverse of `hf_read`: fields computed from the whole config, laid over the mapped ones."""

    def tensors(self, config: ModelConfig) -> Iterator[Tensor]:
        """Every tensor of a complete config, in the order of the forward pass."""
        first_block = next((n for n, w in enumerate(self.weights) if "{i}" in w.name), len(self.weights))
        for n, weight in enumerate(self.weights):
            if "{i}" not in weight.name and n < first_block:
                yield from _tensors(weight, config, None)
        for layer in range(config.num_layers):
            for weight in self.weights:
                if "{i}" in weight.name:
                    yield from _tensors(weight, config, layer)
        for n, weight in enumerate(self.weights):
            if "{i}" not in weight.name and n > first_block:
                yield from _tensors(weight, config, None)

    def alternative_tensors(self, config: ModelConfig) -> Iterator[Tensor]:
        """The same tensors as the `alternatives` would have them in a file."""
        for weight in self.alternatives:
            for layer in range(config.num_layers) if "{i}" in weight.name else (None,):
                yield from _tensors(weight, config, layer)


def _tensors(weight: Weight, config: ModelConfig, layer: int | None) -> Iterator[Tensor]:
    """One line of the table for one layer: a tensor, one for each expert, or none."""
    if weight.unless_tied and config.tie_word_embeddings:
        return
    if not all(getattr(config, switch) for switch in weight.when.split()):
        return
    shape = tuple(getattr(config, word) for word in weight.shape.split())
    fused = [getattr(config, word) for word in weight.fused.split()] or [shape[0]]
    hf_shape = (sum(fused), *shape[1:])
    if weight.transposed:
        hf_shape = hf_shape[::-1]
    if weight.stacked:
        hf_shape = (config.num_experts or 0, *hf_shape)
    for expert in range(config.num_experts or 0) if "{e}" in weight.name else (None,):
        yield Tensor(
            name=weight.name.format(i=layer, e=expert),
            hf_name=weight.hf_name.format(i=layer, e=expert),
            shape=shape,
            hf_shape=hf_shape,
            transposed=weight.transposed,
            start=sum(fused[: weight.part]),
            expert=expert if weight.stacked else None,
            layer=layer,
            part=part_of(weight.name),
        )


def part_of(name: str) -> str:
    """The part of the model that a tensor of ours is counted under."""
    *_, module, _ = name.split(".")
    if module == "token_embeddings":
        return "embedding"
    if module == "position_embeddings":
        return "positions"
    if module == "output_projection":
        return "output"
    if module.endswith("norm"):
        return "norms"
    if module == "router":
        return "router"
    if ".experts." in name:
        return "experts"
    return "attention" if ".attention." in name else "feed_forward"


@cache
def names() -> tuple[str, ...]:
    """Every family by name: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def get(name: str) -> Family:
    """The family of that name. Raises ConfigError naming the known ones."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise ConfigError(f"unknown family '{name}'", f"{hint}Known families: {', '.join(names())}.")
    family: Family = importlib.import_module(f"{__name__}.{name}").FAMILY
    return family


_COMMON = {
    "family",
    "vocab_size",
    "embed_dim",
    "num_layers",
    "num_heads",
    "hidden_dim",
    "max_position_embeddings",
    "norm_eps",
    "dropout",
    "tie_word_embeddings",
    "scale_embeddings",
    "initializer_range",
}
"""The keys that mean something in every family; of all others a family names those of its own."""


def complete(config: ModelConfig, source: str = "") -> ModelConfig:
    """The config with every key that the family leaves open filled in, and checked as a whole.

    Raises ConfigError, beginning with `source`, for a key that the family does not have and for sizes that do not
    fit together. Completing twice changes nothing.
    """
    where = f"{source}: " if source else ""
    family = get(config.family)
    if config.tie_word_embeddings and config.head_bias:
        raise ConfigError(
            f"{where}head_bias = true with tie_word_embeddings = true",
            "A tied output has no bias: leave one of them out.",
        )
    if config.embed_dim % config.num_heads and (config.head_size is None or "head_size" not in family.keys):
        raise ConfigError(
            f"{where}embed_dim {config.embed_dim} does not divide by num_heads {config.num_heads}",
            "Choose sizes that divide, or set head_size in a family that has it.",
        )
    implied = {
        "num_kv_heads": config.num_heads,
        "head_size": config.embed_dim // config.num_heads,
        **{key: value(config) if callable(value) else value for key, value in family.defaults.items()},
    }
    if config.tie_word_embeddings:
        implied["head_bias"] = False
    filled = {key: value for key, value in implied.items() if getattr(config, key) is None}
    result = msgspec.structs.replace(config, **filled)

    for key, value in msgspec.structs.asdict(result).items():
        if key not in _COMMON | family.keys and value not in (None, False, implied.get(key)):
            raise ConfigError(
                f"{where}{key} = {msgspec.to_builtins(value)}: the family {family.name} has no such thing",
                f"Leave {key} out, or choose a family that has it.",
            )
    if result.num_heads % (result.num_kv_heads or 1):
        raise ConfigError(
            f"{where}num_heads {result.num_heads} does not divide by num_kv_heads {result.num_kv_heads}",
            "Each key/value head serves the same number of query heads.",
        )
    if "rope_theta" in family.keys and (result.head_size or 0) % 2:
        raise ConfigError(f"{where}head_size {result.head_size} is odd", "RoPE turns pairs of dimensions.")
    if (result.top_k_experts or 0) > (result.num_experts or 0):
        raise ConfigError(
            f"{where}top_k_experts {result.top_k_experts} is more than num_experts {result.num_experts}",
            "A token cannot use more experts than there are.",
        )
    return result
