"""Safetensors headers, shard indexes and single tensors: read exactly, or refused with the file's name."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmcli import tensors
from llmcli.errors import CheckpointError, LlmcliError

BASE = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def file_of(path: Path, header: bytes | dict[str, Any], data: int | bytes = 32, length: int | None = None) -> Path:
    """A file of that header in front of that much data; `length` is what it claims the header's length to be."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = data if isinstance(data, bytes) else bytes(data)
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        tensors.read_header(path)
    assert str(path) in caught.value.message
    return caught.value.message


# Headers


def test_a_header_says_where_each_tensor_lies(tmp_path: Path) -> None:
    values = {"x": torch.arange(6, dtype=torch.float32).view(2, 3), "y": torch.ones(4, dtype=torch.bfloat16)}
    save_file(values, tmp_path / "m.safetensors")
    infos = tensors.read_header(tmp_path / "m.safetensors")
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
        "x": ("F32", (2, 3)),
        "y": ("BF16", (4,)),
    }
    raw = (tmp_path / "m.safetensors").read_bytes()
    assert raw[infos["x"].start : infos["x"].end] == values["x"].numpy().tobytes()


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {}}, {"__metadata__": {"format": "pt", "note": "x"}}])
def test_metadata_may_be_absent_empty_or_anything(tmp_path: Path, metadata: dict[str, Any]) -> None:
    assert set(tensors.read_header(file_of(tmp_path / "m", metadata | BASE))) == {"a", "b"}


def test_a_header_padded_with_spaces_reads(tmp_path: Path) -> None:
    assert set(tensors.read_header(file_of(tmp_path / "m", json.dumps(BASE).encode() + b" " * 13))) == {"a", "b"}


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda h: h["a"].update(data_offsets=[0, 20]), "has 20 bytes, not 24"),
        (lambda h: h["b"].update(data_offsets=[16, 24]), "overlaps"),
        (lambda h: h["b"].update(data_offsets=[26, 34]), "leaves a gap"),
        (lambda h: h["b"].update(data_offsets=[2**61, 2**61 + 8]), "leaves a gap"),
        (lambda h: h.pop("b"), "belong to no tensor"),
        (lambda h: h.update(c={"dtype": "F32", "shape": [2], "data_offsets": [32, 40]}), "truncated"),
        (lambda h: h["a"].update(dtype="F31"), "unknown type 'F31'"),
        (lambda h: h["a"].update(shape=[2, -3]), "not described"),
        (lambda h: h["a"].update(shape=[2, 3.0]), "not described"),
        (lambda h: h["a"].update(shape=[True, 3]), "not described"),
        (lambda h: h["a"].update(shape="23"), "not described"),
        (lambda h: h["a"].update(shape=[2**62, 2**62, 2**62]), "has 24 bytes"),
        (lambda h: h["a"].update(shape=[2**80]), "not described"),
        (lambda h: h["a"].update(shape=[1] * 100_000), "not described"),
        (lambda h: h["a"].pop("dtype"), "not described"),
        (lambda h: h["a"].update(data_offsets=[0, 24, 24]), "not described"),
        (lambda h: h["a"].update(data_offsets=[24, 0]), "has -24 bytes"),
        (lambda h: h.update(a=None), "not described"),
        (lambda h: h.update({"x\x1b[31m": h.pop("a")}), "no tensor's name"),
        (lambda h: h.update({"x" * 1000: h.pop("a")}), "no tensor's name"),
    ],
)
def test_a_header_that_does_not_describe_its_data_is_refused(tmp_path: Path, bend: Any, says: str) -> None:
    header = json.loads(json.dumps(BASE))
    bend(header)
    message = refusal(file_of(tmp_path / "m", header))
    assert says in message and len(message) < 1000 and message.isprintable()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "too short"),
        (b"\x08\0\0", "too short"),
        (struct.pack("<Q", 0), "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a table"),
        (struct.pack("<Q", 2) + b"{}x", "belong to no tensor"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (struct.pack("<Q", 3) + b"NaN", "not JSON"),
        (struct.pack("<Q", 4) + b'{"\xff"', "not JSON"),
        (struct.pack("<Q", 2**63) + b"{}", "claims"),
        (struct.pack("<Q", 3) + b"{}", "claims"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"\0" * 60, "PyTorch pickle"),
        (b"\x80\x02}q\x00." + b"\0" * 60, "PyTorch pickle"),
        (b"GGUF" + b"\0" * 60, "GGUF"),
        (b"<!DOCTYPE html><html></html>", "claims"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "m").write_bytes(raw)
    assert says in refusal(tmp_path / "m")


@pytest.mark.parametrize(
    "twice",
    [
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"\\u0061":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8],"data_offsets":[0,8]}}',
    ],
)
def test_a_name_given_twice_is_refused(tmp_path: Path, twice: bytes) -> None:
    assert "twice" in refusal(file_of(tmp_path / "m", twice, 8))


def test_names_with_escapes_and_a_tensor_called_data_offsets_read(tmp_path: Path) -> None:
    header = {"data_offsets": BASE["a"], 'qu"ote': BASE["b"]}
    assert set(tensors.read_header(file_of(tmp_path / "m", header))) == {"data_offsets", 'qu"ote'}


@pytest.mark.parametrize("length", [0x280, 0x480, 0x8004])
def test_a_header_whose_length_looks_like_a_pickle_reads(tmp_path: Path, length: int) -> None:
    path = file_of(tmp_path / "m", json.dumps(BASE).encode().ljust(length))
    assert set(tensors.read_header(path)) == {"a", "b"}


def test_a_folder_a_pipe_and_an_absent_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "absent"):
        assert "not a regular file" in refusal(tmp_path / name)


def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m", BASE)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read anything")
    assert "cannot be read" in refusal(path)


@pytest.mark.parametrize(
    "body",
    [
        lambda size: os.urandom(size),
        lambda size: b"[" * size,
        lambda size: b'{"a":' * (size // 5),
        lambda size: b'{"a":[' + b"[]," * (size // 3),
        lambda size: b"1" * size,
        lambda size: b'"' + b"x" * (size - 2) + b'"',
        lambda size: b'{"' + b"x" * (size - 8) + b'":1}',
        lambda size: b'{"a":{"dtype":"F32","shape":[' + b"9223372036854775807," * (size // 20) + b"1]}}",
        lambda size: b"{" + b'"a":1,' * (size // 6) + b'"b":2}',
        lambda size: b"\0" * size,
    ],
    ids=["random", "brackets", "objects", "lists", "digits", "text", "name", "shape", "pairs", "zeros"],
)
def test_ten_megabytes_of_garbage_cost_little_time_and_memory(tmp_path: Path, body: Any) -> None:
    path = file_of(tmp_path / "m", body(10_000_000), 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    message = refusal(path)
    assert time.process_time() - began < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
    assert len(message) < 1000


def test_a_header_longer_than_any_model_needs_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000))
        file.truncate(100_000_000)
    began = time.process_time()
    assert "longer than" in refusal(path)
    assert time.process_time() - began < 0.1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
NUMBER = st.integers(-3, 70) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30]) | JSON
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*tensors.SIZES, "F33", "", None, 3]),
        "shape": st.lists(NUMBER, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBER, min_size=1, max_size=3) | JSON,
        "extra": JSON,
    },
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=8), ENTRY | JSON, max_size=4) | JSON, data=st.integers(0, 64))
def test_any_json_header_reads_or_is_refused(tmp_path: Path, header: Any, data: int) -> None:
    try:
        infos = tensors.read_header(file_of(tmp_path / "m", json.dumps(header).encode(), data))
    except LlmcliError as error:
        assert error.message
        return
    size = (tmp_path / "m").stat().st_size
    assert all(0 < info.start <= info.end <= size for info in infos.values())


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200), at=st.integers(0, 180), whole=st.booleans())
def test_any_bytes_read_or_are_refused(tmp_path: Path, raw: bytes, at: int, whole: bool) -> None:
    sound = file_of(tmp_path / "m", BASE).read_bytes()
    (tmp_path / "m").write_bytes(raw if whole else sound[:at] + raw + sound[at + len(raw) :])
    try:
        infos = tensors.read_header(tmp_path / "m")
    except LlmcliError:
        return
    for info in infos.values():
        if info.dtype in ("F32", "BF16"):
            assert tensors.read_array(info).shape == info.shape


def test_every_truncation_of_a_sound_file_is_refused(tmp_path: Path) -> None:
    sound = file_of(tmp_path / "m", BASE).read_bytes()
    for length in range(len(sound)):
        (tmp_path / "m").write_bytes(sound[:length])
        refusal(tmp_path / "m")


@pytest.mark.parametrize("values", [{}, {"only": (3,)}, {"x": (2, 3), "a.b": (5,), "scalar": ()}])
def test_a_header_that_is_written_reads_and_its_data_begins_at_a_multiple_of_eight(
    tmp_path: Path, values: dict[str, tuple[int, ...]]
) -> None:
    header = tensors.write_header((name, "F32", shape) for name, shape in values.items())
    assert len(header) % 8 == 0
    size = sum(4 * math.prod(shape) for shape in values.values())
    (tmp_path / "m").write_bytes(header + bytes(size))
    infos = tensors.read_header(tmp_path / "m")
    assert {name: info.shape for name, info in infos.items()} == values
    from safetensors import safe_open

    with safe_open(tmp_path / "m", "pt") as file:
        assert set(file.keys()) == set(values)
        assert file.metadata() == {"format": "pt"}


# Single tensors


def info_of(tmp_path: Path, value: torch.Tensor, name: str = "x") -> tensors.TensorInfo:
    path = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.safetensors"
    save_file({"pad": torch.zeros(3), name: value}, path)
    return tensors.read_header(path)[name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float32_of_stored_values_is_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randn(7, 5).to(dtype)
    value[0, 0], value[1, 1], value[2, 2] = float("nan"), float("inf"), -0.0
    info = info_of(tmp_path, value)
    rows = tensors.as_float32(tensors.read_array(info), info.dtype)
    np.testing.assert_array_equal(rows, value.float().numpy())


def test_an_array_cannot_be_written_to(tmp_path: Path) -> None:
    array = tensors.read_array(info_of(tmp_path, torch.ones(3)))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2


def test_a_type_without_values_here_is_refused(tmp_path: Path) -> None:
    info = info_of(tmp_path, torch.ones(3).to(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        tensors.read_array(info)


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    info = info_of(tmp_path, torch.ones(2000))
    with info.file.open("r+b") as file:
        file.truncate(info.start + 100)
    for read in (tensors.read_array, lambda info: tensors.read_rows(info, 0, 2000)):
        with pytest.raises(CheckpointError, match="changed"):
            read(info)


@pytest.mark.parametrize("start, stop", [(0, 1), (3, 7), (0, 9), (8, 9), (4, 4)])
def test_rows_are_the_rows(tmp_path: Path, start: int, stop: int) -> None:
    value = torch.randn(9, 4, 2).half()
    assert tensors.read_rows(info_of(tmp_path, value), start, stop) == value[start:stop].numpy().tobytes()


# Comparing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 300])
def test_a_difference_in_any_one_value_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int
) -> None:
    monkeypatch.setattr(tensors, "_CHUNK", 256)
    value = torch.randn(rows, 8).to(dtype)
    a = info_of(tmp_path, value)
    assert tensors.compare(a, info_of(tmp_path, value.clone())) == tensors.Comparison(True, 0.0)
    for row in {0, rows // 2, rows - 1, min(rows - 1, 37)}:
        other = value.clone()
        other[row, 3] += 0.5
        found = tensors.compare(a, info_of(tmp_path, other))
        assert not found.equal
        assert found.max_difference == pytest.approx(abs(float(other[row, 3]) - float(value[row, 3])), rel=1e-6)


def test_values_of_two_types_are_compared_as_values(tmp_path: Path) -> None:
    half = torch.randn(20, 4).half()
    assert tensors.equal(info_of(tmp_path, half), info_of(tmp_path, half.float()))
    assert tensors.equal(info_of(tmp_path, half.bfloat16()), info_of(tmp_path, half.bfloat16().float()))
    precise = torch.randn(20, 4)
    assert not tensors.equal(info_of(tmp_path, precise), info_of(tmp_path, precise.bfloat16()))


def test_the_largest_difference_passes_over_what_is_the_same(tmp_path: Path) -> None:
    a = torch.tensor([[float("nan"), float("inf"), 1.0], [0.0, 2.0, -1.0]])
    b = torch.tensor([[float("nan"), float("inf"), 1.5], [-0.0, 2.0, -1.0]])
    assert tensors.max_difference(info_of(tmp_path, a), info_of(tmp_path, b)) == 0.5
    b[0, 0] = 1.0
    assert math.isnan(tensors.max_difference(info_of(tmp_path, a), info_of(tmp_path, b)))


def test_empty_and_scalar_tensors_compare(tmp_path: Path) -> None:
    for value in (torch.zeros(0, 4), torch.zeros(4, 0)):
        assert tensors.compare(info_of(tmp_path, value), info_of(tmp_path, value)).equal
    assert not tensors.equal(info_of(tmp_path, torch.tensor(1.0)), info_of(tmp_path, torch.tensor(2.0)))
    assert tensors.max_difference(info_of(tmp_path, torch.tensor(1.0)), info_of(tmp_path, torch.tensor(3.0))) == 2.0


def test_matrices_that_differ_clearly_are_told_apart_by_a_few_rows(tmp_path: Path) -> None:
    a, b = info_of(tmp_path, torch.randn(500, 8)), info_of(tmp_path, torch.randn(500, 8))
    read: list[int] = []

    def counted(info: tensors.TensorInfo, start: int, stop: int) -> bytes:
        read.append(stop - start)
        return tensors.read_rows(info, start, stop)

    assert not tensors.equal(a, b, counted)
    assert read == [1, 1]


# Files of a checkpoint


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
    found = tensors.read_checkpoint(tmp_path)
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
        tensors.read_checkpoint(tmp_path)
    assert refusal.value.hint and len(refusal.value.message) < 2000


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"weight_map":' * 10_000])
def test_an_index_that_is_no_json_table_is_refused(tmp_path: Path, raw: bytes) -> None:
    index(tmp_path, raw)
    with pytest.raises(CheckpointError, match="JSON"):
        tensors.read_checkpoint(tmp_path)


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
    found = tensors.read_checkpoint(tmp_path)
    assert set(found.infos) == {"a", "b", "c"}
    assert len(found.notes) == 1 and says in found.notes[0]


@pytest.mark.parametrize("metadata", [None, [], {"total_size": "many"}, {"total_size": None}, {"other": 1}])
def test_an_index_may_say_anything_about_its_total(tmp_path: Path, metadata: Any) -> None:
    index(tmp_path, shards(tmp_path, **TWO) | {"metadata": metadata})
    assert set(tensors.read_checkpoint(tmp_path).infos) == {"a", "b", "c"}


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, one={"a": torch.ones(2), "b": torch.ones(2)}, two={"b": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"'b' is in one\.safetensors and in two\.safetensors"):
        tensors.read_checkpoint(tmp_path)


def test_shards_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        save_file({f"t{n}": torch.ones(2)}, tmp_path / f"model-{n:05d}-of-00003.safetensors")
    found = tensors.read_checkpoint(tmp_path)
    assert set(found.infos) == {"t1", "t2", "t3"} and "no index" in found.notes[0]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 3 shards are missing: model-00002-of-00003"):
        tensors.read_checkpoint(tmp_path)


def test_one_file_beside_an_index_is_read_and_that_is_said(tmp_path: Path) -> None:
    shards(tmp_path, **TWO)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    found = tensors.read_checkpoint(tmp_path)
    assert set(found.infos) == {"x"} and "both there" in found.notes[0]


def test_a_file_itself_is_a_checkpoint(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "any name.safetensors")
    assert set(tensors.read_checkpoint(tmp_path / "any name.safetensors").infos) == {"x"}


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
        tensors.read_checkpoint(tmp_path)
    assert name in refusal.value.message and refusal.value.hint


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        tensors.read_checkpoint(tmp_path)
    assert "empty" in refusal.value.hint
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError) as refusal:
        tensors.read_checkpoint(tmp_path)
    assert "notes.txt" in refusal.value.hint
    with pytest.raises(CheckpointError, match="no such folder"):
        tensors.read_checkpoint(tmp_path / "absent")


def test_pickles_are_not_opened_here(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles") as refusal:
        tensors.read_checkpoint(tmp_path)
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
            tensors.read_checkpoint(tmp_path / folder)


def test_links_out_of_the_folder_are_refused_and_others_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    save_file({"x": torch.ones(1)}, outside / "w.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "w.safetensors")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        tensors.read_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.ones(1)}, folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert set(tensors.read_checkpoint(folder).infos) == {"x"}
    (tmp_path / "alias").symlink_to(folder)
    assert set(tensors.read_checkpoint(tmp_path / "alias").infos) == {"x"}


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    store = tmp_path / "models--org--name"
    snapshot = store / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (store / "blobs").mkdir()
    save_file({"x": torch.ones(1)}, store / "blobs" / "sha")
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha")
    assert set(tensors.read_checkpoint(snapshot).infos) == {"x"}
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    save_file({"x": torch.ones(1)}, other / "sha")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "sha")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        tensors.read_checkpoint(snapshot)


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
        found = tensors.read_checkpoint(tmp_path)
    except LlmcliError as error:
        assert len(error.message) < 5000
        return
    assert set(found.infos) <= {"a", "b", "c"}


def test_headers_are_read_without_numpy_or_torch(tmp_path: Path) -> None:
    import subprocess

    shards(tmp_path, **TWO)
    code = (
        "import sys; from pathlib import Path; from llmcli import tensors; "
        f"tensors.read_checkpoint(Path({str(tmp_path)!r})); "
        "assert not {'numpy', 'torch'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_texts_of_a_file_are_made_fit_for_a_message() -> None:
    assert tensors.clip("plain") == "plain"
    assert tensors.clip("a\x1b[31m\nb") == "a\\x1b[31m\\nb"
    assert tensors.clip("x" * 1000) == "x" * 200 + "…"
    assert tensors.listing(["a", "b"]) == "a, b"
    assert tensors.listing((str(n) for n in range(60)), 3) == "0, 1, 2 and 57 more"
