"""Weights across the disk: bit-equal both ways, whole or not at all, from whatever form they come in."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import hf
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmcli import checkpoint, load_model, weight_files
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, LlmcliError, UsageError
from llmcli.model import Decoder, build

KINDS = [(family, tied) for family in hf.FAMILIES for tied in (True, False)]


class Made:
    """A checkpoint that transformers wrote, its model, and the tensors in it."""

    def __init__(self, folder: Path, family: str, tied: bool, **changes: Any) -> None:
        self.folder, self.family, self.tied = folder, family, tied
        self.model = hf.make(family, folder, tie_word_embeddings=tied, **changes)
        self.tensors = load_file(folder / "model.safetensors")

    def rewritten(self, folder: Path, values: dict[str, torch.Tensor] | None = None) -> Path:
        """A copy of the folder without its weights, or with others."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes((self.folder / "config.json").read_bytes())
        if values is not None:
            save_file({name: value.clone() for name, value in values.items()}, folder / "model.safetensors")
        return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Made]:
    return {kind: Made(tmp_path_factory.mktemp(kind[0]), *kind) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def made(request: pytest.FixtureRequest, everything: dict[tuple[str, bool], Made]) -> Made:
    return everything[request.param]


@pytest.fixture(scope="module")
def llama(everything: dict[tuple[str, bool], Made]) -> Made:
    return everything["llama", False]


@pytest.fixture(scope="module")
def gpt2(everything: dict[tuple[str, bool], Made]) -> Made:
    return everything["gpt2", True]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 30), generator=torch.Generator().manual_seed(4))


def bits(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and bits(value) == bits(other[name]), name


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


# Both ways


def test_load_save_load_is_bit_equal_and_so_are_the_files(made: Made, tmp_path: Path) -> None:
    model, _ = checkpoint.load(made.folder)
    checkpoint.save(model, tmp_path / "saved")
    again, plan = checkpoint.load(tmp_path / "saved")
    same_bits(model.state_dict(), again.state_dict())
    same_bits(load_file(tmp_path / "saved" / "model.safetensors"), made.tensors)
    assert again.config == model.config
    assert plan.warnings == plan.ignored == plan.notes == ()
    assert plan.tie.decision == ("tie" if made.tied else "untie")


def test_what_is_saved_transformers_loads_whole_with_equal_logits(
    made: Made, tmp_path: Path, ids: torch.Tensor
) -> None:
    checkpoint.save(load_model(made.folder), tmp_path / "saved")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert torch.equal(logits(theirs, ids), logits(made.model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_type_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    hf.make("gpt2", tmp_path / "source", dtype=dtype)
    model = load_model(tmp_path / "source")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    checkpoint.save(model, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    same_bits(stored, load_file(tmp_path / "source" / "model.safetensors"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("asked", ["bfloat16", "bf16", "float16", "fp16", "float64", torch.float32])
def test_a_type_is_converted_as_torch_does_when_loading_and_when_saving(
    llama: Made, tmp_path: Path, asked: str | torch.dtype
) -> None:
    wanted = checkpoint.dtype_of(asked)
    model = load_model(llama.folder, dtype=asked)
    for name, value in load_model(llama.folder).state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(wanted))
    checkpoint.save(load_model(llama.folder), tmp_path / "saved", dtype=asked)
    same_bits(load_file(tmp_path / "saved" / "model.safetensors"), {n: v.to(wanted) for n, v in llama.tensors.items()})


@pytest.mark.parametrize("bad", ["int8", "bf17", "", "nn", "Tensor", torch.int32])
def test_an_unknown_type_is_refused_naming_the_known_ones(llama: Made, bad: Any) -> None:
    with pytest.raises(UsageError, match="dtype") as refusal:
        load_model(llama.folder, dtype=bad)
    assert "bfloat16" in refusal.value.hint


@pytest.mark.parametrize("device", ["cuda:7", "nonsense", "cpu:x", "mps"])
def test_a_device_that_is_not_there_is_refused(llama: Made, device: str) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is there")
    with pytest.raises(UsageError, match="device"):
        load_model(llama.folder, device=device)


@pytest.mark.parametrize("bad", [{"tie": "yes"}, {"tie": "tie", "keep": "left"}, {"keep": "input"}])
def test_words_that_are_no_ties_are_refused(llama: Made, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_model(llama.folder, **bad)


@pytest.mark.parametrize("where", ["absent", "absent/deeper", "file.txt"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file.txt").write_text("words")
    with pytest.raises(LlmcliError):
        load_model(tmp_path / where)


# After a load


def test_nothing_is_left_without_a_source_or_on_the_meta_device(made: Made) -> None:
    model, plan = checkpoint.load(made.folder)
    assert not model.training
    names = {name for name, _ in model.named_parameters()}
    assert names == set(plan.sources) == set(model.state_dict())
    for value in (*model.parameters(), *model.buffers()):
        assert value.device.type == "cpu" and value.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tied_output_is_one_tensor_and_one_step_moves_both_uses(
    everything: dict[tuple[str, bool], Made], tmp_path: Path, ids: torch.Tensor
) -> None:
    for family in hf.FAMILIES:
        model = load_model(everything[family, True].folder)
        for _ in range(2):
            assert model.output_projection is None
            assert sum("output_projection" in name for name in model.state_dict()) == 0
            model = model.to("cpu").to(torch.float32)
            before = model.token_embeddings.weight.detach().clone()
            model(ids).float().logsumexp(-1).sum().backward()
            torch.optim.SGD(model.parameters(), lr=1e-3).step()
            model.zero_grad()
            moved = model.token_embeddings.weight.detach()
            assert not torch.equal(before, moved)
            hidden = torch.randn(1, 1, 16)
            assert torch.equal(model.scores(hidden), softcapped(model, hidden @ moved.T))
            assert torch.equal(model.token_embeddings.weight[5], moved[5])
            checkpoint.save(model, tmp_path / family)
            again = load_model(tmp_path / family)
            assert torch.equal(again.token_embeddings.weight, moved)
            model = again


def softcapped(model: Decoder, scores: torch.Tensor) -> torch.Tensor:
    cap = model.config.logit_softcap
    return scores if cap is None else cap * torch.tanh(scores / cap)


def test_an_untied_output_is_trained_apart(everything: dict[tuple[str, bool], Made]) -> None:
    model = load_model(everything["gpt2", True].folder, tie="untie")
    assert model.output_projection is not None
    assert torch.equal(model.output_projection.weight, model.token_embeddings.weight)
    with torch.no_grad():
        model.output_projection.weight.add_(1)
    assert not torch.equal(model.output_projection.weight, model.token_embeddings.weight)


def test_writing_to_a_loaded_model_leaves_its_file_alone(made: Made) -> None:
    before = (made.folder / "model.safetensors").read_bytes()
    model = load_model(made.folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())
    assert (made.folder / "model.safetensors").read_bytes() == before


def test_a_file_whose_data_begins_anywhere_is_read(llama: Made, tmp_path: Path, ids: torch.Tensor) -> None:
    raw = (llama.folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = raw[8 : 8 + length].rstrip(b" "), raw[8 + length :]
    for spaces in range(4):
        folder = llama.rewritten(tmp_path / str(spaces))
        padded = header + b" " * spaces
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(padded)) + padded + data)
        assert torch.equal(logits(load_model(folder), ids), logits(load_model(llama.folder), ids))


# Pickles


def written(made: Made, folder: Path, value: Any, name: str = "pytorch_model.bin", zip_form: bool = True) -> Path:
    made.rewritten(folder)
    torch.save(value, folder / name, _use_new_zipfile_serialization=zip_form)
    return folder


@pytest.mark.parametrize("zip_form", [True, False], ids=["zip", "before torch 1.6"])
def test_a_pickle_loads_as_the_safetensors_file_does(made: Made, tmp_path: Path, zip_form: bool) -> None:
    folder = written(made, tmp_path / "x", made.tensors, zip_form=zip_form)
    same_bits(load_model(folder).state_dict(), load_model(made.folder).state_dict())
    again = load_model(folder / "pytorch_model.bin")
    same_bits(again.state_dict(), load_model(made.folder).state_dict())


def test_a_module_of_parameters_loads(llama: Made, tmp_path: Path) -> None:
    state = llama.model.state_dict()  # views of parameters, an OrderedDict with metadata
    state = type(state)((name, torch.nn.Parameter(value)) for name, value in llama.tensors.items())
    same_bits(load_model(written(llama, tmp_path / "x", state)).state_dict(), load_model(llama.folder).state_dict())


@pytest.mark.parametrize(
    ("wrap", "beside"),
    [
        (lambda t: {"model": t}, ()),
        (lambda t: {"state_dict": t, "epoch": 3, "optimizer_states": [{"lr": 0.1}]}, ("epoch", "optimizer_states")),
        (lambda t: {"model": t, "optimizer": {0: torch.ones(3)}, "step": torch.tensor(3)}, ("optimizer", "step")),
        (lambda t: {"state_dict": {"model": t, "x": 1}, "y": None}, ("x", "y")),
        (lambda t: {**t, "_extra_state": None}, ("_extra_state",)),
    ],
)  # fmt: skip
def test_wrapped_weights_are_unwrapped_and_what_lies_beside_them_is_said(
    llama: Made, tmp_path: Path, wrap: Any, beside: tuple[str, ...]
) -> None:
    folder = written(llama, tmp_path / "x", wrap(llama.tensors))
    model, plan = checkpoint.load(folder)
    same_bits(model.state_dict(), load_model(llama.folder).state_dict())
    assert plan.ignored == beside


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
@pytest.mark.parametrize("indexed", [True, False])
def test_shards_of_either_form_load(made: Made, tmp_path: Path, ending: str, indexed: bool) -> None:
    folder = made.rewritten(tmp_path / "x")
    names = sorted(made.tensors)
    stem = "pytorch_model" if ending == "bin" else "model"
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-{number:05d}-of-00002.{ending}"
        values = {name: made.tensors[name] for name in part}
        torch.save(values, folder / file) if ending == "bin" else save_file(values, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if indexed:
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model, plan = checkpoint.load(folder)
    same_bits(model.state_dict(), load_model(made.folder).state_dict())
    assert plan.warnings == (() if indexed else ("the shards have no index",))


def test_a_tied_pair_in_a_pickle_is_two_tensors_once_untied(
    everything: dict[tuple[str, bool], Made], tmp_path: Path
) -> None:
    tied = everything["llama", True]
    embedding = tied.tensors["model.embed_tokens.weight"]
    folder = written(tied, tmp_path / "x", {**tied.tensors, "lm_head.weight": embedding})
    assert load_model(folder).output_projection is None
    model = load_model(folder, tie="untie")
    with torch.no_grad():
        model.token_embeddings.weight.zero_()
    assert model.output_projection is not None and torch.equal(model.output_projection.weight, embedding)


def test_layers_that_share_a_tensor_in_a_pickle_are_trained_apart(llama: Made, tmp_path: Path) -> None:
    one = "model.layers.0.mlp.up_proj.weight"
    values = {**llama.tensors, "model.layers.1.mlp.up_proj.weight": llama.tensors[one]}
    values["model.norm.weight"] = torch.ones(1).expand(16)
    model = load_model(written(llama, tmp_path / "x", values))
    with torch.no_grad():
        model.blocks[0].feed_forward.up.weight.zero_()
        model.final_norm.weight[0] = 2.0  # type: ignore[union-attr, index]
    assert torch.equal(model.blocks[1].feed_forward.up.weight, llama.tensors[one])
    assert model.final_norm.weight.sum() == 17  # type: ignore[union-attr, operator]


class Runs:
    """What a hostile pickle holds: an object that runs a command when it is put together."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zip_form", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_a_pickle_that_would_run_code_is_refused_and_nothing_ran(
    llama: Made, tmp_path: Path, zip_form: bool, name: str
) -> None:
    trace = tmp_path / "it-ran"
    value = {**llama.tensors, "x": Runs(os.system, f"touch {trace}")}
    folder = written(llama, tmp_path / "x", value, name, zip_form)
    with pytest.raises(CheckpointError, match="nothing was run") as refusal:
        load_model(folder)
    assert "system" in refusal.value.message and not trace.exists()


@pytest.mark.parametrize(
    "call",
    [
        Runs(eval, "__import__('os').system('touch TRACE')"),
        Runs(getattr, os, "system"),
        Runs(subprocess.run, ["touch", "TRACE"]),
        Runs(torch.load, "TRACE"),
    ],
)
def test_a_bare_pickle_that_would_run_code_is_refused(llama: Made, tmp_path: Path, call: Runs) -> None:
    folder = llama.rewritten(tmp_path / "x")
    for protocol in (0, 2, 4):
        try:
            raw = pickle.dumps({"x": call}, protocol)
        except TypeError:  # a module has no pickle
            continue
        (folder / "pytorch_model.bin").write_bytes(raw.replace(b"TRACE", str(tmp_path / "it-ran").encode()[:5]))
        with pytest.raises(CheckpointError):
            load_model(folder)
    assert not (tmp_path / "it-ran").exists()


def test_a_numpy_array_in_a_pickle_is_no_code_of_ours(llama: Made, tmp_path: Path) -> None:
    import numpy as np

    folder = written(llama, tmp_path / "x", {**llama.tensors, "scale": np.float64(3.0)})
    with pytest.raises(CheckpointError, match="would run code"):
        load_model(folder)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {}, torch.ones(3), "words", {"model": {"state_dict": {}}}])
def test_a_pickle_without_tensors_by_name_is_refused(llama: Made, tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="no tensors by name"):
        load_model(written(llama, tmp_path / "x", value))


def test_tensors_that_are_not_plain_are_refused_by_name(llama: Made, tmp_path: Path) -> None:
    name = "model.norm.weight"
    sparse = torch.ones(16).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they go away in a later torch
        quantised = torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.qint8)
    for number, odd in enumerate((sparse, quantised)):
        with pytest.raises(CheckpointError, match=name):
            load_model(written(llama, tmp_path / str(number), {**llama.tensors, name: odd}))
    with pytest.raises(CheckpointError, match="no tensor's name"):
        load_model(written(llama, tmp_path / "3", {**llama.tensors, "a\nb": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"floating-point.*norm"):
        load_model(written(llama, tmp_path / "4", {**llama.tensors, name: torch.ones(16).int()}))


def test_every_kind_of_damage_to_a_pickle_is_refused(llama: Made, tmp_path: Path) -> None:
    folder = written(llama, tmp_path / "x", llama.tensors)
    file = folder / "pytorch_model.bin"
    sound = file.read_bytes()
    damaged = [b"", b"PK\x03\x04", b"\x80\x02.", os.urandom(500), b"version https://git-lfs", b"x" * 10_000_000]
    damaged += [sound[: len(sound) * n // 10] for n in range(1, 10)]
    damaged += [sound[:n] + b"\xff" * 40 + sound[n + 40 :] for n in (0, 40, 100, 400, len(sound) - 60)]
    damaged += [pickle.dumps(1), b"(" * 100_000]
    for raw in damaged:
        file.write_bytes(raw)
        with pytest.raises(CheckpointError) as refusal:
            load_model(folder)
        assert str(file) in refusal.value.message and len(refusal.value.message) < 1000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    zip_form=st.booleans(),
    changes=st.lists(
        st.tuples(st.integers(0, 10**6), st.binary(max_size=9) | st.just(b"\xff" * 8), st.integers(0, 9)), max_size=4
    ),
)
def test_any_bytes_in_a_pickle_load_or_are_refused(tmp_path: Path, zip_form: bool, changes: Any) -> None:
    raw = io.BytesIO()
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(3)}}, raw, _use_new_zipfile_serialization=zip_form)
    data = raw.getvalue()
    for position, new, cut in changes:
        at = position % len(data)
        data = data[:at] + new + data[at + cut :]
    (tmp_path / "x.bin").write_bytes(data)
    try:
        values, _ = checkpoint.read_pickle(tmp_path / "x.bin")
    except LlmcliError as error:
        assert error.hint and error.message.isprintable() and len(error.message) < 1000
        return
    for value in values.values():
        assert value.device.type == "cpu"
        value.clone()


def test_an_archive_that_unpacks_to_more_than_it_is_is_refused(llama: Made, tmp_path: Path) -> None:
    folder = written(llama, tmp_path / "x", llama.tensors)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(folder / "pytorch_model.bin") as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    (folder / "pytorch_model.bin").write_bytes(packed.getvalue())
    with pytest.raises(CheckpointError, match="not an archive that torch"):
        load_model(folder)


def test_safetensors_are_preferred_to_pickles(llama: Made, tmp_path: Path) -> None:
    folder = llama.rewritten(tmp_path / "x", llama.tensors)
    (folder / "pytorch_model.bin").write_bytes(b"damaged")
    same_bits(load_model(folder).state_dict(), load_model(llama.folder).state_dict())


# Saving


def test_a_tied_output_is_stored_once_or_as_a_copy_on_request(
    everything: dict[tuple[str, bool], Made], tmp_path: Path, ids: torch.Tensor
) -> None:
    for family in hf.FAMILIES:
        source = everything[family, True]
        model = load_model(source.folder)
        checkpoint.save(model, tmp_path / family / "once")
        checkpoint.save(model, tmp_path / family / "copy", head_copy=True)
        once, copy = (load_file(tmp_path / family / name / "model.safetensors") for name in ("once", "copy"))
        assert copy.keys() - once.keys() == {"lm_head.weight"} and "lm_head.weight" not in source.tensors
        again, plan = checkpoint.load(tmp_path / family / "copy")
        assert plan.tie.decision == "tie" and "equal" in plan.tie.reason and not plan.warnings
        same_bits(again.state_dict(), model.state_dict())
        embedding = source.model.get_input_embeddings().weight
        assert torch.equal(copy["lm_head.weight"], embedding)


def test_a_copy_of_the_head_of_an_untied_model_is_its_own_head(llama: Made, tmp_path: Path) -> None:
    checkpoint.save(load_model(llama.folder), tmp_path / "x", head_copy=True)
    same_bits(load_file(tmp_path / "x" / "model.safetensors"), llama.tensors)


@pytest.mark.parametrize("shard_bytes", [1, 3000, 10_000])
def test_shards_hold_at_most_what_was_asked_and_load_here_and_in_transformers(
    made: Made, tmp_path: Path, shard_bytes: int, ids: torch.Tensor
) -> None:
    model = load_model(made.folder)
    checkpoint.save(model, tmp_path / "x", shard_bytes=shard_bytes)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "x").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    stored: dict[str, torch.Tensor] = {}
    for name in files:
        part = load_file(tmp_path / "x" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        assert sum(value.nbytes for value in part.values()) <= shard_bytes or len(part) == 1
        stored |= part
    same_bits(stored, made.tensors)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    again, plan = checkpoint.load(tmp_path / "x")
    same_bits(again.state_dict(), model.state_dict())
    assert not plan.warnings
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(logits(theirs, ids), logits(model, ids), atol=2e-4, rtol=0)


def test_bytes_are_reported_as_they_are_written(llama: Made, tmp_path: Path) -> None:
    written: list[float] = []
    checkpoint.save(load_model(llama.folder), tmp_path / "x", on_bytes=written.append)
    assert len(written) == len(llama.tensors)
    assert sum(written) == sum(value.nbytes for value in llama.tensors.values())


def test_what_is_untied_here_and_has_a_bias_is_written_under_a_name_that_transformers_refuses(tmp_path: Path) -> None:
    config = ModelConfig(family="gpt2", vocab_size=50, embed_dim=32, num_layers=2, num_heads=4)
    model = build(config)
    with torch.no_grad():
        model.output_projection.bias.normal_()  # type: ignore[union-attr]
    checkpoint.save(model, tmp_path / "x")
    again = load_model(tmp_path / "x")
    same_bits(again.state_dict(), model.state_dict())
    with pytest.raises(ValueError, match="llmcli-gpt2"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    tied, plan = checkpoint.load(tmp_path / "x", tie="tie", keep="input")
    assert tied.output_projection is None and "bias lm_head.bias is dropped" in plan.warnings[0]


def test_the_older_checkpoint_stands_until_the_newer_one_is_whole(
    llama: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(llama.folder)
    checkpoint.save(model, tmp_path / "x")
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}

    for kind in (OSError, KeyboardInterrupt):

        def stop(folder: Path, kind: type[BaseException] = kind) -> None:
            (folder / "half").write_bytes(b"x")
            raise kind(28, "No space left on device")

        with pytest.raises(CheckpointError if kind is OSError else KeyboardInterrupt) as refusal:
            checkpoint.save(model, tmp_path / "x", extra_files=stop)
        if kind is OSError:
            assert "No space left" in str(refusal.value)
        assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_of_something_else_is_not_replaced(llama: Made, tmp_path: Path) -> None:
    model = load_model(llama.folder)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("home", "file"):
        with pytest.raises(UsageError, match="is no checkpoint"):
            checkpoint.save(model, tmp_path / name)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(CheckpointError):
        checkpoint.save(model, Path("/"))
    (tmp_path / "empty").mkdir()
    checkpoint.save(model, tmp_path / "empty")
    assert load_model(tmp_path / "empty")


def test_a_link_to_a_folder_is_followed_when_saving(llama: Made, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    checkpoint.save(load_model(llama.folder), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_model_may_be_saved_over_the_checkpoint_it_is_mapped_from(llama: Made, tmp_path: Path) -> None:
    folder = llama.rewritten(tmp_path / "x", llama.tensors)
    model = load_model(folder)
    with torch.no_grad():
        model.final_norm.weight.mul_(2)  # type: ignore[union-attr]
    checkpoint.save(model, folder)
    want = {**llama.tensors, "model.norm.weight": llama.tensors["model.norm.weight"] * 2}
    same_bits(load_file(folder / "model.safetensors"), want)
    assert torch.equal(model.token_embeddings.weight, llama.tensors["model.embed_tokens.weight"])


@pytest.mark.slow
def test_saving_holds_one_tensor_beside_a_model_that_is_mapped(tmp_path: Path) -> None:
    code = """
import resource, sys, torch
from pathlib import Path
from llmcli import checkpoint
from llmcli.config import ModelConfig
from llmcli.model import build
folder = Path(sys.argv[1])
if sys.argv[2] == "make":
    config = ModelConfig(family="gpt2", vocab_size=1000, embed_dim=1024, num_layers=12, num_heads=8,
                         tie_word_embeddings=True)
    checkpoint.save(build(config), folder / "big")
else:
    model, _ = checkpoint.load(folder / "big")
    before = open("/proc/self/status").read()
    checkpoint.save(model, folder / "again", shard_bytes=10**8)
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, anonymous())
"""
    for what in ("make", "again"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), what], check=True, capture_output=True, text=True
        )
    size = (tmp_path / "big" / "model.safetensors").stat().st_size
    assert size > 600_000_000
    assert int(done.stdout.split()[1]) * 1024 < 350_000_000  # torch itself and one tensor, not a second model
    assert (
        weight_files.read_checkpoint(tmp_path / "again").infos.keys()
        == weight_files.read_checkpoint(tmp_path / "big").infos.keys()
    )


# What is no number


def test_values_that_are_no_numbers_are_counted_tensor_by_tensor(gpt2: Made, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in gpt2.tensors.items()}
    values["transformer.h.0.attn.c_attn.weight"][0, :40] = float("nan")  # over q, k and v
    values["transformer.wte.weight"][3, 4] = float("inf")
    values["transformer.ln_f.bias"][:2] = torch.tensor([float("-inf"), float("nan")])
    model, plan = checkpoint.load(gpt2.rewritten(tmp_path / "x", values))
    counts: dict[str, list[int]] = {}
    size = 0
    for finding in checkpoint.findings(model, plan):
        size += finding.size
        if finding.nan or finding.infinite:
            old = counts.setdefault(finding.name, [0, 0])
            counts[finding.name] = [old[0] + finding.nan, old[1] + finding.infinite]
    assert counts == {
        "transformer.h.0.attn.c_attn.weight": [40, 0],
        "transformer.wte.weight": [0, 1],
        "transformer.ln_f.bias": [1, 1],
    }
    assert size == sum(parameter.nbytes for parameter in model.parameters())
    clean, made = checkpoint.load(gpt2.folder)
    assert not any(finding.nan or finding.infinite for finding in checkpoint.findings(clean, made))


def test_a_weight_of_another_shape_than_the_table_s_is_never_saved(tmp_path: Path) -> None:
    model = build(ModelConfig(family="llama", vocab_size=8, embed_dim=8, num_layers=1, num_heads=2, hidden_dim=12))
    model.blocks[0].feed_forward.down.weight = torch.nn.Parameter(torch.zeros(8, 8))  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"feed_forward\.down\.weight: the model's is \(8, 8\).*\(8, 12\)"):
        checkpoint.save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
