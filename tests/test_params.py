"""Counts are those of the real models and of the real files; what a config or an index claims is only compared."""

from __future__ import annotations

import hashlib
import json
import logging
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hf import FAMILIES, make
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import llmcli
from llmcli import config, families, hf_config, params
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, ConfigError, UsageError
from llmcli.model import Decoder
from llmcli.params import breakdown, count, flip_tie, take
from llmcli.targets import read_config

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"

PUBLISHED = {  # total as configured, the embedding, and the total with the tie the other way
    "gpt1": (116_534_784, 40_478 * 768, 116_534_784 + 40_478 * 768 + 40_478),
    "gpt2": (124_439_808, 50_257 * 768, 163_087_441),
    "gpt2-medium": (354_823_168, 50_257 * 1024, 354_823_168 + 50_257 * 1025),
    "gpt2-large": (774_030_080, 50_257 * 1280, 774_030_080 + 50_257 * 1281),
    "gpt2-xl": (1_557_611_200, 50_257 * 1600, 1_557_611_200 + 50_257 * 1601),
    "gemma-2b": (2_506_172_416, 524_288_000, 3_030_460_416),
    "gemma-7b": (8_537_680_896, 256_000 * 3072, 8_537_680_896 + 256_000 * 3072),
    "llama-7b": (6_738_415_616, 131_072_000, 6_738_415_616 - 131_072_000),
    "mistral-7b": (7_241_732_096, 131_072_000, 7_241_732_096 - 131_072_000),
    "mixtral-8x7b": (46_702_792_704, 131_072_000, 46_702_792_704 - 131_072_000),
    "glasslm": (852_608, 131_072, 852_608 + 131_072),
}
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def on_meta(made: ModelConfig) -> Any:
    """transformers' own model of a config, without memory."""
    table = hf_config.write(made, "bfloat16")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.CONFIG_MAPPING[table.pop("model_type")](**table)
        )


def numbers(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Configs.


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_counts_what_is_published_and_what_transformers_builds(name: str) -> None:
    made = read_config(name)
    counted = count(made)
    total, embedding, other = PUBLISHED[name]
    assert counted.total == total == numbers(on_meta(made))
    assert counted.embedding == counted.parts["embedding"] == embedding
    assert {counted.total_tied, counted.total_untied} == {total, other}
    assert counted.total == (counted.total_tied if counted.tie_word_embeddings else counted.total_untied)
    assert counted.saved_by_tying == abs(total - other)


@pytest.mark.parametrize("name", config.presets())
def test_one_layer_stands_for_all_and_the_parts_add_up(name: str) -> None:
    for made in (read_config(name), flip_tie(read_config(name))):
        counted = count(made)
        every = sum(prod(tensor.shape) for tensor in families.get(made.family).tensors(made))
        assert counted.total == every == sum(counted.parts.values())
        if made.num_experts is None:
            assert counted.active == counted.total


@settings(deadline=None)  # a first import takes longer
@given(
    family=st.sampled_from(families.names()),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    layers=st.integers(0, 3),
    vocab=st.integers(1, 40),
    hidden=st.integers(1, 24),
    tied=st.booleans(),
)
def test_a_count_is_what_the_decoder_holds(
    family: str, heads: tuple[int, int], layers: int, vocab: int, hidden: int, tied: bool
) -> None:
    known = families.get(family)
    num_heads = heads[0] * heads[1]
    made = ModelConfig(
        family=family,
        vocab_size=vocab,
        embed_dim=4 * num_heads,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=heads[1] if "num_kv_heads" in known.keys else None,
        hidden_dim=hidden,
        num_experts=5 if "num_experts" in known.keys else None,
        top_k_experts=2 if "num_experts" in known.keys else None,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        assert count(made).total == numbers(Decoder(made))


@pytest.mark.parametrize(("vocab", "dim", "difference"), [(1000, 256, 257_000), (50, 32, 1_650)])
@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_an_untied_head_of_gpt_has_a_bias(family: str, vocab: int, dim: int, difference: int) -> None:
    table = {"family": family, "vocab_size": vocab, "embed_dim": dim, "num_heads": 4, "num_layers": 2}
    untied, tied = llmcli.count(table), llmcli.count({**table, "tie_word_embeddings": True})
    assert untied.total - tied.total == difference == untied.saved_by_tying == tied.saved_by_tying
    assert llmcli.count({**table, "head_bias": False}).total - tied.total == vocab * dim


@pytest.mark.parametrize("family", sorted(set(families.names()) - {"gpt", "gpt2"}))
def test_any_other_head_is_its_matrix_alone(family: str) -> None:
    made = ModelConfig(family=family, vocab_size=100, embed_dim=32, num_heads=4, num_layers=2)
    assert count(made).total_untied - count(made).total_tied == 100 * 32


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_mixture_is_active_in_all_but_the_experts_that_are_not_chosen(name: str) -> None:
    made = read_config(name)
    experts = others = 0
    for key, value in on_meta(made).named_parameters():
        if ".experts." in key:
            experts += value.numel()
        else:
            others += value.numel()
    assert made.num_experts and made.top_k_experts
    active = count(made).active
    assert active == others + experts // made.num_experts * made.top_k_experts
    assert active == {"mixtral-8x7b": 12_879_925_248, "qwen3-30b-a3b": 3_353_032_704}[name]


def test_llama_405b_from_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    counted = take(tmp_path / "config.json").count
    assert counted.total == 405_853_388_800
    assert counted.embedding == 128_256 * 16_384


@pytest.mark.parametrize("name", ["gpt1", "gemma-2b", "mixtral-8x7b"])
@pytest.mark.parametrize("by", ["part", "layer", "tensor"])
def test_a_breakdown_adds_up(name: str, by: params.By) -> None:
    counted = take(name)
    lines = breakdown(counted, by)
    assert sum(line.parameters for line in lines) == counted.count.total
    assert sum(line.share for line in lines) == pytest.approx(1)
    assert len({line.name for line in lines}) == len(lines)
    if by == "tensor":
        assert all(line.parameters == prod(line.shape or ()) for line in lines)


def test_layers_stand_between_what_is_before_and_behind_them() -> None:
    lines = breakdown(take("gpt2"), "layer")
    assert [line.name for line in lines] == [
        "embedding",
        "positions",
        *(f"layer {n}" for n in range(12)),
        "final_norm",
    ]
    # GPT-2's block: 12·d² + 13·d (four matrices of attention, two of the feed-forward, biases and two norms).
    assert {line.parameters for line in lines[2:-1]} == {12 * 768**2 + 13 * 768}


def test_the_embedding_share_counts_a_heads_own_matrix() -> None:
    llama, gpt = (params.embedding_share(take(name)) for name in ("llama-7b", "gpt1"))
    assert llama.share == pytest.approx(0.01945, abs=1e-5)
    assert llama.share_with_head == pytest.approx(2 * llama.share)
    assert gpt.share == gpt.share_with_head == pytest.approx(0.26676, abs=1e-5)


# Files.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied GPT-2 of 64 tokens and width 16, as transformers saves it."""
    make("gpt2", tmp_path, bos_token_id=0, eos_token_id=0)
    return tmp_path


def bend(folder: Path, change: Any) -> None:
    """Rewrite a checkpoint's tensors with `change(tensors)` applied."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def bend_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def said(counted: params.Counted) -> str:
    assert counted.files is not None
    return "; ".join(counted.files.disagreements)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_counts_what_its_files_hold(family: str, tied: bool, tmp_path: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = make(family, tmp_path, tie_word_embeddings=tied)
    counted = take(tmp_path)
    assert counted.files and counted.config
    assert counted.count.total == numbers(model)
    assert counted.count == count(counted.config)
    assert counted.count.tie_word_embeddings is tied
    assert (counted.files.disagreements, counted.notes, counted.files.buffers) == ((), (), 0)
    for by in ("layer", "tensor"):
        assert sum(line.parameters for line in breakdown(counted, by)) == counted.count.total
    ours = breakdown(msgspec.structs.replace(counted, entries=None), "layer")
    assert {line.name: line.parameters for line in breakdown(counted, "layer")} == {
        line.name: line.parameters for line in ours
    }

    # The file alone tells the same, only not which family it is nor how many experts a token uses.
    (tmp_path / "config.json").unlink()
    alone = take(tmp_path / "model.safetensors")
    assert (alone.count.family, alone.config) == (params.UNKNOWN, None)
    assert alone.count.parts == counted.count.parts
    assert alone.count.tie_word_embeddings is tied
    assert "no config.json" in alone.notes[0]
    assert ("active counts all" in said(alone)) == ("experts" in alone.count.parts)


def test_buffers_are_no_parameters(folder: Path) -> None:
    before = take(folder).count

    def masks(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
            tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    bend(folder, masks)
    counted = take(folder)
    assert counted.count == before
    assert counted.files and counted.files.buffers == 2 * (64 * 64 + 1)
    assert said(counted) == ""


def test_an_output_matrix_equal_to_a_tied_embedding_is_counted_once(folder: Path) -> None:
    before = take(folder).count
    bend(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    counted = take(folder)
    assert counted.count == before
    assert "'lm_head.weight', equal to the embedding: counted once" in said(counted)


def test_two_different_matrices_are_both_counted_whatever_the_flag_says(folder: Path) -> None:
    before = take(folder).count
    bend(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))
    counted = take(folder)
    assert counted.count.total == before.total + 64 * 16
    assert not counted.count.tie_word_embeddings
    assert (counted.count.total_tied, counted.count.saved_by_tying) == (before.total, 64 * 16)
    assert "says tied, the files hold another output matrix" in said(counted)


def test_untied_in_the_config_and_no_output_matrix_is_said(tmp_path: Path) -> None:
    make("llama", tmp_path, tie_word_embeddings=True)
    tied = take(tmp_path).count
    bend_config(tmp_path, tie_word_embeddings=False)
    counted = take(tmp_path)
    assert counted.count == tied
    assert said(counted) == "config.json says untied, the files hold no output matrix: counted as tied"


def test_only_the_output_matrix_of_a_tied_model_is_its_embedding(folder: Path) -> None:
    before = take(folder).count
    bend(folder, lambda t: t.update({"lm_head.weight": t.pop("transformer.wte.weight")}))
    assert take(folder).count == before


def test_what_cannot_be_compared_is_believed_and_said(folder: Path) -> None:
    bend(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))
    from llmcli.weight_files import read_checkpoint

    hf = hf_config.read(json.loads((folder / "config.json").read_text()), "config.json")
    counted = params.count_files(read_checkpoint(folder), hf, "remote", readable=False)
    assert counted.count.tie_word_embeddings
    assert "not compared" in said(counted)


def test_rows_that_the_config_does_not_know_are_counted_and_said(folder: Path) -> None:
    before = take(folder).count.total
    bend(folder, lambda t: t.update({"transformer.wte.weight": torch.zeros(70, 16)}))
    counted = take(folder)
    assert counted.count.total == before + 6 * 16
    assert "70 x 16, the config makes it 64 x 16" in said(counted)
    assert f"config.json makes {before:,} parameters, the files hold {before + 96:,}" in said(counted)
    assert counted.files and (counted.files.rows, counted.files.config_total) == (70, before)


def test_missing_and_left_over_tensors_are_counted_as_they_are_and_said(folder: Path) -> None:
    before = take(folder).count

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".h.1." in name]:
            del tensors[name]
        tensors["transformer.adapter.weight"] = torch.zeros(3, 5)

    bend(folder, change)
    counted = take(folder)
    layer = 12 * 16**2 + 13 * 16
    assert counted.count.total == before.total - layer + 15
    assert counted.count.parts["other"] == 15
    assert "missing from the files: transformer.h.1" in said(counted)
    assert "not in the config's model: transformer.adapter.weight" in said(counted)


def test_the_index_is_not_believed(tmp_path: Path) -> None:
    model = make("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {
        "metadata": {"total_size": 12345},
        "weight_map": {name: file for file, held in shards.items() for name in held},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    counted = take(tmp_path)
    assert counted.count.total == numbers(model)
    assert said(counted) == f"the index claims 12345 bytes of tensors, the shards hold {4 * numbers(model)}"
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        take(tmp_path)


def test_prefixes_of_compilers_and_trainers_change_nothing(folder: Path) -> None:
    before = take(folder).count
    bend(folder, lambda t: [t.update({f"_orig_mod.module.{name}": t.pop(name)}) for name in list(t)])
    assert take(folder).count == before


def test_padding_rows_are_those_without_a_token(folder: Path) -> None:
    assert take(folder).files.padding_rows is None  # type: ignore[union-attr]
    vocabulary = {f"t{n}": n for n in range(50)}
    added = [{"id": 60, "content": "<end>"}]
    for model in ({"type": "BPE", "vocab": vocabulary, "merges": []}, {"vocab": [[f"t{n}", 0.0] for n in range(50)]}):
        for tokens, size in ((added, 61), ([], 50)):
            (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": tokens}))
            assert take(folder).files.padding_rows == 64 - size  # type: ignore[union-attr]
    (folder / "tokenizer.json").write_text("{")
    assert take(folder).files.padding_rows is None  # type: ignore[union-attr]


def test_a_family_that_is_not_known_is_counted_by_its_files(folder: Path) -> None:
    before = take(folder).count
    bend_config(folder, model_type="mamba")
    counted = take(folder)
    assert (counted.count.total, counted.count.family) == (before.total, params.UNKNOWN)
    assert "model_type 'mamba'" in counted.notes[0] and "counted from the files alone" in counted.notes[0]


def test_adapters_and_quantised_files_are_counted_as_they_are_and_named(folder: Path) -> None:
    bend(folder, lambda t: t.update({"transformer.h.0.attn.c_attn.lora_A.weight": torch.zeros(2, 16)}))
    counted = take(folder)
    assert counted.count.parts["other"] == 32
    assert "adapter" in said(counted)


def test_a_folder_without_weights_is_counted_by_its_config(folder: Path) -> None:
    before = take(folder).count
    (folder / "model.safetensors").unlink()
    counted = take(folder)
    assert (counted.count, counted.files) == (before, None)
    assert counted.notes == (f"{folder}: no safetensors files there, counted from config.json",)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        take(folder)


def test_a_damaged_file_is_refused_and_nothing_guessed(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        take(folder)
    with pytest.raises(UsageError):
        take(folder / "nothing-there")
    bend_config(folder, n_embd=-1)
    with pytest.raises(ConfigError, match="n_embd"):
        take(folder / "config.json")


def test_counting_changes_no_file(folder: Path) -> None:
    def digests() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    bend(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    before = digests()
    take(folder)
    assert digests() == before


@pytest.mark.skipif(not STORIES.exists(), reason="stories260K is not here")
def test_stories260k() -> None:
    counted = take(STORIES)
    assert counted.files
    assert (counted.count.total, counted.count.total_untied) == (260_032, 260_032 + 512 * 64)
    assert (counted.files.bytes, counted.files.padding_rows, counted.files.disagreements) == (4 * 260_032, 0, ())


def test_the_api_counts_whatever_the_command_counts(folder: Path) -> None:
    assert llmcli.count("gpt2") == count(read_config("gpt2")) == llmcli.count(read_config("gpt2"))
    assert llmcli.count(LLAMA_405B).total == 405_853_388_800
    bend(folder, lambda t: t.update({"extra": torch.zeros(7)}))
    assert llmcli.count(folder) == take(folder).count
    assert llmcli.count(folder).parts["other"] == 7
