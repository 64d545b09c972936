"""trace: what is recorded is what the model computed, stage by stage, and recording changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from llmcli import checkpoint, cli, families, trace
from llmcli.cache import LayerCache, new_cache
from llmcli.commands import trace as commands_trace
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.lab import Lab, Limits, pass_bytes
from llmcli.layers import rotate
from llmcli.model import Decoder, build
from llmcli.trace import Node, Pass

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
IDS = [5, 61, 7, 7, 30, 12, 50, 3, 44, 21, 9, 63, 0, 17, 33, 2]  # past every window of the tiny models

needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="no stories260K here")
Models = Callable[[str], Decoder]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, Decoder] = {}

    def model(family: str) -> Decoder:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            hf.make(family, folder)
            made[family] = checkpoint.load(folder)[0]
        return made[family]

    return model


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_traced_logits_are_untraced_ones_bit_for_bit_and_nothing_stays_behind(family: str, models: Models) -> None:
    model = models(family)
    with torch.no_grad():
        plain = model(torch.tensor([IDS]))[0]
        plain_cache = new_cache(model.config)
        steps = [model(torch.tensor([ids]), plain_cache)[0] for ids in (IDS[:11], IDS[11:12], IDS[12:])]
    assert torch.equal(trace.record(model, IDS).tensors["logits"], plain)
    cache = new_cache(model.config)
    for ids, want in zip((IDS[:11], IDS[11:12], IDS[12:]), steps, strict=True):
        assert torch.equal(trace.record(model, ids, cache).tensors["logits"], want)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "mix" not in vars(module)


def test_a_pass_that_fails_leaves_nothing_behind(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("llama")
    monkeypatch.setattr(Decoder, "scores", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace.record(model, IDS)
    assert not any(module._forward_hooks or "mix" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_the_graph_names_every_stage_in_order_and_makes_each_from_stages_before_it(family: str, models: Models) -> None:
    model = models(family)
    nodes = trace.graph(model)
    assert [node.name for node in nodes] == list(trace.record(model, IDS).tensors)
    cache = new_cache(model.config)
    trace.record(model, IDS, cache)
    assert [node.name for node in nodes] == list(trace.record(model, [1], cache).tensors)
    known: set[str] = set()
    for node in nodes:
        assert known >= set(node.inputs), node
        known.add(node.name)
    used = {name for node in nodes for name in node.weights}
    assert used == {name for name, _ in model.named_parameters()}
    assert {node.name.rpartition(".")[2] for node in nodes} <= set(trace.KINDS)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_every_stage_follows_from_its_inputs_as_the_graph_says(family: str, models: Models) -> None:
    """Each stage again, in float64, from the recorded stages and the weights that its node names."""
    model = models(family)
    made = trace.record(model, IDS)
    for node in trace.graph(model):
        again = recomputed(model, node, made)
        got = made.tensors[node.name]
        assert tuple(again.shape) == tuple(got.shape), node
        np.testing.assert_allclose(got.double(), again, rtol=2e-4, atol=2e-4, err_msg=str(node))


def recomputed(model: Decoder, node: Node, made: Pass) -> torch.Tensor:
    config, kind = model.config, node.name.rpartition(".")[2]
    inputs = [made.tensors[name].double() for name in node.inputs]
    weights = [dict(model.named_parameters())[name].detach().double() for name in node.weights]
    layer = int(node.name.split(".")[1]) if "." in node.name else -1
    if kind == "ids":
        return torch.tensor(IDS)
    if kind in ("embed", "positions"):
        return weights[0][IDS if kind == "embed" else range(len(IDS))]
    if kind == "embed_scaled":
        return inputs[0] * config.embed_dim**0.5
    if node.how == "sum" or node.how == " + ".join(node.inputs):
        return sum(inputs, torch.zeros(()))
    if "Norm" in node.how:
        return norm(node, inputs[0], weights, config.norm_eps or 0)
    if kind in ("q", "k", "v", "gate", "up"):
        flat = linear(inputs[0], weights)
        return flat.view(len(IDS), -1, config.head_size).transpose(0, 1) if kind in "qkv" else flat
    if kind in ("q_rotated", "k_rotated"):
        rope = config.rope_of(layer)
        assert rope is not None
        assert node.how == ("RoPE, the local one" if rope == "local" else "RoPE")
        turn = model.rotary[rope](torch.arange(len(IDS)), torch.float64)
        return rotate(inputs[0][None], turn)[0]
    if kind in ("keys", "values"):
        return inputs[0]
    if kind == "weights":
        q, k = inputs
        scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT / (config.query_scale or config.head_size) ** 0.5
        if config.attention_softcap:
            scores = config.attention_softcap * (scores / config.attention_softcap).tanh()
        far = torch.arange(len(IDS))[:, None] - torch.arange(len(IDS))
        hidden = (far < 0) | (far >= (config.window_of(layer) or 999))
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)
    if kind == "mixed":
        shares, values = inputs
        return (shares @ values.repeat_interleave(len(shares) // len(values), 0)).transpose(0, 1).flatten(1)
    if kind == "attention":
        return linear(inputs[0], weights)
    if kind == "hidden":
        activate = torch.nn.functional.silu
        if node.how.startswith("gelu"):
            activate = lambda x: torch.nn.functional.gelu(x, approximate="tanh")  # noqa: E731
        return activate(inputs[0]) * (inputs[1] if len(inputs) > 1 else 1)
    if kind == "router":
        return linear(inputs[0], weights).softmax(-1)
    if kind == "experts":
        return inputs[0].argsort(-1, descending=True)[:, : config.top_k_experts]
    if kind == "expert_weights":
        shares = inputs[0].sort(-1, descending=True).values[:, : config.top_k_experts]
        return shares / shares.sum(-1, keepdim=True) if config.renormalise_experts else shares
    if kind == "feed_forward" and config.num_experts:
        x, chosen, shares = inputs
        by_expert = [
            (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
            for gate, up, down in zip(weights[::3], weights[1::3], weights[2::3], strict=True)
        ]
        rows = torch.arange(len(IDS))
        return sum(
            (shares[:, n, None] * torch.stack(by_expert)[chosen[:, n].long(), rows] for n in range(shares.shape[1])),
            torch.zeros(()),
        )
    if kind == "feed_forward":
        return linear(inputs[0], weights)
    if kind == "logits":
        scores = linear(inputs[0], weights)
        return scores if not config.logit_softcap else config.logit_softcap * (scores / config.logit_softcap).tanh()
    assert kind == "probabilities"
    return inputs[0].softmax(-1)


def linear(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return x @ weights[0].T + (weights[1] if len(weights) > 1 else 0)


def norm(node: Node, x: torch.Tensor, weights: list[torch.Tensor], eps: float) -> torch.Tensor:
    weight = weights[0] + 1 if "1 + w" in node.how else weights[0]
    by_head = node.name.endswith(("q_norm", "k_norm"))
    if by_head and "all heads" in node.how:  # all heads of a position side by side
        flat = x.transpose(0, 1).flatten(1)
        return norm(Node("", (), node.how), flat, weights, eps).view(len(IDS), len(x), -1).transpose(0, 1)
    if node.how == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + (weights[1] if len(weights) > 1 else 0)


def test_norms_behind_a_sum_are_recorded_with_the_sum(models: Models) -> None:
    tensors = trace.record(models("gpt"), IDS).tensors
    np.testing.assert_allclose(
        tensors["blocks.1.attention_sum"], tensors["blocks.0.residual"] + tensors["blocks.1.attention"], atol=1e-5
    )
    assert "blocks.0.attention_norm" not in tensors
    assert "final_norm" not in tensors


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", 9), ("gemma2", 9)])
def test_cached_passes_have_one_position_and_the_context_stands_in_keys_and_values(
    family: str, window: int | None, models: Models
) -> None:
    model = models(family)
    cache = new_cache(model.config)
    recorded = [trace.record(model, IDS[:6], cache)]
    kept = {name: tensor.clone() for name, tensor in recorded[0].tensors.items()}
    recorded += [trace.record(model, [id], cache) for id in IDS[6:]]
    whole = trace.record(model, IDS)
    for n, made in enumerate(recorded[1:]):
        assert (made.kind, made.start, made.ids) == ("cached", 6 + n, (IDS[6 + n],))
        assert made.tensors["embed"].shape == (1, 16)
        assert made.tensors["logits"].shape == (1, 64)
        seen = 7 + n if window is None else min(7 + n, window)
        for part in ("keys", "values"):
            got = made.tensors[f"blocks.0.{part}"]
            assert got.shape == (2, seen, model.config.head_size)
            np.testing.assert_allclose(got, whole.tensors[f"blocks.0.{part}"][:, 7 + n - seen : 7 + n], atol=1e-4)
        assert made.tensors["blocks.0.weights"].shape == (4, 1, seen)
        turned = whole.tensors["blocks.0.k_rotated"][:, 6 + n]
        np.testing.assert_allclose(made.tensors["blocks.0.k_rotated"][:, 0], turned, atol=1e-4)
        np.testing.assert_allclose(made.tensors["logits"][0], whole.tensors["logits"][6 + n], atol=1e-3)
    assert recorded[0].kind == "prompt"
    for name, tensor in kept.items():
        assert torch.equal(recorded[0].tensors[name], tensor), name


@pytest.mark.parametrize("window", [None, 5])
def test_what_a_cache_gave_out_stays_as_it_is(window: int | None) -> None:
    cache = LayerCache(window)
    given = []
    for step in range(600):  # past where its buffer grows
        keys = torch.full((1, 1, 1 + step % 3, 2), float(step))
        both = cache.append(keys, -keys) if step % 2 else cache.append_one(torch.stack((keys, -keys))[:, :, :, -1])
        given.append([(view, view.clone()) for view in both])
    for views in given:
        assert all(torch.equal(view, copy) for view, copy in views)


def test_a_window_narrower_than_the_prompt_hides_what_lies_before_it(models: Models) -> None:
    weights = trace.record(models("mistral"), IDS).tensors["blocks.0.weights"]
    assert weights.shape == (4, 16, 16)
    assert weights[:, 15, :7].eq(0).all()
    assert weights[:, 15, 7:].gt(0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_the_last_residual_through_the_lens_is_the_output(models: Models) -> None:
    for family in ("llama", "gpt", "gemma2"):
        made = trace.record(models(family), IDS)
        lens = trace.logit_lens(models(family), made, slice(3, 9), 5)
        assert [name for name, _, _ in lens] == ["residual", "blocks.0.residual", "blocks.1.residual"]
        _, ids, shares = lens[-1]
        best = made.tensors["probabilities"][3:9].topk(5)
        assert torch.equal(ids, best.indices)
        np.testing.assert_allclose(shares, best.values, rtol=1e-4)
        assert not torch.equal(lens[0][1], ids)


def test_statistics_are_numpys(models: Models) -> None:
    made = trace.record(models("qwen2"), IDS)
    for found in made.stages():
        values = made.tensors[found.name].double().numpy()
        assert found.shape == values.shape
        assert len(found.axes) == values.ndim
        want = values.mean(), (values**2).mean() ** 0.5, values.min(), values.max()
        np.testing.assert_allclose((found.mean, found.rms, found.min, found.max), want, rtol=1e-6, atol=1e-12)


def test_half_precision_is_recorded_as_it_is_computed(tmp_path: Path) -> None:
    hf.make("llama", tmp_path, dtype=torch.bfloat16)
    model = checkpoint.load(tmp_path)[0]
    made = trace.record(model, IDS)
    with torch.no_grad():
        assert torch.equal(made.tensors["logits"], model(torch.tensor([IDS]))[0])
    assert made.tensors["embed"].dtype == made.tensors["blocks.0.residual"].dtype == torch.bfloat16
    assert made.tensors["probabilities"].dtype == made.tensors["blocks.0.weights"].dtype == torch.float32


def test_a_model_without_layers_has_a_graph_too() -> None:
    config = ModelConfig(family="llama", vocab_size=8, embed_dim=4, num_layers=0, num_heads=2, tie_word_embeddings=True)
    model = build(config).eval()
    made = trace.record(model, [1, 2])
    assert list(made.tensors) == [node.name for node in trace.graph(model)]
    assert list(made.tensors) == ["ids", "embed", "residual", "logits", "probabilities"]


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_logits_name_one_matrix_exactly_when_tied(tied: bool) -> None:
    for family in families.names():
        if "num_experts" in families.get(family).keys:
            continue
        config = ModelConfig(
            family=family, vocab_size=8, embed_dim=4, num_layers=1, num_heads=2, tie_word_embeddings=tied
        )
        nodes = {node.name: node for node in trace.graph(build(config))}
        assert nodes["embed"].weights == ("token_embeddings.weight",)
        assert (nodes["logits"].weights == nodes["embed"].weights) == tied


def test_refusals_name_what_there_is(models: Models) -> None:
    with pytest.raises(UsageError, match="no token to trace"):
        trace.record(models("llama"), [])
    with pytest.raises(UsageError, match="token id 64"):
        trace.record(models("llama"), [64])
    with pytest.raises(UsageError, match="learned positions"):
        trace.record(models("gpt2"), [1] * 65)
    with pytest.raises(UsageError) as refused:
        trace.record(models("llama"), IDS).tensor("blocks.2.q")
    assert "blocks.0 to blocks.1" in refused.value.hint
    assert "q_rotated" in refused.value.hint


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.run(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    hf.make("mistral", folder)
    return folder


def test_json_has_every_stage_of_every_pass(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(run(capsys, tiny, "--ids", "1,2 3", "--generate", "2", "--json"))
    assert set(result) == {"checkpoint", "tied", "passes"}
    assert result["tied"] is False
    prompt, first, second = result["passes"]
    assert (prompt["kind"], prompt["start"], prompt["ids"]) == ("prompt", 0, [1, 2, 3])
    assert (first["kind"], first["start"], second["start"]) == ("cached", 3, 4)
    model = checkpoint.load(tiny)[0]
    with torch.no_grad():
        assert first["ids"] == [int(model(torch.tensor([[1, 2, 3]]))[0, -1].argmax())]
        assert second["ids"] == [int(model(torch.tensor([[1, 2, 3, *first["ids"]]]))[0, -1].argmax())]
    shapes = [{stage["name"]: stage["shape"] for stage in one["stages"]} for one in (prompt, second)]
    assert shapes[0]["embed"] == [3, 16]
    assert shapes[0]["logits"] == shapes[0]["probabilities"] == [3, 64]
    assert shapes[1]["embed"] == [1, 16]
    assert shapes[1]["blocks.1.keys"] == [2, 5, 8]
    assert set(prompt["stages"][1]) == {"name", "meaning", "axes", "shape", "mean", "rms", "min", "max"}


def test_a_slice_of_a_stage_says_what_it_cuts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint.load(tiny)[0]
    want = trace.record(model, IDS).tensors["blocks.1.q"]
    cut = ("--stage", "blocks.1.q", "--head", "3", "--rows", "2:5", "--columns=-3:")
    found = json.loads(run(capsys, tiny, "--ids", ",".join(map(str, IDS)), *cut, "--json"))
    assert (found["head"], found["rows"], found["columns"]) == (3, [2, 5], [5, 8])
    assert found["stage"]["shape"] == [4, 16, 8]
    np.testing.assert_array_equal(np.float32(found["values"]), want[3, 2:5, 5:])
    assert found["row_labels"] == ["#7", "#7", "#30"]
    assert found["column_labels"] is None
    table = run(capsys, tiny, "--ids", ",".join(map(str, IDS)), *cut)
    assert "head 3 of 4, rows 2 to 4 of 16, columns 5 to 7 of 8" in table
    assert f"{want[3, 4, 7]:.4g}" in table
    assert "all 3 rows" in run(capsys, tiny, "--ids", "1,2,3", "--stage", "embed")
    row = json.loads(run(capsys, tiny, "--ids", "1,2,3", "--stage", "embed", "--rows", "1", "--columns=-1", "--json"))
    assert (row["rows"], row["columns"]) == ([1, 2], [15, 16])
    one = json.loads(run(capsys, tiny, "--ids", "4,2", "--stage", "ids", "--json"))
    assert one["values"] == [[4], [2]]


def test_labels_of_a_windowed_stage_are_the_tokens_it_sees(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = tiny, "--ids", ",".join(map(str, IDS[:12])), "-n", "1", "--pass=-1", "--stage", "blocks.0.weights"
    found = json.loads(run(capsys, *arguments, "--json"))
    assert found["pass"] == 1
    assert found["stage"]["shape"] == [4, 1, 9]
    assert found["column_labels"] == [f"#{id}" for id in IDS[4:12]] + found["row_labels"]


def test_saved_tensors_are_the_recorded_ones(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    file = tmp_path / "passes.safetensors"
    run(capsys, tiny, "--ids", "1,2,3", "--save", file)
    saved = load_file(file)
    want = trace.record(checkpoint.load(tiny)[0], [1, 2, 3]).tensors
    assert list(want) != []
    assert saved.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)
    run(capsys, tiny, "--ids", "1,2,3", "--save", file, "-n", "1")
    assert load_file(file)["1.blocks.0.keys"].shape == (2, 4, 8)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@needs_stories
def test_a_text_is_traced_by_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, STORIES, "Once upon a time", "-n", "3")
    assert "8 x 5 x 8" in shown
    assert "4 x 8 x 8" in shown  # keys after three more tokens
    weights = run(capsys, STORIES, "Once upon a time", "--stage", "blocks.1.weights", "--head", "2")
    assert "·upon" in weights
    assert "head 2 of 8, all 5 rows, all 5 columns" in weights


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a text or --ids"),
        (["--ids", "1", "text"], "give a text or --ids"),
        (["--ids", "one"], "not a list of numbers"),
        (["--ids", "64"], "64"),
        (["text"], "tokenizer"),
        (["--ids", "1", "--stage", "emebd"], "no stage 'emebd'"),
        (["--ids", "1", "--stage", "embed", "--rows", "a"], "--rows a"),
        (["--ids", "1", "--stage", "embed", "--columns", "5:2"], "--columns 5:2: no column lies there"),
        (["--ids", "1", "--stage", "embed", "--columns=-2:-5"], "--columns -2:-5: no column lies there"),
        (["--ids", "1", "--stage", "embed", "--columns", ":0"], "--columns :0: no column lies there"),
        (["--ids", "1", "--stage", "embed", "--rows", "1:9", "--json"], "--rows 1:9: no row of 1 lies there"),
        (["--ids", "1", "--stage", "blocks.0.q", "--columns", "9:", "--json"], "--columns 9:: no column of 8 lies"),
        (["--ids", "1", "--stage", "blocks.0.q", "--head", "4"], "--head 4"),
        (["--ids", "1", "--rows", "0:1"], "--rows 0:1: of which stage?"),
        (["--ids", "1", "--pass", "1"], "--pass 1"),
        (["--ids", "1", "--save", "x.txt"], "x.txt"),
        (["--ids", "1", "--html", "/nowhere/x.html"], "/nowhere"),
    ],
)
def test_refusals_are_usage_errors(
    arguments: list[str], said: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.run(["trace", str(tiny), *arguments])
    captured = capsys.readouterr()
    assert code == (1 if said in ("tokenizer", "64") else 2), captured.err
    assert captured.out == ""
    assert said in captured.err
    assert "hint" in captured.err


def test_more_passes_than_there_is_room_for_are_answered_before_the_first(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learned positions end, rotary ones go on with a warning, and memory is reckoned before it is taken."""
    hf.make("gpt2", tmp_path)
    most = checkpoint.load(tmp_path)[0].config.max_position_embeddings
    for new, said in ((most - 2, ""), (most - 1, f"used up after {most - 2:,} new tokens"), (10**18, "used up after")):
        assert cli.run(["trace", str(tmp_path), "--ids", "1,2", "-n", str(new), "--json"]) == 0
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)["passes"]) == most - 1
        assert said in captured.err and bool(said) == ("used up" in captured.err)
    trained = checkpoint.load(tiny)[0].config.max_position_embeddings
    assert cli.run(["trace", str(tiny), "--ids", "1,2", "-n", str(trained - 1), "--json"]) == 0
    assert f"warning: {trained + 1:,} tokens" in capsys.readouterr().err
    monkeypatch.setattr(Lab, "step", None)  # not one pass is made
    assert cli.run(["trace", str(tiny), "--ids", "1,2", "-n", "100000000"]) == 2
    assert "-n 100000000: the recorded values would take" in capsys.readouterr().err


def test_what_passes_will_take_is_reckoned_as_their_records_are(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint.load(tiny)[0]
    taken = sum(pass_bytes(model, 1, n) for n in range(4, 9)) + pass_bytes(model, 3, 3)
    for most, right in ((taken, True), (taken - 1, False)):
        monkeypatch.setattr("llmcli.lab.Limits", lambda most=most: Limits(memory=most))
        if right:
            assert commands_trace._as_far_as_it_goes(model, 3, 5) == 5
        else:
            with pytest.raises(UsageError, match="-n 5"):
                commands_trace._as_far_as_it_goes(model, 3, 5)


def test_the_table_of_passes_says_where_each_stands_and_a_mean_only_of_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf.make("llama", tmp_path)
    assert cli.run(["trace", str(tmp_path), "--ids", "7,8,9", "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ids = next(line.split() for line in lines if line.startswith("ids "))
    assert ids[1:4] == ["3", "7", "9"], "shape, smallest, largest: no mean of names"
    steps = lines[next(n for n, line in enumerate(lines) if line.startswith("pass  ")) + 1 :]
    assert [line.split()[:5] for line in steps[:3]] == [
        ["0", "0-2", "3", "x", "16"],
        ["1", "3", "1", "x", "16"],
        ["2", "4", "1", "x", "16"],
    ]
