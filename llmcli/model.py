"""The decoder: token ids in, a score for every token of the vocabulary out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from llmcli import families, params
from llmcli.cache import LayerCache
from llmcli.config import ModelConfig
from llmcli.errors import UsageError
from llmcli.layers import RMSNorm, Rotary, TokenEmbeddings, norm_of, softcap


class Decoder(nn.Module):
    """A decoder-only language model of any family, from a complete config.

    A tied output is the absence of a matrix: `output_projection` is None and the embedding scores the hidden states.
    Without layers there is nothing to place or to normalise either: logits = scores(embed(ids)).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = families.complete(config)
        self.source: Path | None = None  # the checkpoint it was read from, for what a message may say of it
        family = families.get(config.family)
        layered = config.num_layers > 0
        self.token_embeddings = TokenEmbeddings(config.vocab_size, config.embed_dim, config.scale_embeddings)
        # Zeros, until `initialise` or a checkpoint fills them: nn.Embedding would draw values, which on the meta device
        # (where loading builds a model) makes torch import its compiler, at ten times the cost of loading.
        length = config.max_position_embeddings
        self.position_embeddings = (
            nn.Embedding(length, config.embed_dim, _weight=torch.zeros(length, config.embed_dim))
            if family.learned_positions and layered
            else None
        )
        self.rotary = nn.ModuleDict()
        if config.rope_theta is not None:
            size = cast(int, config.rotary_size or config.head_size)
            self.rotary["global"] = Rotary(size, config.rope_theta, config.rope_scaling)
            if config.local_rope_theta is not None:
                self.rotary["local"] = Rotary(size, config.local_rope_theta, None)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(family.block(config, layer) for layer in range(config.num_layers))
        self.final_norm: nn.Module | None = None
        if family.final_norm and layered:
            self.final_norm = norm_of(config, family.norm)
        self.output_projection = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bool(config.head_bias))
        )

    def forward(self, ids: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Logits (B, T, V) of ids (B, T); with a cache, ids are the positions that follow those it has seen.

        Raises UsageError for what is no (B, T) of ids, an id outside the vocabulary, or a position past the last
        learned one.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise UsageError(f"ids are {got}, not whole numbers (B, T)", "For one text: torch.tensor([ids]).")
        self.check_ids(ids)
        return self.scores(self.hidden(ids, cache))

    def hidden(self, ids: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """The states that the output scores, (B, T, d): after the last block and the final norm."""
        x = self.token_embeddings(ids)
        positions = self._positions(ids, cache)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions.view(-1, ids.shape[1]))
        x = self.dropout(x)
        ropes = {kind: rotary(positions, x.dtype) for kind, rotary in self.rotary.items()}
        for layer, block in enumerate(self.blocks):
            x = block(x, ropes, cache[layer] if cache is not None else None)
        return cast(Tensor, self.final_norm(x)) if self.final_norm is not None else cast(Tensor, x)

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states: (B, T, d) -> (B, T, V)."""
        if self.output_projection is None:
            return softcap(self.token_embeddings.scores(hidden), self.config.logit_softcap)
        return softcap(self.output_projection(hidden), self.config.logit_softcap)

    def check_ids(self, ids: Tensor) -> None:
        """Raise UsageError for ids that have no row in the embedding. On a GPU the check would stall it: not done."""
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
            return
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            size = params.tokenizer_size(self.source) if self.source else None
            also = "" if size is None else f"; the tokenizer beside the weights has {size}"
            raise UsageError(
                f"token id {wrong} is outside the vocabulary: vocab_size is {self.config.vocab_size}{also}",
                "The text was encoded with a tokenizer of another model.",
            )

    def check_position(self, position: int) -> None:
        """Raise UsageError for a position past the last learned one. Rotary positions have no end."""
        if self.position_embeddings is not None and position >= self.config.max_position_embeddings:
            raise UsageError(
                f"position {position + 1} is past the last one: the model has "
                f"{self.config.max_position_embeddings} learned positions",
                "Use a shorter text.",
            )

    def _positions(self, ids: Tensor, cache: Sequence[LayerCache] | None) -> Tensor:
        """Where the new ids stand: (T,), or (B, 1, T) where rows begin at different places."""
        start = cache[0].length if cache else 0
        end = start + ids.shape[1]
        self.check_position(end - 1)
        positions = torch.arange(start, end, device=ids.device)
        if not cache or cache[0].padding is None:
            return positions
        return (positions - cache[0].padding.to(ids.device)[:, None, None]).clamp(min=0)

    def initialise(self, seed: int) -> None:
        """Fresh weights: every Linear and Embedding from N(0, initializer_range), biases 0, norms 1
        (0 where they multiply by 1 + w).

        The draw is on the CPU and in the order of the names, so one seed gives the same model on every device.
        """
        generator = torch.Generator().manual_seed(seed)
        neutral = {
            f"{name}.weight": 0.0 if isinstance(module, RMSNorm) and module.plus_one else 1.0
            for name, module in self.named_modules()
            if isinstance(module, RMSNorm | nn.LayerNorm)
        }
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name in neutral:
                    parameter.fill_(neutral[name])
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    values = torch.empty(parameter.shape).normal_(0, self.config.initializer_range, generator=generator)
                    parameter.copy_(values)


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """A freshly initialised model in float32 on the CPU. Raises ConfigError for an impossible config."""
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    model.initialise(seed)
    return model
