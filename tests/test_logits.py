"""The next token's distribution at each position, and the parts of a logit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hf
import pytest
import torch

from llmcli import checkpoint, cli, predictions
from llmcli import tokenizer as tokens
from llmcli.config import ModelConfig
from llmcli.errors import TokenizerError, UsageError
from llmcli.model import Decoder, build

BYTES = tokens.bytes_tokenizer()
TEXT = list(b"hello there")


def wild(family: str = "llama", **changes: object) -> Decoder:
    """A tiny model of bytes with every parameter at random."""
    sizes = {"vocab_size": 300, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32}
    made = build(ModelConfig(family=family, **{**sizes, **changes})).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return made


@pytest.mark.parametrize("rows", [300 * 4, 1 << 24])
@torch.inference_mode()
def test_each_position_has_its_best_candidates_and_the_rank_of_what_follows(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "LOGITS", rows)
    model = wild()
    logits = model(torch.tensor([TEXT]))[0].double()
    found = list(predictions.predict(model, BYTES, TEXT, 4))
    assert [p.position for p in found] == list(range(len(TEXT)))
    assert [p.id for p in found] == TEXT
    for p in found:
        row = logits[p.position]
        best = row.topk(4)
        assert [guess.id for guess in p.top] == best.indices.tolist()
        assert [guess.logit for guess in p.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [guess.probability for guess in p.top] == pytest.approx(row.softmax(-1)[best.indices].tolist(), rel=1e-5)
        assert [guess.rank for guess in p.top] == [1, 2, 3, 4]
        if p.position + 1 < len(TEXT):
            assert p.next is not None and p.next.id == TEXT[p.position + 1]
            place = row.argsort(descending=True).tolist().index(p.next.id)
            assert p.next.rank == place + 1
    assert found[-1].next is None
    assert len(next(predictions.predict(model, BYTES, TEXT, 1000)).top) == 300


def test_rows_without_a_token_are_named_by_their_number() -> None:
    names = {guess.token for p in predictions.predict(wild(), BYTES, TEXT, 300) for guess in p.top}
    assert {f"<row {id}>" for id in range(257, 300)} <= names


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {"head_bias": True}),
        ("gemma2", {"tie_word_embeddings": True, "logit_softcap": 2.0, "attention_softcap": 5.0}),
    ],
)
@torch.inference_mode()
def test_a_logit_is_its_parts(family: str, changes: dict[str, object]) -> None:
    model = wild(family, **changes)
    logits = model(torch.tensor([TEXT]))[0]
    hidden = model.hidden(torch.tensor([TEXT]))[0].double()
    for position, candidate in ((3, 5), (-1, 120)):
        why = predictions.why(model, BYTES, TEXT, candidate, position)
        assert why.position == position % len(TEXT)
        assert why.dot == pytest.approx(why.state_norm * why.row_norm * why.cosine, rel=1e-9)
        assert why.state_norm == pytest.approx(float(hidden[position].norm()), rel=1e-6)
        assert -1 <= why.cosine <= 1
        whole = why.dot + why.bias
        capped = whole if why.cap is None else why.cap * math.tanh(whole / why.cap)
        assert why.logit == pytest.approx(capped, abs=1e-5)
        assert why.logit == pytest.approx(float(logits[position, candidate]), abs=1e-5)
    assert (why.bias != 0) == bool(changes.get("head_bias"))
    assert (why.cap is None) == ("logit_softcap" not in changes)


def test_what_is_not_there_is_refused() -> None:
    model = wild()
    with pytest.raises(UsageError, match="no token"):
        list(predictions.predict(model, BYTES, [], 3))
    with pytest.raises(UsageError, match="position 11"):
        predictions.why(model, BYTES, TEXT, 5, 11)
    with pytest.raises(TokenizerError, match="300"):
        predictions.why(model, BYTES, TEXT, 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint.save(wild(), tmp_path / "model", extra_files=BYTES.save)
    return tmp_path / "model"


def test_the_command_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-k", "2", "--why", "a", "--why", "#299", "--json"]
    assert cli.run(["logits", str(folder), "hi!", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["positions", "why"]
    assert [p["token"] for p in found["positions"]] == ["h", "i", "!"]
    assert list(found["positions"][0]) == ["position", "id", "token", "top", "next"]
    assert list(found["positions"][0]["top"][0]) == ["id", "token", "logit", "probability", "rank"]
    assert [(w["position"], w["id"]) for w in found["why"]] == [(2, 97), (2, 299)]
    assert cli.run(["logits", str(folder), "hi!", "--position", "0", *options]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [p["position"] for p in first["positions"]] == [0] == [w["position"] for w in first["why"][:1]]


def test_the_command_in_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["logits", str(folder), "hi!", "-k", "3", "--why", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["position", "token", "next", "rank"]
    assert [line.count("%") for line in lines[1:4]] == [4, 4, 3]
    assert lines[-2].split()[:3] == ["position", "candidate", "logit"] and lines[-1].split()[1] == "a"
    assert lines[-2].split()[-1] == "bias", "no column for the cap that this model has not"


def test_a_cap_has_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(wild("gemma2", tie_word_embeddings=True, logit_softcap=2.0), tmp_path / "m", extra_files=BYTES.save)
    assert cli.run(["logits", str(tmp_path / "m"), "hi!", "--why", "a"]) == 0
    *_, headings, row = capsys.readouterr().out.splitlines()
    assert headings.split()[-2:] == ["bias", "cap"] and row.split()[-1] == "2"


def test_ids_are_read_as_the_text_they_stand_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for text in (["hi!"], ["--ids", ",".join(map(str, b"hi!"))]):
        assert cli.run(["logits", str(folder), *text, "--why", "a", "--json"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_ids_need_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(wild(), tmp_path / "model")
    assert cli.run(["logits", str(tmp_path / "model"), "--ids", "5 299", "--why", "#7", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [p["token"] for p in found["positions"]] == ["5", "299"] and found["why"][0]["token"] == "7"
    assert "tokens are shown as ids" in shown.err
    assert cli.run(["logits", str(tmp_path / "model"), "--ids", "5,300"]) == 1
    assert "300" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["hi", "--position", "2"], 2, "--position 2"),
        (["hi", "--why", "#x"], 1, "'#x' is 2 tokens"),
        (["hi", "--why", "#512"], 1, "512"),
        (["hi", "--why", "two"], 1, "'two' is 3 tokens"),
        (["", "--json"], 2, "no token"),
        ([], 2, "a text or --ids"),
        (["hi", "--ids", "1"], 2, "a text or --ids"),
        (["--ids", "1,x"], 2, "not a list of numbers"),
    ],
)
def test_the_command_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert cli.run(["logits", str(folder), *arguments]) == code
    assert said in capsys.readouterr().err


def test_every_family_is_taken_apart(tmp_path: Path) -> None:
    for family in hf.FAMILIES:
        hf.make(family, tmp_path / family)
        model = checkpoint.load(tmp_path / family)[0]
        why = predictions.why(model, BYTES, [1, 2, 3], 7)
        assert model(torch.tensor([[1, 2, 3]]))[0, -1, 7].item() == pytest.approx(why.logit, rel=1e-4, abs=1e-5)
