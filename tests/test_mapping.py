"""A file's tensors beside a family's table: every layout of the same weights is found, and everything else is named."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import hf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmcli import checkpoint, mapping, tensors, weight_files
from llmcli.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


class Case:
    """A checkpoint of one family in memory, to be bent and loaded, and what the straight one computes."""

    def __init__(self, family: str, folder: Path, **changes: Any) -> None:
        hf.make(family, folder, **changes)
        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
        self.logits = self.run(folder)

    @torch.no_grad()
    def run(self, folder: Path) -> torch.Tensor:
        return checkpoint.load(folder)[0](self.ids)

    def write(self, folder: Path, values: Tensors, config: dict[str, Any] | None = None) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config if config is None else config))
        save_file({name: value.clone().contiguous() for name, value in values.items()}, folder / "model.safetensors")
        return folder

    def same(self, folder: Path, values: Tensors, config: dict[str, Any] | None = None) -> None:
        assert torch.equal(self.run(self.write(folder, values, config)), self.logits)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {family: Case(family, tmp_path_factory.mktemp(family)) for family in hf.FAMILIES}


@pytest.fixture(scope="module", params=hf.FAMILIES)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.plan(folder)
    assert str(folder) in caught.value.message and caught.value.hint
    return caught.value


# Names


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "module.module._orig_mod.", "model."]
)
def test_wrappers_in_front_of_names_are_stripped(case: Case, tmp_path: Path, prefix: str) -> None:
    case.same(tmp_path, {prefix + name: value for name, value in case.tensors.items()})


@pytest.mark.parametrize("wrapper", ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_anywhere_in_names_are_stripped(case: Case, tmp_path: Path, wrapper: str) -> None:
    def wrapped(name: str) -> str:  # around each layer, as torch.compile or checkpointing of layers leaves it
        parts = name.split(".")
        number = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
        return name if number is None else ".".join([*parts[: number + 1], wrapper, *parts[number + 1 :]])

    case.same(tmp_path, {wrapped(name): value for name, value in case.tensors.items()})


def test_names_without_the_base_prefix_are_the_same_names(case: Case, tmp_path: Path) -> None:
    bare = {name.removeprefix("model.").removeprefix("transformer."): value for name, value in case.tensors.items()}
    assert bare.keys() != case.tensors.keys()
    case.same(tmp_path, bare)


def test_wrappers_on_some_of_the_names_only(case: Case, tmp_path: Path) -> None:
    draw = random.Random(0)
    prefixes = ("", "module.", "_orig_mod.", "language_model.")
    case.same(tmp_path, {draw.choice(prefixes) + name: value for name, value in case.tensors.items()})


def test_two_names_that_mean_one_tensor_are_refused(case: Case, tmp_path: Path) -> None:
    name = next(iter(case.tensors))
    folder = case.write(tmp_path, case.tensors | {f"module.{name}": case.tensors[name]})
    message = refusal(folder).message
    assert f"'{name}'" in message and f"'module.{name}'" in message


@given(
    st.lists(st.sampled_from(["_orig_mod", "module", "model", "transformer", "h", "0", "attn", "weight"]), max_size=8)
)
def test_stripping_a_name_twice_strips_it_once(parts: list[str]) -> None:
    once = mapping.canonical(".".join(parts))
    assert mapping.canonical(once) == once
    assert mapping.canonical(f"module.{once}" if once else "module") == once


# GPT-1 and GPT-2 as the Hub has them


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.float16])
def test_mask_buffers_are_ignored_and_named(
    cases: dict[str, Case], tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    case, mask = cases[family], torch.tril(torch.ones(1, 1, 64, 64)).to(dtype)
    buffers = {f"h.{n}.attn.bias": mask.clone() for n in range(2)}
    if family == "gpt2":
        buffers |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    bare = {name.removeprefix("transformer."): value for name, value in case.tensors.items()}
    case.same(tmp_path, bare | buffers)
    plan = checkpoint.plan(tmp_path)
    assert set(plan.ignored) == set(buffers) and plan.warnings == ()


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_a_missing_bias_is_not_excused_by_the_mask_of_a_like_name(
    cases: dict[str, Case], tmp_path: Path, family: str
) -> None:
    values = {name: value for name, value in cases[family].tensors.items() if "h.1.attn.c_attn.bias" not in name}
    values["transformer.h.1.attn.bias"] = torch.ones(1, 1, 64, 64)
    message = refusal(cases[family].write(tmp_path, values)).message
    assert "missing (1): transformer.h.1.attn.c_attn.bias" in message


@pytest.mark.parametrize("name", ["h.0.attn.bias.extra", "decoder.h.0.attn.bias", "h.0.attn.biases", "h.x.attn.bias"])
def test_only_the_very_name_of_a_mask_is_ignored(cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = cases["gpt2"].write(tmp_path, cases["gpt2"].tensors | {name: torch.ones(1)})
    assert f"left over (1): {name}" in refusal(folder).message


@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_a_file_saved_from_linear_layers_is_recognised_by_its_oblong_matrices(
    cases: dict[str, Case], tmp_path: Path, family: str
) -> None:
    turned = {
        name: value.T if ".c_" in name and name.endswith("weight") else value
        for name, value in cases[family].tensors.items()
    }
    assert any(v.shape[0] == v.shape[1] and ".c_" in name for name, v in turned.items() if v.dim() == 2)
    cases[family].same(tmp_path, turned)


def test_a_file_of_both_conventions_is_refused(cases: dict[str, Case], tmp_path: Path) -> None:
    values = dict(cases["gpt2"].tensors)
    name = "transformer.h.0.mlp.c_fc.weight"
    values[name] = values[name].T
    message = refusal(cases["gpt2"].write(tmp_path, values)).message
    assert f"{name} is 64 x 16, the config makes it 16 x 64" in message


def test_a_feed_forward_as_wide_as_the_model_does_not_confuse_the_layout(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    case = Case("gpt2", tmp_path / "made", n_inner=16)
    turned = {n: v.T if ".c_" in n and n.endswith("weight") else v for n, v in case.tensors.items()}
    case.same(tmp_path / "turned", turned)


# Other layouts


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_the_output_matrix_is_found_under_other_projects_names(tmp_path: Path, family: str) -> None:
    case = Case(family, tmp_path, tie_word_embeddings=False)
    for name in ("output.weight", "embed_out.weight", "model.lm_head.weight"):
        case.same(tmp_path / name, {name if n == "lm_head.weight" else n: v for n, v in case.tensors.items()})


def test_two_output_matrices_are_refused(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, tie_word_embeddings=False)
    message = refusal(case.write(tmp_path / "x", case.tensors | {"output.weight": torch.ones(64, 16)})).message
    assert "left over (1): output.weight" in message


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "gemma"])
def test_rotary_tables_are_ignored_and_named(cases: dict[str, Case], tmp_path: Path, family: str) -> None:
    tables = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    cases[family].same(tmp_path, cases[family].tensors | tables)
    assert set(checkpoint.plan(tmp_path).ignored) == set(tables)


def stacked(values: Tensors) -> Tensors:
    """Mixtral's tensors as transformers 5 holds them in memory: a layer's experts in two tensors."""
    result = {name: value for name, value in values.items() if "block_sparse_moe" not in name}
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        w1, w2, w3 = (
            torch.stack([values[f"{old}.experts.{e}.{w}.weight"] for e in range(4)]) for w in ("w1", "w2", "w3")
        )
        result[f"{new}.gate.weight"] = values[f"{old}.gate.weight"]
        result[f"{new}.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        result[f"{new}.experts.down_proj"] = w2
    return result


def test_mixtrals_experts_may_be_stacked(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["mixtral"]
    assert any("experts.3.w2" in name for name in case.tensors)
    case.same(tmp_path, stacked(case.tensors))


def test_an_expert_too_few_is_named_in_either_layout(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["mixtral"]
    values = {name: value for name, value in case.tensors.items() if ".experts.2." not in name}
    message = refusal(case.write(tmp_path / "single", values)).message
    assert "missing (6): model.layers.{0-1}.block_sparse_moe.experts.2.w{1-3}.weight" in message
    values = {n: v[:3] if ".experts." in n else v for n, v in stacked(case.tensors).items()}
    message = refusal(case.write(tmp_path / "stacked", values)).message
    assert "model.layers.{0-1}.mlp.experts.gate_up_proj is 3 x 48 x 16, the config makes it 4 x 48 x 16" in message


# What does not fit is named, all of it


def test_a_number_where_a_vector_belongs_is_called_a_scalar(cases: dict[str, Case], tmp_path: Path) -> None:
    values = dict(cases["llama"].tensors)
    values["model.norm.weight"] = torch.tensor(1.0)
    error = refusal(cases["llama"].write(tmp_path, values))
    assert "misshapen (1): model.norm.weight is scalar, the config makes it 16" in error.message


@pytest.mark.parametrize(
    ("file", "config", "alike"),
    [("llama", "gpt2", "gemma, llama, mistral, qwen2, smollm3"), ("gpt2", "llama", "gpt2"), ("qwen3", "gpt", "qwen3")],
)
def test_names_of_another_family_are_told_from_damage(
    cases: dict[str, Case], tmp_path: Path, file: str, config: str, alike: str
) -> None:
    hint = refusal(cases[file].write(tmp_path, cases[file].tensors, cases[config].config)).hint
    assert hint == f"The tensors are named as those of {alike}; config.json says {config}. No weights were read."


def test_whole_numbers_alone_are_no_damage(cases: dict[str, Case], tmp_path: Path) -> None:
    values = {n: v.to(torch.int8) if "proj" in n else v for n, v in cases["llama"].tensors.items()}
    hint = refusal(cases["llama"].write(tmp_path, values)).hint
    assert "get the original checkpoint" in hint and "damaged" not in hint


def test_everything_that_does_not_fit_is_said_at_once(cases: dict[str, Case], tmp_path: Path) -> None:
    values = dict(cases["llama"].tensors)
    del values["model.layers.0.mlp.up_proj.weight"], values["model.layers.1.mlp.up_proj.weight"]
    values["model.norm.weight"] = torch.ones(17)
    values["model.layers.0.self_attn.q_proj.bias"] = torch.ones(16)
    values["model.layers.1.mlp.gate_proj.weight"] = torch.ones(24, 16, dtype=torch.int8)
    del values["lm_head.weight"]
    error = refusal(cases["llama"].write(tmp_path, values))
    for part in (
        "missing (2): model.layers.{0-1}.mlp.up_proj.weight",
        "left over (1): model.layers.0.self_attn.q_proj.bias",
        "misshapen (1): model.norm.weight is 17, the config makes it 16",
        "quantised (1): model.layers.1.mlp.gate_proj.weight",
        "no output matrix in the file, and config says untied",
        "llama, 2 layers, embed_dim 16",
    ):
        assert part in error.message
    assert "config.json belongs to another model" in error.hint


def test_of_very_many_the_rest_is_counted() -> None:
    names = tuple("x" * n for n in range(1, 61))
    nothing: tuple[str, ...] = ()
    matched = mapping.Match(
        found={}, sources={}, missing=names, left_over=names, misshapen=names,
        other_parts=nothing, not_floats=names, ignored=nothing,
    )  # fmt: skip
    said = mapping.mismatches(matched)
    assert len(said) == 4
    for line in said:
        assert "(60): x" in line and "x" * 50 in line and "x" * 51 not in line and line.endswith(" and 10 more")


@pytest.mark.parametrize(("field", "says"), [("more", "missing"), ("fewer", "left over")])
def test_another_number_of_layers_than_the_files_is_refused(case: Case, tmp_path: Path, field: str, says: str) -> None:
    key = "n_layer" if "n_layer" in case.config else "num_hidden_layers"
    number = 3 if field == "more" else 1
    config = {k: v for k, v in case.config.items() if k not in ("layer_types", "no_rope_layers")} | {key: number}
    message = refusal(case.write(tmp_path, case.tensors, config)).message
    assert says in message and f"{2 if field == 'more' else 1}." in message


@pytest.mark.parametrize(("ours", "other"), list(itertools.permutations(hf.FAMILIES[:6], 2)))
def test_another_familys_config_is_refused_or_describes_the_same_tensors(
    cases: dict[str, Case], tmp_path: Path, ours: str, other: str
) -> None:
    shapes = [{n: v.shape for n, v in cases[family].tensors.items()} for family in (ours, other)]
    folder = cases[ours].write(tmp_path, cases[ours].tensors, cases[other].config)
    assert shapes[0] != shapes[1]
    refusal(folder)


def test_any_one_tensor_missing_left_over_or_misshapen_is_refused(case: Case, tmp_path: Path) -> None:
    matrices = ("embed", "wte", "lm_head")
    for name, value in case.tensors.items():
        without = {n: v for n, v in case.tensors.items() if n != name}
        if not any(word in name for word in matrices):
            assert name in refusal(case.write(tmp_path, without)).message
        message = refusal(case.write(tmp_path, case.tensors | {name: value[:-1]})).message
        assert name in message or "63 x 16" in message  # the two matrices are named by their shapes
        extra = name.replace("0", "7") + "_extra"
        assert extra in refusal(case.write(tmp_path, case.tensors | {extra: value.clone()})).message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "adapter"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight", "adapter"),
        ("model.layers.0.self_attn.q_proj.qweight", "quantised"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "quantised"),
        ("model.layers.0.self_attn.q_proj.weight.absmax", "quantised"),
        ("model.layers.0.mlp.down_proj.SCB", "quantised"),
        ("tok_embeddings.weight", "Meta's own layout"),
        ("layers.0.attention.wq.weight", "Meta's own layout"),
    ],
)
def test_what_is_no_whole_unquantised_model_is_refused_by_name(
    cases: dict[str, Case], tmp_path: Path, name: str, says: str
) -> None:
    folder = cases["llama"].write(tmp_path, cases["llama"].tensors | {name: torch.ones(2)})
    assert says in refusal(folder).message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_of_no_plain_type_are_called_quantised(
    cases: dict[str, Case], tmp_path: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    values = cases["llama"].tensors | {name: torch.ones(24, 16).to(dtype)}
    assert f"quantised (1): {name}" in refusal(cases["llama"].write(tmp_path, values)).message


def test_a_config_of_millions_of_parts_is_refused_at_once(cases: dict[str, Case], tmp_path: Path) -> None:
    config = cases["mixtral"].config | {"num_hidden_layers": 10_000, "num_local_experts": 100_000}
    assert (
        "10,000 layers of 100,000 experts"
        in refusal(cases["mixtral"].write(tmp_path, cases["mixtral"].tensors, config)).message
    )


def test_sizes_that_would_ask_for_terabytes_are_refused_from_the_header(cases: dict[str, Case], tmp_path: Path) -> None:
    for family, width in (("llama", "hidden_size"), ("gpt2", "n_embd")):
        config = cases[family].config | {"vocab_size": 10**8, width: 10**8}
        message = refusal(cases[family].write(tmp_path, cases[family].tensors, config)).message
        assert "100000000 x 100000000" in message and len(message) < 5000


def test_a_mix_of_types_is_said_and_widened(cases: dict[str, Case], tmp_path: Path) -> None:
    values = {n: v.bfloat16() if "mlp" in n else v for n, v in cases["llama"].tensors.items()}
    folder = cases["llama"].write(tmp_path, values)
    model, plan = checkpoint.load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert any("BF16 and F32" in note for note in plan.notes)
    for name, source in plan.sources.items():
        stored = values[source.info.name]
        if stored.shape == source.tensor.shape:
            assert torch.equal(model.state_dict()[name], stored.float())


# Reading only what decides


def test_weights_are_read_only_to_compare_the_two_matrices(tmp_path: Path) -> None:
    hf.make("llama", tmp_path, tie_word_embeddings=False)
    read: list[tuple[str, int, int]] = []

    def counted(info: tensors.TensorInfo, start: int, stop: int) -> bytes:
        read.append((info.name, start, stop))
        return tensors.read_rows(info, start, stop)

    from llmcli.targets import read_hf_config

    plan = mapping.plan(weight_files.read_checkpoint(tmp_path), read_hf_config(tmp_path), "here", read=counted)
    assert plan.tie.decision == "untie"
    assert read == [("model.embed_tokens.weight", 0, 1), ("lm_head.weight", 0, 1)]


# Grouping


@pytest.mark.parametrize(
    ("names", "grouped"),
    [
        (["a.weight"], ["a.weight"]),
        (["h.0.w", "h.1.w", "h.2.w"], ["h.{0-2}.w"]),
        (["h.0.w", "h.2.w", "h.3.w", "x"], ["x", "h.{0,2-3}.w"]),
        (["h.1.w", "h.1.w"], ["h.1.w"]),
        ([f"l.{i}.e.{e}.w{w}" for i in (0, 1) for e in (0, 1, 5) for w in (1, 3)], ["l.{0-1}.e.{0-1,5}.w{1,3}"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.{0-1}", "l.1.e.0"]),
    ],
)
def test_names_that_differ_in_numbers_are_grouped(names: list[str], grouped: list[str]) -> None:
    assert sorted(mapping.grouped(names)) == sorted(grouped)


def spelled_out(text: str) -> list[str]:
    """The names that a group stands for."""
    head, brace, rest = text.partition("{")
    if not brace:
        return [text]
    inside, _, tail = rest.partition("}")
    numbers: list[int] = []
    for run in inside.split(","):
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return [f"{head}{n}{rest}" for n in numbers for rest in spelled_out(tail)]


@settings(max_examples=200)
@given(
    st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from("xy"), st.integers(0, 12)), max_size=40)
)
def test_a_group_stands_for_exactly_its_names(parts: set[tuple[str, int, str, int]]) -> None:
    names = {f"{a}.{i}.{x}{n}" for a, i, x, n in parts}
    groups = mapping.grouped(names)
    out = [name for group in groups for name in spelled_out(group)]
    assert sorted(out) == sorted(names)
