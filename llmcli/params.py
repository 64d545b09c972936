"""Counting parameters: from a family's table, shapes multiplied and nothing allocated, or from the headers of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from llmcli import families
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from llmcli.hf_config import HfConfig
    from llmcli.weight_files import Checkpoint

By = Literal["part", "layer", "tensor"]

ORDER = ("embedding", "positions", "attention", "feed_forward", "router", "experts", "norms", "output", "other")
"""The parts as they are listed: the way a token goes, norms behind what they serve."""


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


class EmbeddingShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the embedding matrix (V, d) is in the whole: its share, and its share with the head's own matrix and bias.

    A tied head has none of its own: both shares are the same.
    """

    vocab_size: int
    embed_dim: int
    embedding: int
    total: int
    share: float
    share_with_head: float
    tied: bool
    saved_by_tying: int


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a breakdown: a part, a layer or a tensor, its parameters and their share of the total."""

    name: str
    parameters: int
    share: float
    shape: tuple[int, ...] | None = None


class Entry(msgspec.Struct, frozen=True):
    """One counted tensor."""

    name: str
    shape: tuple[int, ...]
    part: str
    layer: int | None


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in a checkpoint's files beside the count.

    `buffers` are numbers that nothing trains (causal masks, rotary tables), `bytes` everything stored, `dtypes` the
    parameters by stored type. `config_total` is what config.json makes the total, None where there is none to read.
    `rows` are those of the embedding, `padding_rows` those past the tokenizer's last token, None without a tokenizer.
    `disagreements` between the files, their config and their index are sentences.
    """

    tensors: int
    buffers: int
    bytes: int
    dtypes: dict[str, int]
    config_total: int | None
    rows: int
    padding_rows: int | None
    disagreements: tuple[str, ...]


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """A target's count with what it came from: a complete config (None where files have none), and files if any.

    `matrix` is the shape (V, d) of the embedding, or of the head where that is all there is. `notes` are sentences on
    why the count came from there.
    """

    count: ParameterCount
    config: ModelConfig | None
    matrix: tuple[int, int]
    entries: tuple[Entry, ...] | None = None
    files: Files | None = None
    notes: tuple[str, ...] = ()


def count(config: ModelConfig) -> ParameterCount:
    """The parameters of a model, tied and untied. Raises ConfigError for an impossible config.

    In a mixture of experts all weights but the experts' are active, and of the experts the chosen share; the
    embedding counts whole (arXiv:2401.04088 counts Mixtral 8x7B so: 12.9 of 46.7 billion).
    """
    config = families.complete(config)
    parts: dict[str, int] = {}
    for tensor, copies in distinct(config):
        parts[tensor.part] = parts.get(tensor.part, 0) + copies * prod(tensor.shape)
    flipped = flip_tie(config)
    other = sum(copies * prod(tensor.shape) for tensor, copies in distinct(flipped))
    return _counted(config.family, config.tie_word_embeddings, parts, other, config.top_k_experts, config.num_experts)


def distinct(config: ModelConfig) -> Iterator[tuple[families.Tensor, int]]:
    """The tensors of a complete config, those of the first layer standing for all layers, and how many there are of
    each: layers are alike in shape, so that a hundred of them cost no more than one."""
    first = msgspec.structs.replace(config, num_layers=min(1, config.num_layers))
    for tensor in families.get(config.family).tensors(first):
        yield tensor, 1 if tensor.layer is None else config.num_layers


def flip_tie(config: ModelConfig) -> ModelConfig:
    """The same model with the output tied where it was not, or in a matrix of its own where it was tied."""
    return families.complete(
        msgspec.structs.replace(config, tie_word_embeddings=not config.tie_word_embeddings, head_bias=None)
    )


def embedding_share(counted: Counted) -> EmbeddingShare:
    """The embedding matrix beside the whole model."""
    c, (rows, dim) = counted.count, counted.matrix
    return EmbeddingShare(
        vocab_size=rows,
        embed_dim=dim,
        embedding=c.embedding,
        total=c.total,
        share=c.embedding / (c.total or 1),
        share_with_head=(c.embedding + c.parts.get("output", 0)) / (c.total or 1),
        tied=c.tie_word_embeddings,
        saved_by_tying=c.saved_by_tying,
    )


def breakdown(counted: Counted, by: By) -> list[Line]:
    """The parameters by part, by layer (with what stands before and behind the layers), or tensor by tensor."""
    total = counted.count.total or 1
    if by == "part":
        return [Line(name=part, parameters=n, share=n / total) for part, n in counted.count.parts.items()]
    entries = counted.entries if counted.entries is not None else _entries(counted.config)
    if by == "tensor":
        sizes = ((entry, prod(entry.shape)) for entry in entries)
        return [Line(name=entry.name, parameters=n, share=n / total, shape=entry.shape) for entry, n in sizes]
    sums: dict[str, int] = {}
    for entry in entries:
        outside = "final_norm" if entry.part == "norms" else entry.part
        name = outside if entry.layer is None else f"layer {entry.layer}"
        sums[name] = sums.get(name, 0) + prod(entry.shape)
    return [Line(name=name, parameters=n, share=n / total) for name, n in sums.items()]


def _entries(config: ModelConfig | None) -> Iterator[Entry]:
    for tensor in families.get(config.family).tensors(config) if config else ():
        yield Entry(tensor.name, tensor.shape, tensor.part, tensor.layer)


def _counted(
    family: str, tied: bool, parts: dict[str, int], other: int, top_k: int | None, num_experts: int | None
) -> ParameterCount:
    """A count from the parts as configured, and the total `other` with the tie the other way."""
    parts = {part: parts[part] for part in ORDER if part in parts}
    total = sum(parts.values())
    total_tied, total_untied = (total, other) if tied else (other, total)
    experts = parts.get("experts", 0)
    return ParameterCount(
        family=family,
        tie_word_embeddings=tied,
        total=total,
        total_tied=total_tied,
        total_untied=total_untied,
        saved_by_tying=total_untied - total_tied,
        embedding=parts.get("embedding", 0),
        parts=parts,
        active=total - experts + experts * (top_k or 0) // (num_experts or 1),
    )


WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

UNKNOWN = "unknown"
"""The family of files that no config describes."""
OTHER = "other"
"""The part of a tensor that no table names."""


def take(target: str | Path, *, revision: str | None = None, offline: bool = False) -> Counted:
    """The count of whatever a target names: by the headers of its files where it has any, else by its config.

    Of a repository on the Hub only the files' beginnings are transferred. Raises as `targets.read_headers` and
    `targets.read_config` do; a checkpoint whose config is missing or of no known family is counted by its files alone.
    """
    from llmcli import targets

    path, repo = Path(targets.named(target)), targets.repo_id(target, revision)
    notes: list[str] = []
    if repo or path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        if path.is_dir() and not repo and not any(next(path.glob(pattern), None) for pattern in WEIGHTS):
            notes.append(f"{target}: no safetensors files there, counted from config.json")
        else:
            try:
                headers = targets.read_headers(target, revision=revision, offline=offline)
            except CheckpointError as refusal:
                if not repo:
                    raise
                notes.append(f"{refusal.message}; counted from config.json")
            else:
                try:
                    hf = targets.read_hf_config(headers.path)
                except (ConfigError, CheckpointError) as refusal:
                    hf = None
                    notes.append(f"{refusal.message}; counted from the files alone")
                tokens = tokenizer_size(headers.path)
                counted = count_files(headers.checkpoint, hf, str(target), tokens=tokens, readable=headers.here)
                return msgspec.structs.replace(counted, notes=tuple(notes))
    config = targets.read_config(target, revision=revision, offline=offline)
    matrix = (config.vocab_size, config.embed_dim)
    return Counted(count=count(config), config=config, matrix=matrix, notes=tuple(notes))


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _Added(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    """What of a tokenizer.json tells its size."""

    model: _Model
    added_tokens: list[_Added] = []


def tokenizer_size(checkpoint: Path) -> int | None:
    """The largest token id + 1 of a checkpoint's tokenizer, read without the tokenizers library; None without one."""
    path = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Vocabulary)
    except (OSError, msgspec.DecodeError):
        return None
    vocab = tokenizer.model.vocab
    last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return max([last, *(token.id for token in tokenizer.added_tokens)]) + 1


def count_files(
    checkpoint: Checkpoint,
    hf: HfConfig | None,
    where: str,
    *,
    tokens: int | None = None,
    readable: bool = True,
) -> Counted:
    """The parameters that a checkpoint's files hold, by their headers; what config and index claim is only compared.

    `hf` is None without a config that can be read: parts are then told by the names that any family's table knows.
    `tokens` is the tokenizer's size. An output matrix beside a tied embedding is left out where the two are equal, for
    which both are read; `readable` False says that they cannot be, and the config is believed. `where` names the
    checkpoint in what is said.
    """
    from llmcli.mapping import canonical

    part_of, is_buffer = _known_names(hf.config.family if hf else None)
    said = list(checkpoint.notes)
    entries, buffers = [], []
    for name, info in checkpoint.infos.items():
        pattern = _pattern(canonical(name))
        if pattern in is_buffer:
            buffers.append(info)
        else:
            layer = re.search(r"(?<=\.)\d+(?=\.)", canonical(name))
            entries.append(Entry(name, info.shape, part_of.get(pattern, OTHER), int(layer[0]) if layer else None))

    tie = _tie(checkpoint, entries, hf, readable)
    said += tie.said
    parts: dict[str, int] = {}
    for entry in tie.entries:
        parts[entry.part] = parts.get(entry.part, 0) + prod(entry.shape)
    config = tie.config
    total, rows = sum(parts.values()), tie.matrix[0]
    other = total - parts.get("output", 0)
    if tie.tied:
        head_bias = bool(config and flip_tie(config).head_bias)
        other = total + prod(tie.matrix) + head_bias * tie.matrix[0]
    top_k, experts = (config.top_k_experts, config.num_experts) if config else (1, 1)
    result = _counted(config.family if config else UNKNOWN, tie.tied, parts, other, top_k, experts)
    if config is None and "experts" in parts:
        said.append("how many experts a token uses is not known without a config: active counts all of them")
    if config:
        said += _disagreements(checkpoint, config, total, where)
    dtypes: dict[str, int] = {}
    for entry in tie.entries:
        dtype = checkpoint.infos[entry.name].dtype
        dtypes[dtype] = dtypes.get(dtype, 0) + prod(entry.shape)
    files = Files(
        tensors=len(checkpoint.infos),
        buffers=sum(prod(info.shape) for info in buffers),
        bytes=sum(info.end - info.start for info in checkpoint.infos.values()),
        dtypes=dtypes,
        config_total=count(config).total if config else None,
        rows=rows,
        padding_rows=None if tokens is None else max(0, rows - tokens),
        disagreements=tuple(said),
    )
    return Counted(count=result, config=config, matrix=tie.matrix, entries=tie.entries, files=files)


class _Tie(msgspec.Struct, frozen=True):
    """Which tensors count once the tie is decided, and the shape of the embedding (of the head where it serves)."""

    tied: bool
    config: ModelConfig | None
    entries: tuple[Entry, ...]
    matrix: tuple[int, int]
    said: tuple[str, ...]


def _tie(checkpoint: Checkpoint, entries: list[Entry], hf: HfConfig | None, readable: bool) -> _Tie:
    """The tie as the files have it, as far as counting needs it: nothing is refused."""
    from llmcli.tensors import compare

    embedding, head = (
        next((entry for entry in entries if entry.part == part and len(entry.shape) == 2), None)
        for part in ("embedding", "output")
    )
    says = bool(hf and hf.config.tie_word_embeddings)
    tied, said = says, []
    if head is None and embedding is not None:
        tied = True
        if hf and not says:
            said.append("config.json says untied, the files hold no output matrix: counted as tied")
    elif head is not None and embedding is None:
        entries = [Entry(e.name, e.shape, "embedding", None) if says and e is head else e for e in entries]
    elif head is not None and embedding is not None and says:
        one, two = (checkpoint.infos[entry.name] for entry in (embedding, head))
        tied = not readable or (one.shape == two.shape and compare(one, two).equal)
        if tied:
            entries = [entry for entry in entries if entry.part != "output"]
            how = "equal to the embedding" if readable else "not compared: config.json says tied"
            said.append(f"the files hold an output matrix besides, '{head.name}', {how}: counted once")
        else:
            said.append(f"config.json says tied, the files hold another output matrix, '{head.name}': both are counted")
    config = hf.config if hf else None
    if config and tied != says:
        config = flip_tie(config) if tied else msgspec.structs.replace(config, tie_word_embeddings=False)
    matrix = embedding or head
    rows, dim = matrix.shape if matrix else (0, 0)
    return _Tie(tied, config, tuple(entries), (rows, dim), tuple(said))


def _disagreements(checkpoint: Checkpoint, config: ModelConfig, total: int, where: str) -> list[str]:
    """What the files hold that the config does not make, and the other way."""
    from llmcli.mapping import grouped, match

    try:
        matched = match(checkpoint.infos, config, where)
    except CheckpointError as error:
        return [error.message]
    said = []
    if matched.missing:
        said.append(f"missing from the files: {', '.join(grouped(matched.missing))}")
    if matched.left_over:
        said.append(f"in the files, but not in the config's model: {', '.join(grouped(matched.left_over))}")
    said += matched.misshapen
    if matched.not_floats:
        said.append(f"not of a floating-point type: {', '.join(grouped(matched.not_floats))}")
    expected = count(config).total
    if total != expected:
        said.append(f"config.json makes {expected:,} parameters, the files hold {total:,}")
    return said


@cache
def _known_names(family: str | None) -> tuple[dict[str, str], frozenset[str]]:
    """The part of every file tensor that a family's table (or any family's) names, and the buffers, by pattern."""
    from llmcli.mapping import canonical

    part_of: dict[str, str] = {}
    buffers: set[str] = set()
    for known in map(families.get, [family] if family else families.names()):
        for weight in (*known.weights, *known.alternatives):
            part_of.setdefault(_pattern(canonical(weight.hf_name)), families.part_of(weight.name))
        buffers.update(_pattern(canonical(name)) for name in known.ignorable)
    return part_of, frozenset(buffers - part_of.keys())


def _pattern(name: str) -> str:
    """A name with a 0 for each number and each {placeholder}."""
    return re.sub(r"\{\w\}|\d+", "0", name)
