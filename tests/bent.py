"""Tiny checkpoints bent in the ways that real ones are, and what is right for each: the straight logits, or a refusal.

Used by the tests and by scripts/bench_bent.py, which counts how many of them load into a model that is wrong.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hf
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bend:
    """A way to bend the checkpoint of `family`. `right` is what a reader may do with it.

    "same": only load it and compute what the straight one computes. "refuse": only refuse it. "either": one or the
    other. "say": load what is there and say that it is damaged, or refuse it.
    """

    name: str
    family: str
    tied: bool
    right: Literal["same", "refuse", "either", "say"]
    bend: Callable[[Path], None]


def read(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def put(folder: Path, values: Tensors) -> None:
    values = {name: value.clone().contiguous() for name, value in values.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


def tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    """A bend of the tensors alone."""
    return lambda folder: put(folder, change(read(folder)))


def renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    return tensors(lambda values: {change(name): value for name, value in values.items()})


def without(part: str) -> Callable[[Path], None]:
    return tensors(lambda values: {name: value for name, value in values.items() if part not in name})


def config(absent: tuple[str, ...] = (), **changes: Any) -> Callable[[Path], None]:
    """A bend of config.json alone."""

    def bend(folder: Path) -> None:
        table = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in table.items() if k not in absent}))

    return bend


def raw_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def both(*bends: Callable[[Path], None]) -> Callable[[Path], None]:
    def bend(folder: Path) -> None:
        for one in bends:
            one(folder)

    return bend


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A bend of the bytes of the weights' file."""

    def bend(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return bend


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def bend(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + length])
        change(table)
        text = json.dumps(table).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return raw(bend)


def pickled(wrap: Callable[[Tensors], Any] = lambda values: values) -> Callable[[Path], None]:
    def bend(folder: Path) -> None:
        torch.save(wrap(read(folder)), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    return bend


def sharded(change: Callable[[Path, dict[str, Any]], None] = lambda folder, index: None) -> Callable[[Path], None]:
    """Two shards and an index, which `change` may bend before it is written."""

    def bend(folder: Path) -> None:
        values = read(folder)
        (folder / "model.safetensors").unlink()
        index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
        for number, names in enumerate((sorted(values)[::2], sorted(values)[1::2]), 1):
            file = f"model-{number:05d}-of-00002.safetensors"
            save_file({name: values[name] for name in names}, folder / file, metadata={"format": "pt"})
            index["weight_map"] |= dict.fromkeys(names, file)
        index["metadata"]["total_size"] = sum(value.nbytes for value in values.values())
        change(folder, index)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return bend


class Runs:
    """Unpickling it makes a file in the working directory."""

    def __reduce__(self) -> Any:
        return os.system, ("touch it-ran",)


def with_masks(values: Tensors) -> Tensors:
    mask = torch.tril(torch.ones(1, 1, 64, 64, dtype=torch.bool))
    bare = {name.removeprefix("transformer."): value for name, value in values.items()}
    return bare | {
        f"h.{n}.attn.{name}": v for n in (0, 1) for name, v in {"bias": mask, "masked_bias": torch.ones(())}.items()
    }


def linear_layout(values: Tensors) -> Tensors:
    return {n: v.T if ".c_" in n and n.endswith("weight") else v for n, v in values.items()}


def stacked(values: Tensors) -> Tensors:
    result = {name: value for name, value in values.items() if "block_sparse_moe" not in name}
    for layer in (0, 1):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        w1, w2, w3 = (
            torch.stack([values[f"{old}.experts.{e}.{w}.weight"] for e in range(4)]) for w in ("w1", "w2", "w3")
        )
        result |= {f"{new}.experts.gate_up_proj": torch.cat([w1, w3], dim=1), f"{new}.experts.down_proj": w2}
        result[f"{new}.gate.weight"] = values[f"{old}.gate.weight"]
    return result


def meta_names(values: Tensors) -> Tensors:
    words = {
        "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "model.": "",
        "self_attn.q_proj": "attention.wq",
    }
    for old, new in words.items():
        values = {name.replace(old, new): value for name, value in values.items()}
    return values


def with_nan(values: Tensors) -> Tensors:
    values["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    return values


def equal_head(values: Tensors) -> Tensors:
    return values | {"lm_head.weight": values["model.embed_tokens.weight"]}


def head_only(values: Tensors) -> Tensors:
    values["lm_head.weight"] = values.pop("model.embed_tokens.weight")
    return values


def linked_out(folder: Path) -> None:
    outside = folder.with_name(folder.name + "-outside.safetensors")
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


NORM, SECOND = "model.norm.weight", "model-00002-of-00002.safetensors"
EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.{}.mlp.up_proj.weight"

BENDS = (
    # Names
    Bend("names without transformer.", "gpt2", True, "same", renamed(lambda n: n.removeprefix("transformer."))),
    Bend("names without model.", "llama", False, "same", renamed(lambda n: n.removeprefix("model."))),
    Bend("_orig_mod. in front", "gpt2", True, "same", renamed("_orig_mod.{}".format)),
    Bend("module. in front", "gpt2", True, "same", renamed("module.{}".format)),
    Bend("_orig_mod.module. in front", "llama", False, "same", renamed("_orig_mod.module.{}".format)),
    Bend(
        "_orig_mod. around each layer",
        "llama",
        False,
        "same",
        renamed(lambda n: n.replace("layers.0.", "layers.0._orig_mod.")),
    ),
    Bend(
        "a name twice after stripping",
        "llama",
        False,
        "refuse",
        tensors(lambda v: v | {f"module.{EMBED}": v[EMBED] + 1}),
    ),
    Bend("the head as output.weight", "llama", False, "either", renamed(lambda n: n.replace("lm_head", "output"))),
    Bend("Meta's names", "llama", False, "refuse", tensors(meta_names)),
    # Layouts
    Bend("mask buffers of 2019", "gpt2", True, "same", tensors(with_masks)),
    Bend("GPT-2 from Linear layers", "gpt2", True, "either", tensors(linear_layout)),
    Bend(
        "GPT-1 without prefix or metadata",
        "gpt",
        True,
        "same",
        both(renamed(lambda n: n.removeprefix("transformer.")), header(lambda h: h.pop("__metadata__"))),
    ),
    Bend("experts stacked", "mixtral", False, "same", tensors(stacked)),
    Bend(
        "rotary tables in the file",
        "llama",
        False,
        "same",
        tensors(lambda v: v | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}),
    ),
    Bend("one .bin", "gpt2", True, "same", pickled()),
    Bend(".bin wrapped beside an optimizer", "gpt2", True, "either", pickled(lambda v: {"model": v, "optimizer": {}})),
    Bend("shards", "llama", False, "same", sharded()),
    # Tensors that do not fit
    Bend("a layer missing from the file", "llama", False, "refuse", without("layers.1.")),
    Bend("one more layer than the config", "llama", False, "refuse", config(num_hidden_layers=1)),
    Bend("one layer less than the config", "gpt2", True, "refuse", config(n_layer=3)),
    Bend("one tensor missing", "gpt2", True, "refuse", without("h.1.attn.c_attn.bias")),
    Bend(
        "a bias that the config has not",
        "llama",
        False,
        "refuse",
        tensors(lambda v: v | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}),
    ),
    Bend("biases that the file has not", "llama", False, "refuse", config(attention_bias=True, mlp_bias=True)),
    Bend("another vocabulary size", "llama", False, "refuse", config(vocab_size=65)),
    Bend("an expert missing", "mixtral", False, "refuse", without("experts.3.")),
    Bend("key/value heads not in the config", "llama", False, "refuse", config(absent=("num_key_value_heads",))),
    Bend("head_dim not in the config", "gemma", True, "refuse", config(absent=("head_dim",))),
    Bend(
        "another architecture's config",
        "llama",
        False,
        "refuse",
        config(model_type="gpt2", n_embd=16, n_layer=2, n_head=4),
    ),
    Bend(
        "weights of int8",
        "llama",
        False,
        "refuse",
        tensors(lambda v: v | {UP.format(0): torch.ones(24, 16).to(torch.int8)}),
    ),
    Bend("NaN among the weights", "llama", False, "say", tensors(with_nan)),
    # The tie
    Bend("tied by the config, a trained head", "llama", False, "same", config(tie_word_embeddings=True)),
    Bend("tied by default, a trained head", "gpt2", False, "same", config(absent=("tie_word_embeddings",))),
    Bend("untied by the config, no head", "llama", False, "refuse", without("lm_head")),
    Bend(
        "untied by default, no head",
        "llama",
        False,
        "refuse",
        both(without("lm_head"), config(absent=("tie_word_embeddings",))),
    ),
    Bend("tied, an equal head in the file", "llama", True, "same", tensors(equal_head)),
    Bend("tied, the head alone in the file", "llama", True, "same", tensors(head_only)),
    Bend("untied, the head alone in the file", "llama", False, "refuse", without("embed_tokens")),
    Bend("a head of other rows", "llama", False, "refuse", tensors(lambda v: v | {HEAD: torch.ones(66, 16)})),
    # The config
    Bend(
        "rope_theta in the old spelling",
        "llama",
        False,
        "same",
        config(absent=("rope_parameters",), rope_theta=10000.0),
    ),
    Bend("head_dim null", "llama", False, "same", config(head_dim=None)),
    Bend("hidden_act gelu in Gemma", "gemma", True, "same", config(hidden_act="gelu")),
    Bend("n_inner null, n_ctx beside n_positions", "gpt2", True, "same", config(n_inner=None, n_ctx=64)),
    Bend(
        "a quantised config", "llama", False, "refuse", config(quantization_config={"quant_method": "gptq", "bits": 4})
    ),
    Bend("an unknown family", "llama", False, "refuse", config(model_type="llama9")),
    Bend("minus three layers", "llama", False, "refuse", config(num_hidden_layers=-3)),
    Bend("a string for a number", "llama", False, "refuse", config(hidden_size="sixteen")),
    Bend("no JSON", "llama", False, "refuse", raw_config("{")),
    # Files
    Bend("cut off in the middle", "llama", False, "refuse", raw(lambda data: data[: len(data) // 2])),
    Bend("empty", "llama", False, "refuse", raw(lambda data: b"")),
    Bend("an absurd header length", "llama", False, "refuse", raw(lambda data: b"\xff" * 7 + b"\x7f" + data[8:])),
    Bend(
        "overlapping offsets",
        "llama",
        False,
        "refuse",
        header(lambda h: h[UP.format(0)].update(data_offsets=h[UP.format(1)]["data_offsets"])),
    ),
    Bend("an unknown type", "llama", False, "refuse", header(lambda h: h[EMBED].update(dtype="F33"))),
    Bend("a shard missing", "llama", False, "refuse", sharded(lambda folder, index: (folder / SECOND).unlink())),
    Bend(
        "an index of absent tensors",
        "llama",
        False,
        "refuse",
        both(without("norm"), sharded(lambda folder, index: index["weight_map"].update({NORM: SECOND}))),
    ),
    Bend(
        "an index that leads out",
        "llama",
        False,
        "refuse",
        sharded(lambda folder, index: index["weight_map"].update(x="../x.safetensors")),
    ),
    Bend("a link out of the folder", "llama", False, "either", linked_out),
    Bend("an adapter", "llama", False, "refuse", adapter),
    Bend("a pickle that runs code", "gpt2", True, "refuse", pickled(lambda v: {**v, "x": Runs()})),
)


class Straight:
    """The checkpoints before they are bent, made once each, and their logits by transformers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
        self._made: dict[tuple[str, bool], torch.Tensor] = {}

    @torch.no_grad()
    def logits(self, family: str, tied: bool) -> torch.Tensor:
        if (family, tied) not in self._made:
            model = hf.make(family, self.root / f"{family}-{tied}", tie_word_embeddings=tied)
            self._made[family, tied] = model(self.ids).logits
        return self._made[family, tied]

    def bent(self, bend: Bend, folder: Path) -> Path:
        """A bent copy in `folder`, which must not exist."""
        self.logits(bend.family, bend.tied)
        shutil.copytree(self.root / f"{bend.family}-{bend.tied}", folder)
        bend.bend(folder)
        return folder
