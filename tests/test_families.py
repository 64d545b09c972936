"""Every family computes what transformers computes, read from files that transformers wrote."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hf
import msgspec
import pytest
import torch
import transformers

from llmcli import checkpoint, families, hf_config, load_model
from llmcli.cache import new_cache
from llmcli.config import ModelConfig
from llmcli.errors import ConfigError
from llmcli.model import Decoder

TOLERANCE = 2e-4
LENGTH = 40  # past position 8 (RoPE is the identity at 0) and past the window of 9


@pytest.fixture(scope="module", params=[(family, tie) for family in hf.FAMILIES for tie in (True, False)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """transformers' model and ours, of one family, tied or untied."""
    family, tie = request.param
    folder = tmp_path_factory.mktemp(family)
    theirs = hf.make(family, folder, tie_word_embeddings=tie, **({"sliding_window": 9} if family == "mixtral" else {}))
    return theirs, load_model(folder)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (3, LENGTH), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


def test_logits_equal_transformers(pair: tuple[Any, Decoder], ids: torch.Tensor) -> None:
    theirs, ours = pair
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * LENGTH, [7, 13, 20], [25] + [1] * 15, [3] * 13 + [1]])
def test_cached_logits_equal_transformers_however_the_text_is_cut(
    pair: tuple[Any, Decoder], ids: torch.Tensor, pieces: list[int]
) -> None:
    theirs, ours = pair
    cache = new_cache(ours.config)
    got = torch.cat([ours(piece, cache) for piece in ids.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(got, logits(theirs, ids), atol=TOLERANCE, rtol=0)


def test_a_swap_of_any_two_tensors_of_a_block_would_be_noticed(pair: tuple[Any, Decoder], ids: torch.Tensor) -> None:
    """The fixtures are strong enough: swapping any two of a block's tensors of one shape moves the logits."""
    _, ours = pair
    want = logits(ours, ids)
    block = dict(ours.blocks[1].named_parameters())
    for (one, a), (other, b) in itertools.combinations(block.items(), 2):
        if a.shape != b.shape:
            continue
        saved = a.detach().clone(), b.detach().clone()
        with torch.no_grad():
            a.copy_(saved[1])
            b.copy_(saved[0])
            moved = (logits(ours, ids) - want).abs().max().item()
            a.copy_(saved[0])
            b.copy_(saved[1])
        assert moved > 5 * TOLERANCE, (one, other)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 10000.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ],
    ids=["theta", "linear", "llama3", "yarn", "yarn-mscale"],
)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rope_of_every_kind_equals_transformers(tmp_path: Path, ids: torch.Tensor, family: str, rope: Any) -> None:
    theirs = hf.make(family, tmp_path, rope_parameters=rope, head_dim=16)
    ours = load_model(tmp_path)
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_bfloat16_errs_no_more_than_transformers(tmp_path: Path, ids: torch.Tensor, family: str) -> None:
    theirs = hf.make(family, tmp_path, dtype=torch.bfloat16)
    ours, exact = load_model(tmp_path), logits(load_model(tmp_path, dtype="float64"), ids)
    assert ours.token_embeddings.weight.dtype == torch.bfloat16
    our_error = (logits(ours, ids).double() - exact).pow(2).mean().sqrt()
    their_error = (logits(theirs, ids).double() - exact).pow(2).mean().sqrt()
    assert our_error <= 1.2 * their_error + 1e-4, (our_error, their_error)


def test_gemma_scales_embeddings_in_the_type_of_the_matrix() -> None:
    config = families.complete(
        ModelConfig(family="gemma", vocab_size=8, embed_dim=2048, num_layers=0, num_heads=8, scale_embeddings=True)
    )
    embeddings = Decoder(config).token_embeddings
    assert embeddings.scale == pytest.approx(45.254834, abs=1e-6)
    assert embeddings.to(torch.bfloat16).scale == 45.25


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"head_dim": 6}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 500}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"num_experts_per_tok": 4}),
    ("gemma", {"attention_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 9}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    ("phi3", {"sliding_window": 9}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    ("smollm3", {"no_rope_layers": [0, 1]}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0]}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=[f"{f}-{'-'.join(c)}" for f, c in VARIANTS])
def test_every_switch_that_is_read_acts_as_in_transformers(
    tmp_path: Path, ids: torch.Tensor, family: str, changes: dict[str, Any]
) -> None:
    theirs = hf.make(family, tmp_path / "theirs", **changes)
    want = logits(theirs, ids)
    ours = load_model(tmp_path / "theirs")
    torch.testing.assert_close(logits(ours, ids), want, atol=TOLERANCE, rtol=0)
    checkpoint.save(ours, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(logits(back, ids), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt", {"afn": "relu"}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"add_cross_attention": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("llama", {"num_hidden_layers": 0}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma", {"final_logit_softcapping": 30.0}),
        ("qwen2", {"hidden_act": "gelu"}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma2", {"hidden_activation": "relu"}),
        ("gemma3", {"final_logit_softcapping": 30.0}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}}),
        ("phi3", {"hidden_act": "gelu"}),
        ("olmo2", {"hidden_act": "gelu"}),
        ("olmo2", {"clip_qkv": 8.0}),
        ("smollm3", {"hidden_act": "gelu"}),
    ],
    ids=str,
)
def test_a_switch_that_changes_the_computation_and_is_not_computed_is_refused_by_name(
    family: str, changes: dict[str, Any]
) -> None:
    kind, sizes = hf.CONFIGS[family]
    table = json.loads(kind(**sizes).to_json_string(use_diff=False)) | changes
    if "rope_scaling" in changes:
        table.pop("rope_parameters")
    with pytest.raises(ConfigError) as caught:
        hf_config.read(table, "config.json")
    name, value = next(iter(changes.items()))
    assert name in str(caught.value)
    detail = (
        value.get("type") or value.get("rope_type") or value.get("quant_method") if isinstance(value, dict) else None
    )
    assert detail is None or detail in str(caught.value)


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_the_table_names_exactly_the_parameters_of_the_model(family: str) -> None:
    kind, sizes = hf.CONFIGS[family]
    for tie in (True, False):
        config = hf_config.read(kind(**sizes, tie_word_embeddings=tie).to_dict(), family).config
        for switch in (True, False) if "bias" in families.get(family).keys else (None,):
            config = families.complete(msgspec.structs.replace(config, bias=switch, head_bias=None))
            with torch.device("meta"):
                model = Decoder(config)
            in_table = {tensor.name: tensor.shape for tensor in families.get(family).tensors(config)}
            assert in_table == {name: tuple(value.shape) for name, value in model.named_parameters()}


def test_a_checkpoint_written_here_opens_in_transformers_whole(pair: tuple[Any, Decoder], tmp_path: Path) -> None:
    _, ours = pair
    checkpoint.save(ours, tmp_path / "saved")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.arange(LENGTH)[None]
    torch.testing.assert_close(logits(theirs, ids), logits(ours, ids), atol=TOLERANCE, rtol=0)


def test_the_language_model_inside_a_larger_one_loads_and_the_rest_is_named(tmp_path: Path, ids: torch.Tensor) -> None:
    kind, sizes = hf.CONFIGS["gemma3"]
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=kind(**sizes).to_dict(),
        vision_config=vision.to_dict(),
        mm_tokens_per_image=4,
        boi_token_index=60,
        eoi_token_index=61,
        image_token_index=62,
    )
    theirs = hf.save_randomised(transformers.Gemma3ForConditionalGeneration(config).eval(), tmp_path)
    ours, plan = checkpoint.load(tmp_path)
    words = ids % 60  # the ids above are images
    torch.testing.assert_close(logits(ours, words), logits(theirs, words), atol=TOLERANCE, rtol=0)
    assert "34 tensors of other parts are left alone: multi_modal_projector, vision_tower" in plan.notes


def test_every_family_that_is_found_is_held_against_transformers() -> None:
    assert set(hf.FAMILIES) == set(families.names())
