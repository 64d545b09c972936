"""llmcli load-hf, as it is run: every bent checkpoint right or refused, clean output, and nothing lost."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import bent
import hf
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcli import checkpoint, cli, commands, hub, load_model, tensors, verify, weight_files
from llmcli.commands import load_hf
from llmcli.errors import CheckpointError, UsageError
from llmcli.tokenizer import bytes_tokenizer

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
KEYS = ["family", "parameters", "tie", "ignored", "warnings", "out"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> bent.Straight:
    return bent.Straight(tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="module")
def folders(straight: bent.Straight) -> dict[tuple[str, bool], Path]:
    for family in hf.FAMILIES:
        for tied in (True, False):
            straight.logits(family, tied)
    return {(f, tied): straight.root / f"{f}-{tied}" for f in hf.FAMILIES for tied in (True, False)}


class Shell:
    """Runs the command in this process and takes its streams apart."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        code = cli.run(["load-hf", *map(str, arguments)])
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    def report(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        got, out, err = self(*arguments, "--json")
        assert got == code, err
        return json.loads(out)  # type: ignore[no-any-return]

    def refusal(self, *arguments: str | Path, code: int = 1) -> str:
        got, out, err = self(*arguments)
        assert (got, out) == (code, ""), err
        assert err.startswith("error: ") and "  hint: " in err
        return err


@pytest.fixture
def load(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("bend", bent.BENDS, ids=lambda bend: bend.name)
@pytest.mark.parametrize("check", [True, False], ids=["check", "load"])
def test_a_bent_checkpoint_is_right_or_refused(
    straight: bent.Straight, tmp_path: Path, load: Shell, bend: bent.Bend, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = straight.bent(bend, tmp_path / "bent")
    code, out, err = load(folder, "--json", *(["--check"] if check else []))
    assert not (tmp_path / "it-ran").exists()
    if bend.right == "refuse":
        assert code == 1 and str(folder) in err and "  hint: " in err
        return
    if bend.right == "either" and code:
        assert code == 1 and str(folder) in err
        return
    assert code == int(bend.right == "say" and not check), err
    report = json.loads(out)
    if bend.right == "say":
        if not check:
            assert report["warnings"] == ["model.layers.1.mlp.up_proj.weight holds 1 NaN values"]
            assert "1 NaN" in err
        return
    said = pytest.warns(UserWarning, match="bent: ") if report["warnings"] else nullcontext()
    with torch.no_grad(), said:  # the API says what the command says
        logits = load_model(folder)(straight.ids)
    torch.testing.assert_close(logits, straight.logits(bend.family, bend.tied), atol=2e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_the_report_of_every_family(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path, family: str, tied: bool
) -> None:
    folder = folders[family, tied]
    stored = load_file(folder / "model.safetensors")
    report = load.report(folder)
    assert list(report) == KEYS
    assert report | {"tie": None} == {
        "family": family,
        "parameters": sum(value.numel() for value in stored.values()),
        "tie": None,
        "ignored": [],
        "warnings": [],
        "out": None,
    }
    assert list(report["tie"]) == ["decision", "reason"]
    assert report["tie"]["decision"] == ("tie" if tied else "untie")
    assert load.report(folder, "--check") == report
    written = load.report(folder, "--out", tmp_path / "out")
    assert written == report | {"out": str(tmp_path / "out")}
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)


def test_the_view_says_each_thing_on_a_line(folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    values = load_file(folders["llama", False] / "model.safetensors")
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    values["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    folder.mkdir()
    table = json.loads((folders["llama", False] / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(table))
    save_file(values, folder / "model.safetensors")
    code, out, err = load(folder, "--out", tmp_path / "out")
    assert code == 0 and err.splitlines() == [line for line in err.splitlines() if line.startswith("warning: ")]
    assert "config says tied, but" in err  # a report that goes elsewhere leaves no warning unseen
    lines = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in out.splitlines()}
    assert list(lines) == ["family", "parameters", "output", "ignored", "warning", "written to"]
    assert lines["parameters"] == "5,968 (5.968 k)"
    assert lines["output"] == "untied: two different matrices in the file; config says tied"
    assert lines["ignored"] == "model.layers.{0-1}.self_attn.rotary_emb.inv_freq"
    assert re.search(r"max difference \d", lines["warning"])
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table["tie_word_embeddings"] is False  # what is saved says what the tensors are
    assert checkpoint.plan(tmp_path / "out").warnings == ()


def test_warnings_go_to_stderr_beside_json_and_wherever_a_checkpoint_is_opened(
    straight: bent.Straight, tmp_path: Path, load: Shell
) -> None:
    bend = next(bend for bend in bent.BENDS if bend.name == "tied by the config, a trained head")
    folder = straight.bent(bend, tmp_path / "x")
    code, out, err = load(folder, "--json")
    assert code == 0 and json.loads(out)["warnings"][0] in err and "warning: config says tied" in err
    model, plan = commands.open_model(str(folder))
    assert "warning: config says tied" in load.capsys.readouterr().err
    assert plan.tie.decision == "untie" and model.output_projection is not None
    tied, _ = commands.open_model(str(folder), tie="tie", keep="output", dtype="bfloat16")
    assert tied.output_projection is None and tied.token_embeddings.weight.dtype == torch.bfloat16


def test_a_warning_is_said_once_where_both_streams_end_in_one_place(straight: bent.Straight, tmp_path: Path) -> None:
    bend = next(bend for bend in bent.BENDS if bend.name == "tied by the config, a trained head")
    arguments = [sys.executable, "-m", "llmcli", "load-hf", str(straight.bent(bend, tmp_path / "x")), "--check"]
    one = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=60)
    assert one.stdout.count("config says tied, but") == 1
    two = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert two.stderr.count("config says tied, but") == two.stdout.count("config says tied, but") == 1


# Options


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--check", "--out", "x"], "--check reads no weights, --out needs them"),
        (["--check", "--verify"], "--check reads no weights, --verify needs them"),
        (["--check", "--dtype", "bf16"], "--check reads no weights, --dtype needs them"),
        (["--head", "copy"], "--head copy"),
        (["--shard-size", "5GB"], "--shard-size"),
        (["--force"], "--force"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--keep", "input"], "without --tie tie"),
        (["--tie", "tie"], "--keep input or --keep output"),
        (["--tie", "maybe"], "maybe"),
        (["--out", "x", "--shard-size", "lots"], "lots"),
        (["--out", "x", "--shard-size", "0"], "not a size"),
        (["--revision", "main"], "not a repository"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_a_usage_error(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path, arguments: list[str], says: str
) -> None:
    arguments = [str(tmp_path / "x") if argument == "x" else argument for argument in arguments]
    assert says in load.refusal(folders["llama", False], *arguments, code=2)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5 g", 15 * 10**8), ("4096", 4096), ("2kb", 2000)]
)
def test_sizes_are_powers_of_ten(text: str, size: int) -> None:
    assert load_hf.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5TB", "5 5", "0", "0.1", "nan", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        load_hf.parse_size(text)


def test_a_tie_is_changed_and_changed_back_with_equal_logits(
    straight: bent.Straight, folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    for family in hf.FAMILIES:
        want = straight.logits(family, True)
        untied, tied = tmp_path / family / "untied", tmp_path / family / "tied"
        report = load.report(folders[family, True], "--tie", "untie", "--out", untied)
        assert report["tie"]["decision"] == "untie" and "lm_head.weight" in load_file(untied / "model.safetensors")
        assert load.report(untied)["tie"]["decision"] == "untie"
        report = load.report(untied, "--tie", "tie", "--out", tied)
        assert report["tie"]["decision"] == "tie" and "lm_head.weight" not in load_file(tied / "model.safetensors")
        with torch.no_grad():
            for folder in (untied, tied):
                torch.testing.assert_close(load_model(folder)(straight.ids), want, atol=2e-4, rtol=0)
        assert (
            load_file(tied / "model.safetensors").keys()
            == load_file(folders[family, True] / "model.safetensors").keys()
        )


def test_a_head_is_copied_a_type_converted_and_a_file_split_on_request(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    load.report(folders["gpt2", True], "--out", out, "--head", "copy", "--dtype", "bf16", "--shard-size", "5kB")
    found = weight_files.read_checkpoint(out)
    assert len(found.files) > 1 and {info.dtype for info in found.infos.values()} == {"BF16"}
    assert tensors.equal(found.infos["lm_head.weight"], found.infos["transformer.wte.weight"])
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load.report(out)["tie"]["decision"] == "tie"


def test_values_that_leave_the_range_of_a_type_are_said(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    values = load_file(folders["llama", False] / "model.safetensors")
    values["model.norm.weight"][:3] = 1e6
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "config.json").write_bytes((folders["llama", False] / "config.json").read_bytes())
    save_file(values, folder / "model.safetensors")
    assert load.report(folder)["warnings"] == []
    assert load.report(folder, "--dtype", "fp16", code=1)["warnings"] == [
        "model.norm.weight holds 3 infinite values as fp16"
    ]


def test_what_is_no_number_is_counted_over_all_that_one_tensor_of_the_file_fills(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    values = load_file(folders["gpt2", True] / "model.safetensors")
    values["transformer.h.0.attn.c_attn.weight"][0, :40] = float("nan")  # q's 16, k's 16 and 8 of v
    values["transformer.wte.weight"][1, :2] = torch.tensor([float("inf"), float("nan")])
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "config.json").write_bytes((folders["gpt2", True] / "config.json").read_bytes())
    save_file(values, folder / "model.safetensors")
    assert load.report(folder, code=1)["warnings"] == [
        "transformer.wte.weight holds 1 NaN and 1 infinite values",
        "transformer.h.0.attn.c_attn.weight holds 40 NaN values",
    ]


@pytest.mark.parametrize("bend", bent.BENDS, ids=lambda bend: bend.name)
def test_load_hf_and_inspect_full_agree_whether_there_is_a_problem(
    bend: bent.Bend, straight: bent.Straight, load: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = straight.bent(bend, tmp_path / "bent")
    loaded = load(folder)[0]
    assert cli.run(["inspect", "--full", str(folder)]) == loaded


def test_values_that_are_not_finite_matter_only_where_the_model_has_them(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer that nothing reads is no problem; of a weight, whoever meets it names the file's tensor and the file."""
    for name, code in (("model.layers.0.self_attn.rotary_emb.inv_freq", 0), ("model.layers.1.mlp.up_proj.weight", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((folders["llama", False] / "config.json").read_bytes())
        values = load_file(folders["llama", False] / "model.safetensors")
        values[name] = torch.full_like(values.get(name, torch.zeros(4)), float("nan"))
        save_file(values, folder / "model.safetensors")
        assert load(folder)[0] == code
        assert cli.run(["inspect", "--full", str(folder)]) == code
        assert f"{name} holds {values[name].numel():,} values that are not finite" in capsys.readouterr().out
        assert cli.run(["logits", str(folder), "--ids", "1,2,3"]) == code
    assert f"the weight {name} of {folder / 'model.safetensors'} holds NaN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "zeros", "said"),
    [
        ("llama", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"], "2 tensors"),
        ("llama", ["model.layers.0.self_attn.q_proj.weight"], "1 tensor"),
        ("gpt2", ["transformer.h.0.attn.c_attn.weight"], "1 tensor"),
        ("gpt2", ["transformer.h.0.attn.c_attn.bias", "transformer.ln_f.bias"], ""),
        ("gemma", ["model.norm.weight"], ""),
    ],
)
def test_tensors_of_nothing_but_zeros_are_named_where_they_should_not_be(
    folders: dict[tuple[str, bool], Path],
    load: Shell,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    zeros: list[str],
    said: str,
) -> None:
    """As the end of a file that was never written has them; a bias, and a norm that adds 1, may well be zero."""
    shutil.copytree(folders[family, True], tmp_path / "m")
    values = load_file(tmp_path / "m" / "model.safetensors")
    save_file(values | {name: torch.zeros_like(values[name]) for name in zeros}, tmp_path / "m" / "model.safetensors")
    warnings = load.report(tmp_path / "m")["warnings"]
    hold = "holds" if said == "1 tensor" else "hold"
    assert [f"{said} {hold} nothing but zeros: {', '.join(zeros)}"] * bool(said) == warnings
    assert cli.run(["inspect", "--full", str(tmp_path / "m"), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [f"nothing but zeros in {', '.join(zeros)}"] * bool(said) == notes


def test_a_part_of_a_fused_tensor_may_be_zero(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    shutil.copytree(folders["gpt2", True], tmp_path / "m")
    values = load_file(tmp_path / "m" / "model.safetensors")
    values["transformer.h.0.attn.c_attn.weight"][:, :16] = 0  # the queries of it: their attention looks evenly about
    save_file(values, tmp_path / "m" / "model.safetensors")
    assert load.report(tmp_path / "m")["warnings"] == []


def test_a_tokenizer_that_cannot_be_read_or_has_too_many_tokens_is_said(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    shutil.copytree(folders["llama", False], tmp_path / "m")
    bytes_tokenizer().save(tmp_path / "m")
    assert load.report(tmp_path / "m")["warnings"] == ["its tokenizer has 257 tokens, the model 64 rows"]
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    (said,) = load.report(tmp_path / "m", "--out", tmp_path / "out")["warnings"]
    assert said.startswith("its tokenizer cannot be read: ") and "tokenizer.json" in said


def test_the_largest_numbers_of_float64_are_described(
    folders: dict[tuple[str, bool], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((folders["llama", False] / "config.json").read_bytes())
    values = load_file(folders["llama", False] / "model.safetensors")
    values["model.norm.weight"] = torch.tensor([3e300, 1e300], dtype=torch.float64).repeat(
        len(values["model.norm.weight"]) // 2
    )
    save_file(values, tmp_path / "model.safetensors")
    assert cli.run(["inspect", "--full", "--json", str(tmp_path)]) == 0
    (found,) = (t["values"] for t in json.loads(capsys.readouterr().out)["tensors"] if t["name"] == "model.norm.weight")
    assert found["mean"] == pytest.approx(2e300) and found["std"] == pytest.approx(1e300)
    assert cli.run(["inspect", "--full", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model.norm.weight"))
    assert line.split()[-3:] == ["2e+300", "1e+300", "3e+300"]


# Writing


def test_what_goes_along_goes_along_unchanged(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for path in folders["gpt2", True].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    table = json.loads((source / "config.json").read_text())
    table |= {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": "x", "custom": 1}
    (source / "config.json").write_text(json.dumps(table))
    for name in hub.BESIDE:
        (source / name).write_bytes(f"{name} as it is\r\n\xff".encode("latin-1"))
    (source / "optimizer.pt").write_bytes(b"not to be carried")
    before = digest(source)
    load.report(source, "--out", out)
    assert digest(source) == before
    for name in hub.BESIDE:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert sorted(p.name for p in out.iterdir()) == sorted(["config.json", "model.safetensors", *hub.BESIDE])
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (5, [6, 7], None)
    load.report(source / "model.safetensors", "--out", tmp_path / "from-the-file")
    assert digest(tmp_path / "from-the-file") == digest(out)


def test_a_link_is_not_carried_out_of_reach(folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in folders["gpt2", True].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (tmp_path / "secret").write_text("s3cret")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert "link out of the folder" in load.refusal(source, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_source_is_never_overwritten(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "deep" / "source"
    source.mkdir(parents=True)
    for path in folders["gpt2", True].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(source)
    before = digest(source)
    for out in (source, tmp_path / "link", source.parent, tmp_path, ".", "..", f"{source}/../source/"):
        for force in ([], ["--force"]):
            assert "source itself" in load.refusal(source, "--out", out, *force, code=2)
            assert "source itself" in load.refusal(source / "model.safetensors", "--out", out, *force, code=2)
    assert digest(source) == before


def test_what_is_there_is_replaced_only_by_force_and_only_a_checkpoint(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    load.report(folders["gpt2", True], "--out", out)
    assert "is there already" in load.refusal(folders["gpt2", False], "--out", out, code=2)
    assert load.report(out)["tie"]["decision"] == "tie"
    load.report(folders["gpt2", False], "--out", out, "--force")
    assert load.report(out)["tie"]["decision"] == "untie"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("x")
    assert "is no checkpoint" in load.refusal(folders["gpt2", True], "--out", tmp_path / "home", "--force", code=2)
    assert (tmp_path / "home" / "thesis").exists()
    (tmp_path / "empty").mkdir()
    load.report(folders["gpt2", True], "--out", tmp_path / "empty")


def test_names_with_spaces_accents_and_signs_work(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    out = tmp_path / "ein schöner = Name\u2028" / "[bold]x"
    assert load.report(folders["llama", False], "--out", out)["out"] == str(out)
    code, shown, _ = load(out, "--out", tmp_path / "[red]again")
    assert code == 0 and "[red]again" in shown


def test_an_unwritable_place_is_refused(folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    load.refusal(folders["llama", False], "--out", tmp_path / "file" / "out", code=2)
    load.refusal(folders["llama", False], "--out", "/proc/out")
    load.refusal(folders["llama", False], "--out", tmp_path / ("x" * 300), code=2)


# Beside transformers


def test_verify_compares_with_transformers(folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path) -> None:
    report = load.report(folders["mixtral", False], "--verify")
    assert list(report) == [*KEYS, "verify"]
    found = report["verify"]
    assert found["agrees"] and found["max_difference"] < 1e-4 < found["max_logit"] and found["tokens"] == 48
    code, out, _ = load(folders["gpt", True], "--verify", "--tie", "untie", "--out", tmp_path / "out")
    assert code == 0 and re.search(r"verified +largest difference of logits from transformers \d", out)


def test_verify_compares_like_with_like(folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path) -> None:
    folder = folders["llama", False]
    whole = load.report(folder, "--verify", "--out", tmp_path / "whole")["verify"]
    assert whole["tolerance"] == pytest.approx(1e-3 * max(1, whole["max_logit"])) and not whole["written"]
    # bfloat16 moves the logits by more than the tolerance; that is no fault of who reads them.
    code, out, _ = load(folder, "--verify", "--dtype", "bfloat16", "--out", tmp_path / "half", "--json")
    found = json.loads(out)["verify"]
    ids = torch.randint(load_model(folder).config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        half, ours = (load_model(path, dtype="float32")(ids) for path in (tmp_path / "half", folder))
    assert (half - ours).abs().max() > found["tolerance"] > found["max_difference"]
    assert code == 0 and found["written"] and found["max_logit"] == pytest.approx(float(half.abs().max()))
    for changed in (["--tie", "tie", "--keep", "input"], ["--tie", "untie"]):
        report = load.report(folder, "--verify", *changed, "--out", tmp_path / changed[1])
        assert report["verify"]["written"] and report["verify"]["agrees"]
        assert "has the checkpoint as it is" in load.refusal(folder, "--verify", *changed, code=2)


def test_verify_of_nothing_but_zeros_verifies_nothing(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama", False], tmp_path / "x")
    bent.put(folder, {name: torch.zeros_like(value) for name, value in bent.read(folder).items()})
    code, out, err = load(folder, "--verify")
    assert code == 1 and "not verified" in out and "every logit is 0" in err


def test_verify_fails_where_the_two_differ(straight: bent.Straight, load: Shell, tmp_path: Path) -> None:
    bend = next(bend for bend in bent.BENDS if bend.name == "module. in front")
    folder = straight.bent(bend, tmp_path / "x")
    code, out, err = load(folder, "--verify", "--json")
    report = json.loads(out)
    assert code == 1 and report["verify"]["agrees"] is False and "differ by" in err and "said of it is above" in err
    assert any("missing keys" in warning for warning in report["warnings"])
    # What is written from it is what transformers reads rightly.
    assert load.report(folder, "--verify", "--out", tmp_path / "clean")["verify"]["agrees"]


def test_verify_says_what_it_cannot_compare(
    folders: dict[tuple[str, bool], Path], load: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.config import ModelConfig
    from llmcli.model import build

    checkpoint.save(
        build(ModelConfig(family="gpt2", vocab_size=9, embed_dim=8, num_layers=1, num_heads=2)), tmp_path / "x"
    )
    assert "transformers cannot load it" in load.refusal(tmp_path / "x", "--verify")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "not installed" in load.refusal(folders["llama", True], "--verify")
    with pytest.raises(CheckpointError):
        monkeypatch.delitem(sys.modules, "transformers")
        verify.verify(tmp_path / "x")


# Costs


BIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


PEAK = "print(next(l.split()[1] for l in open('/proc/self/status') if 'VmHWM' in l), file=sys.stderr)"  # kilobytes


def big(folder: Path) -> Path:
    """LLaMA 7B's shapes in bfloat16: 13.5 GB of holes, in which the two matrices differ in one row."""
    from llmcli import families, hf_config

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BIG))
    config = hf_config.read(BIG, "big").config
    table = list(families.get("llama").tensors(config))
    header = tensors.write_header((t.hf_name, "BF16", t.hf_shape) for t in table)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.write(b"\x01" * 8192)  # the embedding's first row
        file.truncate(len(header) + 2 * sum(torch.Size(t.hf_shape).numel() for t in table))
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads its memory from /proc")
def test_a_check_costs_headers_only_at_any_size_and_no_torch(tmp_path: Path) -> None:
    folder = big(tmp_path / "big")
    assert (folder / "model.safetensors").stat().st_size > 13 * 10**9
    code = (
        "import sys; from llmcli import cli; "
        f"assert cli.run(['load-hf', {str(folder)!r}, '--check', '--json']) == 0; "
        "heavy = {'torch', 'numpy', 'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules); "
        "assert not heavy, heavy; "
        f"{PEAK}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["parameters"] == 6_738_415_616
    assert int(run.stderr) < 60_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads its memory from /proc")
def test_a_check_of_equal_matrices_reads_them_without_keeping_them(tmp_path: Path) -> None:
    folder = big(tmp_path / "big")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(int.from_bytes(file.read(8), "little") + 8)
        file.write(bytes(8192))
    code = (
        "import sys; from llmcli import cli; "
        f"assert cli.run(['load-hf', {str(folder)!r}, '--check', '--json']) == 0; "
        f"{PEAK}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "could be tied (--tie tie)" in json.loads(run.stdout)["tie"]["reason"]
    assert int(run.stderr) < 70_000


@pytest.mark.skipif(not STORIES.is_dir(), reason="the model is not here")
def test_a_trained_model_is_what_it_is(load: Shell) -> None:
    report = load.report(STORIES)
    assert report["family"] == "llama" and report["parameters"] == 260_032
    assert report["tie"] == {"decision": "tie", "reason": "no output matrix in the file; config says tied"}
    assert load.report(STORIES, "--check") == report


def test_a_pipe_sees_no_progress_and_no_colour(folders: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "llmcli", "load-hf", str(folders["llama", True]), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert run.stderr == "" and "\x1b" not in run.stdout and "written to" in run.stdout


def test_a_tied_gpt2_is_said_to_be_tied_and_nothing_new(folders: dict[tuple[str, bool], Path], load: Shell) -> None:
    code, out, err = load(folders["gpt2", True])  # without a head in the file, as on the Hub
    assert (code, err) == (0, "")
    assert "output      tied to the token embeddings: no output matrix in the file" in out and "new" not in out
