"""Safetensors headers and single tensors: read exactly, or refused with the file's name."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from strategies import JSON

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
        (b'{"model_type": "gpt2"}', "JSON text, not weights"),
        (b'\n{\n  "model_type": "gpt2"}', "JSON text, not weights"),
        (b'{"a":1}\x01', "claims"),
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
    odd = torch.tensor([[float("nan"), float("inf"), 1.0]])
    assert tensors.compare(info_of(tmp_path, odd), info_of(tmp_path, odd.half())) == tensors.Comparison(True, 0.0)
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
