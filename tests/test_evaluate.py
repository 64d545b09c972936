"""Evaluation: every token once, with the context that is stated, to the numbers of a plain computation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcli import checkpoint, cli, evaluate, load_model, load_tokenizer
from llmcli import tokenizer as tokens
from llmcli.config import ModelConfig
from llmcli.errors import DataError, TokenizerError, UsageError
from llmcli.evaluate import Document, Evaluation
from llmcli.generate import NonFiniteLogits
from llmcli.model import Decoder, build

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
BYTES = tokens.bytes_tokenizer()


def wild(family: str = "llama", **changes: object) -> Decoder:
    """A tiny model of bytes with every parameter at random."""
    sizes = {"vocab_size": 257, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32}
    made = build(ModelConfig(family=family, **{**sizes, **changes})).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return made


def scored(model: Decoder, texts: Sequence[str], **options: object) -> tuple[Evaluation, int]:
    """The evaluation of texts in bytes, and how many tokens the progress counted."""
    documents = evaluate.encode(BYTES, texts, model.config.vocab_size)
    steps, done = evaluate.evaluate(model, BYTES, documents, **options), 0  # type: ignore[arg-type]
    while True:
        try:
            done += next(steps)
        except StopIteration as end:
            return end.value, done


@torch.inference_mode()
def plain(model: Decoder, text: str, context: int, stride: int) -> list[float]:
    """Each token's loss in float64, one window and one token at a time."""
    exact = build(model.config).eval().double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    ids, losses = list(text.encode()), []
    for target in range(1, len(ids)):
        window = max(0, math.ceil((target - context) / stride))  # the first one that reaches the target
        logits = exact(torch.tensor([ids[window * stride : target]]))[0, -1]
        losses.append(float(logits.logsumexp(-1) - logits[ids[target]]))
    return losses


@given(length=st.integers(0, 60), context=st.integers(1, 20), data=st.data())
def test_each_token_is_scored_once_from_at_least_the_stated_context(
    length: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    scored = []
    for begin, end, fresh in evaluate.windows(length, context, stride):
        assert 0 < end - begin <= context and begin % stride == 0
        for target in range(fresh, end + 1):
            assert target - begin >= min(target, context - stride + 1)
            scored.append(target)
    assert scored == list(range(1, length))


@pytest.mark.parametrize(("context", "stride"), [(32, 16), (32, 32), (20, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_loss_is_that_of_a_plain_float64_computation(family: str, context: int, stride: int) -> None:
    model, text = wild(family), "To be, or not to be: that is the question — whether 'tis nobler in the mind."
    wanted = plain(model, text, context, stride)
    found, done = scored(model, [text], context=context, stride=stride)
    assert found.losses[0][1:] == pytest.approx(wanted, abs=1e-5)
    assert math.isnan(found.losses[0][0])
    total = math.fsum(wanted)
    assert found.tokens == done == len(wanted) == len(text.encode()) - 1
    assert found.loss == pytest.approx(total / len(wanted), abs=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / len(wanted)), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / (len(text.encode()) - 1), rel=1e-6)
    assert found.bits_per_character == pytest.approx(total / math.log(2) / (len(text) - 1), rel=1e-6)
    assert (found.context, found.stride) == (context, stride)


def test_documents_do_not_see_each_other_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wild()
    texts = ["first text, which is a rather long one " * 3, "", "x", "a second", "a third text of some length" * 2]
    together, done = scored(model, texts)
    for text, losses in zip(texts, together.losses, strict=True):
        if len(text) > 1:
            np.testing.assert_allclose(losses[1:], scored(model, [text])[0].losses[0][1:], atol=1e-5)
    assert done == together.tokens == sum(max(0, len(text) - 1) for text in texts)
    # The first byte of each text is not predicted, and counts among neither bytes nor characters.
    assert together.bytes == together.characters == together.tokens
    monkeypatch.setattr(evaluate, "PASS", 40)
    monkeypatch.setattr(evaluate, "LOGITS", 257 * 3)
    in_pieces, _ = scored(model, texts)
    assert in_pieces.loss == pytest.approx(together.loss, abs=1e-6)


def test_no_more_logits_exist_at_a_time_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, most = wild(), []
    scores = Decoder.scores
    monkeypatch.setattr(evaluate, "LOGITS", 257 * 5)
    monkeypatch.setattr(Decoder, "scores", lambda self, hidden: most.append(len(hidden)) or scores(self, hidden))
    scored(model, ["some text of more than five bytes" * 4])
    assert max(most) == 5


def test_the_default_stride_is_half_the_context_and_the_context_the_model_s() -> None:
    assert (scored(wild(), ["abc"])[0].context, scored(wild(), ["abc"])[0].stride) == (32, 16)
    long = wild(max_position_embeddings=100_000)
    assert scored(long, ["abc"])[0].context == evaluate.CONTEXT


def test_the_curve_is_the_loss_by_tokens_before_over_every_window() -> None:
    model, text = wild(), "all work and no play makes Jack a dull boy " * 2
    found, _ = scored(model, [text], context=32, stride=16, curve=True)
    assert found.losses[0][1:] == pytest.approx(plain(model, text, 32, 16), abs=1e-5)
    sums, counts = np.zeros(32), np.zeros(32, dtype=int)
    for begin, end, _ in evaluate.windows(len(text), 32, 16):
        losses = plain(model, text[begin : end + 1], 32, 32)
        sums[: len(losses)] += losses
        counts[: len(losses)] += 1
    np.testing.assert_allclose(found.curve[0], sums, atol=1e-4)
    assert found.curve[1].tolist() == counts.tolist()
    bins = evaluate.bins(found)
    assert [(bin.start, bin.end) for bin in bins] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)]
    assert bins[3].loss == pytest.approx(sums[4:8].sum() / counts[4:8].sum(), abs=1e-5)
    assert sum(bin.tokens for bin in bins) == counts.sum()


def test_a_bin_ends_where_the_text_does() -> None:
    found, _ = scored(wild(), ["x" * 7], curve=True)
    assert [(bin.start, bin.end, bin.tokens) for bin in evaluate.bins(found)] == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 4, 2),
        (5, 6, 2),
    ]


def test_each_token_has_its_place() -> None:
    texts = ["ab\nc\n\nd", "é!"]
    found, _ = scored(wild(), texts)
    documents = evaluate.encode(BYTES, texts, 257)
    places = [(t.document, t.line, t.column, t.token) for t in evaluate.by_token(BYTES, documents, found)]
    assert places[:6] == [
        (1, 1, 2, "b"),
        (1, 1, 3, "Ċ"),
        (1, 2, 1, "c"),
        (1, 2, 2, "Ċ"),
        (1, 3, 1, "Ċ"),
        (1, 4, 1, "d"),
    ]
    assert places[-1] == (2, 1, 2, "!")  # é is two tokens and one column
    assert [t.loss for t in evaluate.by_token(BYTES, documents, found)] == [
        loss for losses in found.losses for loss in losses if not math.isnan(loss)
    ]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"context": 33}, UsageError),
        ({"context": 8, "stride": 9}, UsageError),
        ({"context": 8, "stride": 0}, UsageError),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        scored(wild("gpt2"), ["abc"], **options)


def test_a_perplexity_past_what_a_float_holds_is_infinite() -> None:
    model = wild()
    assert model.output_projection is not None
    with torch.no_grad():
        model.output_projection.weight *= 1e4
    found = scored(model, ["abc"])[0]
    assert found.loss > 710 and math.isfinite(found.loss) and found.perplexity == math.inf


def test_what_cannot_be_measured_is_refused() -> None:
    for texts in ([], [""], ["x", "y"]):
        with pytest.raises(DataError, match="too short"):
            scored(wild(), texts)
    with pytest.raises(TokenizerError, match=r"97.*64.*257"):
        evaluate.encode(BYTES, ["a"], 64)
    broken = wild()
    with torch.no_grad():
        broken.token_embeddings.weight[98] = math.nan
    with pytest.raises(NonFiniteLogits, match=r"the logits are not finite: .*token_embeddings\.weight"):
        scored(broken, ["abc"])


@pytest.mark.skipif(not STORIES.exists(), reason="the trained model is not here")
def test_stories260k_has_the_published_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((STORIES / "expected.json").read_text())
    text = tmp_path / "text.txt"
    text.write_text(expected["text"])
    assert cli.run(["evaluate", str(STORIES), str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["tokens"] == len(expected["ids"]) - 1
    # BOS stands before the text: all of its bytes are predicted.
    bits = expected["loss"] * (len(expected["ids"]) - 1) / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / len(expected["text"].encode()), abs=1e-5)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not here")
@pytest.mark.skipif(not STORIES.exists(), reason="the trained model is not here")
def test_more_context_predicts_better_or_as_well() -> None:
    model, coder = load_model(STORIES), load_tokenizer(STORIES)
    documents = evaluate.encode(coder, [SHAKESPEARE.read_text()[:3000]], 512)

    def loss(context: int, stride: int) -> float:
        steps = evaluate.evaluate(model, coder, documents, context=context, stride=stride)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return float(end.value.loss)

    assert loss(256, 64) < loss(64, 16) < loss(64, 64) < loss(4, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint.save(wild(), tmp_path / "model", extra_files=BYTES.save)
    return tmp_path / "model"


def test_json_has_these_keys_and_more_where_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder.parent / "text.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert cli.run(["evaluate", str(folder), str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["tokens", "loss", "perplexity", "bits_per_byte", "stride"]
    assert found["tokens"] == len("one\ntwo\n") - 1 and found["stride"] == 16
    options = ["--by-token", "--context-curve", "--stride", "4", "--context", "8"]
    assert cli.run(["evaluate", str(folder), str(folder), str(text), "--json", *options]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second and first["checkpoint"] == str(folder)
    assert list(first) == [
        "checkpoint",
        "tokens",
        "loss",
        "perplexity",
        "bits_per_byte",
        "stride",
        "by_token",
        "context_curve",
    ]
    assert len(first["by_token"]) == first["tokens"]
    assert list(first["by_token"][0]) == ["id", "token", "loss", "document", "line", "column"]
    assert list(first["context_curve"][0]) == ["start", "end", "tokens", "loss"]


def test_a_context_that_no_text_fills_costs_nothing() -> None:
    few = scored(wild(), ["some text"], context=32, stride=32, curve=True)[0]
    many = scored(wild(), ["some text"], context=10**12, stride=32, curve=True)[0]
    assert many.loss == few.loss and evaluate.bins(many) == evaluate.bins(few)


def test_a_loss_that_is_worse_than_guessing_is_said_to_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "text.txt").write_text("some text")
    assert cli.run(["evaluate", str(folder), str(folder.parent / "text.txt")]) == 0
    assert "worse than guessing" not in capsys.readouterr().err
    model, _ = checkpoint.load(folder)
    with torch.no_grad():
        model.get_parameter("output_projection.weight").mul_(40)
    checkpoint.save(model, folder, extra_files=BYTES.save)
    assert cli.run(["evaluate", str(folder), str(folder.parent / "text.txt")]) == 0
    assert "is worse than guessing (ln 257 = 5.55)" in capsys.readouterr().err


def test_several_checkpoints_stand_in_one_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder.parent / "lines.jsonl"
    text.write_text('{"text": "one"}\n{"text": "two three"}\n')
    options = ["--by-token", "--context-curve"]
    assert cli.run(["evaluate", str(folder), str(folder), str(text), *options]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split()[:4] == ["checkpoint", "tokens", "loss", "perplexity"]
    assert lines[1].split()[1] == lines[2].split()[1] == "10"
    assert shown.out.count("the worst tokens") == shown.out.count("loss by context") == 2
    losses = [float(line.split()[2]) for line in lines[6:16]]
    assert losses == sorted(losses, reverse=True)
    spans = re.findall(r"^([\d–]+) +\d+ +\d+\.\d{4} ", shown.out, re.MULTILINE)
    assert spans == ["1", "2", "3–4", "5–8"] * 2, "as far as the longest document reaches"
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["only-one"], 2, "a checkpoint and a text"),
        (["MODEL", "/nowhere.txt"], 2, "/nowhere.txt"),
        (["/nowhere", "TEXT"], 2, "/nowhere"),
        (["MODEL", "TEXT", "--stride", "33"], 2, "stride 33"),
    ],
)
def test_the_command_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    text = folder.parent / "text.txt"
    text.write_text("abc")
    named = {"MODEL": str(folder), "TEXT": str(text)}
    assert cli.run(["evaluate", *(named.get(word, word) for word in arguments)]) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


def test_a_context_past_the_trained_one_warns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder.parent / "text.txt"
    text.write_text("abc")
    assert cli.run(["evaluate", str(folder), str(text), "--context", "33"]) == 0
    assert "trained for 32" in capsys.readouterr().err


def test_a_document_keeps_its_text_and_ids() -> None:
    (document,) = evaluate.encode(BYTES, ["ab"], 257)
    assert isinstance(document, Document) and document.text == "ab" and document.ids.tolist() == [97, 98]
