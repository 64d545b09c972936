"""Curves: what is read of metrics.jsonl, however it was written, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmcli import cli, curves
from llmcli.errors import LlmcliError


def step(number: int, speed: float = 10.0, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 9 / number, "lr": 0.1, "tokens": 8 * number} | {
        "tokens_per_second": speed,
        **more,
    }


def evaluation(number: int, loss: float) -> dict[str, Any]:
    return {"event": "eval", "step": number, "val_loss": loss, "perplexity": 2.0, "bits_per_byte": loss / 4}


def start(parameters: int) -> dict[str, Any]:
    return {"event": "start", "parameters": parameters, "tie_word_embeddings": True}


def run(tmp_path: Path, *events: Any, name: str = "mine") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_the_best_evaluation_is_the_lowest_and_the_speed_the_median(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(
        tmp_path,
        *(start(5), step(1, 700), evaluation(1, 3.0), step(2, 30), evaluation(2, 1.5), step(3, 20), evaluation(3, 2.0)),
    )
    assert cli.run(["curves", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["tokens"], found["loss"]) == (3, 24, 3.0)
    assert (found["best_loss"], found["best_step"], found["bits_per_byte"]) == (1.5, 2, 0.375)
    assert found["tokens_per_second"] == 30


def test_a_folder_and_its_file_are_one_run_by_the_folders_name(tmp_path: Path) -> None:
    folder = run(tmp_path, step(1))
    assert curves.read(folder) == curves.read(folder / "metrics.jsonl")
    assert curves.read(folder).name == "mine"


def test_a_run_is_described_as_it_last_began(tmp_path: Path) -> None:
    assert curves.read(run(tmp_path, start(5), step(1), start(7), step(2))).start["parameters"] == 7


@pytest.mark.parametrize("key", ["step", "loss", "lr", "tokens", "tokens_per_second"])
@pytest.mark.parametrize("value", [None, "1", [1]])
def test_a_step_without_its_numbers_is_none(tmp_path: Path, key: str, value: Any) -> None:
    odd = step(2) | {key: value}
    assert [row["step"] for row in curves.read(run(tmp_path, step(1), odd, step(3))).steps] == [1, 3]
    with pytest.raises(LlmcliError, match="no steps"):
        curves.read(run(tmp_path, odd, name="odd"))


@pytest.mark.parametrize("line", ["", "{", "[1]", "7", '{"event": "eval", "step": 2}', '{"event": "news"}'])
def test_lines_of_another_kind_are_passed_over(tmp_path: Path, line: str) -> None:
    found = curves.read(run(tmp_path, step(1), line, evaluation(1, 2.0), line))
    assert (len(found.steps), len(found.evaluations), found.start) == (1, 1, {})


def test_the_csv_has_a_row_for_each_step_in_order_with_its_evaluation(tmp_path: Path) -> None:
    events = (step(1), step(2), step(4), evaluation(2, 1.5), evaluation(3, 1.25))
    text = curves.as_csv(curves.read(run(tmp_path, *events)))
    assert text.splitlines() == [
        "step,loss,lr,grad_norm,tokens,tokens_per_second,mfu,memory,val_loss,perplexity,bits_per_byte",
        "1,9.0,0.1,,8,10.0,,,,,",
        "2,4.5,0.1,,16,10.0,,,1.5,2.0,0.375",
        "3,,,,,,,,1.25,2.0,0.3125",
        "4,2.25,0.1,,32,10.0,,,,,",
    ]
