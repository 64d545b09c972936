"""Configurations are read strictly: what is wrong is named, with the file and the nearest right word."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcli import families
from llmcli.config import ModelConfig, Recipe, find_recipe, layered, parse, presets, read_table, with_settings
from llmcli.errors import ConfigError, LlmcliError, UsageError
from llmcli.targets import read_config

MODEL = {"family": "llama", "vocab_size": 64, "embed_dim": 16, "num_layers": 2, "num_heads": 4}


def test_every_preset_reads_completes_and_says_where_its_sizes_come_from() -> None:
    assert {"gpt1", "gpt2", "gemma-2b", "llama-7b", "mixtral-8x7b", "glasslm"} <= presets().keys()
    for name, path in presets().items():
        config = read_config(name)
        assert families.complete(config) == config
        assert path.read_text().startswith("# "), f"{name} does not say what it is"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocabsize", 64, "unknown key 'vocabsize'\nDid you mean 'vocab_size'?"),
        ("num_layers", -3, "num_layers: expected `int` >= 0"),
        ("num_heads", "four", "num_heads: expected `int`, got `str`"),
        ("embed_dim", 1.5, "embed_dim: expected `int`, got `float`"),
        ("vocab_size", 10**12, "vocab_size: expected `int` <="),
        ("dropout", 1.0, "dropout: expected `float` < 1.0"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings: expected `bool`, got `str`"),
        ("rope_scaling", {"type": "dynamic"}, "rope_scaling.type: unknown value 'dynamic'"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_file(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "my model.json"
    path.write_text(json.dumps({**MODEL, key: value}))
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="config: the key 'num_heads' is missing"):
        parse({key: value for key, value in MODEL.items() if key != "num_heads"}, ModelConfig, "config")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "not UTF-8 text (byte 0xff at offset 0)"),
        (b"[1, 2]", "holds list where a table of keys belongs"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(MODEL).encode())
    assert read_config(path).vocab_size == 64


@given(st.binary(max_size=200))
def test_no_bytes_whatever_make_the_reader_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    for suffix in ("json", "toml"):
        path = tmp_path_factory.getbasetemp() / f"fuzz.{suffix}"
        path.write_bytes(raw)
        with contextlib.suppress(LlmcliError):
            read_config(path)


def recipe_of(path: Path, *settings: str) -> Recipe:
    return layered(find_recipe(str(path)), ("--set", with_settings({}, list(settings)))).recipe


def test_settings_are_laid_over_a_recipe_and_read_as_toml(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\nfamily = "gpt2"\nvocab_size = 65\nembed_dim = 8\nnum_layers = 1\nnum_heads = 2\n')
    recipe = recipe_of(path, "train.lr=3e-4", "data.path=/a b/ü.txt", "model.tie_word_embeddings=true")
    assert recipe.train.lr == 3e-4
    assert recipe.data.path == "/a b/ü.txt"
    assert recipe.model.tie_word_embeddings
    assert isinstance(recipe, Recipe)


@pytest.mark.parametrize("setting", ["lr=1", "train.lr", "optimizer.lr=1", "train.=1", "=", ""])
def test_a_setting_of_another_form_is_a_usage_error(setting: str) -> None:
    with pytest.raises(UsageError, match=r"section\.key=value"):
        with_settings({"model": MODEL}, [setting])


def test_an_unknown_setting_names_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": MODEL}))
    with pytest.raises(UsageError, match=r"--set: unknown key 'train.learning_rat'") as caught:
        recipe_of(path, "train.learning_rat=1")
    assert "Known keys: context, batch_size" in caught.value.hint


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.max_steps=-5", "--set train.max_steps=-5: expected `int` >= 0"),
        ("train.lr=abc", "--set train.lr=abc: expected `float`, got `str`"),
        ("model.rope_scaling.factor=2", "--set: unknown key 'model.rope_scaling.factor'"),
    ],
)
def test_a_value_is_refused_where_it_was_given(tmp_path: Path, setting: str, said: str) -> None:
    """On the command line as usage, in a file as a configuration, whatever else is laid over it."""
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": MODEL}))
    with pytest.raises(UsageError) as caught:
        recipe_of(path, setting, "train.seed=1")
    assert caught.value.message == said
    path.write_text(json.dumps({"model": MODEL, "train": {"max_steps": -5}}))
    with pytest.raises(ConfigError, match=r"recipe\.json: train\.max_steps: expected `int` >= 0"):
        recipe_of(path, "train.seed=1")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("train.schedule=cosin", "Did you mean 'cosine'? Known: cosine, linear, constant, wsd."),
        ("data.shuffle=none", "Known: windows, random."),
        ('model.rope_scaling={type="dynamic"}', "Known: linear, llama3, yarn."),
    ],
)
def test_an_unknown_word_names_those_that_are_known(tmp_path: Path, setting: str, hint: str) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": MODEL}))
    with pytest.raises(UsageError, match=rf"{setting.split('=')[0]}.*: unknown value") as caught:
        recipe_of(path, setting)
    assert caught.value.hint == hint


def test_a_name_that_is_nothing_lists_the_presets_and_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"gpt-two: no such file or folder") as caught:
        read_config("gpt-two")
    assert "mixtral-8x7b" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        read_config("gpt2-x")
    assert "Did you mean 'gpt2-xl'?" in caught.value.hint
