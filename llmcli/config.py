"""Configurations as frozen structs, read strictly from TOML or JSON; presets by name.

A config of ours speaks the field's words. What a key left out means (`None` here) may depend on the family:
`families.complete` fills it in.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from llmcli.errors import ConfigError, LlmcliError, UsageError, remedy

# A size beyond these bounds is a typing error, not a model: the largest public decoders stay far below them.
Size = Annotated[int, Meta(ge=1, le=100_000_000)]
Layers = Annotated[int, Meta(ge=0, le=10_000)]
Steps = Annotated[int, Meta(ge=0, le=10_000_000_000)]  # at a thousandth of a second each, four months
Probability = Annotated[float, Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, Meta(gt=0.0, le=1e300)]  # no infinity: JSON cannot hold it
NotNegative = Annotated[float, Meta(ge=0.0, le=1e300)]


MAX_BYTES = 10_000_000
"""The longest configuration read; more is something else under its name."""

WRITING = "`llmcli presets gpt2` shows a model's file, `llmcli train --print-config` every key of a recipe."
"""What to do about a configuration that cannot be read."""


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How RoPE's frequencies are stretched past the trained context.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the slow ones, keeps the fast ones and
    blends between. `yarn` (arXiv:2309.00071) blends by dimension and scales cos and sin by `attention_factor`.
    """

    type: Literal["linear", "llama3", "yarn"]
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only model in sizes and switches. Sizes are counts of rows, dimensions or positions.

    `window_layers` are the layers (from 0) whose attention sees only the last `window_size` positions; absent, all do.
    With `local_rope_theta` those layers turn by it instead of `rope_theta`, unscaled. `nope_layers` have no RoPE at
    all, and `rotary_size` is how many dimensions of a head RoPE turns. Attention scores are divided by the root of
    `query_scale` (head_size where absent); a softcap c bounds scores or logits x to c·tanh(x / c).
    """

    family: str
    vocab_size: Size
    embed_dim: Size
    num_layers: Layers
    num_heads: Size
    num_kv_heads: Size | None = None
    head_size: Size | None = None
    hidden_dim: Size | None = None
    max_position_embeddings: Size = 1024
    window_size: Size | None = None
    window_layers: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    num_experts: Size | None = None
    top_k_experts: Size | None = None
    renormalise_experts: bool | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeScaling | None = None
    local_rope_theta: Positive | None = None
    rotary_size: Size | None = None
    nope_layers: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    query_scale: Size | None = None
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    norm_eps: Positive | None = None
    dropout: Probability = 0.0
    bias: bool | None = None
    head_bias: bool | None = None
    tie_word_embeddings: bool = False
    scale_embeddings: bool = False
    initializer_range: Positive = 0.02

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * (self.head_size or 0)

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together."""
        return (self.num_kv_heads or 0) * (self.head_size or 0)

    def window_of(self, layer: int) -> int | None:
        """How many positions a layer's queries see, themselves included; None for all."""
        return self.window_size if self.window_layers is None or layer in self.window_layers else None

    def rope_of(self, layer: int) -> Literal["global", "local"] | None:
        """Which of the model's rotations a layer uses; None for none."""
        if self.rope_theta is None or layer in (self.nope_layers or ()):
            return None
        return "local" if self.local_rope_theta is not None and self.window_of(layer) else "global"


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the text comes from and how it becomes token ids. `path = None` is the corpus that CPython carries.

    A path is a file, a folder or a pattern (`texts/*.jsonl.gz`), or a list of them. `tokenizer` is `bpe` (trained on
    the training text to the model's vocab_size), `char`, `byte`, or where a tokenizer lies. `field` is the key of the
    text in JSON lines and parquet. `shuffle`: `windows` cuts the text into windows and visits each once an epoch,
    `random` starts them anywhere.
    """

    path: str | tuple[str, ...] | None = None
    validation_path: str | tuple[str, ...] | None = None
    validation_fraction: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.1
    tokenizer: str = "bpe"
    field: str = "text"
    encoding: str = "auto"
    shuffle: Literal["windows", "random"] = "windows"


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run. Lengths are in steps unless the name says otherwise; a step is one update of the weights.

    `batch_size` sequences go through the model at a time in each process; a step adds up `accumulation` of them.
    `context` None is the model's max_position_embeddings, at most 1,024. `warmup_steps` lead up to `lr`; `schedule`
    leads from there to `min_lr` at `schedule_steps` (None: `max_steps`); `wsd` stays at `lr` until the last
    `decay_fraction` of them. An evaluation reads as much of the validation text as `eval_batches` steps would (0: all);
    `save_every` None saves at each. `keep` so many older checkpoints besides the last, `patience` so many evaluations
    without a better one (0: no limit), `time_limit` in seconds (0: none). `auto` finds the device, the precision and
    whether to compile by what is faster here; several processes are `ddp` unless told to be `fsdp`.
    """

    context: Size | None = None
    batch_size: Size = 16
    accumulation: Size = 1
    max_steps: Steps = 1000
    lr: Positive = 1e-3
    min_lr: NotNegative = 1e-4
    warmup_steps: Steps = 100
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    schedule_steps: Annotated[int, Meta(ge=1, le=10_000_000_000)] | None = None
    decay_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.2
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    decay_embeddings: bool = True
    grad_clip: NotNegative = 1.0
    eval_every: Size = 100
    eval_batches: Annotated[int, Meta(ge=0)] = 20
    save_every: Size | None = None
    sample_every: Annotated[int, Meta(ge=0)] = 0
    sample_prompt: str = ""
    sample_tokens: Size = 64
    log_every: Size = 10
    keep: Annotated[int, Meta(ge=0)] = 0
    patience: Annotated[int, Meta(ge=0)] = 0
    time_limit: NotNegative = 0.0
    seed: Annotated[int, Meta(ge=0)] = 1337
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training recipe's file holds: the tables `[model]`, `[data]` and `[train]`."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()


def presets() -> dict[str, Path]:
    """Every preset by name: the files of `configs/`, inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))} if folder else {}


def read_table(path: Path) -> dict[str, Any]:
    """The table in a TOML or JSON file. Raises ConfigError, naming the file, when it cannot be read as one."""
    try:
        if path.exists() and not path.is_file():  # a device has no end
            raise ConfigError(f"{path}: not a file", WRITING)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes are too many for a configuration", WRITING)
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", remedy(error)) from None
    try:
        text = raw.decode("utf-8-sig")
        table = msgspec.toml.decode(text) if path.suffix == ".toml" else json.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start:,})", WRITING
        ) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"{path}: not valid {kind}: {error}", WRITING) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: holds {type(table).__name__} where a table of keys belongs", WRITING)
    return table


T = TypeVar("T", bound=msgspec.Struct)


def parse(table: dict[str, Any], kind: type[T], source: str, origins: dict[str, str] | None = None) -> T:
    """A table of keys as the struct `kind`. Raises ConfigError naming `source`, the key, and the nearest known key.

    `origins` says of keys ("train.lr") that they come from elsewhere. One from an option raises UsageError.
    """

    def refusal(key: str, what: str, hint: str = "") -> LlmcliError:
        section, _, rest = key.partition(".")
        inner = rest.partition(".")[0]
        known = origins or {}
        origin = known.get(key) or known.get(f"{section}.{inner}", source)
        if origin == "--set":
            given = table.get(section, {}).get(inner)
            where = f"--set {key}={given}" if "unknown key" not in what else "--set"
            return UsageError(f"{where}: {what}", hint or "`llmcli train --print-config` shows what it is without it.")
        said = f"{origin}: {what}" if not key or "unknown key" in what else f"{origin}: {key}: {what}"
        return (UsageError if origin.startswith("--") else ConfigError)(said, hint or WRITING)

    if wrong := [key for key in table if not isinstance(key, str)]:
        raise ConfigError(f"{source}: {wrong[0]!r}: not the name of a key", WRITING)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        where = where.strip("`").removeprefix("$").removeprefix(".")
        unknown = re.search(r"unknown field `(.*)`", message)
        if word := re.fullmatch(r"Invalid enum value '(.*)'", message):
            words = _words(kind, where)
            near = difflib.get_close_matches(word[1], words, n=1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise refusal(where, f"unknown value '{word[1]}'", f"{hint}Known: {', '.join(words)}.") from None
        if not unknown:
            what = re.sub(r"^Object missing required field `(.*)`$", r"the key '\1' is missing", message)
            raise refusal(where, f"{what[:1].lower()}{what[1:]}") from None
        struct: Any = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}.get(where, kind)
        known = [field.name for field in msgspec.structs.fields(struct)]
        near = difflib.get_close_matches(unknown[1], known, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Known keys: {', '.join(known)}."
        key = f"{where}.{unknown[1]}" if where else unknown[1]
        raise refusal(key, f"unknown key '{key}'", hint) from None


def _words(kind: Any, where: str) -> tuple[str, ...]:
    """The words that the key `where` ("train.schedule") of a struct may hold."""
    for key in where.split("."):
        kinds = get_args(kind) or (kind,)  # of `RopeScaling | None` the struct
        structs = [inner for inner in kinds if isinstance(inner, type) and issubclass(inner, msgspec.Struct)]
        kind = next(field.type for inner in structs for field in msgspec.structs.fields(inner) if field.name == key)
    return get_args(kind)


def model_table(table: dict[str, Any], source: str) -> dict[str, Any]:
    """The model's keys in a recipe (its `[model]`) or in a file that holds nothing else. Raises ConfigError."""
    inner = table.get("model", table)
    if not isinstance(inner, dict):
        raise ConfigError(f"{source}: model: holds {type(inner).__name__} where a table of keys belongs", WRITING)
    return inner


def with_settings(table: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """A copy of a recipe's table with `--set section.key=value` applied; values are read as TOML, else as text."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    for setting in settings:
        name, equals, text = setting.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key) or section not in ("model", "data", "train"):
            raise UsageError(
                f"--set {setting}: not of the form section.key=value",
                "For example: --set train.lr=3e-4 (sections: model, data, train).",
            )
        try:
            value = msgspec.toml.decode(f"value = {text}")["value"]
        except (msgspec.DecodeError, KeyError):
            value = text
        result.setdefault(section, {})[key] = value
    return result


class Layered(msgspec.Struct, frozen=True):
    """A recipe put together from layers, and for each key that was given ("train.lr") the layer it came from."""

    recipe: Recipe
    origins: dict[str, str]


def layered(*layers: tuple[str, dict[str, Any]]) -> Layered:
    """A recipe from (source, table) pairs, later ones over earlier ones. Raises ConfigError naming the source."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, table in layers:
        for section, values in table.items():
            if not isinstance(values, dict):
                parse({section: values}, Recipe, source)  # unknown, or not a table: its message says which
            merged.setdefault(section, {}).update(values)
            origins.update(dict.fromkeys((f"{section}.{key}" for key in values), source))
    return Layered(parse(merged, Recipe, " + ".join(source for source, table in layers if table), origins), origins)


def find_recipe(name: str) -> tuple[str, dict[str, Any]]:
    """The source and the table of a recipe: a preset's name or a file. A file that is all model is a recipe's [model].

    Raises UsageError when nothing of that name exists, and ConfigError when it cannot be read.
    """
    known, path = presets(), Path(name)
    if path.exists() and not path.is_file() and name not in known:
        what = "a folder" if path.is_dir() else "neither a file nor a folder"
        raise UsageError(f"{name}: {what}, not a recipe", "Give a preset's name or a recipe file.")
    if not path.is_file() and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"{name}: no such recipe file, and no preset of that name",
            (f"Did you mean '{near[0]}'? " if near else "") + f"Presets: {', '.join(known)}.",
        )
    source = path if path.is_file() else known[name]
    table = read_table(source)
    return (str(source) if path.is_file() else f"preset {name}"), table if "model" in table else {"model": table}
