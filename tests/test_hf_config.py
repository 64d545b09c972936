"""config.json as transformers reads it: every spelling, every default; what is impossible is refused by name."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import hf
import msgspec
import pytest
import torch
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import JSON

from llmcli import checkpoint, families, hf_config, load_model, read_config, targets
from llmcli.config import ModelConfig
from llmcli.errors import ConfigError, LlmcliError
from llmcli.layers import rope_frequencies

NAMES = {family: kind for family, (kind, _) in hf.CONFIGS.items()}


def table(family: str, **changes: Any) -> dict[str, Any]:
    """The whole config.json of a family's tiny model, with every key that transformers knows spelled out."""
    kind, sizes = hf.CONFIGS[family]
    return json.loads(kind(**{**sizes, **changes}).to_json_string(use_diff=False))  # type: ignore[no-any-return]


def refusal(config: Any, *parts: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        hf_config.read(config, "DIR/config.json")
    message = caught.value.message
    assert message.startswith("DIR/config.json") and message.isprintable() and len(message) < 1000
    assert caught.value.hint
    for part in parts:
        assert part in message, message
    return caught.value


# Defaults

# Keys that say nothing of the computation, or without which a table does not say which family it is.
KEPT = {"model_type"}


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_key_left_out_means_what_it_means_to_transformers(family: str) -> None:
    whole = table(family)
    for key in whole.keys() - KEPT:
        without = {name: value for name, value in whole.items() if name != key}
        try:
            filled = NAMES[family](**copy.deepcopy(without)).to_dict()
        except Exception:  # transformers cannot fill it in either
            continue
        try:
            wanted = hf_config.read(filled, "filled")
        except ConfigError as error:  # a default of another size that does not go with the rest
            with pytest.raises(ConfigError):
                hf_config.read(without, "without")
            assert "filled" in error.message
            continue
        found = hf_config.read(without, "without")
        assert found.config == wanted.config, key
        tied = wanted.tie_flag if found.tie_flag is None else found.tie_flag
        assert tied == wanted.tie_flag == filled["tie_word_embeddings"]


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_config_that_says_nothing_means_what_it_means_to_transformers(family: str) -> None:
    theirs = hf_config.read(NAMES[family]().to_dict(), "theirs")
    ours = hf_config.read({"model_type": NAMES[family].model_type}, "ours")
    assert ours.config == theirs.config
    assert ours.tie_flag is None and theirs.tie_flag == ours.config.tie_word_embeddings


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_a_class_name_is_enough_where_the_model_type_is_absent(family: str) -> None:
    whole = table(family)
    del whole["model_type"]
    refusal(whole, "no model_type")
    whole["architectures"] = [families.get(family).hf_architecture]
    assert hf_config.read(whole, "c").config.family == family


# Spellings


@pytest.mark.parametrize(
    ("family", "absent", "given", "ours"),
    [
        ("gpt2", ["n_embd"], {"hidden_size": 32}, {"embed_dim": 32}),
        ("gpt2", ["n_head"], {"num_attention_heads": 2}, {"num_heads": 2}),
        ("gpt2", ["n_layer"], {"num_hidden_layers": 3}, {"num_layers": 3}),
        ("gpt2", ["n_positions"], {"max_position_embeddings": 48}, {"max_position_embeddings": 48}),
        ("gpt2", [], {"n_ctx": 48}, {"max_position_embeddings": 64}),
        ("gpt2", ["n_positions"], {"n_ctx": 48}, {"max_position_embeddings": 48}),
        ("gpt", [], {"n_ctx": 64}, {"max_position_embeddings": 64}),
        ("gpt2", [], {"n_inner": None}, {"hidden_dim": 64}),
        ("gpt2", ["n_inner"], {}, {"hidden_dim": 64}),
        ("gpt2", [], {"n_inner": 40}, {"hidden_dim": 40}),
        ("mixtral", ["num_local_experts"], {"num_experts": 3}, {"num_experts": 3}),
        ("llama", ["num_key_value_heads"], {}, {"num_kv_heads": 4}),
        ("llama", [], {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("mistral", [], {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("llama", ["head_dim"], {}, {"head_size": 4}),
        ("llama", [], {"head_dim": None}, {"head_size": 4}),
        ("mistral", [], {"head_dim": None}, {"head_size": 4}),
        ("llama", [], {"head_dim": 10}, {"head_size": 10}),
        ("llama", [], {"hidden_size": 18, "head_dim": 10}, {"head_size": 10}),
        ("gemma", ["head_dim"], {}, {"head_size": 256}),
        ("mistral", [], {"sliding_window": None}, {"window_size": None}),
        ("mistral", ["sliding_window"], {}, {"window_size": 4096}),
        ("mistral", [], {"sliding_window": 4096}, {"window_size": 4096}),
        ("mixtral", ["sliding_window"], {}, {"window_size": None}),
        ("gemma", [], {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_dim": 24}),
        ("llama", ["rope_parameters"], {"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ("llama", ["rope_parameters"], {"rope_theta": None}, {"rope_theta": 1e4}),
        ("mixtral", ["rope_parameters"], {}, {"rope_theta": 1e6}),
        ("llama", [], {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, {"rope_theta": 7.0}),
        ("llama", ["rope_parameters"], {"rope_scaling": {"rope_theta": 8.0, "type": "default"}}, {"rope_theta": 8.0}),
        ("llama", [], {"attention_dropout": None}, {"dropout": 0.0}),
        ("llama", [], {"attention_dropout": 0}, {"dropout": 0.0}),
        ("gpt2", [], {"resid_pdrop": 1.0, "embd_pdrop": 1.0, "attn_pdrop": 1.0}, {"dropout": 0.99}),
        ("llama", [], {"use_cache": False, "pretraining_tp": 2, "_name_or_path": "x", "auto_map": {}}, {}),
        ("llama", [], {"use_sliding_window": True, "torchscript": True, "vision": [1]}, {}),
    ],
    ids=str,
)
def test_every_spelling_is_read(family: str, absent: list[str], given: dict[str, Any], ours: dict[str, Any]) -> None:
    spelled = {key: value for key, value in table(family).items() if key not in absent} | given
    found = hf_config.read(spelled, "c").config
    straight = hf_config.read(table(family), "c").config
    assert {key: getattr(found, key) for key in ours} == ours
    sizes = {"head_size", "hidden_dim"} if "embed_dim" in ours or "num_heads" in ours else set()
    for key in (
        set(found.__struct_fields__) - ours.keys() - sizes - ({"embed_dim"} if "hidden_size" in given else set())
    ):
        if not ("num_heads" in ours and key == "num_kv_heads"):
            assert getattr(found, key) == getattr(straight, key), key


@pytest.mark.parametrize(
    "given",
    [
        {"n_embd": 16, "hidden_size": 32},
        {"n_layer": 2, "num_hidden_layers": 3},
        {"n_head": 4, "num_attention_heads": 2},
        {"n_positions": 64, "max_position_embeddings": 32},
    ],
)
def test_two_spellings_that_disagree_are_refused(given: dict[str, Any]) -> None:
    refusal(table("gpt2") | given, "disagree", *(f"{key} = {value}" for key, value in given.items()))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
     "original_max_position_embeddings": 16},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "beta_fast": 20, "beta_slow": 2}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "truncate": False, "attention_factor": None}},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 77.0},
    {"rope_scaling": None, "rope_theta": 77.0},
    {"rope_scaling": {}, "rope_theta": 77.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_every_spelling_of_rope_gives_transformers_frequencies(rope: dict[str, Any], head_dim: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spelled = {key: value for key, value in table("llama", head_dim=head_dim).items() if not key.startswith("rope_")}
    spelled |= rope
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(spelled)))
    config = hf_config.read(spelled, "c").config
    assert config.head_size is not None and config.rope_theta is not None
    frequencies, factor = rope_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(frequencies, theirs.inv_freq, atol=0, rtol=1e-6)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_an_old_rope_is_computed_as_transformers_does_far_into_the_text(tmp_path: Path) -> None:
    hf.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.randint(0, 64, (1, 60), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(ids), theirs(ids).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor and high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor = True"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor = -2.0"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor = inf"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "a"}}, "mscale = 'a'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "a"}}, "truncate"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta = 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}}, "original_max"),
        ({"rope_scaling": [1]}, "not one set"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 1.0}}}, "not one set"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta is not a finite number"),
        ({"rope_theta": math.nan}, "rope_theta"),
        (
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling disagree",
        ),
    ],
    ids=str,
)
def test_a_rope_that_is_not_computed_or_makes_no_sense_is_refused(rope: dict[str, Any], says: str) -> None:
    spelled = {key: value for key, value in table("llama").items() if not key.startswith("rope_")}
    refusal(spelled | rope, says)


# Impossible values


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {"num_hidden_layers": -3}, "num_hidden_layers = -3: not a number of layers"),
        ("gpt2", {"n_layer": "2"}, "n_layer = '2': not a number of layers"),
        ("gpt2", {"n_layer": 2.0}, "n_layer = 2.0"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ("gemma2", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ("qwen2", {"max_window_layers": -(10**12)}, "max_window_layers"),
        ("llama", {"hidden_size": "sixteen"}, "hidden_size = 'sixteen'"),
        ("llama", {"hidden_size": 0}, "hidden_size = 0"),
        ("llama", {"hidden_size": 16.5}, "hidden_size = 16.5"),
        ("llama", {"hidden_size": [16]}, "hidden_size = [16]"),
        ("llama", {"hidden_size": True}, "hidden_size = True"),
        ("llama", {"vocab_size": 10**15}, "vocab_size = 1000000000000000"),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
         "hidden_size 16 does not divide by num_attention_heads 3"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 does not divide by num_key_value_heads 3"),
        ("llama", {"head_dim": 5}, "head_dim 5 is odd"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 4"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0"),
        ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps is not a finite number"),
        ("llama", {"attention_dropout": 2.0}, "attention_dropout = 2.0"),
        ("llama", {"attention_bias": "yes", "mlp_bias": "yes"}, "attention_bias = 'yes'"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        ("llama", {"model_type": "mamba"}, "model_type 'mamba'"),
        ("llama", {"model_type": ["llama"]}, "not a family"),
        ("llama", {"hidden_act": {"a": 1}}, "hidden_act"),
        ("llama", {"hidden_size": "x" * 100_000}, "hidden_size"),
        ("llama", {"hidden_act": "\x1b[31mred"}, "hidden_act"),
        ("gemma2", {"layer_types": ["full_attention"]}, ""),
        ("smollm3", {"no_rope_layers": 3}, ""),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, ""),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_an_impossible_value_is_refused_under_the_name_that_the_file_gives_it(
    family: str, changes: dict[str, Any], says: str
) -> None:
    spelled = table(family) | changes
    if family == "gemma2" and "layer_types" in changes:
        assert hf_config.read(spelled, "c").config.window_layers == ()  # too short, and no layer is named: none has one
        return
    refusal(spelled, says)


@pytest.mark.parametrize("where", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_weights_are_refused_by_method(where: str, nested: bool) -> None:
    spelled = table("llama")
    outer = {"model_type": "wrapper", "text_config": spelled} if nested else spelled
    refusal(outer | {where: {"quant_method": "awq", "bits": 4}}, where, "awq")


def test_an_unknown_family_is_refused_naming_the_known_ones() -> None:
    hint = refusal({"model_type": "bert"}, "bert").hint
    assert all(kind.model_type in hint for kind in NAMES.values())


# Nesting


def test_a_nested_config_is_read_and_the_outer_one_fills_in_for_the_tie() -> None:
    inner = {key: value for key, value in table("llama").items() if key != "tie_word_embeddings"}
    for outer in (True, False, None):
        found = hf_config.read({"model_type": "w", "text_config": inner, "tie_word_embeddings": outer}, "c")
        assert found.tie_flag is outer and found.config.embed_dim == 16 and not found.warnings
        assert "text_config" in found.notes[0]
    found = hf_config.read(
        {"model_type": "w", "text_config": inner | {"tie_word_embeddings": False}, "tie_word_embeddings": True}, "c"
    )
    assert found.tie_flag is False and "nested one holds" in found.warnings[0]


def test_a_nested_config_may_leave_its_type_to_the_outer_one() -> None:
    inner = {key: value for key, value in table("llama").items() if key not in ("model_type", "architectures")}
    assert hf_config.read({"model_type": "llama", "text_config": inner}, "c").config.family == "llama"
    refusal({"model_type": "w", "text_config": inner}, "model_type 'w'")


def test_dropouts_that_differ_are_said() -> None:
    found = hf_config.read(table("gpt2") | {"attn_pdrop": 0.3}, "c")
    assert found.config.dropout == 0.1
    assert "attn_pdrop = 0.3" in found.notes[0] and not hf_config.read(table("gpt2"), "c").notes


# Files


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "list"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"model_type":' * 50_000, "not valid JSON"),
        (b"{}", "no model_type"),
        (b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}", ""),
        (b'{"model_type": null}', "not a family"),
    ],
)
def test_a_config_that_is_no_table_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(LlmcliError) as caught:
        targets.read_hf_config(tmp_path)
    assert str(tmp_path) in caught.value.message and says in caught.value.message


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(table("llama")).encode())
    assert read_config(tmp_path).embed_dim == 16


def test_a_config_that_is_absent_endless_or_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(LlmcliError, match=r"no config\.json"):
        targets.read_hf_config(folder)
    with (folder / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(LlmcliError, match="too many"):
        targets.read_hf_config(folder)
    (folder / "config.json").unlink()
    (tmp_path / "secret").write_text("{}")
    (folder / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(LlmcliError, match="link out of the folder"):
        targets.read_hf_config(folder)


# Anything


LIKELY = JSON | st.sampled_from([0, 1, 2, 3, 4, 8, 16, -1, 10**12, 2**70, 0.5, 1e308, "default", "yarn", True, None])
KEYS = sorted(
    {key for family in hf.FAMILIES for key in table(family)} | {"n_ctx", "rope_scaling", "rope_theta", "llmcli"}
)
ROPE_KEYS = ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "mscale",
             "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "partial_rotary_factor",
             "original_max_position_embeddings", "full_attention", "sliding_attention"]  # fmt: skip
ROPE = st.dictionaries(st.sampled_from(ROPE_KEYS), LIKELY, max_size=6)


@settings(max_examples=600, deadline=10_000, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(hf.FAMILIES),
    changes=st.dictionaries(
        st.sampled_from(KEYS), LIKELY | ROPE | st.lists(LIKELY, max_size=3), min_size=1, max_size=3
    ),
    private=st.booleans(),
)
def test_any_values_read_or_are_refused(family: str, changes: dict[str, Any], private: bool) -> None:
    spelled = TABLES[family] | ({"model_type": f"llmcli-{family}"} if private else {}) | changes
    try:
        found = hf_config.read(spelled, "c")
    except LlmcliError as error:
        assert error.message.isprintable() and len(error.message) < 3000
        return
    assert families.complete(found.config) == found.config
    for value in msgspec.structs.astuple(found.config):
        assert not isinstance(value, float) or math.isfinite(value)
    if found.config.rope_theta is not None and (found.config.head_size or 0) < 1000:
        assert rope_frequencies(found.config.head_size or 0, found.config.rope_theta, found.config.rope_scaling)


TABLES = {family: table(family) for family in hf.FAMILIES}


@settings(max_examples=200, deadline=10_000)
@given(JSON)
def test_any_json_reads_or_is_refused(value: Any) -> None:
    if isinstance(value, dict):
        with pytest.raises(LlmcliError):
            hf_config.read(value, "c")


# Writing


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Complete configs of every family, also such as Hugging Face's format cannot say."""
    family = families.get(draw(st.sampled_from(hf.FAMILIES)))
    heads = draw(st.sampled_from([1, 2, 4]))
    keys: dict[str, Any] = {
        "family": family.name,
        "vocab_size": draw(st.integers(1, 500)),
        "embed_dim": 8 * heads,
        "num_layers": draw(st.integers(0, 3)),
        "num_heads": heads,
        "max_position_embeddings": draw(st.integers(1, 500)),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "hidden_dim": draw(st.none() | st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "scale_embeddings": draw(st.booleans()),
    }
    optional = {
        "num_kv_heads": st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]),
        "head_size": st.sampled_from([2, 8, 10]),
        "rope_theta": st.sampled_from([5e5, 1e3]),
        "window_size": st.integers(1, 40),
        "bias": st.booleans(),
        "rope_scaling": st.sampled_from([{"type": "linear", "factor": 2.0}]),
    }
    for key, values in optional.items():
        # Without layers there is none to say whether it has the window.
        unsaid = key == "window_size" and "window_layers" in family.keys and not keys["num_layers"]
        if key in family.keys and not unsaid and draw(st.booleans()):
            keys[key] = draw(values)
    if draw(st.booleans()) and not keys["tie_word_embeddings"]:
        keys["head_bias"] = draw(st.booleans())
    try:
        return families.complete(msgspec.convert(keys, ModelConfig))
    except ConfigError:
        assume(False)
        raise


def meaning(config: ModelConfig) -> ModelConfig:
    """The config with the layers that have the window spelled out, where absence would mean all of them."""
    windowed = tuple(layer for layer in range(config.num_layers) if config.window_of(layer))
    return msgspec.structs.replace(config, window_layers=windowed)


@settings(max_examples=300, deadline=None)
@given(config=configs())
def test_a_config_that_is_written_reads_as_itself(config: ModelConfig) -> None:
    written = json.loads(json.dumps(hf_config.write(config, "float32")))
    found = hf_config.read(written, "c")
    assert meaning(found.config) == meaning(config)
    assert found.tie_flag is config.tie_word_embeddings
    assert found.notes == found.warnings == ()
    private = written["model_type"].startswith("llmcli-")
    assert private == bool(hf_config.private_reasons(config))
    if not private:
        theirs = NAMES[config.family](**copy.deepcopy(written))
        assert meaning(hf_config.read(theirs.to_dict(), "c").config) == meaning(config)


@pytest.mark.parametrize("said", [{"unknown": 1}, {"family": "llama"}, [1], "x", None])
def test_a_private_config_says_only_what_it_may(said: Any) -> None:
    config = families.complete(
        msgspec.convert(
            {"family": "gpt2", "vocab_size": 8, "embed_dim": 8, "num_layers": 1, "num_heads": 2}, ModelConfig
        )
    )
    written = hf_config.write(config, "float32")
    assert written["model_type"] == "llmcli-gpt2" and hf_config.read(written, "c").config == config
    refusal(written | {"llmcli": said}, "llmcli =")
    assert hf_config.read({k: v for k, v in written.items() if k != "llmcli"}, "c").config.head_bias is False


def test_transformers_refuses_a_private_type(tmp_path: Path) -> None:
    from llmcli.model import build

    config = ModelConfig(family="gpt2", vocab_size=8, embed_dim=8, num_layers=1, num_heads=2)
    checkpoint.save(build(config), tmp_path / "saved")
    with pytest.raises(ValueError, match="llmcli-gpt2"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert load_model(tmp_path / "saved").config == families.complete(config)
