"""The files of a checkpoint: one or shards with an index, all there and inside the folder, or refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from strategies import JSON

from llmcli import weight_files
from llmcli.errors import CheckpointError, LlmcliError


def shards(folder: Path, **files: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Shards by name in a folder, with a sound index; the index's table, to bend."""
    weight_map: dict[str, str] = {}
    for name, values in files.items():
        save_file(values, folder / f"{name}.safetensors")
        weight_map |= dict.fromkeys(values, f"{name}.safetensors")
    total = sum(v.nbytes for values in files.values() for v in values.values())
    table: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    index(folder, table)
    return table


def index(folder: Path, table: Any) -> None:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    (folder / "model.safetensors.index.json").write_bytes(raw)


TWO = {"one": {"a": torch.ones(2), "b": torch.ones(3)}, "two": {"c": torch.ones(4)}}


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    shards(tmp_path, **TWO)
    found = weight_files.read_checkpoint(tmp_path)
    assert {name: info.file.name for name, info in found.infos.items()} == {
        "a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors",
    }  # fmt: skip
    assert found.notes == ()


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda t: t["weight_map"].update(z="gone.safetensors", y="lost.safetensors"), "2 of 4 shards are missing"),
        (lambda t: t["weight_map"].update(z="one.safetensors", y="two.safetensors"), "2 tensors that no shard holds"),
        (lambda t: t["weight_map"].update(z="../one.safetensors"), "outside its folder"),
        (lambda t: t["weight_map"].update(z="/etc/passwd"), "outside its folder"),
        (lambda t: t["weight_map"].update(z="sub\\one.safetensors"), "outside its folder"),
        (lambda t: t["weight_map"].update(z=".."), "outside its folder"),
        (lambda t: t["weight_map"].update(z="\0"), "outside its folder"),
        (lambda t: t["weight_map"].update(z="x" * 5000), "cannot be"),
        (lambda t: t["weight_map"].update(z=3), "not an index"),
        (lambda t: t.update(weight_map=[]), "not an index"),
        (lambda t: t.update(weight_map={}), "no shards at all"),
        (lambda t: t.pop("weight_map"), "not an index"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, bend: Any, says: str) -> None:
    table = shards(tmp_path, **TWO)
    bend(table)
    index(tmp_path, table)
    with pytest.raises(CheckpointError, match=says) as refusal:
        weight_files.read_checkpoint(tmp_path)
    assert refusal.value.hint and len(refusal.value.message) < 2000


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"weight_map":' * 10_000])
def test_an_index_that_is_no_json_table_is_refused(tmp_path: Path, raw: bytes) -> None:
    index(tmp_path, raw)
    with pytest.raises(CheckpointError, match="JSON"):
        weight_files.read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda t: t["metadata"].update(total_size=5), "claims 5 bytes of tensors, the shards hold 36"),
        (lambda t: t["weight_map"].pop("b"), "does not name: b"),
        (lambda t: t["weight_map"].update(a="two.safetensors"), "another shard: a"),
    ],
)
def test_what_an_index_gets_wrong_without_losing_anything_is_said(tmp_path: Path, bend: Any, says: str) -> None:
    table = shards(tmp_path, **TWO)
    bend(table)
    index(tmp_path, table)
    found = weight_files.read_checkpoint(tmp_path)
    assert set(found.infos) == {"a", "b", "c"}
    assert len(found.notes) == 1 and says in found.notes[0]


@pytest.mark.parametrize("metadata", [None, [], {"total_size": "many"}, {"total_size": None}, {"other": 1}])
def test_an_index_may_say_anything_about_its_total(tmp_path: Path, metadata: Any) -> None:
    index(tmp_path, shards(tmp_path, **TWO) | {"metadata": metadata})
    assert set(weight_files.read_checkpoint(tmp_path).infos) == {"a", "b", "c"}


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, one={"a": torch.ones(2), "b": torch.ones(2)}, two={"b": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"'b' is in one\.safetensors and in two\.safetensors"):
        weight_files.read_checkpoint(tmp_path)


def test_shards_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        save_file({f"t{n}": torch.ones(2)}, tmp_path / f"model-{n:05d}-of-00003.safetensors")
    found = weight_files.read_checkpoint(tmp_path)
    assert set(found.infos) == {"t1", "t2", "t3"} and "no index" in found.notes[0]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 3 shards are missing: model-00002-of-00003"):
        weight_files.read_checkpoint(tmp_path)


def test_one_file_beside_an_index_is_read_and_that_is_said(tmp_path: Path) -> None:
    shards(tmp_path, **TWO)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    found = weight_files.read_checkpoint(tmp_path)
    assert set(found.infos) == {"x"} and "both there" in found.notes[0]


def test_a_file_itself_is_a_checkpoint(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "any name.safetensors")
    assert set(weight_files.read_checkpoint(tmp_path / "any name.safetensors").infos) == {"x"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapter_model.safetensors", "adapter"),
        ("consolidated.00.pth", "maker's own layout"),
        ("llama.Q4_K_M.gguf", "GGUF"),
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("weights.safetensors", "another name"),
        ("weights.pt", "another name"),
    ],
)
def test_a_folder_of_another_format_is_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=says) as refusal:
        weight_files.read_checkpoint(tmp_path)
    assert name in refusal.value.message and refusal.value.hint


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        weight_files.read_checkpoint(tmp_path)
    assert "empty" in refusal.value.hint
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError) as refusal:
        weight_files.read_checkpoint(tmp_path)
    assert "notes.txt" in refusal.value.hint
    with pytest.raises(CheckpointError, match="no such folder"):
        weight_files.read_checkpoint(tmp_path / "absent")


def test_pickles_are_not_opened_here(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles") as refusal:
        weight_files.read_checkpoint(tmp_path)
    assert "load-hf" in refusal.value.hint


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "full" / "model.safetensors")
    for method, folder in (("is_file", "full"), ("resolve", "full"), ("is_dir", "empty"), ("iterdir", "empty")):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Permission denied"):
            patch.setattr(Path, method, denied)
            weight_files.read_checkpoint(tmp_path / folder)


def test_links_out_of_the_folder_are_refused_and_others_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    save_file({"x": torch.ones(1)}, outside / "w.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "w.safetensors")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        weight_files.read_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.ones(1)}, folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert set(weight_files.read_checkpoint(folder).infos) == {"x"}
    (tmp_path / "alias").symlink_to(folder)
    assert set(weight_files.read_checkpoint(tmp_path / "alias").infos) == {"x"}


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    store = tmp_path / "models--org--name"
    snapshot = store / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (store / "blobs").mkdir()
    save_file({"x": torch.ones(1)}, store / "blobs" / "sha")
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha")
    assert set(weight_files.read_checkpoint(snapshot).infos) == {"x"}
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    save_file({"x": torch.ones(1)}, other / "sha")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "sha")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        weight_files.read_checkpoint(snapshot)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=st.fixed_dictionaries(
        {},
        optional={
            "metadata": JSON,
            "weight_map": st.dictionaries(
                st.sampled_from(["a", "b", "c", "d"]) | st.text(max_size=5),
                st.sampled_from(["one.safetensors", "two.safetensors", "..", "", "x/y"]) | st.text(max_size=8) | JSON,
                max_size=5,
            )
            | JSON,
        },
    )
    | JSON
)
def test_any_json_index_reads_or_is_refused(tmp_path: Path, table: Any) -> None:
    if not (tmp_path / "one.safetensors").exists():
        shards(tmp_path, **TWO)
    index(tmp_path, json.dumps(table).encode())
    try:
        found = weight_files.read_checkpoint(tmp_path)
    except LlmcliError as error:
        assert len(error.message) < 5000
        return
    assert set(found.infos) <= {"a", "b", "c"}


def test_headers_are_read_without_numpy_or_torch(tmp_path: Path) -> None:
    import subprocess

    shards(tmp_path, **TWO)
    code = (
        "import sys; from pathlib import Path; from llmcli import weight_files; "
        f"weight_files.read_checkpoint(Path({str(tmp_path)!r})); "
        "assert not {'numpy', 'torch'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
