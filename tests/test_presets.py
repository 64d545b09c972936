"""Presets have the published sizes, survive the way to Hugging Face's config and back, and are listed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from llmcli import cli, config, families, hf_config, params
from llmcli.targets import read_config

PUBLISHED = {  # the sums of the tensors on the Hub
    "gemma2-2b": 2_614_341_888,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "olmo2-7b": 7_298_617_344,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm3-3b": 3_075_098_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_counts_what_is_published_and_what_transformers_builds(name: str) -> None:
    made = read_config(name)
    assert params.count(made).total == PUBLISHED[name]
    table = hf_config.write(made, "bfloat16")
    theirs = transformers.CONFIG_MAPPING[table.pop("model_type")](**table)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(theirs)
    assert sum(value.numel() for value in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", config.presets())
@pytest.mark.parametrize("tied", [True, False])
def test_a_config_survives_the_way_to_hugging_face_and_back(name: str, tied: bool) -> None:
    made = read_config(name)
    made = made if made.tie_word_embeddings == tied else params.flip_tie(made)
    table = json.loads(json.dumps(hf_config.write(made, "float32")))
    read = hf_config.read(table, name)
    assert read.config == made
    assert read.tie_flag is tied
    assert table["model_type"].startswith("llmcli-") == bool(hf_config.private_reasons(made))


def test_every_family_has_a_preset() -> None:
    assert {read_config(name).family for name in config.presets()} == set(families.names())


def test_presets_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["presets", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {preset["name"] for preset in listed} == config.presets().keys()
    places = [(preset["family"], preset["total"]) for preset in listed]
    assert places == sorted(places), "a family together, the smallest first"
    mixtral = next(preset for preset in listed if preset["name"] == "mixtral-8x7b")
    assert (mixtral["total"], mixtral["active"]) == (46_702_792_704, 12_879_925_248)
    assert cli.run(["presets"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split("  tied")[0].split("  untied")[0].split()[2:] for line in shown.splitlines()}
    assert "8.03 B" in shown
    assert rows["gpt2"] == ["124.4", "M"] and rows["mixtral-8x7b"] == ["46.7", "B", "12.88", "B"], "active where fewer"
    assert cli.run(["presets", "gemma-2b"]) == 0
    assert capsys.readouterr().out == config.presets()["gemma-2b"].read_text()
    assert cli.run(["presets", "gemma-2c"]) == 2
    assert "no preset of that name" in capsys.readouterr().err
