"""A file's tensors against a family's table: which of the file's tensors fills which of ours, decided from headers.

Nothing is filled in and nothing dropped unsaid: a tensor that is missing, left over or misshapen is an error, and the
error names them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from llmcli import families, tensors, weight_files
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, dimensions, listing
from llmcli.hf_config import HfConfig
from llmcli.tensors import ReadRows, TensorInfo
from llmcli.tying import Evidence, Request, Side, Tie, decide

EMBEDDING, HEAD, HEAD_BIAS = "token_embeddings.weight", "output_projection.weight", "output_projection.bias"

# torch.compile's, DataParallel's, FSDP's and activation checkpointing's, anywhere in a name
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# a model inside a model, in front of a name
_BASES = {"model", "transformer", "language_model", "base_model"}
NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""In a name: between two dots, a layer's or an expert's, not that of ln_1."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_MOST_PARTS = 300_000  # layers times experts; what says more is no model, and would take minutes to spell out
# What the names of its tensors give away: what the checkpoint is, and what to do with it.
_NOT_WEIGHTS = (
    (
        re.compile(r"\.lora_[AB]\b|\.lora_embedding"),
        "an adapter (LoRA), not a whole model",
        "Merge it into its base model first.",
    ),
    (
        re.compile(r"\.(qweight|qzeros|scales|weight_scale|weight_scale_inv|SCB|absmax|weight_packed)$"),
        "quantised weights",
        "Get the original checkpoint.",
    ),
    (
        re.compile(r"^tok_embeddings\.weight$|\.attention\.wq\.weight$"),
        "Meta's own layout, which interleaves q and k for RoPE",
        "Convert it to Hugging Face's: transformers has convert_llama_weights_to_hf.py.",
    ),
)


class Source(msgspec.Struct, frozen=True):
    """Where one of our tensors lies: in the file's tensor `info`, which is stored (in, out) when `transposed`."""

    tensor: families.Tensor
    info: TensorInfo
    transposed: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint fills a model: `config` with the tie as decided, `sources` for every tensor of it by name."""

    config: ModelConfig
    tie: Tie
    sources: dict[str, Source]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def canonical(name: str) -> str:
    """A tensor's name without the wrappers that compilers, trainers and base models put in front of it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts and parts[0] in _BASES:
        parts.pop(0)
    return ".".join(parts)


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """A file's tensors beside the table of a config: what fills what, and all that does not fit, none of it judged yet.

    `found` is every tensor of ours (by our name) of which the file has one by name, `sources` those whose shape fits
    too. An embedding and an output matrix are never `missing`: the tie table decides what their absence means.
    `other_parts` are the tensors of a larger model (images, sound) around a language model that is `wrapped` in it.
    """

    found: dict[str, tuple[families.Tensor, TensorInfo]]
    sources: dict[str, Source]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    other_parts: tuple[str, ...]
    misshapen: tuple[str, ...]
    not_floats: tuple[str, ...]
    ignored: tuple[str, ...]


def match(infos: Mapping[str, TensorInfo], config: ModelConfig, where: str, wrapped: bool = False) -> Match:
    """Match a file's tensors to a family's table, from headers alone.

    Raises CheckpointError beginning with `where` when two names mean the same tensor, or when the file holds an
    adapter, quantised weights or another project's layout.
    """
    by_name = _by_canonical_name(infos, where)
    if config.num_layers * (config.num_experts or 1) > _MOST_PARTS:
        raise CheckpointError(
            f"{where}: config.json describes {config.num_layers:,} layers of {config.num_experts:,} experts",
            f"The file holds {len(infos):,} tensors: config.json belongs to no model.",
        )
    config = msgspec.structs.replace(config, tie_word_embeddings=False)
    family = families.get(config.family)
    wanted = {tensor.name: tensor for tensor in family.tensors(config)}
    candidates: dict[str, list[families.Tensor]] = {name: [tensor] for name, tensor in wanted.items()}
    for tensor in family.alternative_tensors(config):
        candidates[tensor.name].append(tensor)
    found = {
        name: (held, by_name[canonical(held.hf_name)])
        for name, options in candidates.items()
        if (held := next((t for t in options if canonical(t.hf_name) in by_name), None))
    }

    linear = _is_linear_layout(found.values())
    sources, misshapen = {}, []
    # An embedding and an output matrix of two shapes are a question for the tie table, which names both.
    apart = {EMBEDDING, HEAD} <= found.keys() and found[EMBEDDING][1].shape != found[HEAD][1].shape
    for name, (tensor, info) in found.items():
        shape = tensor.hf_shape[::-1] if tensor.transposed and linear else tensor.hf_shape
        if info.shape == shape:
            sources[name] = Source(tensor, info, tensor.transposed and not linear)
        elif not (apart and name in (EMBEDDING, HEAD)):
            misshapen.append(f"{info.name} is {dimensions(info.shape)}, the config makes it {dimensions(shape)}")
    missing = [tensor.hf_name for name, tensor in wanted.items() if name not in found and name not in (EMBEDDING, HEAD)]
    used = {canonical(info.name) for _, info in found.values()}
    ignorable = _patterns(family.ignorable)
    ignored = sorted(info.name for key, info in by_name.items() if key not in used and ignorable.fullmatch(key))
    left_over = [info.name for key, info in by_name.items() if key not in used and not ignorable.fullmatch(key)]
    own = {_first_word(tensor.hf_name) for tensor in wanted.values()}
    other_parts = [name for name in left_over if wrapped and _first_word(name) not in own]
    not_floats = sorted(info.name for _, info in found.values() if info.dtype not in _FLOATS)
    return Match(
        found=found,
        sources=sources,
        missing=tuple(dict.fromkeys(missing)),
        left_over=tuple(sorted(set(left_over) - set(other_parts))),
        other_parts=tuple(sorted(other_parts)),
        misshapen=tuple(misshapen),
        not_floats=tuple(not_floats),
        ignored=tuple(ignored),
    )


def plan(
    checkpoint: weight_files.Checkpoint,
    hf: HfConfig,
    where: str,
    *,
    request: Request = "auto",
    keep: Side | None = None,
    read: ReadRows | None = tensors.read_rows,
) -> Plan:
    """Match a file's tensors to the table of its config and decide the tie.

    `read` is called only to compare an embedding and an output matrix; None says that values are out of reach.
    Raises CheckpointError, beginning with `where`, for a file that does not hold what its config describes.
    """
    family = families.get(hf.config.family)
    matched = match(checkpoint.infos, hf.config, where, hf.wrapped)
    sources = matched.sources
    problems = mismatches(matched)
    try:
        if not (problems and EMBEDDING in matched.found and HEAD in matched.found):
            tie = decide(_evidence(matched, hf, family.tied_in_hf, request, keep, read), request, keep)
    except CheckpointError as error:
        if not problems:
            raise CheckpointError(f"{where}: {error.message}", error.hint) from None
        problems.append(error.message)
    if problems:
        raise CheckpointError(
            f"{where}: the file does not hold what its config describes ({hf.config.family}, "
            f"{hf.config.num_layers} layers, embed_dim {hf.config.embed_dim})\n  " + "\n  ".join(problems),
            _what_to_do(matched, checkpoint.infos, family.name, len(problems) > bool(matched.not_floats)),
        )

    warnings = [*checkpoint.notes, *hf.warnings, *([tie.warning] if tie.warning else [])]
    sides = {"input": EMBEDDING, "output": HEAD}
    filled = {name: source for name, source in sources.items() if name not in sides.values()}
    filled[EMBEDDING] = sources[sides[tie.embedding_from]]
    if tie.head_from:
        filled[HEAD] = sources[sides[tie.head_from]]
    elif HEAD_BIAS in filled:
        warnings.append(f"the output's bias {filled.pop(HEAD_BIAS).info.name} is dropped: a tied output has none")
    decided = families.complete(
        msgspec.structs.replace(
            hf.config,
            tie_word_embeddings=tie.decision == "tie",
            head_bias=HEAD_BIAS in filled,
        )
    )
    order = [tensor.name for tensor in family.tensors(decided)]
    types = sorted({filled[name].info.dtype for name in order})
    mixed = [f"the file mixes {' and '.join(types)}: all are widened"] if len(types) > 1 else []
    return Plan(
        config=decided,
        tie=tie,
        sources={name: filled[name] for name in order},
        ignored=matched.ignored,
        warnings=tuple(warnings),
        notes=(*hf.notes, *left_alone(matched), *mixed),
    )


def left_alone(matched: Match) -> list[str]:
    """A line that names the other parts of a larger model, or none."""
    parts = sorted({_first_word(name) for name in matched.other_parts})
    return [f"{len(matched.other_parts)} tensors of other parts are left alone: {', '.join(parts)}"] if parts else []


def resembled(names: Iterable[str]) -> list[str]:
    """The families whose tables have most of these names (layers and experts without their numbers), if any has.

    Among equals, those of which the fewest names are lacking that each of their models has.
    """
    held = {_numberless(name) for name in names}
    score: dict[str, tuple[int, int]] = {}
    for family in families.names():
        table = families.get(family)
        known = {_numberless(weight.hf_name.format(i=0, e=0)) for weight in (*table.weights, *table.alternatives)}
        always = {
            _numberless(weight.hf_name.format(i=0, e=0))
            for weight in table.weights
            if not (weight.when or weight.unless_tied)
        }
        score[family] = len(held & known) - len(held - known), -len(always - held)
    best = max(score.values())
    return [family for family, points in score.items() if points == best and best[0] > 0]


def _numberless(name: str) -> str:
    """A canonical name without its numbers; of a table's line `hf_name.format(i=0, e=0)` is such a name."""
    return NUMBER.sub("", canonical(name))


def _what_to_do(matched: Match, names: Iterable[str], family: str, others: bool) -> str:
    """The hint where a file does not hold what its config describes; `others`: not only types are wrong."""
    hints = []
    if matched.not_floats:
        hints.append("Quantised weights are not computed with: get the original checkpoint.")
    if others:
        named = matched.missing or matched.left_over
        alike = resembled(names) if named else []
        hints.append(
            f"The tensors are named as those of {', '.join(alike)}; config.json says {family}."
            if alike and family not in alike
            else "Either files are missing or damaged, or config.json belongs to another model."
        )
    return " ".join((*hints, "No weights were read."))


def _first_word(name: str) -> str:
    return canonical(name).partition(".")[0]


def _by_canonical_name(infos: Mapping[str, TensorInfo], where: str) -> dict[str, TensorInfo]:
    by_name: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        for pattern, what, hint in _NOT_WEIGHTS:
            if pattern.search(name):
                raise CheckpointError(f"{where}: tensor '{name}' belongs to {what}", hint)
        key = canonical(name)
        if key in by_name:
            raise CheckpointError(
                f"{where}: '{by_name[key].name}' and '{name}' are the same tensor, '{key}'", "Keep one of them."
            )
        by_name[key] = info
    return by_name


def _is_linear_layout(found: Iterable[tuple[families.Tensor, TensorInfo]]) -> bool:
    """Whether a file whose table says Conv1D (in, out) was saved from Linear layers (out, in) instead.

    A square matrix cannot tell, so the file's matrices that are not square decide for all of them.
    """
    telling = [(t, info) for t, info in found if t.transposed and t.hf_shape != t.hf_shape[::-1]]
    return bool(telling) and all(info.shape == tensor.hf_shape[::-1] for tensor, info in telling)


def _patterns(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(canonical(name)).replace(r"\{i\}", r"\d+") for name in names) or r"(?!)")


def _evidence(
    matched: Match, hf: HfConfig, tied_in_family: bool, request: Request, keep: Side | None, read: ReadRows | None
) -> Evidence:
    """What the tie table asks. Values are compared only as far as its answer depends on them."""
    found, sources = matched.found, matched.sources
    equal = largest = None
    if EMBEDDING in sources and HEAD in sources and read:
        pair = (sources[EMBEDDING].info, sources[HEAD].info, read)
        equal = tensors.equal(*pair)
        if not equal and ((request == "tie" and keep is None) or (request == "auto" and hf.tie_flag)):
            largest = tensors.max_difference(*pair)
    return Evidence(
        embedding=found[EMBEDDING][1].shape if EMBEDDING in found else None,
        head=found[HEAD][1].shape if HEAD in found else None,
        equal=equal,
        max_difference=largest,
        flag=hf.tie_flag,
        tied_in_family=tied_in_family,
    )


def mismatches(matched: Match) -> list[str]:
    """Why a file does not hold what its config describes, a line for each kind; empty where it does."""
    problems = []
    if missing := matched.missing:
        problems.append(f"missing ({len(missing)}): {listing(grouped(missing))}")
    if left_over := matched.left_over:
        problems.append(f"left over ({len(left_over)}): {listing(grouped(left_over))}")
    if misshapen := matched.misshapen:
        problems.append(f"misshapen ({len(misshapen)}): {listing(grouped(misshapen), between='; ')}")
    if not_floats := matched.not_floats:
        problems.append(
            f"not of a floating-point type, so perhaps quantised ({len(not_floats)}): {listing(grouped(not_floats))}"
        )
    return problems


def grouped(names: Iterable[str]) -> list[str]:
    """Names that differ only in their numbers, as one: `h.{0-11}.ln_1.weight`, `layers.{0-3}.experts.{0-7}.w1`."""
    # Each name is its text with the numbers out, and the numbers; they are put together from the last to the first.
    keys = [(tuple(re.split(r"\d+", name)), tuple(re.findall(r"\d+", name))) for name in dict.fromkeys(names)]
    for axis in range(max((len(numbers) for _, numbers in keys), default=0) - 1, -1, -1):
        merged: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
        whole: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        for text, numbers in keys:
            if axis >= len(numbers):
                whole.append((text, numbers))
            else:
                rest = (*numbers[:axis], "", *numbers[axis + 1 :])
                merged.setdefault((text, rest), []).append(int(numbers[axis]))
        keys = whole + [
            (text, (*rest[:axis], ranges(numbers), *rest[axis + 1 :])) for (text, rest), numbers in merged.items()
        ]
    return ["".join(a + b for a, b in zip(text, (*numbers, ""), strict=True)) for text, numbers in keys]


def may_be_zero(name: str, family: str) -> bool:
    """Whether a tensor of ours may well hold nothing but zeros: biases do, and norms that multiply by 1 + w."""
    return name.endswith("bias") or ("norm" in name and families.get(family).norm == "rms_plus_one")


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2 and 5 as `{0-2,5}`, one number as itself."""
    numbers = list(numbers)
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
