"""Every family goes the whole way: trained, opened in transformers, continued, probed and traced."""

from __future__ import annotations

import json
from pathlib import Path

import hf
import msgspec
import pytest
import torch
import transformers

from llmcli import cli, hf_config
from llmcli.config import DataConfig, Recipe, TrainConfig
from llmcli.train import train


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_tiny_model_is_trained_opened_continued_probed_and_traced(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog lay by the door. " * 60)
    kind, sizes = hf.CONFIGS[family]
    model = msgspec.structs.replace(hf_config.read(kind(**sizes).to_dict(), family).config, vocab_size=257)
    config = TrainConfig(context=32, batch_size=4, max_steps=3, eval_every=3, eval_batches=1, lr=1e-2, warmup_steps=0)
    recipe = Recipe(model=model, data=DataConfig(path=str(text), tokenizer="byte"), train=config)
    losses = [event.loss for event in train(recipe, tmp_path / "run") if type(event).__name__ == "Step"]
    assert losses[-1] < losses[0]

    last = tmp_path / "run" / "last"
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        last, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    ids = torch.tensor([list(b"the cat sat on the mat")])
    from llmcli import load_model

    with torch.no_grad():
        torch.testing.assert_close(load_model(last)(ids), theirs(ids).logits, atol=2e-4, rtol=0)

    assert cli.run(["generate", str(last), "the cat", "-n", "4", "--temperature", "0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 4
    assert cli.run(["nearest-tokens", str(last), "#116", "-k", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["neighbours"]) == 3
    assert cli.run(["trace", str(last), "the cat", "--json"]) == 0
    stages = {stage["name"] for stage in json.loads(capsys.readouterr().out)["passes"][0]["stages"]}
    assert {"embed", "blocks.1.weights", "logits"} <= stages
