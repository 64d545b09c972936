"""gradient-report: the two paths of an embedding's gradient, against autograd and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf
import pytest
import torch
import torch.nn.functional as F

from llmcli import checkpoint, cli, gradients, tokenizer
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.model import Decoder, build

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
stories = pytest.mark.skipif(not STORIES.is_dir(), reason="needs the shared stories260K")
IDS = torch.tensor([[5, 2, 5, 9, 1], [2, 7, 5, 2, 2]])


def bare(tied: bool = True, **changes: Any) -> Decoder:
    """A model without layers: logits are scores of embeddings."""
    sizes = {"family": "llama", "vocab_size": 12, "embed_dim": 4, "num_layers": 0, "num_heads": 1}
    model = build(ModelConfig(**{**sizes, **changes}, tie_word_embeddings=tied))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def loss_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_the_two_paths_add_up_to_autograds_gradient_when_tied(family: str, tmp_path: Path) -> None:
    hf.make(family, tmp_path, tie_word_embeddings=True)
    model, plan = checkpoint.load(tmp_path)
    assert plan.tie.decision == "tie"
    parts = gradients.split(model, IDS)
    loss = loss_of(model, IDS)
    loss.backward()
    whole = model.token_embeddings.weight.grad
    torch.testing.assert_close(parts.input + parts.output, whole, rtol=1e-4, atol=1e-6)
    assert parts.loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_the_two_paths_are_autograds_two_gradients_when_untied(family: str, tmp_path: Path) -> None:
    hf.make(family, tmp_path, tie_word_embeddings=False)
    model = checkpoint.load(tmp_path)[0]
    assert model.output_projection is not None
    parts = gradients.split(model, IDS)
    loss_of(model, IDS).backward()
    torch.testing.assert_close(parts.input, model.token_embeddings.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts.output, model.output_projection.weight.grad, rtol=1e-4, atol=1e-6)


def test_the_worked_example_rows_2_5_7_and_5_three_times() -> None:
    # By the input path alone rows 2, 5 and 7 are reached; where every position's gradient is the same, a row's is as
    # often as it stands there.
    model = bare(tied=False)
    ids = torch.tensor([[5, 2, 5], [2, 7, 5]])
    model.hidden(ids).sum().backward()
    at_once = model.token_embeddings.weight.grad
    assert at_once is not None and at_once.abs().sum(1).nonzero().flatten().tolist() == [2, 5, 7]
    torch.testing.assert_close(at_once[[2, 5, 7]], torch.tensor([[2.0] * 4, [3.0] * 4, [1.0] * 4]))
    read = torch.cat([ids, torch.tensor([[0], [0]])], dim=1)  # the last column is only predicted
    parts = gradients.split(model, read)
    assert (parts.input != 0).any(1).nonzero().flatten().tolist() == [2, 5, 7]
    assert (parts.output != 0).any(1).all()  # softmax pushes every row


def test_by_hand_for_a_model_without_layers() -> None:
    model = bare()
    weight = model.token_embeddings.weight.detach()
    h, target = weight[3], 8
    p = torch.softmax(weight @ h, 0)
    p[target] -= 1
    parts = gradients.split(model, torch.tensor([[3, 8]]))
    torch.testing.assert_close(parts.output, p[:, None] * h)
    torch.testing.assert_close(parts.input[3], p @ weight)
    assert parts.input[[n for n in range(12) if n != 3]].abs().max() == 0


def test_the_embedding_scale_is_part_of_the_input_path() -> None:
    model = bare(family="gemma", scale_embeddings=True)
    parts = gradients.split(model, torch.tensor([[3, 8, 1]]))
    loss_of(model, torch.tensor([[3, 8, 1]])).backward()
    torch.testing.assert_close(parts.input + parts.output, model.token_embeddings.weight.grad)


def test_the_model_is_left_as_it_was() -> None:
    model = bare()
    model.token_embeddings.weight.requires_grad_(False)
    before = model.token_embeddings.weight.clone()
    with torch.no_grad():
        gradients.split(model, IDS)
    assert model.token_embeddings.weight.grad is None and not model.token_embeddings.weight.requires_grad
    assert torch.equal(before, model.token_embeddings.weight)


def test_the_report_counts_and_measures(tmp_path: Path) -> None:
    model = bare()
    names = [f"t{n}" for n in range(12)]
    found = gradients.report(model, IDS, names, most=3)
    parts = gradients.split(model, IDS)
    total = parts.input + parts.output
    assert found.positions == 8 and found.tied and found.vocab_size == 12
    assert found.input.rows == 4 and found.output.rows == 12  # read are 2, 5, 7, 9
    rows = {row.id: row for row in found.rows}
    assert sorted(rows) == [1, 2, 5, 7, 9]
    counts = {id: (row.as_input, row.as_target) for id, row in rows.items()}
    assert counts == {5: (3, 2), 2: (3, 3), 9: (1, 1), 7: (1, 1), 1: (0, 1)}
    for id, row in rows.items():
        assert row.token == f"t{id}"
        assert row.input_norm == pytest.approx(parts.input[id].norm().item(), rel=1e-5)
        assert row.output_norm == pytest.approx(parts.output[id].norm().item())
        assert row.sum_norm == pytest.approx(total[id].norm().item())
    norms = [row.sum_norm for row in found.rows]
    assert norms == sorted(norms, reverse=True)
    outside = [id for id in parts.output.norm(dim=1).argsort(descending=True).tolist() if id not in rows]
    assert [row.id for row in found.others] == outside[:3]
    assert found.sum is not None and found.sum.norm == pytest.approx(total.norm().item())
    assert found.cosine == pytest.approx(
        F.cosine_similarity(parts.input.flatten(), parts.output.flatten(), dim=0).item()
    )
    untied = gradients.report(bare(tied=False), IDS, names)
    assert untied.sum is None and untied.cosine is None and all(row.sum_norm is None for row in untied.rows)
    assert len(untied.others) == 7  # no more than there are


def test_a_row_is_reached_where_any_of_its_numbers_has_a_gradient() -> None:
    part = gradients._part(torch.tensor([[0.0, 3], [0, 0], [-4, 0]]))
    assert (part.rows, part.norm) == (2, 5)


def test_a_text_of_one_token_and_an_id_without_a_row_are_refused() -> None:
    with pytest.raises(UsageError, match="no next one"):
        gradients.split(bare(), torch.tensor([[3]]))
    with pytest.raises(UsageError, match="12"):
        gradients.split(bare(), torch.tensor([[3, 12]]))


@stories
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Lily saw Tim and Lily ran."
    assert cli.run(["gradient-report", str(STORIES), "--text", text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = tokenizer.load(STORIES)
    ids = names.encode(text)
    assert found["positions"] == len(ids) - 1 and found["tied"]
    assert {row["id"] for row in found["rows"]} == set(ids)
    assert found["input"]["rows"] == len(set(ids[:-1])) and found["output"]["rows"] == 512
    lily = next(row for row in found["rows"] if row["token"] == "▁Lily")
    assert (lily["as_input"], lily["as_target"]) == (2, 2)
    assert cli.run(["gradient-report", str(STORIES), "--text", text]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:4] for line in shown if len(line) == 7}  # id, how often read, how often predicted
    assert rows["▁Lily"] == [str(lily["id"]), "2", "2"]
    assert rows["<s>"] == ["1", "1", "–"], "the first is not predicted"
    assert rows["."][1:] == ["–", "1"], "the last is not read"


def test_a_tokenizer_of_more_tokens_than_the_model_has_rows_is_refused_by_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf.make("llama", tmp_path, tie_word_embeddings=True)  # 64 rows
    tokenizer.bytes_tokenizer().save(tmp_path)
    assert cli.run(["gradient-report", str(tmp_path), "--text", "1a"]) == 1
    said = capsys.readouterr().err
    assert "token id 97 has no row in the model: its vocab_size is 64; the tokenizer's size is 257" in said


def test_the_command_refuses_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf.make("llama", tmp_path, tie_word_embeddings=True)
    assert cli.run(["gradient-report", str(tmp_path), "--text", "a"]) == 1
    said = capsys.readouterr().err
    assert "no tokenizer there" in said and f"Copy the tokenizer's files into {tmp_path}." in said


@pytest.mark.parametrize("command", [["gradient-report", "--text"], ["logits"]])
def test_a_text_longer_than_the_model_was_trained_for_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    checkpoint.save(bare(vocab_size=257, max_position_embeddings=8), tmp_path)
    tokenizer.bytes_tokenizer().save(tmp_path)
    assert cli.run([command[0], str(tmp_path), *command[1:], "x" * 8]) == 0
    assert "warning" not in capsys.readouterr().err
    assert cli.run([command[0], str(tmp_path), *command[1:], "x" * 9]) == 0
    said = capsys.readouterr().err
    assert "9 tokens are more than the 8 the model was trained for: expect what it predicts to get worse" in said
