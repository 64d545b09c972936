"""What a model expects after each token of a text, and what a candidate's logit is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from llmcli.errors import UsageError
from llmcli.evaluate import LOGITS
from llmcli.generate import require_finite
from llmcli.model import Decoder
from llmcli.tokenizer import Tokenizer, check_ids


class Guess(msgspec.Struct, frozen=True):
    """A token as the next one: its logit, its probability, and how many tokens are more probable, plus one."""

    id: int
    token: str
    logit: float
    probability: float
    rank: int


class Prediction(msgspec.Struct, frozen=True):
    """What the model expects after the token at `position` (from 0): its best guesses, and the token that follows."""

    position: int
    id: int
    token: str
    top: tuple[Guess, ...]
    next: Guess | None


class Why(msgspec.Struct, frozen=True):
    """Why a token has its logit: state · row + bias, where state · row = |state| |row| cosine.

    The state is the model's last one at `position`, the row is the token's in the output matrix (the embedding's own
    where the output is tied). Where the model caps its logits, `logit` is cap · tanh((dot + bias) / cap).
    """

    position: int
    id: int
    token: str
    logit: float
    dot: float
    state_norm: float
    row_norm: float
    cosine: float
    bias: float
    cap: float | None


@torch.inference_mode()
def predict(model: Decoder, tokenizer: Tokenizer | None, ids: Sequence[int], count: int) -> Iterator[Prediction]:
    """What the model expects after each of the tokens, with its `count` best guesses. Without a tokenizer tokens are
    called by their ids."""
    hidden = _states(model, tokenizer, ids)
    rows = max(1, LOGITS // model.config.vocab_size)
    for start in range(0, len(ids), rows):
        logits = model.scores(hidden[start : start + rows]).float()
        require_finite(model, logits)
        totals = logits.double().logsumexp(-1)
        best = logits.topk(min(count, logits.shape[1])).indices
        for place, row in enumerate(logits):

            def guess(id: int, row: Tensor = row, total: float = float(totals[place])) -> Guess:
                logit = float(row[id])
                rank = 1 + int((row > row[id]).sum())
                return Guess(id, _spelling(tokenizer, id), logit, math.exp(logit - total), rank)

            position = start + place
            following = guess(ids[position + 1]) if position + 1 < len(ids) else None
            top = tuple(guess(id) for id in best[place].tolist())
            yield Prediction(position, ids[position], _spelling(tokenizer, ids[position]), top, following)


@torch.inference_mode()
def why(model: Decoder, tokenizer: Tokenizer | None, ids: Sequence[int], candidate: int, position: int = -1) -> Why:
    """The parts of one candidate's logit after the token at `position`, computed in float64."""
    if not -len(ids) <= position < len(ids):
        raise UsageError(
            f"position {position} is outside the text's {len(ids)} tokens", f"Choose from 0 to {len(ids) - 1}."
        )
    check_ids([candidate], model.config.vocab_size, tokenizer.size if tokenizer else None)
    state = _states(model, tokenizer, ids)[position]
    head = model.output_projection
    row = (model.token_embeddings if head is None else head).weight[candidate].double()
    dot = float(state.double() @ row)
    state_norm, row_norm = float(state.double().norm()), float(row.norm())
    return Why(
        position=position % len(ids),
        id=candidate,
        token=_spelling(tokenizer, candidate),
        logit=float(model.scores(state[None])[0, candidate]),
        dot=dot,
        state_norm=state_norm,
        row_norm=row_norm,
        cosine=dot / (state_norm * row_norm) if state_norm * row_norm else 0.0,
        bias=0.0 if head is None or head.bias is None else float(head.bias[candidate]),
        cap=model.config.logit_softcap,
    )


def _spelling(tokenizer: Tokenizer | None, id: int) -> str:
    return tokenizer.token(id) if tokenizer else str(id)


def _states(model: Decoder, tokenizer: Tokenizer | None, ids: Sequence[int]) -> Tensor:
    """The states (N, d) that the output scores."""
    if not ids:
        raise UsageError("the text has no token", "Give some text.")
    check_ids(ids, model.config.vocab_size, tokenizer.size if tokenizer else None)
    return model.hidden(torch.tensor([list(ids)], device=model.token_embeddings.weight.device))[0]
