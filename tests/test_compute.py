"""The way of a step: chosen by what is measured, kept when a run goes on, and never in the way of training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from llmcli import compute, train
from llmcli.compute import Prepared, Trial, Way
from llmcli.config import DataConfig, ModelConfig, Recipe, TrainConfig
from llmcli.layers import gelu_tanh
from llmcli.model import build
from llmcli.train import Objective, Start

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 257,
    "embed_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 48,
    "max_position_embeddings": 16,
    "dropout": 0.1,
    "tie_word_embeddings": True,
}
# What torch's compiler imports and traces warns of other parts of torch.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def objective() -> Objective:
    return Objective(build(ModelConfig(**SIZES), seed=1)).train()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 257, (3, 17), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


Measured = dict[tuple[str, bool], tuple[float, float] | str]
"""What a trial is to find: seconds and loss of each way, or why it fails."""


@pytest.fixture
def choose(
    objective: Objective, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Way, list[str], list[tuple[str, bool]]]]:
    """The way chosen of those measured so, the notes, and what was tried."""

    def chosen(
        found: Measured, *, rounds: int = 10_000, amx: bool = True, known: Way | None = None, **settings: Any
    ) -> tuple[Way, list[str], list[tuple[str, bool]]]:
        tried: list[tuple[str, bool]] = []

        def trial(_: object, way: Prepared, *rest: object) -> Trial:
            tried.append(key := (way.way.precision, way.way.compiled))
            value = found[key]
            return Trial(way, failure=value) if isinstance(value, str) else Trial(way, *value)

        monkeypatch.setattr(compute, "trial", trial)
        monkeypatch.setattr(compute, "bf16_is_faster", lambda *_: amx)
        monkeypatch.setattr(torch, "compile", lambda module, **_: module)
        preparing = compute.prepare(objective, TrainConfig(**settings), CPU, batch, rounds, known)
        while True:
            try:
                next(preparing)
            except StopIteration as end:
                prepared, notes = end.value
                return prepared.way, notes, tried

    return chosen


EAGER_FP32, EAGER_BF16, COMPILED_FP32, COMPILED_BF16 = ("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [((3, 2, 1), COMPILED_BF16), ((3, 1, 2), EAGER_BF16), ((1, 2, 3), EAGER_FP32)],
)
def test_the_fastest_way_is_chosen(
    choose: Callable[..., Any], seconds: tuple[int, ...], best: tuple[str, bool]
) -> None:
    found = dict(zip((EAGER_FP32, EAGER_BF16, COMPILED_BF16), ((s, 5.0) for s in seconds), strict=True))
    way, notes, tried = choose(found)
    assert (way.precision, way.compiled) == best and not notes and len(tried) == 3


def test_without_fast_bfloat16_only_float32_is_tried(choose: Callable[..., Any]) -> None:
    way, _, tried = choose({EAGER_FP32: (2, 5.0), COMPILED_FP32: (1, 5.0)}, amx=False)
    assert way == Way("fp32", True) and tried == [EAGER_FP32, COMPILED_FP32]


def test_bfloat16_that_changes_the_loss_is_not_chosen(choose: Callable[..., Any]) -> None:
    found = {EAGER_FP32: (3, 5.0), EAGER_BF16: (2, 5.03), COMPILED_BF16: (1, math.nan)}
    assert choose(found)[0] == Way("fp32", False)
    assert choose({**found, EAGER_BF16: (2, 5.01)})[0] == Way("bf16", False)


def test_compiling_is_not_tried_in_a_run_that_ends_before_it_pays(choose: Callable[..., Any]) -> None:
    found = {EAGER_FP32: (0.01, 5.0), EAGER_BF16: (0.008, 5.0), COMPILED_BF16: (0.004, 5.0)}
    assert choose(found, rounds=1000)[0] == Way("bf16", False)  # 8 s
    assert choose(found, rounds=100_000)[0] == Way("bf16", True)  # 800 s
    assert choose(found, rounds=100_000, time_limit=8.0)[0] == Way("bf16", False)


def test_what_is_told_is_done_and_a_short_run_measures_nothing(choose: Callable[..., Any]) -> None:
    assert choose({}, precision="bf16", compile="off") == (Way("bf16", False), [], [])
    assert choose({}, precision="fp32", compile="off") == (Way("fp32", False), [], [])
    assert choose({}, precision="fp32", rounds=9) == (Way("fp32", False), [], [])
    way, _, tried = choose({COMPILED_FP32: (9, 9.0)}, precision="fp32", compile="on", rounds=1)
    assert way == Way("fp32", True) and tried == [COMPILED_FP32]
    way, _, tried = choose({EAGER_BF16: (2, 5.0), COMPILED_BF16: (1, 5.0)}, precision="bf16", amx=False)
    assert way == Way("bf16", True) and tried == [EAGER_BF16, COMPILED_BF16]


def test_a_run_that_goes_on_keeps_its_way_unless_told_otherwise(choose: Callable[..., Any]) -> None:
    assert choose({}, known=Way("bf16", False), amx=False) == (Way("bf16", False), [], [])
    assert choose({}, known=Way("fp32", False)) == (Way("fp32", False), [], [])
    assert choose({COMPILED_BF16: (9, 9.0)}, known=Way("bf16", True), rounds=1)[0] == Way("bf16", True)
    assert choose({}, known=Way("bf16", True), precision="fp32", compile="off")[0] == Way("fp32", False)


@pytest.mark.parametrize("compile", ["auto", "on"])
def test_compiling_that_fails_is_a_note(choose: Callable[..., Any], compile: str) -> None:
    found = {EAGER_FP32: (3, 5.0), EAGER_BF16: (2, 5.0), COMPILED_BF16: "InvalidCxxCompiler: no C++ compiler"}
    way, notes, tried = choose(found, compile=compile)
    assert way == Way("bf16", False) and tried.count(COMPILED_BF16) == 1
    assert notes == ["the step is not compiled: InvalidCxxCompiler: no C++ compiler"]
    way, notes, _ = choose(found, compile=compile, known=Way("bf16", True))
    assert way == Way("bf16", False) and "rounded otherwise" in notes[1]


def test_experts_are_compiled_only_when_told(batch: tuple[Tensor, Tensor]) -> None:
    sparse = Objective(build(ModelConfig(**{**SIZES, "family": "mixtral", "num_experts": 2, "top_k_experts": 1})))
    dense = Objective(build(ModelConfig(**SIZES)))
    assert compute.compiling_pays(dense, 1e6, "fp32") and not compute.compiling_pays(sparse, 1e6, "fp32")


def test_a_trial_leaves_the_model_as_it_was(objective: Objective, batch: tuple[Tensor, Tensor]) -> None:
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    found = compute.trial(objective, compute.prepared(objective, Way("bf16", False), CPU), batch, times=2)
    assert 0 < found.seconds < 60 and found.loss == pytest.approx(math.log(257), abs=0.1) and found.failure is None
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_an_error_of_the_model_itself_is_not_taken_for_one_of_the_compiler(
    objective: Objective, batch: tuple[Tensor, Tensor]
) -> None:
    wrong = (batch[0], batch[1] + 257)
    with pytest.raises(IndexError):
        compute.trial(objective, compute.prepared(objective, Way("fp32", False), CPU), wrong, times=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_bfloat16_is_in_the_products_only(family: str) -> None:
    sizes = {k: v for k, v in SIZES.items() if family != "gpt2" or k not in ("num_kv_heads", "hidden_dim")}
    if family == "gemma2":
        sizes |= {"head_size": 8, "attention_softcap": 20.0, "logit_softcap": 10.0}
    objective = Objective(build(ModelConfig(**{**sizes, "family": family, "dropout": 0.0}), seed=1))
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.mul_(3)  # so that attention and logits are far from even
    ids = torch.randint(0, 257, (3, 17), generator=torch.Generator().manual_seed(0))
    found = {}
    for precision in ("fp32", "bf16"):
        loss = compute.prepared(objective, Way(precision, False), CPU).loss_of(ids[:, :-1], ids[:, 1:])  # type: ignore[arg-type]
        objective.zero_grad()
        loss.backward()
        found[precision] = loss, {name: parameter.grad for name, parameter in objective.named_parameters()}
    (value, exact_gradients), (rounded, gradients) = found.values()
    assert rounded.dtype == torch.float32 and rounded.item() != value.item()
    assert rounded.item() == pytest.approx(value.item(), rel=0.01)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        # The gradient of a key's bias is nothing but rounding: it moves all scores of a query alike.
        assert name.endswith("k.bias") or (gradient - (exact := exact_gradients[name])).norm() < 0.05 * exact.norm(), (
            name
        )


def test_attention_by_plain_products_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(**{**SIZES, "family": "mistral", "window_size": 5, "dropout": 0.0})
    model = build(config, seed=1).bfloat16()
    ids = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        by_kernel = model.hidden(ids)
    called = []
    real = compute.torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda *arguments: called.append(1) or real(*arguments))
    by_products = model.hidden(ids)
    assert len(called) == 2 * config.num_layers
    assert (by_products - by_kernel).abs().max() < 0.05 * by_kernel.abs().max()


def test_gelu_has_one_value_compiled_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    eager = gelu_tanh(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (gelu_tanh(x) - eager).abs().max() < 1e-14


# In a run


TEXT = "".join(f"{n} bottles of beer on the wall, take one down, pass it around: {n - 1}.\n" for n in range(99, 0, -1))


def recipe(tmp_path: Path, **settings: Any) -> Recipe:
    (tmp_path / "text.txt").write_text(TEXT)
    common = {"batch_size": 4, "max_steps": 6, "warmup_steps": 1, "eval_every": 3, "eval_batches": 2, "compile": "off"}
    return Recipe(
        model=ModelConfig(**SIZES),
        data=DataConfig(path=str(tmp_path / "text.txt"), tokenizer="byte"),
        train=TrainConfig(**{**common, **settings}),
    )


def start_of(events: list[Any]) -> Start:
    return next(event for event in events if isinstance(event, Start))


def weights(folder: Path) -> dict[str, Tensor]:
    return {**load_file(folder / "last" / "model.safetensors"), **load_file(folder / "last" / train.MOMENTS)}


def goes_on_bit_for_bit(tmp_path: Path, **settings: Any) -> None:
    """Six steps in one go, and three and three, the second half with all settings back to `auto`."""
    made = recipe(tmp_path, **settings)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = start_of(list(train.train(made, whole)))
    asked = iter([None] * 3)
    list(train.train(made, parts, stop=lambda: next(asked, "SIGINT")))
    again = recipe(tmp_path, precision="auto", compile="auto")
    second = start_of(list(train.train(again, parts, resume=True)))
    assert second.step == 3
    assert (second.precision, second.compiled) == (first.precision, first.compiled)
    one, other = weights(whole), weights(parts)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_bfloat16_goes_on_bit_for_bit_in_the_way_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "bf16_is_faster", lambda *_: False)
    goes_on_bit_for_bit(tmp_path, precision="bf16")
    assert json.loads((tmp_path / "parts" / "last" / train.STATE).read_text())["way"] == {
        "precision": "bf16",
        "compiled": False,
    }


def test_where_nothing_compiles_the_run_goes_on_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler\nand a page of traces")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    start = start_of(list(train.train(recipe(tmp_path, precision="fp32", compile="on"), tmp_path / "run")))
    assert not start.compiled
    assert start.notes == ("the step is not compiled: RuntimeError: no C++ compiler",)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_run_goes_on_bit_for_bit_and_trains_what_an_eager_one_does(tmp_path: Path, precision: str) -> None:
    goes_on_bit_for_bit(tmp_path, precision=precision, compile="on")
    compiled = weights(tmp_path / "whole")
    list(train.train(recipe(tmp_path, precision=precision), tmp_path / "eager"))
    eager = weights(tmp_path / "eager")
    # Dropout draws otherwise when compiled, so only what the two have in common is compared: without it they agree.
    assert eager.keys() == compiled.keys()
    still = {**SIZES, "dropout": 0.0}
    objective = Objective(build(ModelConfig(**still), seed=1))
    ids = torch.randint(0, 257, (3, 17), generator=torch.Generator().manual_seed(0))
    results = []
    for how in (False, True):
        loss = compute.prepared(objective, Way(precision, how), CPU).loss_of(ids[:, :-1], ids[:, 1:])  # type: ignore[arg-type]
        loss.backward()
        results.append([loss.item(), *(p.grad.clone() for p in objective.parameters() if p.grad is not None)])
        objective.zero_grad()
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert results[0][0] == pytest.approx(results[1][0], rel=tolerance)
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert (one - other).norm() <= tolerance * one.norm()


@pytest.mark.slow
def test_a_machine_without_compiler_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    settings = {"data.path": f'"{tmp_path}/text.txt"', "data.tokenizer": '"byte"', "train.max_steps": 2}
    settings |= {"model.vocab_size": 257, "model.num_layers": 1}
    command = [sys.executable, "-m", "llmcli", "train", "glasslm", "--out", str(tmp_path / "run"), "--compile"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    environment = dict(os.environ, CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "note: the step is not compiled" in said and "Traceback" not in said
    assert (tmp_path / "run" / "last" / "model.safetensors").exists()


def test_the_matmul_peak_is_the_best_of_as_many_products_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's own: products of 4, 2 and then always 5 milliseconds."""
    took = iter([0.004, 0.002, *[0.005] * 99])
    now, started = [0.0], [False]

    def clock() -> float:
        if started[0]:
            now[0] += next(took)
        started[0] = not started[0]
        return now[0]

    monkeypatch.setattr(compute.time, "perf_counter", clock)
    assert compute.matmul_peak(torch.device("cpu"), "fp32") == pytest.approx(2 * 768**3 / 0.002)
    assert compute.PEAK_SECONDS <= now[0] < compute.PEAK_SECONDS + 0.005
