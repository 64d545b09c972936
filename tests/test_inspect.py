"""inspect: what is in a checkpoint, fitting or not, and what lies between two."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcli import cli, differences, inspection, mapping, params, targets, tensors, weight_files
from llmcli.errors import CheckpointError, LlmcliError
from llmcli.inspection import Inspection, TensorEntry
from llmcli.tokenizer import load as load_tokenizer
from llmcli.tokenizer import train_bpe

Arrays = dict[str, tuple[str, np.ndarray]]  # name -> (safetensors' type, values as they are stored)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a family's tiny checkpoint as transformers writes it; made once, not to be changed."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            hf.make(family, folder)
        return folder

    return make


@pytest.fixture
def gpt2(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A GPT-2 that a test may bend; its flag says tied and it has no head."""
    return Path(shutil.copytree(checkpoints("gpt2"), tmp_path / "gpt2"))


def read(folder: Path) -> Arrays:
    infos = weight_files.read_checkpoint(folder).infos
    return {name: (info.dtype, np.array(tensors.read_array(info))) for name, info in infos.items()}


def write(path: Path, arrays: Arrays) -> None:
    """A safetensors file, or a folder's model.safetensors."""
    file = path / "model.safetensors" if path.is_dir() else path
    header = tensors.write_header((name, dtype, array.shape) for name, (dtype, array) in arrays.items())
    file.write_bytes(header + b"".join(array.tobytes() for _, array in arrays.values()))


def set_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    table = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def floats(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) >> 16).astype(np.uint16)


EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


def refusal(folder: Path) -> str | None:
    """Why loading refuses a checkpoint, None where it does not."""
    try:
        mapping.plan(weight_files.read_checkpoint(folder), targets.read_hf_config(folder), str(folder))
    except LlmcliError as error:
        return error.message
    return None


def counted(folder: Path) -> int:
    """What count-params makes of a checkpoint."""
    try:
        config = targets.read_hf_config(folder)
    except LlmcliError:
        config = None
    return params.count_files(weight_files.read_checkpoint(folder), config, "here").count.total


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_sound_checkpoint_is_described_whole(checkpoints: Callable[[str], Path], family: str) -> None:
    folder = checkpoints(family)
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    for full in (False, True):
        found = inspection.inspect(folder, full=full)
        config = targets.read_config(folder)
        assert found.family == family and found.config == config
        assert found.problems == found.missing == found.left_over == found.misshapen == ()
        assert found.parameters == params.count(config).total == found.total.values
        assert found.total.bytes == 4 * found.total.values == found.dtypes["F32"].bytes
        assert found.total.tensors == len(found.tensors) == found.files[0].tensors
        assert {entry.role for entry in found.tensors} == {"model"}
        assert found.files[0].bytes == (folder / "model.safetensors").stat().st_size
        assert found.tie and (found.tie.decision == "tie") == config.tie_word_embeddings
        assert [health.side for health in found.matrices] == (
            ["input"] if config.tie_word_embeddings else ["input", "output"]
        )
        assert all((entry.values is not None) == full for entry in found.tensors)
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).digest() == before


def test_tensors_come_in_the_order_of_the_forward_pass_and_the_rest_behind(gpt2: Path) -> None:
    arrays = read(gpt2)
    extra = {f"extra.{n}.weight": ("F32", floats((2,))) for n in (10, 2)}
    write(gpt2, dict(sorted((extra | arrays).items(), reverse=True)))
    names = [entry.name for entry in inspection.inspect(gpt2).tensors]
    assert names[:3] == [EMBEDDING, "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"]
    assert names[-3:] == ["transformer.ln_f.bias", "extra.2.weight", "extra.10.weight"]


FLAGS = {"true": True, "false": False, "silent": None}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("head", ["absent", "equal", "different", "taller"])
@pytest.mark.parametrize("embedding", ["present", "absent"])
def test_the_tie_is_what_loading_makes_of_it(gpt2: Path, flag: str, head: str, embedding: str) -> None:
    arrays = read(gpt2)
    _, matrix = arrays[EMBEDDING]
    heads = {"equal": matrix, "different": matrix + np.float32(0.25), "taller": np.vstack([matrix, matrix[:2]])}
    if head in heads:
        arrays[HEAD] = ("F32", heads[head])
    if embedding == "absent":
        del arrays[EMBEDDING]
    write(gpt2, arrays)
    set_config(gpt2, tie_word_embeddings=FLAGS[flag])
    refused = refusal(gpt2)
    for full in (False, True):
        found = inspection.inspect(gpt2, full=full)
        tie = found.tie
        assert tie is not None
        assert (tie.flag, tie.tied_in_family) == (FLAGS[flag], True)
        assert (tie.embedding, tie.head) == (
            EMBEDDING if embedding == "present" else None,
            None if head == "absent" else HEAD,
        )
        if embedding == "present" and head in ("equal", "different"):
            assert tie.equal == (head == "equal")
            assert tie.max_difference == pytest.approx(0 if head == "equal" else 0.25, abs=1e-6)
            assert tie.rows_compared == tie.rows == 64
        else:
            assert tie.equal is None and tie.max_difference is None
        assert bool(found.problems) == (refused is not None)
        assert found.parameters == counted(gpt2)
        if refused is None:
            made = mapping.plan(weight_files.read_checkpoint(gpt2), targets.read_hf_config(gpt2), "here")
            assert (tie.decision, tie.reason) == (made.tie.decision, made.tie.reason)
        elif tie.refused:
            assert tie.decision is None
            assert tie.reason.split(".")[0] in refused and tie.reason in found.problems
        else:
            assert "misshapen" in refused


def test_a_redundant_head_is_a_copy_and_counts_once(gpt2: Path) -> None:
    arrays = read(gpt2)
    write(gpt2, arrays | {HEAD: arrays[EMBEDDING]})
    found = inspection.inspect(gpt2)
    assert next(entry for entry in found.tensors if entry.name == HEAD).role == "copy"
    assert found.parameters == params.count(targets.read_config(gpt2)).total
    assert found.total.values == found.parameters + 64 * 16


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gpt2", "4 heads, vocabulary"),
        ("llama", "4 heads (2 for keys and values), vocabulary"),
        ("mixtral", ", 4 experts, "),
    ],
)
def test_heads_and_experts_are_said_as_the_family_has_them(
    checkpoints: Callable[[str], Path], family: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(checkpoints(family))]) == 0
    assert said in capsys.readouterr().out.splitlines()[0]


def test_values_that_are_not_parameters_are_said_to_be_left_out_of_the_count(
    gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run(["inspect", str(gpt2)])
    assert "not counted" not in capsys.readouterr().out
    arrays = read(gpt2)
    write(gpt2, arrays | {HEAD: arrays[EMBEDDING]})  # 64 x 16 once more
    cli.run(["inspect", str(gpt2)])
    assert ", and 1,024 values that are not counted\n" in capsys.readouterr().out


def test_another_head_is_counted_and_the_model_untied_whatever_the_flag_says(gpt2: Path) -> None:
    arrays = read(gpt2)
    write(gpt2, arrays | {HEAD: ("F32", floats((64, 16)))})
    found = inspection.inspect(gpt2)
    assert found.tie and found.tie.flag is True and found.tie.decision == "untie" and found.problems == ()
    assert found.parameters == found.total.values == params.count(targets.read_config(gpt2)).total_untied - 64, (
        "no bias"
    )


def bent(arrays: Arrays, case: str) -> tuple[Arrays, dict[str, Any]]:
    """One way in which a checkpoint is found broken: its tensors and changed keys of its config."""
    layer = "transformer.h.1."
    match case:
        case "a layer is missing":
            return {name: a for name, a in arrays.items() if not name.startswith(layer)}, {}
        case "a layer too many":
            return arrays, {"n_layer": 1}
        case "one tensor is missing":
            return {name: a for name, a in arrays.items() if name != layer + "mlp.c_fc.bias"}, {}
        case "the embedding is missing":
            return {name: a for name, a in arrays.items() if name != EMBEDDING}, {}
        case "a tensor is left over":
            return arrays | {"value_head.weight": ("F32", floats((3,)))}, {}
        case "wrong width":
            return arrays, {"n_embd": 8}
        case "wrong vocabulary":
            return arrays, {"vocab_size": 65}
        case "integers":
            return arrays | {"transformer.ln_f.weight": ("I32", np.ones(16, np.int32))}, {}
        case "eight-bit floats":
            return arrays | {"transformer.ln_f.weight": ("F8_E4M3", np.ones(16, np.uint8))}, {}
        case "quantised":
            return arrays | {layer + "mlp.c_fc.qweight": ("I32", np.ones(16, np.int32))}, {}
        case "an adapter":
            return {"base_model.model.h.0.attn.c_attn.lora_A.weight": ("F32", floats((2, 3)))}, {}
        case "two names for one tensor":
            return arrays | {"wte.weight": arrays[EMBEDDING]}, {}
        case "an untied model without a head":
            return arrays, {"tie_word_embeddings": False}
        case "another head row":
            return arrays | {HEAD: ("F32", floats((65, 16)))}, {}
        case "no family":
            return arrays, {"model_type": "bert", "architectures": ["BertModel"]}
        case "impossible sizes":
            return arrays, {"n_layer": -3}
        case "terabytes":
            return arrays, {"n_embd": 10**7, "vocab_size": 10**7, "n_layer": 500}
    raise AssertionError(case)


CASES = (
    "a layer is missing", "a layer too many", "one tensor is missing", "the embedding is missing",
    "a tensor is left over", "wrong width", "wrong vocabulary", "integers", "eight-bit floats", "quantised",
    "an adapter", "two names for one tensor", "an untied model without a head", "another head row", "no family",
    "impossible sizes", "terabytes",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("full", [False, True], ids=["sampled", "full"])
def test_a_broken_checkpoint_is_described_with_everything_that_is_wrong(gpt2: Path, case: str, full: bool) -> None:
    arrays, changes = bent(read(gpt2), case)
    write(gpt2, arrays)
    set_config(gpt2, **changes)
    found = inspection.inspect(gpt2, full=full)
    assert (found.problems == ()) == (refusal(gpt2) is None), found.problems
    assert {entry.name for entry in found.tensors} == arrays.keys()
    assert found.total.bytes == sum(array.nbytes for _, array in arrays.values())
    assert found.parameters == counted(gpt2)


def test_problems_name_each_tensor_and_the_layers_that_explain_them(gpt2: Path) -> None:
    arrays, _ = bent(read(gpt2), "a layer is missing")
    write(gpt2, arrays | {"extra.weight": ("F32", floats((3,)))})
    found = inspection.inspect(gpt2)
    assert found.problems[0] == "config.json says 2 layers, the files hold 1: 0"
    assert len(found.missing) == 12 and all(name.startswith("transformer.h.1.") for name in found.missing)
    assert found.left_over == ("extra.weight",)
    assert [entry.role for entry in found.tensors if entry.name == "extra.weight"] == ["left over"]
    set_config(gpt2, n_embd=8)
    wrong = inspection.inspect(gpt2)
    assert any("transformer.wte.weight is 64 x 16, the config makes it 64 x 8" in line for line in wrong.misshapen)
    assert {entry.role for entry in wrong.tensors} == {"misshapen", "left over"}


def test_buffers_are_ignored_and_not_counted(gpt2: Path) -> None:
    mask = ("BOOL", np.ones((1, 1, 64, 64), np.uint8))
    write(gpt2, read(gpt2) | {f"transformer.h.{n}.attn.bias": mask for n in range(2)})
    found = inspection.inspect(gpt2)
    assert found.problems == () and len(found.ignored) == 2
    assert found.parameters == params.count(targets.read_config(gpt2)).total
    assert found.dtypes["BOOL"] == inspection.Amount(2, 2 * 4096, 2 * 4096)
    assert [entry.role for entry in found.tensors[-2:]] == ["ignored", "ignored"]


def test_prefixes_of_wrappers_change_nothing(gpt2: Path) -> None:
    plain = inspection.inspect(gpt2)
    write(gpt2, {f"_orig_mod.module.{name}": array for name, array in read(gpt2).items()})
    wrapped = inspection.inspect(gpt2)
    assert wrapped.problems == () and wrapped.parameters == plain.parameters
    assert [entry.shape for entry in wrapped.tensors] == [entry.shape for entry in plain.tensors]


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\xff", None])
def test_without_a_config_that_can_be_read_the_tensors_are_still_listed(gpt2: Path, content: str | None) -> None:
    (gpt2 / "config.json").unlink()
    if content is not None:
        (gpt2 / "config.json").write_bytes(content.encode("latin-1"))
    for target in (gpt2, gpt2 / "model.safetensors"):
        found = inspection.inspect(target)
        assert found.family is None and found.config is None and found.tie is None
        assert len(found.problems) == 1 and "config.json" in found.problems[0]
        assert len(found.tensors) == 28 and {entry.role for entry in found.tensors} == {"unknown"}
        assert any("named as those of" in note and "gpt2" in note for note in found.notes)
        assert found.parameters == found.total.values


def test_a_family_is_named_only_where_most_names_are_its_own(tmp_path: Path) -> None:
    known = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ]
    others = [f"vision.{letter}.weight" for letter in "abcd"]
    for names, said in ((known + others[:2], True), (known + others, False)):
        write(tmp_path / "x.safetensors", {name: ("F32", floats((2, 2))) for name in names})
        notes = inspection.inspect(tmp_path / "x.safetensors").notes
        assert any("named as those of" in note for note in notes) == said


def shard(folder: Path) -> list[str]:
    """Split a folder's single file into three shards with an index; returns their names."""
    arrays = list(read(folder).items())
    (folder / "model.safetensors").unlink()
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    for n, name in enumerate(names):
        write(folder / name, dict(arrays[n::3]))
    weight_map = {tensor: names[n % 3] for n, (tensor, _) in enumerate(arrays)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def test_shards_add_up_to_the_single_file(gpt2: Path) -> None:
    single = inspection.inspect(gpt2)
    names = shard(gpt2)
    found = inspection.inspect(gpt2)
    assert found.problems == () and found.total == single.total and found.parameters == single.parameters
    assert [file.name for file in found.files] == names
    assert sum(file.tensors for file in found.files) == 28
    assert [entry.name for entry in found.tensors] == [entry.name for entry in single.tensors]
    assert {entry.file for entry in found.tensors} == set(names)


def test_shards_that_remain_are_described_beside_those_that_cannot_be_read(gpt2: Path) -> None:
    names = shard(gpt2)
    whole = (gpt2 / names[0]).read_bytes()
    (gpt2 / names[0]).write_bytes(whole[:-4])
    (gpt2 / names[2]).unlink()
    found = inspection.inspect(gpt2)
    assert [file.name for file in found.files] == names[:2]
    assert any(names[2] in problem and "missing" in problem for problem in found.problems)
    assert any(names[0] in problem and "truncated" in problem for problem in found.problems)
    assert len(found.tensors) + len(found.missing) == 28
    assert [entry.cut for entry in found.tensors if entry.file == names[0]].count(True) == 1


@pytest.mark.parametrize("as_file", [False, True])
def test_of_a_file_cut_short_the_header_is_shown_and_the_tensors_that_are_not_whole(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_file: bool
) -> None:
    other = Path(shutil.copytree(gpt2, tmp_path / "other"))
    arrays = read(gpt2)
    write(gpt2, {EMBEDDING: arrays[EMBEDDING]} | arrays | {HEAD: ("F32", floats((64, 16)))})
    file = gpt2 / "model.safetensors"
    whole = inspection.inspect(gpt2)
    ends = sorted(info.end for info in tensors.read_header(file).values())
    os.truncate(file, ends[-3] + 1)
    target = file if as_file else gpt2
    for full in (False, True):
        found = inspection.inspect(target, full=full)
        cut = {entry.name for entry in found.tensors if entry.cut}
        assert len(cut) == 2 and HEAD in cut and found.total == whole.total
        assert [file.bytes for file in found.files] == [ends[-3] + 1], "what is there, not what was promised"
        (problem,) = found.problems
        for part in (str(file), f"{ends[-3] + 1:,} bytes of the {ends[-1]:,}", *cut):
            assert part in problem
        assert {entry.name for entry in found.tensors if full and not entry.values} == (cut if full else set())
        assert found.tie and (found.tie.equal, found.tie.refused) == (None, False)
        assert [health.side for health in found.matrices] == ["input"]
    assert cli.run(["inspect", str(target)]) == 1
    shown = capsys.readouterr().out
    assert "is truncated" in shown and re.search(r"lm_head\.weight .* cut\n", shown)
    assert cli.run(["load-hf", str(gpt2), "--check"]) == 1
    assert "is truncated" in capsys.readouterr().err
    compared = run_json(capsys, target, other, code=1)
    assert (compared["equal"], compared["only_a"], compared["problems"]) == (28 - 1, [], [[problem], []])


def test_a_nan_that_signals_is_counted_as_any(gpt2: Path) -> None:
    arrays = read(gpt2)
    arrays[EMBEDDING][1].view(np.uint32)[5, 3] = 0x7FA00000
    write(gpt2, arrays)
    assert any("1 values that are not finite" in problem for problem in inspection.inspect(gpt2, full=True).problems)


def test_a_tensor_in_two_shards_is_a_problem_and_listed_where_it_first_stands(gpt2: Path) -> None:
    names = shard(gpt2)
    first = tensors.read_header(gpt2 / names[0])
    arrays = {name: (info.dtype, np.array(tensors.read_array(info))) for name, info in first.items()}
    write(gpt2 / names[2], arrays)
    found = inspection.inspect(gpt2)
    assert any(f"{names[2]} holds tensors that another file holds too" in problem for problem in found.problems)
    assert {entry.file for entry in found.tensors if entry.name in arrays} == {names[0]}


def test_an_index_that_names_what_no_shard_holds_is_a_problem_and_one_with_a_wrong_size_is_noted(gpt2: Path) -> None:
    shard(gpt2)
    index = gpt2 / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    index.write_text(json.dumps(table | {"metadata": {"total_size": 7}}))
    found = inspection.inspect(gpt2)
    assert found.problems == () and any("7 bytes" in note for note in found.notes)
    table["weight_map"]["ghost.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))
    assert any("ghost.weight" in problem for problem in inspection.inspect(gpt2).problems)
    assert len(inspection.inspect(gpt2).tensors) == 28


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 100, b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_without_a_header_is_refused_in_words(gpt2: Path, content: bytes) -> None:
    (gpt2 / "model.safetensors").write_bytes(content)
    for target in (gpt2, gpt2 / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            inspection.inspect(target)
    empty = gpt2 / "nothing here"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="no model"):
        inspection.inspect(empty)


STORED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda x: x,
    "F64": lambda x: x.astype(np.float64),
    "F16": lambda x: x.astype(np.float16),
    "BF16": bf16,
}


def as_float64(dtype: str, stored: np.ndarray) -> np.ndarray:
    return (
        (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if dtype == "BF16"
        else stored.astype(float)
    )


def one_tensor(path: Path, dtype: str, stored: np.ndarray) -> tensors.TensorInfo:
    write(path, {"x": (dtype, stored)})
    return tensors.read_header(path)["x"]


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("full", [False, True], ids=["sampled", "full"])
def test_norms_of_rows_are_those_of_float64(tmp_path: Path, dtype: str, full: bool) -> None:
    matrix = floats((40, 12))
    matrix[3], matrix[7, 2], matrix[9, 1], matrix[39] = 0, np.nan, np.inf, 0
    stored = STORED[dtype](matrix)
    health = inspection.matrix_health(one_tensor(tmp_path / "x", dtype, stored), "input", full=full)
    norms = np.linalg.norm(as_float64(dtype, stored), axis=1)
    sound = norms[np.isfinite(norms) & (norms > 0)]
    assert (health.rows, health.width, health.rows_read) == (40, 12, 40)
    assert (health.zero_rows, health.non_finite_rows) == (2, 2)
    for got, wanted in zip(
        (health.norm_mean, health.norm_std, health.norm_min, health.norm_max),
        (sound.mean(), sound.std(), sound.min(), sound.max()),
        strict=True,
    ):
        assert got == pytest.approx(wanted, rel=1e-12)


def test_a_large_matrix_is_sampled_from_its_first_row_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "SAMPLE_VALUES", 100)
    matrix = np.ones((1000, 4), np.float32)
    matrix[0] = matrix[999] = 0
    asked: list[int] = []

    def watching(info: tensors.TensorInfo, start: int, stop: int) -> bytes:
        asked.extend(range(start, stop))
        return tensors.read_rows(info, start, stop)

    info = one_tensor(tmp_path / "x", "F32", matrix)
    health = inspection.matrix_health(info, "input", read=watching)
    assert (health.rows, health.rows_read, health.zero_rows) == (1000, 25, 2)
    assert len(asked) == len(set(asked)) == 25 and np.ptp(np.diff(asked)) <= 1, "evenly spaced, nothing else is read"
    assert inspection.matrix_health(info, "input", full=True).rows_read == 1000


def test_what_a_sample_cannot_see_full_sees_and_the_sample_says_how_far_it_saw(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspection, "SAMPLE_VALUES", 160)  # ten rows of 16
    arrays = read(gpt2)
    other = arrays[EMBEDDING][1].copy()
    other[1] += np.float32(0.5)
    write(gpt2, arrays | {HEAD: ("F32", other)})
    sampled, whole = inspection.inspect(gpt2).tie, inspection.inspect(gpt2, full=True).tie
    assert sampled and whole
    assert (sampled.equal, sampled.rows_compared, sampled.rows) == (True, 10, 64)
    assert (whole.equal, whole.rows_compared, whole.rows) == (False, 64, 64)
    assert whole.max_difference == pytest.approx(0.5, rel=1e-6) and whole.decision == "untie"
    assert cli.run(["inspect", str(gpt2)]) == 0
    shown = capsys.readouterr().out
    assert "equal in the 10 of 64 rows compared; --full compares all" in shown
    assert "of 10 rows; --full reads all" in shown


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (5, 3), (3, 4, 2)])
def test_statistics_of_a_tensor_are_those_of_numpy(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.asarray(floats(shape))
    array.reshape(-1)[::3] = 0
    stored = np.asarray(STORED[dtype](array)).reshape(shape)
    values = as_float64(dtype, stored).ravel()
    info = one_tensor(tmp_path / "x", dtype, stored)
    for chunk in (1 << 20, 5):
        monkeypatch.setattr(inspection, "CHUNK_VALUES", chunk)
        found = inspection.values(info)
        assert (found.zeros, found.non_finite) == ((values == 0).sum(), 0)
        if values.size:
            assert found.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-15)
            assert found.std == pytest.approx(values.std(), rel=1e-6, abs=1e-7)
            assert found.max_abs == np.abs(values).max()
        else:
            assert (found.mean, found.std, found.max_abs) == (0, 0, 0)


def test_values_that_are_no_numbers_are_counted_and_kept_out_of_the_rest(gpt2: Path) -> None:
    arrays = read(gpt2)
    norm = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 3] + [1] * 10, np.float32)
    arrays["transformer.ln_f.weight"] = ("F32", norm)
    write(gpt2, arrays)
    assert inspection.inspect(gpt2).problems == (), "a sample looks at the embedding only"
    found = inspection.inspect(gpt2, full=True)
    assert found.problems == ("transformer.ln_f.weight holds 3 values that are not finite",)
    values = next(entry.values for entry in found.tensors if entry.name == "transformer.ln_f.weight")
    assert values and (values.non_finite, values.zeros, values.max_abs) == (3, 2, 3)
    assert values.mean == pytest.approx(1)
    arrays[EMBEDDING][1][5, 5] = np.nan
    write(gpt2, arrays)
    assert inspection.inspect(gpt2).problems == (f"{EMBEDDING}: 1 of 64 rows hold values that are not finite",)


@pytest.mark.parametrize("head", ["F32", "F64"])
@pytest.mark.parametrize("full", [False, True], ids=["sampled", "full"])
def test_a_nan_that_both_matrices_hold_is_no_difference_and_one_alone_is_not_lost_among_numbers(
    gpt2: Path, full: bool, head: str
) -> None:
    arrays = read(gpt2)
    one = np.ones((64, 16), np.float32)
    one[0, 0] = np.nan
    other = one.astype(np.float64 if head == "F64" else np.float32)
    other[0, 1] = 1.25
    write(gpt2, arrays | {EMBEDDING: ("F32", one), HEAD: (head, other)})
    tie = inspection.inspect(gpt2, full=full).tie
    assert tie and (tie.equal, tie.max_difference) == (False, 0.25)
    other[0, 0] = 1
    write(gpt2, arrays | {EMBEDDING: ("F32", one), HEAD: (head, other)})
    tie = inspection.inspect(gpt2, full=full).tie
    assert tie and not tie.equal and tie.max_difference is not None and math.isnan(tie.max_difference)


def test_with_every_value_read_a_matrix_that_is_not_finite_is_one_problem(gpt2: Path) -> None:
    arrays = read(gpt2)
    arrays[EMBEDDING][1][5, 5:7] = np.nan
    write(gpt2, arrays)
    assert inspection.inspect(gpt2, full=True).problems == (f"{EMBEDDING} holds 2 values that are not finite",)


def entry(
    name: str, shape: tuple[int, ...] = (2,), dtype: str = "F32", role: inspection.Role = "model", cut: bool = False
) -> TensorEntry:
    return TensorEntry(name=name, dtype=dtype, shape=shape, bytes=8, file="f", role=role, cut=cut)


def test_layers_fold_into_one_line_and_what_differs_stands_apart() -> None:
    entries = [entry(f"h.{n}.ln_1.weight") for n in (0, 1, 2, 10, 11)]
    entries += [entry("h.0.ln_2.weight"), entry("h.3.ln_1.weight", dtype="BF16"), entry("h.4.ln_1.weight", (3,))]
    entries += [
        entry("h.5.ln_1.weight", role="left over"),
        entry("h.6.ln_1.weight", cut=True),
        entry("a.0.e.0.w1"),
        entry("a.0.e.1.w1"),
        entry("a.1.e.0.w1"),
    ]
    folded = inspection.fold(entries)
    assert [(line.name, len(line.entries)) for line in folded] == [
        ("h.{0-2,10-11}.ln_1.weight", 5),
        ("h.0.ln_2.weight", 1),
        ("h.3.ln_1.weight", 1),
        ("h.4.ln_1.weight", 1),
        ("h.5.ln_1.weight", 1),
        ("h.6.ln_1.weight", 1),
        ("a.{0-1}.e.{0-1}.w1", 3),
    ]


@given(st.lists(st.text("ab.01\0{}*[\\", max_size=8), unique=True))
def test_folding_loses_no_tensor_whatever_it_is_called(names: list[str]) -> None:
    folded = inspection.fold([entry(name) for name in names])
    assert sorted(e.name for line in folded for e in line.entries) == sorted(names)
    for line in folded:
        assert len(line.entries) > 1 or line.name == line.entries[0].name


@given(st.lists(st.integers(0, 999).map("h.{}.w".format), unique=True))
def test_numbers_in_names_sort_as_numbers(names: list[str]) -> None:
    assert sorted(names, key=inspection.natural) == sorted(names, key=lambda name: int(name.split(".")[1]))


NAMES = st.sampled_from(
    [EMBEDDING, HEAD, "wte.weight", "_orig_mod.wte.weight", "h.0.ln_1.weight", "h.0.attn.bias", "h.7.ln_1.weight", "x",
     "transformer.wpe.weight", "model.h.0.attn.c_attn.weight", "h.1.mlp.c_fc.qweight", "lm_head.bias"]
)  # fmt: skip
SHAPES = st.lists(st.sampled_from([0, 1, 2, 16, 64]), max_size=3).map(tuple)
TYPES = st.sampled_from(["F32", "BF16", "F64", "I8", "BOOL", "F8_E5M2"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(st.dictionaries(NAMES, st.tuples(TYPES, SHAPES), max_size=6), st.booleans(), st.booleans())
def test_whatever_the_tensors_are_it_is_described_or_refused_and_agrees_with_loading(
    gpt2: Path, described: dict[str, tuple[str, tuple[int, ...]]], tied: bool, full: bool
) -> None:
    header = tensors.write_header((name, dtype, shape) for name, (dtype, shape) in described.items())
    size = sum(math.prod(shape) * tensors.SIZES[dtype] for dtype, shape in described.values())
    (gpt2 / "model.safetensors").write_bytes(header + bytes(size))
    set_config(gpt2, tie_word_embeddings=tied)
    found = inspection.inspect(gpt2, full=full)
    assert {entry.name for entry in found.tensors} == described.keys()
    assert bool(found.problems) == (refusal(gpt2) is not None)


def test_a_checkpoint_on_the_hub_is_described_without_values(gpt2: Path) -> None:
    arrays = read(gpt2)
    write(gpt2, arrays | {HEAD: arrays[EMBEDDING]})
    remote = weight_files.read_checkpoint(gpt2)
    (gpt2 / "model.safetensors").unlink()
    found = inspection.inspect(gpt2, "org/name", remote=remote)
    assert found.target == "org/name" and found.matrices == () and found.problems == ()
    assert found.tie and (found.tie.equal, found.tie.decision, found.tie.refused) == (None, None, False)
    set_config(gpt2, tie_word_embeddings=False)
    found = inspection.inspect(gpt2, "org/name", remote=remote)
    assert found.tie and (found.tie.decision, found.tie.refused) == ("untie", False)


def test_a_pickle_is_inspected_like_any_other_file(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    plain = run_json(capsys, gpt2)
    values = {name: torch.from_numpy(array) for name, (_, array) in read(gpt2).items()}
    (gpt2 / "model.safetensors").unlink()
    torch.save(values, gpt2 / "pytorch_model.bin")
    found = run_json(capsys, gpt2)
    assert found["tensors"] == [entry | {"file": "pytorch_model.bin"} for entry in plain["tensors"]]
    assert found["matrices"] == plain["matrices"] and found["problems"] == []


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    assert cli.run(["inspect", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_holds_every_field_and_nothing_else(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, gpt2)
    assert tuple(found) == Inspection.__struct_fields__
    assert tuple(found["tensors"][0]) == TensorEntry.__struct_fields__
    assert found["tensors"][0] == {
        "name": EMBEDDING,
        "dtype": "F32",
        "shape": [64, 16],
        "bytes": 4096,
        "file": "model.safetensors",
        "role": "model",
        "cut": False,
        "values": None,
    }


def test_tensors_are_picked_by_glob(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, gpt2, "--tensors", "*.0.*ln_?.weight", "--tensors", "*wte*")
    names = [entry["name"] for entry in found["tensors"]]
    assert names == [EMBEDDING, "transformer.h.0.ln_1.weight", "transformer.h.0.ln_2.weight"]
    assert found["total"]["tensors"] == 28, "the totals are still the checkpoint's"
    assert cli.run(["inspect", str(gpt2), "--tensors", "*.ln_1.weight"]) == 0
    shown = capsys.readouterr().out
    assert "transformer.h.0.ln_1.weight" in shown and "transformer.h.1.ln_1.weight" in shown, "one by one"
    assert "wte" not in shown
    assert cli.run(["inspect", str(gpt2), "--tensors", "nothing*"]) == 2
    assert "no tensor's name fits 'nothing*'" in capsys.readouterr().err


def test_a_view_of_seven_billion_parameters_is_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA 7B in two shards that are holes in the disk."""
    from llmcli import families, hf_config

    config = targets.read_config("llama-7b")
    table = list(families.get("llama").tensors(config))
    (tmp_path / "config.json").write_text(json.dumps(hf_config.write(config, "bfloat16")))
    weight_map = {}
    for n, part in enumerate((table[:100], table[100:]), 1):
        name = f"model-{n:05d}-of-00002.safetensors"
        header = tensors.write_header((tensor.hf_name, "BF16", tensor.hf_shape) for tensor in part)
        with (tmp_path / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(2 * math.prod(tensor.hf_shape) for tensor in part))
        weight_map |= {tensor.hf_name: name for tensor in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert cli.run(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 24
    assert any("6,738,415,616" in line and line.startswith("parameters") for line in shown)
    assert any("model.layers.{0-31}.mlp.up_proj.weight" in line and "32 ×" in line and "1-2" in line for line in shown)
    assert not any(line.startswith("problem") for line in shown)


def test_names_in_brackets_are_shown_as_they_are(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(gpt2, read(gpt2) | {"[bold]x[/nonsense]": ("F32", floats((2,)))})
    assert cli.run(["inspect", str(gpt2)]) == 1
    shown = capsys.readouterr().out
    assert "left over (1): [bold]x[/nonsense]" in shown and "\n[bold]x[/nonsense] " in shown
    assert cli.run(["inspect", str(gpt2), str(gpt2 / "model.safetensors")]) == 1


# Two checkpoints.


def between(a: Path, b: Path) -> differences.Differences:
    pairs = differences.pair(weight_files.read_checkpoint(a), weight_files.read_checkpoint(b))
    found = [difference for difference, _ in differences.compare(pairs)]
    return differences.summary("a", "b", pairs, found, (None, None))


@pytest.fixture
def two(tmp_path: Path) -> Callable[[Arrays, Arrays], differences.Differences]:
    def compare(a: Arrays, b: Arrays) -> differences.Differences:
        write(tmp_path / "a.safetensors", a)
        write(tmp_path / "b.safetensors", b)
        return between(tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    return compare


Two = Callable[[Arrays, Arrays], differences.Differences]


def test_a_checkpoint_does_not_differ_from_itself(checkpoints: Callable[[str], Path]) -> None:
    found = between(checkpoints("llama"), checkpoints("llama"))
    assert found.equal == len(weight_files.read_checkpoint(checkpoints("llama")).infos)
    assert found.different == found.misshapen == found.only_a == found.only_b == () and found.retyped == 0


@pytest.mark.parametrize("chunk", [1 << 18, 7])
@pytest.mark.parametrize("dtypes", [("F32", "F32"), ("F32", "BF16"), ("F64", "F16")])
def test_differences_are_those_of_float64(
    two: Two, chunk: int, dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "CHUNK_VALUES", chunk)
    x, y = floats((9, 5)), floats((9, 5)) + np.float32(0.01) * floats((9, 5), seed=1)
    a, b = ((dtype, STORED[dtype](array)) for dtype, array in zip(dtypes, (x, y), strict=True))
    (found,) = two({"x": a}, {"x": b}).different
    apart = as_float64(*a) - as_float64(*b)
    assert found.largest == np.abs(apart).max()
    assert found.relative == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(as_float64(*a)), rel=1e-12)
    assert found.dtypes == dtypes and found.shapes == ((9, 5), (9, 5)) and not found.transposed


def test_the_largest_relative_difference_comes_first_and_nan_before_all(two: Two) -> None:
    base = {name: floats((4, 4), seed=n) for n, name in enumerate("pqrs")}
    other = {name: array.copy() for name, array in base.items()}
    other["q"] *= np.float32(1.01)
    other["r"] *= np.float32(1.5)
    other["s"][0, 0] = np.nan
    found = two({n: ("F32", a) for n, a in base.items()}, {n: ("F32", a) for n, a in other.items()})
    assert [difference.name for difference in found.different] == ["s", "r", "q"] and found.equal == 1
    assert math.isnan(found.different[0].largest)
    assert found.different[1].relative == pytest.approx(0.5)
    assert found.different[2].relative == pytest.approx(0.01, rel=1e-4)


def test_the_same_nan_and_infinity_on_both_sides_is_no_difference(two: Two) -> None:
    odd = np.array([[np.nan, np.inf], [-np.inf, 1]], np.float32)
    assert two({"x": ("F32", odd)}, {"x": ("F32", odd)}).equal == 1
    near = odd.copy()
    near[1, 1] = 1.5
    (found,) = two({"x": ("F32", odd)}, {"x": ("F32", near)}).different
    assert found.largest == 0.5 and found.relative == 0.5
    assert two({"x": ("F32", odd)}, {"x": ("BF16", bf16(odd))}).equal == 1
    flipped = odd.copy()
    flipped[0, 1] = -np.inf
    (found,) = two({"x": ("F32", odd)}, {"x": ("F32", flipped)}).different
    assert found.largest == math.inf


def test_a_copy_in_another_type_is_equal_where_nothing_is_lost(two: Two) -> None:
    exact = bf16(floats((4, 6)))
    wide = (exact.astype(np.uint32) << 16).view(np.float32)
    found = two({"x": ("F32", wide)}, {"x": ("BF16", exact)})
    assert (found.equal, found.retyped, found.different) == (1, 1, ())
    apart = two({"x": ("F32", wide)}, {"x": ("BF16", bf16(wide + np.float32(1)))})
    assert (apart.equal, apart.retyped, len(apart.different)) == (0, 0, 1), "retyped are some of those that are equal"
    zeros = np.zeros(3, np.float32)
    assert two({"x": ("F32", zeros)}, {"x": ("F32", -zeros)}).equal == 1, "-0 is 0"
    assert two({"x": ("I32", np.arange(4, dtype=np.int32))}, {"x": ("I64", np.arange(4))}).equal == 1


def test_a_transposed_matrix_is_turned_and_said_to_be(two: Two) -> None:
    x = floats((3, 5))
    found = two({"x": ("F32", x)}, {"x": ("F32", np.ascontiguousarray(x.T))})
    assert (found.equal, found.different, found.misshapen) == (1, (), ())
    y = np.ascontiguousarray(x.T)
    y[4, 1] += np.float32(0.25)
    (near,) = two({"x": ("F32", x)}, {"x": ("F32", y)}).different
    assert near.transposed and near.largest == pytest.approx(0.25, rel=1e-6)
    other = two({"x": ("F32", x)}, {"x": ("F32", floats((3, 4)))})
    assert [d.shapes for d in other.misshapen] == [((3, 5), (3, 4))] and other.equal == 0


def test_tensors_pair_by_name_without_prefixes(two: Two) -> None:
    x, y = ("F32", floats((2, 3))), ("F32", floats((3,)))
    found = two({"transformer.wte.weight": x, "lonely": y}, {"_orig_mod.wte.weight": x, "model.other": y})
    assert (found.equal, found.only_a, found.only_b) == (1, ("lonely",), ("model.other",))
    twice = two({"wte.weight": x, "model.wte.weight": y}, {"model.wte.weight": y, "wte.weight": x})
    assert (twice.equal, twice.only_a) == (2, ()), "two names that would become one stay as they are"


def test_scalars_and_empty_tensors_compare(two: Two) -> None:
    one, other = np.array(1.5, np.float32), np.array(2.0, np.float32)
    empty = ("F32", np.zeros((0, 4), np.float32))
    found = two(
        {"s": ("F32", one), "t": ("F32", one), "e": empty}, {"s": ("F32", one), "t": ("F32", other), "e": empty}
    )
    assert found.equal == 2 and found.different[0].largest == 0.5
    zero = ("F32", np.zeros(2, np.float32))
    assert two({"x": zero}, {"x": ("F32", np.ones(2, np.float32))}).different[0].relative == math.inf


def test_the_command_compares_two(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(gpt2, tmp_path / "other"))
    arrays = read(other)
    arrays["transformer.h.1.ln_1.bias"] = ("F32", arrays["transformer.h.1.ln_1.bias"][1] + np.float32(2))
    write(other, arrays | {HEAD: ("F32", floats((64, 16)))})
    found = run_json(capsys, gpt2, other)
    assert tuple(found) == differences.Differences.__struct_fields__
    assert (found["equal"], found["only_b"], len(found["different"])) == (27, [HEAD], 1)
    assert found["different"][0]["largest"] == pytest.approx(2, rel=1e-5)
    assert [tie["decision"] for tie in found["ties"]] == ["tie", "untie"]
    assert cli.run(["inspect", str(gpt2), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "27 of 28 tensors" in shown and "only in b" in shown and "h.1.ln_1.bias" in shown
    assert run_json(capsys, gpt2, other, "--tensors", "*.h.0.*")["equal"] == 12
    assert cli.run(["inspect", str(gpt2), str(tmp_path / "gone")]) == 2


def test_of_two_checkpoints_the_tokenizers_are_compared(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c, d = (Path(shutil.copytree(gpt2, tmp_path / name)) for name in "abcd")
    train_bpe(["one two three one two three"] * 9, 260).save(a)
    train_bpe(["one two three one two three"] * 9, 260).save(b)
    train_bpe(["four five six four five six"] * 9, 260).save(c)
    (b / "tokenizer.json").write_text(json.dumps(json.loads((b / "tokenizer.json").read_text()), indent=4))
    assert run_json(capsys, a, b)["tokenizer"] == run_json(capsys, a, d)["tokenizer"] == ""
    apart = sum(load_tokenizer(a).token(id) != load_tokenizer(c).token(id) for id in range(260))
    assert run_json(capsys, a, c)["tokenizer"] == f"{apart} of 260 tokens" and 0 < apart < 10
    assert cli.run(["inspect", str(a), str(c)]) == 0
    assert f"tokenizer differs  {apart} of 260 tokens" in capsys.readouterr().out
    (c / "tokenizer.json").write_text("{")
    assert "damaged" in run_json(capsys, a, c)["tokenizer"]


def test_the_command_shows_the_largest_differences_and_says_how_many_more(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(gpt2, tmp_path / "other"))
    arrays = read(other)
    names = [f"transformer.h.1.{part}.bias" for part in ("ln_1", "ln_2", "mlp.c_fc")]
    write(other, arrays | {name: ("F32", arrays[name][1] * np.float32(n)) for n, name in enumerate(names, 2)})
    for most, said in ((2, "and 1 more; --json lists them all"), (3, None)):
        monkeypatch.setattr("llmcli.commands.inspect.MOST", most)
        assert cli.run(["inspect", str(gpt2), str(other)]) == 0
        shown = capsys.readouterr().out
        assert [name in shown for name in reversed(names)] == [True] * most + [False] * (3 - most)
        assert said in shown if said else "more" not in shown


@pytest.mark.parametrize("place", [0, 1])
def test_offline_holds_for_both_of_two(
    gpt2: Path, place: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def fetch(repo: object, offline: bool = False) -> Path:
        asked.append((str(repo), offline))
        return gpt2

    monkeypatch.setattr("llmcli.hub.fetch", fetch)
    two = [str(gpt2), str(gpt2)]
    two[place] = "org/name"
    assert cli.run(["inspect", *two, "--offline"]) == 0
    assert asked == [("org/name", True)]


def test_configs_that_differ_and_problems_are_said_where_tensors_are_equal(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(gpt2, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    layers = config["n_layer"]
    (other / "config.json").write_text(json.dumps(config | {"n_layer": layers + 1}))
    found = run_json(capsys, gpt2, other, code=1)
    assert found["config"] == [{"field": "num_layers", "a": layers, "b": layers + 1}] and not found["different"]
    assert found["problems"] == [[], list(inspection.inspect(other).problems)] and found["problems"][1]
    assert cli.run(["inspect", str(gpt2), str(other)]) == 1
    shown = capsys.readouterr().out
    assert f"num_layers {layers}, {layers + 1}" in shown and "problem in b" in shown and "problem in a" not in shown


def test_a_difference_bears_the_name_that_the_file_has(two: Two) -> None:
    x = floats((2, 3))
    found = two({"model.norm.weight": ("F32", x)}, {"model.norm.weight": ("F32", x + 1), "model.b": ("F32", x)})
    assert (found.different[0].name, found.only_b) == ("model.norm.weight", ("model.b",))


def test_switches_that_differ_are_spelled_as_a_config_file_does(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["load-hf", str(gpt2), "--tie", "untie", "--out", str(tmp_path / "untied")]) == 0
    assert cli.run(["inspect", str(gpt2), str(tmp_path / "untied")]) == 0
    assert "tie_word_embeddings true, false" in capsys.readouterr().out
