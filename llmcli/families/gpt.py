"""GPT-1 (OpenAI, 2018, "Improving Language Understanding"): post-norm blocks, no final norm, learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama

if TYPE_CHECKING:
    from llmcli.layers import Block

QKV = "q_dim kv_dim kv_dim"  # c_attn holds the three side by side
BLOCK = (
    Weight("blocks.{i}.attention.q.weight", "transformer.h.{i}.attn.c_attn.weight", "q_dim embed_dim", True, QKV, 0),
    Weight("blocks.{i}.attention.k.weight", "transformer.h.{i}.attn.c_attn.weight", "kv_dim embed_dim", True, QKV, 1),
    Weight("blocks.{i}.attention.v.weight", "transformer.h.{i}.attn.c_attn.weight", "kv_dim embed_dim", True, QKV, 2),
    Weight("blocks.{i}.attention.q.bias", "transformer.h.{i}.attn.c_attn.bias", "q_dim", False, QKV, 0, when="bias"),
    Weight("blocks.{i}.attention.k.bias", "transformer.h.{i}.attn.c_attn.bias", "kv_dim", False, QKV, 1, when="bias"),
    Weight("blocks.{i}.attention.v.bias", "transformer.h.{i}.attn.c_attn.bias", "kv_dim", False, QKV, 2, when="bias"),
    Weight("blocks.{i}.attention.output.weight", "transformer.h.{i}.attn.c_proj.weight", "embed_dim q_dim", True),
    Weight("blocks.{i}.attention.output.bias", "transformer.h.{i}.attn.c_proj.bias", "embed_dim", when="bias"),
    Weight("blocks.{i}.attention_norm.weight", "transformer.h.{i}.ln_1.weight", "embed_dim"),
    Weight("blocks.{i}.attention_norm.bias", "transformer.h.{i}.ln_1.bias", "embed_dim", when="bias"),
    Weight("blocks.{i}.feed_forward.up.weight", "transformer.h.{i}.mlp.c_fc.weight", "hidden_dim embed_dim", True),
    Weight("blocks.{i}.feed_forward.up.bias", "transformer.h.{i}.mlp.c_fc.bias", "hidden_dim", when="bias"),
    Weight("blocks.{i}.feed_forward.down.weight", "transformer.h.{i}.mlp.c_proj.weight", "embed_dim hidden_dim", True),
    Weight("blocks.{i}.feed_forward.down.bias", "transformer.h.{i}.mlp.c_proj.bias", "embed_dim", when="bias"),
    Weight("blocks.{i}.feed_forward_norm.weight", "transformer.h.{i}.ln_2.weight", "embed_dim"),
    Weight("blocks.{i}.feed_forward_norm.bias", "transformer.h.{i}.ln_2.bias", "embed_dim", when="bias"),
)
HEAD = (
    Weight("output_projection.weight", "lm_head.weight", "vocab_size embed_dim", unless_tied=True),
    Weight("output_projection.bias", "lm_head.bias", "vocab_size", when="head_bias", unless_tied=True),
)
WEIGHTS = (
    Weight("token_embeddings.weight", "transformer.tokens_embed.weight", "vocab_size embed_dim"),
    Weight(
        "position_embeddings.weight",
        "transformer.positions_embed.weight",
        "max_position_embeddings embed_dim",
        when="num_layers",
    ),
    *BLOCK,
    *HEAD,
)


def block(config: ModelConfig, layer: int) -> Block:
    """x -> norm(x + attention(x)) -> norm(x + feed_forward(x)), both norms after the sum."""
    from llmcli.layers import Attention, FeedForward, NormAfterSumBlock, layer_norm

    return NormAfterSumBlock(
        attention=Attention(config, layer),
        attention_norm=layer_norm(config),
        feed_forward=FeedForward(config, activation="gelu_tanh"),
        feed_forward_norm=layer_norm(config),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="gpt",
    hf_model_type="openai-gpt",
    hf_architecture="OpenAIGPTLMHeadModel",
    tied_in_hf=True,
    weights=WEIGHTS,
    alternatives=llama.HEAD_NAMES,
    ignorable=("transformer.h.{i}.attn.bias", "transformer.position_ids"),
    norm="layer",
    final_norm=False,
    learned_positions=True,
    block=block,
    keys=frozenset({"bias", "head_bias"}),
    defaults={"hidden_dim": lambda config: 4 * config.embed_dim, "norm_eps": 1e-5, "bias": True, "head_bias": True},
    hf_fields={
        "vocab_size": "vocab_size",
        "embed_dim": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_position_embeddings": ("n_positions", "n_ctx"),
        "norm_eps": "layer_norm_epsilon",
        "dropout": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "initializer_range": "initializer_range",
    },
    hf_defaults={
        "vocab_size": 40478,
        "embed_dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "dropout": 0.1,
    },
    hf_requires={"afn": ("gelu", "gelu_new")},  # transformers computes tanh-gelu for either name
    hf_writes={"afn": "gelu"},
)
