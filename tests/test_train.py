"""Training by its contracts: exact resume, the same curve as transformers, nothing lost, nothing silent."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hf import make
from safetensors.torch import load_file

from llmcli import (
    batches,
    checkpoint,
    compute,
    data,
    distributed,
    families,
    load_model,
    load_tokenizer,
    run_folder,
    tokenizer,
    train,
)
from llmcli.config import DataConfig, ModelConfig, Recipe, TrainConfig
from llmcli.errors import CheckpointError, ConfigError, DataError, TrainingError, UsageError
from llmcli.events import Done, Eval, Event, Progress, Sample, Saved, Start, Step

TEXT = "".join(f"{n} bottles of beer on the wall, take one down, pass it around: {n - 1}.\n" for n in range(99, 0, -1))
MODEL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 257,
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
GPT2: dict[str, Any] = {
    "family": "gpt2",
    "vocab_size": 257,
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 16,
}
TRAIN: dict[str, Any] = {
    "batch_size": 4,
    "max_steps": 10,
    "warmup_steps": 2,
    "eval_every": 5,
    "eval_batches": 2,
    "log_every": 1,
    "lr": 3e-3,
    "precision": "fp32",
    "compile": "off",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def recipe(text: Path, model: dict[str, Any] | None = None, tokenizer: str = "byte", **changes: Any) -> Recipe:
    return Recipe(
        model=ModelConfig(**(model or MODEL)),
        data=DataConfig(path=str(text), tokenizer=tokenizer),
        train=TrainConfig(**{**TRAIN, **changes}),
    )


def run(made: Recipe, out: Path, **options: Any) -> list[Event]:
    return list(train.train(made, out, **options))


def after(steps: int) -> Callable[[], str | None]:
    """A `stop` that says so when that many steps are done (it is asked before each and after the last)."""
    asked = iter([None] * steps)
    return lambda: next(asked, "SIGINT")


def states(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file}/{name}": value
        for file in ("model.safetensors", run_folder.MOMENTS)
        for name, value in load_file(folder / file).items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def of(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


# Events and files


def test_events_have_the_keys_that_are_promised(text: Path, tmp_path: Path) -> None:
    events = run(recipe(text, sample_every=5, sample_prompt="99 "), tmp_path / "run")
    tables = [msgspec.to_builtins(event) for event in events]
    by_kind = {table["event"]: table for table in tables}
    assert list(by_kind) == ["progress", "start", "step", "eval", "saved", "sample", "done"]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "memory"} <= by_kind["step"].keys()
    assert by_kind["eval"].keys() == {"event", "step", "val_loss", "perplexity", "bits_per_byte"}
    assert by_kind["saved"].keys() == {"event", "step", "path", "best"}
    assert {"step", "reason", "best_loss", "best_step"} <= by_kind["done"].keys()
    assert [table["step"] for table in tables if table["event"] == "step"] == list(range(1, 11))
    assert by_kind["step"]["tokens"] == 10 * 4 * 16
    assert by_kind["done"]["reason"] == "finished"


def test_the_metrics_file_holds_what_was_told(text: Path, tmp_path: Path) -> None:
    events = run(recipe(text), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == json.loads(msgspec.json.encode([e for e in events if not isinstance(e, Progress)]))


def test_the_loss_begins_at_chance_and_falls(text: Path, tmp_path: Path) -> None:
    steps = of(run(recipe(text, max_steps=60, log_every=1, lr=1e-2), tmp_path / "run"), Step)
    assert steps[0].loss == pytest.approx(math.log(257), abs=0.05)
    assert steps[-1].loss < 3.5


@pytest.mark.parametrize(
    "model", [MODEL, {**MODEL, "tie_word_embeddings": False}, GPT2], ids=["tied", "untied", "gpt2"]
)
def test_checkpoints_open_in_transformers_as_they_are(text: Path, tmp_path: Path, model: dict[str, Any]) -> None:
    if model is GPT2:  # an untied gpt2 has a head bias, which only a private model_type can say
        model = {**model, "head_bias": False}
    run(recipe(text, model), tmp_path / "run")
    ids = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))
    for name in ("best", "last"):
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "run" / name, output_loading_info=True
        )
        assert not any(report.values())
        with torch.no_grad():
            difference = (theirs(ids).logits - load_model(tmp_path / "run" / name)(ids)).abs().max()
        assert difference < 2e-5
        by = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / name)
        assert by.encode("99 bottles") == load_tokenizer(tmp_path / "run" / name).encode("99 bottles")
        assert theirs.generation_config.eos_token_id == 256
    assert not (tmp_path / "run" / "best" / run_folder.MOMENTS).exists()


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_after_a_reload_is_the_one_that_was_told(text: Path, tmp_path: Path, tied: bool) -> None:
    events = run(recipe(text, {**MODEL, "tie_word_embeddings": tied}, eval_batches=0), tmp_path / "run")
    told = of(events, Eval)[-1]
    model, by = load_model(tmp_path / "run" / "last"), load_tokenizer(tmp_path / "run" / "last")
    assert (model.output_projection is None) == tied
    held_out = TEXT[int(len(TEXT) * 0.9) :]
    ids, total = torch.tensor(by.encode(held_out)), 0.0
    for start in range(0, len(ids) - 1, 16):
        window = ids[start : start + 17]
        with torch.no_grad():
            total += float(torch.nn.functional.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum"))
    mean = total / (len(ids) - 1)
    assert told.val_loss == pytest.approx(mean, abs=1e-6)
    assert told.perplexity == pytest.approx(math.exp(mean), rel=1e-6)
    assert told.bits_per_byte == pytest.approx(mean / math.log(2), rel=1e-6)  # a token is a byte here


def test_bits_per_byte_count_the_bytes_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "wide.txt"
    path.write_text("世界和平" * 200)
    (event,) = of(run(recipe(path, tokenizer="char", max_steps=1), tmp_path / "run"), Eval)
    assert event.bits_per_byte == pytest.approx(event.val_loss / math.log(2) / 3)


# The step


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_the_learning_rate_rises_and_falls_as_named(schedule: str) -> None:
    config = TrainConfig(lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110, schedule=schedule)  # type: ignore[arg-type]
    rates = [train.learning_rate(config, step) for step in range(130)]
    assert rates[0] == pytest.approx(1 / 11) and rates[9] == pytest.approx(10 / 11) and rates[10] == 1.0
    middle = {"cosine": 0.55, "linear": 0.55, "constant": 1.0, "wsd": 1.0}[schedule]
    assert rates[60] == pytest.approx(middle)
    quarter = {"cosine": 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), "linear": 0.775, "constant": 1, "wsd": 1}
    assert rates[35] == pytest.approx(quarter[schedule])
    assert rates[99] == pytest.approx({"wsd": 0.55}.get(schedule, rates[99]))  # 22 steps down, from 88
    assert rates[110] == rates[129] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_the_schedule_may_be_longer_than_the_run() -> None:
    config = TrainConfig(max_steps=50, schedule_steps=1000)
    assert train.learning_rate(config, 300) == train.learning_rate(TrainConfig(max_steps=1000), 300)


@pytest.mark.parametrize("decay_embeddings", [True, False])
@pytest.mark.parametrize("model", [MODEL, {**GPT2, "tie_word_embeddings": True}, GPT2], ids=["llama", "gpt2", "untied"])
def test_every_tensor_is_in_one_group_and_norms_and_biases_never_decay(
    model: dict[str, Any], decay_embeddings: bool
) -> None:
    made = train.models.build(ModelConfig(**model))
    optimizer, groups = train.make_optimizer(made, TrainConfig(weight_decay=0.5, decay_embeddings=decay_embeddings))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decays) == len(list(made.parameters()))
    for name, parameter in made.named_parameters():
        plain = "norm" in name or name.endswith("bias")
        embedding = name in ("token_embeddings.weight", "position_embeddings.weight")
        assert decays[id(parameter)] == (0.0 if plain or (embedding and not decay_embeddings) else 0.5), name
    assert {group.name for group in groups} == {"matrices", "embeddings", "norms and biases"}
    assert sum(group.parameters for group in groups) == sum(p.numel() for p in made.parameters())


def test_accumulation_in_four_parts_is_one_batch_of_four(text: Path, tmp_path: Path) -> None:
    for name, size, parts in (("one", 4, 1), ("four", 1, 4), ("two", 2, 2)):
        # Unclipped: AdamW forgives a gradient of the wrong scale, its moments do not.
        run(recipe(text, batch_size=size, accumulation=parts, grad_clip=0), tmp_path / name)
    one, four, two = (states(tmp_path / name / "last") for name in ("one", "four", "two"))
    for key in one:
        assert torch.allclose(one[key], four[key], atol=1e-6, rtol=0), key
        assert torch.allclose(one[key], two[key], atol=1e-6, rtol=0), key


def test_the_gradient_is_clipped_to_the_norm_that_is_told_before(text: Path, tmp_path: Path) -> None:
    # Without momentum, AdamW's step hides the scale; the first moment after one step is (1 - beta1) times the gradient.
    for clip in (0.0, 0.01):
        events = run(recipe(text, max_steps=1, grad_clip=clip), tmp_path / f"clip{clip}")
        moments = [value for name, value in states(tmp_path / f"clip{clip}" / "last").items() if "exp_avg." in name]
        norm = float(torch.sqrt(sum((value**2).sum() for value in moments))) / 0.1  # type: ignore[arg-type]
        told = of(events, Step)[0].grad_norm
        assert told > 0.1
        assert norm == pytest.approx(clip or told, rel=1e-3)


def transformers_losses(folder: Path, made: Recipe, steps: int) -> list[float]:
    """The same training in transformers and plain PyTorch, by what the recipe says."""
    config, model = made.train, transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.train()
    plain = [p for n, p in model.named_parameters() if p.ndim < 2]
    decayed = [p for n, p in model.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": config.weight_decay}],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )
    text = data.finished(data.prepare(made.data, made.model.vocab_size, folder))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        begin = batches.starts(
            len(text.train), config.context or 0, step * config.batch_size, config.batch_size, config.seed, "windows"
        )
        both = torch.from_numpy(batches.sequences(text.train, config.context or 0, begin))
        logits = model(both[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), both[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_curve_is_that_of_transformers(text: Path, tmp_path: Path, family: str, tied: bool) -> None:
    make(
        family, tmp_path / "start", vocab_size=257, tie_word_embeddings=tied, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    ) if family == "gpt2" else make(family, tmp_path / "start", vocab_size=257, tie_word_embeddings=tied)
    tokenizer.bytes_tokenizer().save(tmp_path / "start")
    config = msgspec.structs.replace(load_model(tmp_path / "start").config)
    settings = {"max_steps": 50, "context": 24, "eval_every": 50, "warmup_steps": 5}
    settings |= {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7, "weight_decay": 0.3, "grad_clip": 0.5}
    made = Recipe(
        model=config,
        data=DataConfig(path=str(text), tokenizer=str(tmp_path / "start")),
        train=TrainConfig(**{**TRAIN, **settings}),
    )
    ours = [step.loss for step in of(run(made, tmp_path / "run", init_from=tmp_path / "start"), Step)]
    theirs = transformers_losses(tmp_path / "start", made, 50)
    assert len(ours) == 50 and theirs[0] - theirs[-1] > 0.5
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4


# Going on


@pytest.mark.parametrize(
    "model, changes",
    [
        ({**MODEL, "dropout": 0.1}, {}),
        ({**MODEL, "dropout": 0.1, "tie_word_embeddings": False}, {"accumulation": 2}),
        ({**GPT2, "dropout": 0.2, "tie_word_embeddings": True}, {"accumulation": 2, "grad_clip": 0.1}),
        ({**GPT2, "dropout": 0.2}, {}),
        ({**MODEL, "family": "mixtral", "num_experts": 4, "top_k_experts": 1, "dropout": 0.1}, {"batch_size": 1}),
    ],
    ids=["tied", "untied accumulating", "gpt2 tied accumulating", "gpt2 untied", "experts"],
)
def test_a_run_that_was_stopped_twice_is_bit_for_bit_the_run_that_was_not(
    text: Path, tmp_path: Path, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    made = recipe(text, model, **changes)
    run(made, tmp_path / "whole")
    for first, second in ((1, 4), (6, 3)):
        out = tmp_path / f"{first}-{second}"
        run(made, out, stop=after(first))
        assert run_folder.read_state(out / "last").step == first
        run(made, out, resume=True, stop=after(second))
        assert run_folder.read_state(out / "last").step == first + second
        events = run(made, out, resume=True)
        assert of(events, Done)[0].reason == "finished"
        assert same(states(out / "last"), states(tmp_path / "whole" / "last"))
        assert same(
            load_file(out / "best" / "model.safetensors"), load_file(tmp_path / "whole" / "best" / "model.safetensors")
        )

        def lines(folder: Path) -> list[Any]:
            events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            kept = ("event", "step", "loss", "lr", "grad_norm", "tokens", "val_loss")
            return [[e.get(key) for key in kept] for e in events if e["event"] in ("step", "eval")]

        assert lines(out) == lines(tmp_path / "whole")


def test_a_run_that_is_stopped_at_its_end_is_judged_all_the_same(text: Path, tmp_path: Path) -> None:
    events = run(recipe(text, max_steps=3), tmp_path / "run", stop=after(3))
    assert of(events, Done)[0].reason == "finished" and of(events, Eval)[-1].step == 3


def test_five_steps_and_five_are_ten_when_the_schedule_is_given(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=10), tmp_path / "ten")
    run(recipe(text, max_steps=5, schedule_steps=10), tmp_path / "five")
    run(recipe(text, max_steps=10, schedule_steps=10), tmp_path / "five", resume=True)
    assert same(states(tmp_path / "ten" / "last"), states(tmp_path / "five" / "last"))


def test_other_random_numbers_drawn_meanwhile_change_nothing(text: Path, tmp_path: Path) -> None:
    made = recipe(text, {**MODEL, "dropout": 0.1})
    run(made, tmp_path / "whole")
    for _ in train.train(made, tmp_path / "disturbed"):
        torch.rand(3)
    assert same(states(tmp_path / "whole" / "last"), states(tmp_path / "disturbed" / "last"))


def test_dropout_differs_from_step_to_step(text: Path, tmp_path: Path) -> None:
    # One window only: each step sees the same text, so without learning only dropout can tell the steps apart.
    path = tmp_path / "one.txt"
    path.write_text("a" * 17 + "bbb")
    made = recipe(
        path, {**MODEL, "dropout": 0.5, "initializer_range": 1.0}, lr=1e-12, min_lr=0, weight_decay=0, batch_size=1
    )
    losses = [step.loss for step in of(run(made, tmp_path / "run"), Step)]
    assert len({round(loss, 4) for loss in losses}) > 5


def test_dropout_differs_from_process_to_process(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judgement = Eval(step=0, val_loss=1.0, perplexity=1.0, bits_per_byte=1.0)
    monkeypatch.setattr(train.Run, "evaluate", lambda self, step: judgement)
    real, seeds = torch.manual_seed, dict[int, set[int]]()
    for rank in (0, 1):
        own = seeds.setdefault(rank, set())
        one = distributed.Processes(rank, 1, 0, torch.device("cpu"))
        monkeypatch.setattr(train, "joined", lambda device, one=one: nullcontext(one))
        monkeypatch.setattr(torch, "manual_seed", lambda seed, own=own: (own.add(int(seed)), real(seed))[1])
        run(recipe(text, {**MODEL, "dropout": 0.1}), tmp_path / f"{rank}")
    assert min(map(len, seeds.values())) >= 10
    assert seeds[0] & seeds[1] <= {1337}  # the weights that both begin with


def test_settings_that_changed_are_noted_and_the_rest_goes_on(text: Path, tmp_path: Path) -> None:
    run(recipe(text), tmp_path / "run")
    events = run(recipe(text, max_steps=12, lr=1e-3), tmp_path / "run", resume=True)
    notes = of(events, Start)[0].notes
    assert any("train.max_steps was 10, is now 12" in note for note in notes)
    assert any("train.lr" in note for note in notes)
    assert [step.step for step in of(events, Step)] == [11, 12]


@pytest.mark.parametrize(
    "change, what",
    [
        ({"text": TEXT + "more"}, "another text"),
        ({"tokenizer": "char"}, "another tokenizer than this recipe: its vocabulary has 257 tokens, the recipe's 32"),
        ({"model": {**MODEL, "num_layers": 1}}, "num_layers 2 is now 1"),
        ({"model": {**MODEL, "tie_word_embeddings": False}}, "tie_word_embeddings"),
        ({"model": {**MODEL, "rope_theta": 500.0}}, "rope_theta"),
        ({"batch_size": 8}, "4 sequences"),
    ],
)
def test_what_would_be_another_run_is_refused_and_the_option_named(
    text: Path, tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    run(recipe(text, max_steps=1), tmp_path / "run")
    before = states(tmp_path / "run" / "last")
    if "text" in change:
        text.write_text(change.pop("text"))
    with pytest.raises(TrainingError, match=what) as caught:
        run(recipe(text, **{"max_steps": 2, **change}), tmp_path / "run", resume=True)
    assert "--init-from" in caught.value.hint
    assert same(before, states(tmp_path / "run" / "last"))


def test_a_moved_text_of_the_same_content_is_the_same_text(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=1), tmp_path / "run")
    moved = text.rename(tmp_path / "moved.txt")
    assert of(run(recipe(moved, max_steps=2), tmp_path / "run", resume=True), Done)[0].step == 2


def test_a_folder_that_holds_a_run_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=1), tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run already") as caught:
        run(recipe(text), tmp_path / "run")
    assert "--resume" in caught.value.hint


def test_resuming_where_nothing_is_begins_and_says_so(text: Path, tmp_path: Path) -> None:
    events = run(recipe(text, max_steps=1), tmp_path / "run", resume=True)
    assert any("nothing to go on from" in note for note in of(events, Start)[0].notes)
    assert of(events, Done)[0].step == 1


def test_a_finished_run_that_is_resumed_does_nothing_more(text: Path, tmp_path: Path) -> None:
    run(recipe(text), tmp_path / "run")
    events = run(recipe(text), tmp_path / "run", resume=True)
    assert not of(events, Step) and not of(events, Saved) and not of(events, Eval)
    assert of(events, Done)[0].best_step is not None


def test_older_checkpoints_are_kept_by_number_and_a_damaged_last_gives_way_to_them(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=8, save_every=2, keep=2), tmp_path / "kept")
    run(recipe(text, max_steps=8), tmp_path / "whole")
    out = tmp_path / "kept"
    assert sorted(folder.name for folder in out.glob("step-*")) == ["step-00000006", "step-00000008"]
    for folder in (out / "last", out / "step-00000008"):  # they share their files on the disk
        content = (folder / run_folder.MOMENTS).read_bytes()
        (folder / run_folder.MOMENTS).unlink()
        (folder / run_folder.MOMENTS).write_bytes(content[:100])
    events = run(recipe(text, max_steps=8, save_every=2, keep=2), out, resume=True)
    assert any("going on from" in note and "step-00000006" in note for note in of(events, Start)[0].notes)
    assert same(states(out / "last"), states(tmp_path / "whole" / "last"))


def test_when_every_checkpoint_is_damaged_it_says_so(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=1), tmp_path / "run")
    (tmp_path / "run" / "last" / run_folder.STATE).write_text("{")
    with pytest.raises(CheckpointError, match=r"training\.json: damaged"):
        run(recipe(text), tmp_path / "run", resume=True)


def test_metrics_after_the_checkpoint_are_dropped_for_they_come_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = '{"event":"step","step":1}\n{"event":"eval","step":2}\n'
    path.write_text(kept + '{"event":"done","step":2}\n{"event":"step","step":3}\n{"event":"st')
    run_folder.clean_metrics(path, 2)
    assert path.read_text() == kept


def test_metrics_that_cannot_be_cleaned_are_named_and_left_as_they_are(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run(recipe(text, max_steps=1), out)
    before = (out / "metrics.jsonl").read_bytes()
    real = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "metrics" not in path.name:
            return real(path, content)
        real(path, content[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: cannot be written \(No space left"):
        run(recipe(text, max_steps=2), out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before
    assert {path.name for path in out.iterdir()} == {".lock", "best", "last", "metrics.jsonl"}


def test_where_what_happens_cannot_be_written_the_run_stops_with_its_last_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "metrics.jsonl" and (out / "last").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: cannot be written \(No space left") as caught:
        run(recipe(text), out)
    assert "last holds step 5: --resume" in caught.value.hint


# Starting from weights


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma"])
def test_fine_tuning_starts_from_any_checkpoint(text: Path, tmp_path: Path, family: str) -> None:
    theirs = make(family, tmp_path / "start", vocab_size=257)
    tokenizer.bytes_tokenizer().save(tmp_path / "start")
    config = load_model(tmp_path / "start").config
    made = Recipe(
        model=config,
        data=DataConfig(path=str(text), tokenizer=str(tmp_path / "start")),
        train=TrainConfig(**{**TRAIN, "max_steps": 0, "context": 16, "eval_batches": 0}),
    )
    events = run(made, tmp_path / "run", init_from=tmp_path / "start")
    ids = torch.tensor(list(TEXT[int(len(TEXT) * 0.9) :].encode()))
    total = 0.0
    for start in range(0, len(ids) - 1, 16):
        window = ids[start : start + 17]
        with torch.no_grad():
            logits = theirs(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    assert of(events, Eval)[0].val_loss == pytest.approx(total / (len(ids) - 1), abs=1e-4)
    assert same(
        load_file(tmp_path / "run" / "best" / "model.safetensors"), load_file(tmp_path / "start" / "model.safetensors")
    )


def test_weights_of_another_tokenizer_model_or_tie_are_refused(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=1), tmp_path / "run")
    start = tmp_path / "run" / "last"
    for changed, what in (
        (recipe(text, tokenizer="char"), "tokenizer is not"),
        (recipe(text, {**MODEL, "tie_word_embeddings": False}), "tie_word_embeddings"),
        (recipe(text, {**MODEL, "family": "mistral"}), "family is llama, the recipe's mistral"),
        (recipe(text, {**MODEL, "hidden_dim": 32}), r"tensors are not .*blocks\.0\.feed_forward\.down\.weight"),
    ):
        with pytest.raises(TrainingError, match=what):
            run(changed, tmp_path / "other" / what[:4], init_from=start)


# Unbreakable


@pytest.mark.parametrize("where", ["loss", "gradient", "evaluation"])
def test_the_first_number_that_is_not_finite_stops_the_run_with_its_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    made, real = recipe(text, eval_every=2), compute.prepared
    asked = 0

    def broken(objective: Any, *rest: Any) -> Any:
        prepared = real(objective, *rest)

        def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal asked
            value = prepared.loss_of(inputs, targets)
            asked += torch.is_grad_enabled()
            if asked < 5:
                return value
            if where == "loss":
                return value * math.nan
            if where == "gradient":
                value.register_hook(lambda gradient: gradient * math.inf)
            if where == "evaluation" and not torch.is_grad_enabled():
                return value * math.inf
            return value

        return msgspec.structs.replace(prepared, loss_of=loss_of)

    monkeypatch.setattr(compute, "prepared", broken)
    steps: list[Step] = []
    message = {"loss": "step 5: the loss is nan", "gradient": "step 5: the gradient's norm is (inf|nan)"}
    message |= {"evaluation": "step 6: the validation loss is inf"}
    with pytest.raises(TrainingError, match=message[where]) as caught:
        for event in train.train(made, tmp_path / "run"):
            if isinstance(event, Step):
                steps.append(event)
    assert "holds step 4" in caught.value.hint and "--resume" in caught.value.hint
    kept = states(tmp_path / "run" / "last")
    assert all(torch.isfinite(value).all() for value in kept.values())
    assert run_folder.read_state(tmp_path / "run" / "last").step == 4


def test_weights_that_are_not_finite_are_never_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = train.Run.update

    def broken(self: Any, step: int) -> Any:
        result = update(self, step)
        if step == 5:  # an update may overflow although loss and gradient did not
            self.model.blocks[0].attention.q.weight.data[0, 0] = math.inf
        return result

    monkeypatch.setattr(train.Run, "update", broken)
    with pytest.raises(TrainingError, match="step 6: a weight is not finite"):
        run(recipe(text, eval_every=100, save_every=2), tmp_path / "run")
    assert run_folder.read_state(tmp_path / "run" / "last").step == 4


def test_the_best_checkpoint_only_ever_improves(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 1.5, 1.6])

    def judge(self: Any, step: int) -> Eval:
        return Eval(step=step, val_loss=next(losses), perplexity=1.0, bits_per_byte=1.0)

    monkeypatch.setattr(train.Run, "evaluate", judge)
    best = []
    for event in train.train(recipe(text, eval_every=2), tmp_path / "run"):
        if isinstance(event, Saved) and event.best:
            best.append((event.step, load_file(tmp_path / "run" / "best" / "model.safetensors")))
    assert [step for step, _ in best] == [2, 4, 8]
    assert same(best[-1][1], load_file(tmp_path / "run" / "best" / "model.safetensors"))
    state = run_folder.read_state(tmp_path / "run" / "last")
    assert (state.step, state.best_loss, state.best_step, state.stale) == (10, 1.5, 8, 1)


def test_patience_ends_a_run_that_no_longer_improves_and_more_of_it_lets_it_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(
        train.Run,
        "evaluate",
        lambda self, step: Eval(step=step, val_loss=next(losses), perplexity=1.0, bits_per_byte=1.0),
    )
    events = run(recipe(text, eval_every=2, patience=2), tmp_path / "run")
    assert (of(events, Done)[0].reason, of(events, Done)[0].step) == ("no improvement", 8)
    assert run_folder.read_state(tmp_path / "run" / "last").step == 8

    def resumed(**changes: Any) -> tuple[str, str, int]:
        events = run(recipe(text, eval_every=2, **changes), tmp_path / "run", resume=True)
        return "\n".join(of(events, Start)[0].notes), of(events, Done)[0].reason, of(events, Done)[0].step

    told = "nothing is left to do: no improvement at step 8; --set train.patience=N trains on"
    assert resumed(patience=2) == (told, "no improvement", 8)
    assert resumed(patience=3, time_limit=1e-9)[0].count("nothing is left") == 0  # more patience is no help there
    assert resumed(patience=3)[1:] == ("finished", 10)


def test_a_time_limit_ends_a_run_saved(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(train.time, "monotonic", lambda: float(next(clock)))
    events = run(recipe(text, time_limit=4.0), tmp_path / "run")
    done = of(events, Done)[0]
    assert done.reason == "time limit" and 0 < done.step < 10
    assert run_folder.read_state(tmp_path / "run" / "last").step == done.step


def test_no_steps_is_a_run_too(text: Path, tmp_path: Path) -> None:
    events = run(recipe(text, max_steps=0), tmp_path / "run")
    assert [type(event) for event in events[-5:]] == [Start, Eval, Saved, Saved, Done]
    fresh = train.models.build(families.complete(ModelConfig(**MODEL)), 1337)
    saved = load_model(tmp_path / "run" / "last").state_dict()
    assert same(dict(fresh.state_dict()), dict(saved))


def test_an_evaluation_reads_as_much_as_it_is_told_to(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = batches.held_out

    def held_out(tokens: Any, context: int, batch: int, limit: int) -> Any:
        asked.append(limit)
        return real(tokens, context, batch, limit)

    monkeypatch.setattr(batches, "held_out", held_out)
    for limit, accumulation in ((0, 1), (3, 1), (3, 2)):
        made = recipe(text, max_steps=0, eval_batches=limit, accumulation=accumulation)
        run(made, tmp_path / f"{limit}-{accumulation}")
    assert asked == [0, 3 * 4, 3 * 4 * 2]


@pytest.mark.skipif(sys.platform != "linux", reason="two names change places in one step on Linux alone")
def test_no_checkpoint_is_missing_at_any_moment(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    real = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: (renamed.append(Path(target).name), real(self, target))[1])
    run(recipe(text, eval_every=2), tmp_path / "run")
    # Each name is given once; from then on the new folder and the old change places.
    assert [renamed.count(name) for name in ("best", "last", ".best.old", ".last.old")] == [1, 1, 0, 0]


def test_two_runs_in_one_folder_are_refused(text: Path, tmp_path: Path) -> None:
    first = train.train(recipe(text), tmp_path / "run")
    next(first)
    with pytest.raises(TrainingError, match=rf"another run is writing there .process {os.getpid()}"):
        run(recipe(text), tmp_path / "run", resume=True)
    first.close()  # type: ignore[attr-defined]
    assert of(run(recipe(text), tmp_path / "run"), Done)


def test_a_run_that_is_refused_leaves_no_folder_that_was_not_there(text: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    missing, short = recipe(tmp_path / "missing.txt"), recipe(tmp_path / "short.txt")
    for refused, reason in ((missing, UsageError), (short, DataError)):
        with pytest.raises(reason):
            run(refused, tmp_path / "runs" / "deep" / "one")
        assert not (tmp_path / "runs").exists()
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "mine" / "one", tmp_path / "mine"):
        with pytest.raises(UsageError):
            run(missing, out)
    assert not list((tmp_path / "mine").iterdir())
    run(recipe(text, max_steps=1), tmp_path / "mine" / "one")
    files = set(tmp_path.rglob("*"))
    for resume in (False, True):
        with pytest.raises(UsageError):
            run(missing, tmp_path / "mine" / "one", resume=resume)
    assert set(tmp_path.rglob("*")) == files


def test_a_lock_that_was_removed_by_who_held_it_is_no_lock(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    lock = fcntl.flock

    def late(*arguments: Any) -> None:
        (tmp_path / "run" / ".lock").unlink()
        lock(*arguments)

    with monkeypatch.context() as patched, pytest.raises(TrainingError, match="another run is writing there"):
        patched.setattr(fcntl, "flock", late)
        run(recipe(text, max_steps=1), tmp_path / "run")
    assert of(run(recipe(text, max_steps=1), tmp_path / "run"), Done)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="a file is where a folder belongs") as caught:
        next(train.train(recipe(text), tmp_path / "file" / "run"))
    assert "--out" in caught.value.hint


@pytest.mark.parametrize("call", ["fsync", "rename", "write"])
def test_a_disk_that_refuses_loses_nothing_older(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made, out = recipe(text, eval_every=2, save_every=2), tmp_path / "run"

    def full(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        for event in train.train(made, out):
            if isinstance(event, Saved) and event.step == 4 and not event.best:
                before = states(out / "last")
                if call == "fsync":
                    monkeypatch.setattr(checkpoint.os, "fsync", full)
                elif call == "rename":
                    monkeypatch.setattr(checkpoint, "_exchange", lambda a, b: False)
                    monkeypatch.setattr(Path, "rename", full)
                else:
                    monkeypatch.setattr(checkpoint, "_write", full)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert same(before, states(out / "last"))
    load_model(out / "last"), load_model(out / "best")
    assert of(run(made, out, resume=True), Done)[0].step == 10
    assert {path.name for path in out.iterdir()} == {".lock", "best", "last", "metrics.jsonl"}


def test_what_a_killed_run_left_half_written_is_removed(text: Path, tmp_path: Path) -> None:
    run(recipe(text, max_steps=1), tmp_path / "run")
    for name in (".last.writing", ".best.writing", ".step-00000001.writing"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "run" / ".metrics.jsonl.writing").write_text("half")
    for name in ("last", "best"):  # killed between two renames
        (tmp_path / "run" / name).rename(tmp_path / "run" / f".{name}.old")
    run(recipe(text, max_steps=2), tmp_path / "run", resume=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "best", "last", "metrics.jsonl"}


# What is filled in


def test_a_tokenizer_made_from_the_text_decides_the_vocabulary(text: Path, tmp_path: Path) -> None:
    start = of(run(recipe(text, tokenizer="char", max_steps=0), tmp_path / "run"), Start)[0]
    assert start.vocab_size == len(set(TEXT))
    assert any("vocab_size is" in note for note in start.notes)
    assert load_model(tmp_path / "run" / "last").config.vocab_size == len(set(TEXT))


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_and_a_smaller_one_noted(
    text: Path, tmp_path: Path
) -> None:
    tokenizer.bytes_tokenizer().save(tmp_path / "bytes")
    for size, refused in ((256, True), (300, False)):
        made = recipe(text, {**MODEL, "vocab_size": size}, tokenizer=str(tmp_path / "bytes"), max_steps=0)
        if refused:
            with pytest.raises(ConfigError, match="257 tokens, the model 256 rows"):
                run(made, tmp_path / f"{size}")
        else:
            notes = of(run(made, tmp_path / f"{size}"), Start)[0].notes
            assert any("43 of the model's 300 rows have no token" in note for note in notes)


def test_a_context_longer_than_the_model_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.context 17 is more than the model's 16"):
        run(recipe(text, context=17), tmp_path / "run")


def test_a_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("short text.")
    with pytest.raises(DataError, match="has 9 tokens; a context of 16 needs 17") as caught:
        run(recipe(path), tmp_path / "run")
    assert "train.context=8" in caught.value.hint
    assert of(run(recipe(path, context=8), tmp_path / "run"), Done)[0].step == 10


def test_an_unknown_device_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.device = 'tpu7'"):
        run(recipe(text, device="tpu7"), tmp_path / "run")


def test_samples_are_the_same_for_the_same_step(text: Path, tmp_path: Path) -> None:
    model = {**MODEL, "dropout": 0.1}
    made = recipe(text, model, sample_every=5, sample_prompt="9", sample_tokens=8, eval_every=10)
    first, second = (of(run(made, tmp_path / name), Sample) for name in ("a", "b"))
    assert [sample.text for sample in first] == [sample.text for sample in second]
    assert [sample.step for sample in first] == [5, 10]
    # Writing a sample in between leaves the training as it is, dropout on.
    run(recipe(text, model, eval_every=10), tmp_path / "c")
    assert same(states(tmp_path / "a" / "last"), states(tmp_path / "c" / "last"))


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_a_sample_needs_no_prompt(text: Path, tmp_path: Path, tokenizer: str) -> None:
    made = recipe(text, {**MODEL, "vocab_size": 280}, tokenizer=tokenizer, sample_every=1, max_steps=1, sample_tokens=4)
    assert len(of(run(made, tmp_path / "run"), Sample)) == 1


def test_a_sample_begins_with_what_the_text_has_where_it_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("abcdefghij" * 40)
    made = recipe(tmp_path / "line.txt", tokenizer="char", sample_every=1, max_steps=1, sample_tokens=4)
    assert of(run(made, tmp_path / "run"), Sample)[0].prompt == ""


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("9Ω", "train.sample_prompt: the character 'Ω'"), ("9" * 17, "has 17 tokens, the model 16 learned positions")],
)
def test_a_prompt_that_cannot_be_gone_on_from_is_refused_before_the_first_step(
    text: Path, tmp_path: Path, prompt: str, reason: str
) -> None:
    made = recipe(text, GPT2, "char", sample_every=10, sample_prompt=prompt)
    with pytest.raises(ConfigError, match=reason):
        run(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert of(
        run(recipe(text, GPT2, "char", sample_every=1, sample_prompt="9" * 16, max_steps=1), tmp_path / "run"), Sample
    )


def test_a_dry_run_estimates_and_leaves_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    estimate = train.dry_run(recipe(text, max_steps=1000, batch_size=2))
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    windows = (int(len(TEXT) * 0.9) - 1) // 16
    assert estimate.epochs == pytest.approx(2000 / windows)
    assert estimate.seconds >= 1000 * estimate.seconds_per_step > 0
    assert estimate.tokens_per_second == pytest.approx(32 / estimate.seconds_per_step)
    assert estimate.checkpoint_bytes == 12 * estimate.parameters


def test_a_dry_run_of_a_run_that_goes_on_estimates_what_is_left(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(recipe(text, max_steps=4, eval_every=4, batch_size=2), out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    made = recipe(text, max_steps=10, eval_every=4, batch_size=2)
    estimate = train.dry_run(made, resume=out)
    assert (estimate.start.step, estimate.steps) == (4, 6)
    whole = train.dry_run(made)
    assert (whole.start.step, whole.steps) == (0, 10)
    assert estimate.epochs == pytest.approx(0.6 * whole.epochs)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    done = train.dry_run(recipe(text, max_steps=4, eval_every=4, batch_size=2), resume=out)
    assert (done.steps, done.seconds, done.epochs) == (0, 0, 0)
    with pytest.raises(TrainingError, match="another text"):  # as going on would be refused
        other = tmp_path / "other.txt"
        other.write_text(TEXT[::-1])
        train.dry_run(recipe(other, max_steps=10, batch_size=2), resume=out)


@pytest.mark.parametrize("step", [0, 3, 4, 7, 10])
def test_the_evaluations_that_are_left_are_those_that_come(step: int, text: Path, tmp_path: Path) -> None:
    if step:
        run(recipe(text, max_steps=step, eval_every=4), tmp_path / "run")
    made = recipe(text, max_steps=10, eval_every=4)
    found = of(run(made, tmp_path / "run", resume=step > 0), Eval)
    assert len(found) == train.evaluations_left(made.train, step)


def test_a_run_that_goes_on_tells_its_own_time_and_that_of_all_its_processes(text: Path, tmp_path: Path) -> None:
    (first,) = of(run(recipe(text, max_steps=2), tmp_path / "run"), Done)
    assert first.seconds_in_all == pytest.approx(first.seconds, abs=0.05)
    kept = run_folder.read_state(tmp_path / "run" / "last").seconds
    assert 0 < kept <= first.seconds_in_all
    (second,) = of(run(recipe(text, max_steps=4), tmp_path / "run", resume=True), Done)
    assert second.seconds_in_all == pytest.approx(kept + second.seconds, abs=0.05)
    assert run_folder.read_state(tmp_path / "run" / "last").seconds > kept


@pytest.mark.parametrize(
    ("changes", "model", "said"),
    [
        ({"batch_size": 10**8}, {}, r"a step of 1,600,000,000 tokens"),
        ({"batch_size": 2, "accumulation": 10**8}, {}, r"a step of 3,200,000,000 tokens"),
        ({"batch_size": 10**7}, {}, r"training would take some [\d,]+ GB"),
        ({}, {"embed_dim": 10**7}, r"training would take some [\d,]+ GB"),
        ({}, {"num_layers": 10_000, "embed_dim": 8192}, r"training would take some [\d,]+ GB"),
    ],
)
def test_sizes_that_no_step_can_have_are_refused_before_there_is_work(
    changes: dict[str, Any],
    model: dict[str, Any],
    said: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llmcli.data.prepare", None)  # not even the text is read
    made = recipe(text, {**MODEL, **model}, **changes)
    with pytest.raises(ConfigError, match=said):
        run(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=said):
        train.dry_run(made)


def test_rows_for_which_the_text_has_no_tokens_are_not_counted_but_those_of_a_tokenizer_are(
    text: Path, tmp_path: Path
) -> None:
    made = recipe(text, {**MODEL, "vocab_size": 10**8}, max_steps=1)  # the text makes them 257
    assert of(run(made, tmp_path / "run"), Done)
    given = recipe(text, {**MODEL, "vocab_size": 10**8}, str(tmp_path / "run" / "last"), max_steps=1)
    with pytest.raises(ConfigError, match="training would take"):
        run(given, tmp_path / "other")


def test_a_reader_who_stops_listening_frees_the_folder(text: Path, tmp_path: Path) -> None:
    events: Iterator[Event] = train.train(recipe(text), tmp_path / "run")
    for event in events:
        if isinstance(event, Step):
            break
    events.close()  # type: ignore[attr-defined]
    assert of(run(recipe(text), tmp_path / "other"), Done)
    # Nothing was saved, so there is nothing to overwrite; and no step is told twice.
    run(recipe(text), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("start") == 1
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 11))
