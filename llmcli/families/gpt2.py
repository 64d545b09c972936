"""GPT-2 (OpenAI, 2019, "Language Models are Unsupervised Multitask Learners"): pre-norm blocks, a final norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama
from llmcli.families.gpt import BLOCK, HEAD

if TYPE_CHECKING:
    from llmcli.layers import Block

WEIGHTS = (
    Weight("token_embeddings.weight", "transformer.wte.weight", "vocab_size embed_dim"),
    Weight(
        "position_embeddings.weight", "transformer.wpe.weight", "max_position_embeddings embed_dim", when="num_layers"
    ),
    *BLOCK,
    Weight("final_norm.weight", "transformer.ln_f.weight", "embed_dim", when="num_layers"),
    Weight("final_norm.bias", "transformer.ln_f.bias", "embed_dim", when="num_layers bias"),
    *HEAD,
)


def block(config: ModelConfig, layer: int) -> Block:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""
    from llmcli.layers import Attention, Block, FeedForward, layer_norm

    return Block(
        attention_norm=layer_norm(config),
        attention=Attention(config, layer),
        feed_forward_norm=layer_norm(config),
        feed_forward=FeedForward(config, activation="gelu_tanh"),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="gpt2",
    hf_model_type="gpt2",
    hf_architecture="GPT2LMHeadModel",
    tied_in_hf=True,
    weights=WEIGHTS,
    alternatives=llama.HEAD_NAMES,
    ignorable=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    norm="layer",
    learned_positions=True,
    block=block,
    keys=frozenset({"bias", "head_bias"}),
    defaults={"hidden_dim": lambda config: 4 * config.embed_dim, "norm_eps": 1e-5, "bias": True, "head_bias": True},
    hf_fields={
        "vocab_size": "vocab_size",
        "embed_dim": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "hidden_dim": "n_inner",
        "max_position_embeddings": ("n_positions", "n_ctx"),
        "norm_eps": "layer_norm_epsilon",
        "dropout": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "initializer_range": "initializer_range",
    },
    hf_defaults={
        "vocab_size": 50257,
        "embed_dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "max_position_embeddings": 1024,
        "norm_eps": 1e-5,
        "dropout": 0.1,
    },
    hf_requires={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    hf_writes={"activation_function": "gelu_new"},
)
