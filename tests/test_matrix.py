"""Finding the embedding and the output matrix of a checkpoint: by the family's table, else by the names in use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hf
import numpy as np
import pytest
from matrices import NAME, as_read, config, random, write

from llmcli import tensors
from llmcli.errors import CheckpointError
from llmcli.matrix import find_matrix


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_every_familys_matrices_are_found_by_its_table(family: str, checkpoints: Path) -> None:
    for tied in (True, False):
        folder = checkpoints / f"{family}-{tied}"
        model = hf.make(family, folder, tie_word_embeddings=tied)
        read = model.get_input_embeddings().weight.detach().numpy()
        scored = model.get_output_embeddings().weight.detach().numpy()
        for side, weight in (("input", read), ("output", scored)):
            found = find_matrix(folder, side)  # type: ignore[arg-type]
            np.testing.assert_array_equal(as_read(found), weight)
            assert found.tied is tied
            assert not found.notes
            assert found.scale == pytest.approx(4.0 if "gemma" in family else 1.0)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    model = hf.make("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    found = find_matrix(tmp_path, "output")
    np.testing.assert_array_equal(as_read(found), model.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("name", ["_orig_mod.model.embed_tokens.weight", "module.embed_tokens.weight"])
def test_wrappers_in_front_of_the_name(tmp_path: Path, name: str) -> None:
    values = random(9, 4)
    write(tmp_path, {name: values})
    config(tmp_path, 9, 4)
    found = find_matrix(tmp_path)
    np.testing.assert_array_equal(as_read(found), values)
    assert not found.notes


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox.embed_in.weight",
        "transformer.word_embeddings.weight",
        "tok_embeddings.weight",
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "backbone.embeddings.weight",
    ],
)
def test_an_unknown_familys_matrix_is_found_by_its_name_and_a_note_says_so(tmp_path: Path, name: str) -> None:
    values = random(9, 4)
    write(tmp_path, {name: values, "gpt_neox.layers.0.attention.dense.weight": random(4, 4)})
    config(tmp_path, 9, 4, model_type="somebody_elses")
    found = find_matrix(tmp_path)
    np.testing.assert_array_equal(as_read(found), values)
    assert "somebody_elses" in found.notes[0]
    (tmp_path / "config.json").unlink()
    alone = find_matrix(tmp_path / "model.safetensors")
    assert alone.info == found.info
    assert "no config.json" in alone.notes[0]


def test_both_matrices_of_an_untied_checkpoint_and_only_one_of_a_tied(tmp_path: Path) -> None:
    write(tmp_path, {NAME: random(9, 4), "lm_head.weight": random(9, 4, 1)})
    for tied in (True, False):  # what the file holds beats what the config says
        config(tmp_path, 9, 4, tie_word_embeddings=tied)
        for side, seed in (("input", 0), ("output", 1)):
            found = find_matrix(tmp_path, side)  # type: ignore[arg-type]
            np.testing.assert_array_equal(as_read(found), random(9, 4, seed))
            assert not found.tied
    write(tmp_path, {"lm_head.weight": random(9, 4, 1)})
    config(tmp_path, 9, 4)
    found = find_matrix(tmp_path)
    assert found.info.name == "lm_head.weight" and found.tied
    assert "serves as both" in found.notes[0]
    config(tmp_path, 9, 4, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="no embedding matrix"):
        find_matrix(tmp_path)


def test_an_untied_checkpoint_without_an_output_is_refused_for_the_output_only(tmp_path: Path) -> None:
    write(tmp_path, {NAME: random(9, 4)})
    config(tmp_path, 9, 4, tie_word_embeddings=False)
    assert not find_matrix(tmp_path).tied
    with pytest.raises(CheckpointError, match=r"no output matrix.*not tied") as refused:
        find_matrix(tmp_path, "output")
    assert "--matrix input" in refused.value.hint and f"load-hf {tmp_path} --tie tie" in refused.value.hint
    write(tmp_path, {"lm_head.weight": random(9, 4)})
    with pytest.raises(CheckpointError, match=r"no embedding matrix.*not tied") as refused:
        find_matrix(tmp_path)
    assert "--matrix output" in refused.value.hint and "'lm_head.weight'" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "side", "said"),
    [
        (NAME, "input", None),
        (NAME, "output", f"no output matrix in the file: '{NAME}' is taken to serve as both"),
        ("lm_head.weight", "input", "no embedding in the file: the output matrix 'lm_head.weight' serves as both"),
        ("lm_head.weight", "output", None),
    ],
)
def test_without_a_config_the_one_matrix_there_is_serves_as_both_and_a_note_says_so(
    tmp_path: Path, name: str, side: str, said: str | None
) -> None:
    write(tmp_path, {name: random(9, 4)})
    found = find_matrix(tmp_path, side)  # type: ignore[arg-type]
    assert found.info.name == name and found.side == side and not found.tied
    assert "by its name alone" in found.notes[0] and found.notes[1:] == ((said,) if said else ())


def test_what_is_no_matrix_of_numbers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {NAME: random(9, 4)[0]})
    with pytest.raises(CheckpointError, match="not a matrix"):
        find_matrix(tmp_path)
    write(tmp_path, {NAME: np.zeros((0, 4))})
    with pytest.raises(CheckpointError, match="empty"):
        find_matrix(tmp_path)
    header = tensors.write_header([(NAME, "I8", (4, 4))])
    (tmp_path / "model.safetensors").write_bytes(header + bytes(16))
    with pytest.raises(CheckpointError, match="I8"):
        find_matrix(tmp_path)
    write(tmp_path, {NAME: random(9, 4)})
    config(tmp_path, 9, 6)
    with pytest.raises(CheckpointError, match="the config says 6"):
        find_matrix(tmp_path)
    write(tmp_path, {NAME: random(9, 4), "encoder.embed_tokens.weight": random(9, 4)})
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="2 tensors may be the input matrix"):
        find_matrix(tmp_path)
    write(tmp_path, {"something.weight": random(9, 4)})
    with pytest.raises(CheckpointError, match=r"no embedding matrix among its 1 tensors"):
        find_matrix(tmp_path)
