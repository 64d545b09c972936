"""Costs are those of the real thing: operations as torch counts them, memory as autograd and the kernel have it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from hf import CONFIGS, FAMILIES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llmcli import costs, families, hf_config, layers, params
from llmcli.config import ModelConfig
from llmcli.costs import kv_cache, training_memory
from llmcli.errors import ConfigError, UsageError
from llmcli.layers import MATMUL_KEYS
from llmcli.model import build
from llmcli.targets import read_config


def tiny(family: str, **changes: Any) -> ModelConfig:
    """A tiny config of a family, with all that sets it apart."""
    kind, sizes = CONFIGS[family]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return hf_config.read(kind(**{**sizes, **changes}).to_dict(), family).config


# Operations.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(family: str, tied: bool) -> None:
    made = tiny(family, tie_word_embeddings=tied)
    batch, context = 2, 8  # within every window: torch counts hidden pairs too
    model = build(made)
    ids = torch.randint(0, made.vocab_size, (batch, context))
    expected = costs.flops(made, context=context)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(ids)
    assert counter.get_total_flops() == batch * context * expected.forward
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == batch * context * (expected.training - expected.forward)


@pytest.mark.parametrize("name", ["gpt2", "gemma-2b", "llama-7b"])
def test_a_weight_costs_two_operations_and_the_head_counts_though_it_is_tied(name: str) -> None:
    made = read_config(name)
    cost = costs.flops(made, context=1)
    # Kaplan's 2·N, N without embeddings, plus the head's 2·V·d.
    matrices = sum(
        t.shape[0] * t.shape[1]
        for t in families.get(made.family).tensors(made)
        if t.layer is not None and len(t.shape) == 2
    )
    assert cost.attention_projections + cost.feed_forward == 2 * matrices
    assert cost.head == 2 * made.vocab_size * made.embed_dim
    assert cost.forward == costs.flops(params.flip_tie(made), context=1).forward


def test_gemma_2b_spends_more_on_its_head_than_on_all_attention_projections() -> None:
    made = read_config("gemma-2b")
    cost = costs.flops(made, context=1)
    assert cost.head == 1_048_576_000
    one_layer = cost.attention_projections // made.num_layers
    assert one_layer == 18_874_368
    assert cost.head / one_layer == pytest.approx(55.6, abs=0.1)
    assert cost.attention_projections / cost.head == pytest.approx(1 / 3, abs=0.01)


def test_training_is_6n_and_12lhqt() -> None:
    """PaLM's count (arXiv:2204.02311, appendix B), for LLaMA 7B: N are all parameters that enter matrix products."""
    made = read_config("llama-7b")
    context = 2048
    norms = params.count(made).parts["norms"]
    matrices = params.count(made).total - norms - params.count(made).embedding
    assert costs.flops(made, context=context).training == 6 * matrices + 12 * 32 * 32 * 128 * context


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("context", [1, 5, 9, 30])
def test_attention_is_that_of_the_positions_a_mask_leaves(family: str, context: int) -> None:
    made = tiny(family)
    last = pairs = 0
    for layer in range(made.num_layers):
        mask = layers.visible(context, context, made.window_of(layer), torch.device("cpu"))
        seen = torch.ones(context, context, dtype=torch.bool) if mask is None else mask
        last += int(seen[-1].sum())
        pairs += int(seen.sum())
    cost = costs.flops(made, context=context)
    assert cost.attention == 4 * made.q_dim * last
    assert cost.attention_causal == 4 * made.q_dim * pairs // context
    assert cost.attention_share == pytest.approx(cost.attention / cost.forward)


def test_of_a_mixture_the_chosen_experts_work() -> None:
    made = read_config("mixtral-8x7b")
    cost = costs.flops(made, context=1)
    assert cost.feed_forward == 32 * 2 * (2 * 3 * 4096 * 14336 + 8 * 4096)
    active = params.count(made).active
    embedding_and_norms = 32_000 * 4096 + params.count(made).parts["norms"]
    assert cost.forward - cost.attention == 2 * (active - embedding_and_norms)


# The cache.


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("context", [5, 30])
def test_the_cache_is_as_large_as_transformers_own(family: str, context: int) -> None:
    kind, sizes = CONFIGS[family]
    model: Any = transformers.AutoModelForCausalLM.from_config(kind(**sizes))
    cache = model(torch.randint(0, 64, (3, context)), use_cache=True).past_key_values
    theirs = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    made = tiny(family)
    ours = kv_cache(made, dtype="float32", context=context, batch=3)
    # transformers keeps a window's positions without the one that asks.
    asking = sum(made.window_of(n) is not None and context >= 9 for n in range(made.num_layers))
    assert ours.bytes - theirs == asking * 3 * 2 * made.kv_dim * 4
    assert ours.bytes_per_token == made.num_layers * 2 * made.kv_dim * 4
    assert kv_cache(made, dtype="bfloat16", context=context, batch=3).bytes * 2 == ours.bytes


def test_a_window_bounds_the_cache() -> None:
    made = read_config("mistral-7b")
    assert kv_cache(made, dtype="bfloat16", context=32_768).bytes == 4096 * 131_072
    assert kv_cache(made, dtype="bfloat16", context=1000).bytes == 1000 * 131_072


# Training memory.


def saved_by_autograd(made: ModelConfig, batch: int, context: int, autocast: bool) -> int:
    """Bytes of everything that a forward pass keeps for the backward one, weights apart, each storage once."""
    model = build(made).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, made.vocab_size, (batch, context))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        keep(model.hidden(ids))
    return sum(storage.nbytes() for storage in kept.values())


SHAPES: dict[str, dict[str, Any]] = {
    "gemma": {"num_kv_heads": 1, "head_size": 32},
    "gemma2": {"num_kv_heads": 2, "head_size": 32},
    "gemma3": {"num_kv_heads": 2, "head_size": 32},
    "llama": {"num_kv_heads": 2},
    "mistral": {"num_kv_heads": 2},
    "mixtral": {"num_kv_heads": 2, "num_experts": 4, "top_k_experts": 2},
    "olmo2": {"num_kv_heads": 2},
    "phi3": {"num_kv_heads": 2},
    "qwen2": {"num_kv_heads": 2},
    "qwen3": {"num_kv_heads": 2, "head_size": 32},
    "qwen3_moe": {"num_kv_heads": 2, "head_size": 32, "num_experts": 4, "top_k_experts": 2},
    "smollm3": {"num_kv_heads": 2},
}


def shaped(family: str, **changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 256, "embed_dim": 64, "num_layers": 3, "num_heads": 4, "hidden_dim": 176}
    return families.complete(ModelConfig(family=family, **{**sizes, **SHAPES.get(family, {}), **changes}))


@pytest.mark.parametrize("family", families.names())
def test_activations_are_what_autograd_saves(family: str) -> None:
    made = shaped(family)
    ours, _ = costs.activation_bytes(made, dtype="float32", context=128, batch=2)
    assert ours == pytest.approx(saved_by_autograd(made, 2, 128, False), rel=0.03)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_activations_in_bfloat16_are_at_most_a_quarter_short_of_eager_autocast(family: str) -> None:
    context = MATMUL_KEYS + 64  # up to there the CPU's attention is by plain products, which keep their matrices
    made = shaped(family, max_position_embeddings=context)
    ours, _ = costs.activation_bytes(made, dtype="bfloat16", context=context, batch=1)
    copies = 2 * costs._matrices(made)  # autocast's copies of the weights, which are counted with the weights
    assert 0.75 < ours / (saved_by_autograd(made, 1, context, True) - copies) < 1.0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_attention_that_is_not_fused_keeps_its_matrices_besides(family: str) -> None:
    """Under dropout the CPU has no fused kernel."""
    made = shaped(family, dropout=0.1, **({} if family == "gpt2" else {"num_kv_heads": 4}))
    activations, matrices = costs.activation_bytes(made, dtype="float32", context=128, batch=2)
    assert activations + matrices == pytest.approx(saved_by_autograd(made, 2, 128, False), rel=0.03)
    assert matrices == 3 * 2 * 4 * 128 * 128 * 4 * made.num_layers


@pytest.mark.parametrize(("dropout", "each"), [(0.0, 2), (0.1, 4)])
def test_a_cap_on_attention_keeps_a_matrix_more(dropout: float, each: int) -> None:
    made = shaped("gemma2", attention_softcap=50.0, dropout=dropout)
    activations, matrices = costs.activation_bytes(made, dtype="float32", context=128, batch=2)
    assert matrices == each * 2 * 4 * 128 * 128 * 4 * made.num_layers
    assert activations + matrices == pytest.approx(saved_by_autograd(made, 2, 128, False), rel=0.06)


def test_gpt2_keeps_the_published_34_bytes() -> None:
    """34·s·b·h of arXiv:2205.05198: 16·h numbers of 2 bytes and two masks of 1 byte."""
    one, two = (
        costs.activation_bytes(shaped("gpt2", num_layers=n, hidden_dim=256), dtype="float32", context=128, batch=2)[0]
        for n in (1, 2)
    )
    numbers = (two - one) // 4
    assert 2 * numbers + 2 * 128 * 2 * 64 == 34 * 128 * 2 * 64


def test_the_lines_of_training_memory_add_up() -> None:
    made = read_config("gpt2")
    total = params.count(made).total
    memory = training_memory(made, dtype="float32", context=1024, batch=8)
    assert (memory.weights, memory.gradients, memory.moments) == (4 * total, 4 * total, 8 * total)
    assert memory.logits == 3 * 4 * 8 * 1024 * 50_257
    assert memory.total == 16 * total + memory.activations + memory.logits
    assert memory.total_chunked == memory.total - memory.logits + memory.logits_chunked
    assert memory.logits_chunked < memory.logits / 15
    longer = training_memory(made, dtype="float32", context=1024, batch=16)
    assert (longer.activations, longer.logits) == (2 * memory.activations, 2 * memory.logits)
    states, rows = 4 * 8 * 1024 * 768, 2**25 // (4 * 50_257)
    assert memory.logits_chunked == 4 * rows * 50_257 + states + 4 * 50_257 * 768
    assert longer.logits_chunked - memory.logits_chunked == states, "only the states' gradient grows with the batch"
    # Below float32 weights have copies in the smaller type: all matrices, the embedding because it is the head too.
    smaller = training_memory(made, dtype="bfloat16", context=1024, batch=8)
    matrices = total - 1024 * 768 - params.count(made).parts["norms"] - 12 * (4 + 4 + 1) * 768
    assert smaller.weights == 4 * total + 2 * matrices
    assert smaller.logits == (2 + 4 + 4) * 8 * 1024 * 50_257
    assert smaller.logits_chunked == 2 * (2**25 // (2 * 50_257)) * 50_257 + states + (4 + 2) * 50_257 * 768


PEAK = """
import json, sys
import torch, torch.nn.functional as F
from llmcli.config import ModelConfig
from llmcli.loss import cross_entropy
from llmcli.model import build

torch.set_num_threads(1)

def resident(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))

def step(config, batch, context, chunked, steps=1):
    model = build(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, config.vocab_size, (batch, context + 1))
    for n in range(steps):
        if n == steps - 1:
            open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        optimizer.zero_grad()
        for _ in range(2):  # gradients accumulate
            hidden = model.hidden(ids[:, :-1])
            if chunked:
                loss = cross_entropy(hidden, model.token_embeddings.weight, None, ids[:, 1:])
            else:
                loss = F.cross_entropy(model.scores(hidden).flatten(0, 1), ids[:, 1:].flatten())
            del hidden
            loss.backward()
        optimizer.step()

sizes, batch, context, chunked = json.loads(sys.argv[1])
config = ModelConfig(**sizes)
small = ModelConfig(**{**sizes, "vocab_size": 64, "embed_dim": 32, "num_layers": 1, "num_heads": 4, "hidden_dim": 48})
step(small, 2, 8, chunked, 2)  # everything loaded and warm
before = resident("VmRSS")
step(config, batch, context, chunked, 2)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure a peak")
@pytest.mark.parametrize(
    ("family", "vocab", "chunked"),
    [("gpt2", 4096, False), ("llama", 16_384, True), pytest.param("llama", 4096, False, marks=pytest.mark.slow)],
)
def test_a_real_step_takes_the_memory_reckoned(family: str, vocab: int, chunked: bool) -> None:
    sizes = {"vocab_size": vocab, "embed_dim": 192, "num_layers": 4, "num_heads": 6, "hidden_dim": 512}
    sizes |= {"family": family, "tie_word_embeddings": True}
    run = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps([sizes, 4, 256, chunked])],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        # Every large tensor on pages of its own, so that what is freed is gone.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    memory = training_memory(families.complete(ModelConfig(**sizes)), dtype="float32", context=256, batch=4)  # type: ignore[arg-type]
    expected = memory.total_chunked if chunked else memory.total
    assert int(run.stdout) == pytest.approx(expected, rel=0.12)
    # The bound is narrow enough to notice the loss of any line.
    lines = (
        memory.gradients,
        memory.moments / 2,
        memory.activations,
        memory.logits_chunked if chunked else memory.logits,
    )
    assert min(lines) > 0.06 * expected


# All together.


def test_the_context_is_the_configs_and_learned_positions_end() -> None:
    cost = costs.costs(read_config("gpt2"))
    assert (cost.context, cost.batch, cost.dtype) == (1024, 1, "bfloat16")
    assert cost.weights == {
        "float32": 497_759_232,
        "bfloat16": 248_879_616,
        "float16": 248_879_616,
        "float8": 124_439_808,
    }
    assert cost.kv_cache.bytes == 1024 * 36_864
    with pytest.raises(UsageError, match="1024 learned positions"):
        costs.costs(read_config("gpt2"), context=1025)
    assert costs.costs(read_config("llama-7b"), context=4096).context == 4096


def test_no_layers_cost_a_head_and_no_cache() -> None:
    made = ModelConfig(family="llama", vocab_size=100, embed_dim=16, num_layers=0, num_heads=2)
    cost = costs.costs(made, context=10)
    assert (cost.flops.forward, cost.kv_cache.bytes) == (2 * 100 * 16, 0)
    assert cost.flops.head_share == 1


def test_what_cannot_fit_into_memory_is_refused_by_what_makes_it_large() -> None:
    config = read_config("glasslm")
    needed = training_memory(config, dtype="float32", context=256, batch=8).total_chunked
    costs.require_room(config, context=256, batch=8, memory=needed // 2)  # with swap it may be
    with pytest.raises(ConfigError, match=r"852,608 parameters") as caught:
        costs.require_room(config, context=256, batch=8, memory=needed // 2 - 1)
    assert "train.batch_size (now 8) or train.context (now 256)" in caught.value.hint
    with pytest.raises(ConfigError, match=r"6,478,368,768 parameters, and there are 16\.0 GB of memory") as caught:
        costs.require_room(
            msgspec.structs.replace(read_config("llama-7b"), tie_word_embeddings=False, vocab_size=256),
            context=1,
            batch=1,
            memory=16 * 10**9,
        )
    assert "model.embed_dim" in caught.value.hint
