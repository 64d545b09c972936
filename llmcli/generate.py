"""Text from a model, token by token: the next token's distribution, a draw from it, and the loop around both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from llmcli.cache import Cache, new_cache
from llmcli.errors import LlmcliError, UsageError
from llmcli.model import Decoder
from llmcli.tokenizer import Stream, Tokenizer

Finish = Literal["stop", "length", "context"]
"""Why a text ended: an end token or a stop text; as many tokens as were asked for; no learned position left."""

PREFILL = 1024
"""Prompt positions per forward pass: enough to keep the matmuls busy, few enough to bound the attention's memory."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen from its distribution. `temperature` 0 takes the most probable one.

    The filters apply in this order, each to what the one before left: repetition penalty, temperature, top k, top p,
    min p. `seed` None draws anew each time; sample n of a seed is the same however many samples are drawn beside it.
    """

    max_new_tokens: Annotated[int, Meta(ge=0)] = 256
    temperature: Annotated[float, Meta(ge=0.0)] = 0.8
    top_k: Annotated[int, Meta(ge=1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None


DEFAULT = Sampling()


class Rival(msgspec.Struct, frozen=True):
    """A candidate for a position, with the model's own log-probability (natural, at temperature 1, unfiltered)."""

    id: int
    logprob: float


class Token(msgspec.Struct, frozen=True):
    """One new token of one row of the batch; `finish` is set on the row's last one."""

    row: int
    id: int
    logprob: float | None = None
    top: tuple[Rival, ...] = ()
    finish: Finish | None = None


class NonFiniteLogits(LlmcliError):
    """The model's scores are NaN or infinite: there is no next token."""


def distribution(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tokens that may come next, ids (K,) in ascending order, and their probabilities (K,) float64, sum 1.

    `logits` are (V,), -inf for what must not come. `seen` are the distinct ids so far: the repetition penalty divides
    their logits where positive and multiplies them where negative (CTRL, arXiv:1909.05858, as in transformers).
    """
    logits = logits.detach().to("cpu", torch.float32)
    if sampling.repetition_penalty != 1.0 and seen is not None:
        logits = logits.clone()
        scores = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True), torch.ones(1, dtype=torch.float64)
    # The largest logit is taken off before the division: a tiny temperature then underflows to 0 and never overflows.
    weights = ((logits - logits.max()).double() / sampling.temperature).exp()
    ids = torch.arange(len(logits))
    if sampling.top_k is not None and sampling.top_k < len(weights):
        ids = weights.topk(sampling.top_k).indices.sort().values
        weights = weights[ids]
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = weights.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # the mass of all that is more probable: below p, the token stays
        order = order[before < sampling.top_p * weights.sum()].sort().values
        ids, weights = ids[order], weights[order]
    if sampling.min_p:
        kept = weights >= sampling.min_p * weights.max()
        ids, weights = ids[kept], weights[kept]
    return ids, weights / weights.sum()


def draw(ids: Tensor, probabilities: Tensor, uniform: float) -> int:
    """The id at which the cumulated probabilities pass `uniform`, a number from [0, 1)."""
    cumulated = probabilities.cumsum(0)
    # By id and not by rank: two logits that differ in the last bit must not change places between two runs.
    place = int(torch.searchsorted(cumulated, uniform * float(cumulated[-1]), right=True))
    return int(ids[min(place, int(probabilities.nonzero()[-1]))])


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = DEFAULT,
    *,
    allowed: Tensor | None = None,
    ends: Callable[[int, int], bool] = lambda row, id: False,
    use_cache: bool = True,
) -> Iterator[Token]:
    """The tokens that follow each prompt, one row each, as they are chosen: all rows' first, then their second, ...

    `allowed` (V,) bool leaves out the rows that are no tokens. `ends(row, id)` is asked once for each new token and
    says whether the row ends with it. Raises UsageError for an empty prompt, an id without a row, or a prompt longer
    than the learned positions, all before the first forward pass; NonFiniteLogits with the step when it comes to that.
    """
    rows = [list(prompt) for prompt in prompts]
    for row in rows:
        if not row:
            raise UsageError("the prompt is empty: there is no token to go on from", "Give a prompt or --ids.")
        model.check_ids(torch.tensor(row))
    generators = [random.Random(None if sampling.seed is None else f"{sampling.seed}/{n}") for n in range(len(rows))]
    for n, row in enumerate(rows):
        cache = new_cache(model.config) if use_cache else None
        for step in range(sampling.max_new_tokens):
            logits = next_logits(model, row, cache)
            require_finite(model, logits, step)
            scores = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
            seen = torch.tensor(sorted(set(row))) if sampling.repetition_penalty != 1.0 else None
            ids, probabilities = distribution(scores, sampling, seen)
            id = draw(ids, probabilities, generators[n].random())
            row.append(id)
            finish: Finish | None = None
            if ends(n, id):
                finish = "stop"
            elif step + 1 == sampling.max_new_tokens:
                finish = "length"
            elif len(row) > positions(model):
                finish = "context"
            logprob, top = rivals(logits, id, sampling.logprobs) if sampling.logprobs is not None else (None, ())
            yield Token(n, id, logprob, top, finish)
            if finish:
                break


def positions(model: Decoder) -> float:
    """How many tokens the model can take in: learned positions end, rotary ones do not."""
    return torch.inf if model.position_embeddings is None else model.config.max_position_embeddings


@torch.inference_mode()
def next_logits(model: Decoder, ids: Sequence[int], cache: list[Cache] | None) -> Tensor:
    """Logits (V,) of the token after `ids`; a cache is fed what it has not seen yet."""
    known = cache[0].length if cache else 0
    hidden = None
    for start in range(known, len(ids), PREFILL if cache else len(ids)):
        hidden = model.hidden(torch.tensor([ids[start : start + PREFILL if cache else None]]), cache)
    assert hidden is not None
    return model.scores(hidden[:, -1])[0]


def rivals(logits: Tensor, id: int, count: int) -> tuple[float, tuple[Rival, ...]]:
    """The log-probability of `id`, and the `count` most probable tokens with theirs."""
    logs = logits.float().log_softmax(-1)
    values, best = logs.topk(min(count, len(logs)))
    return float(logs[id]), tuple(Rival(int(i), float(v)) for i, v in zip(best, values, strict=True))


def require_finite(model: Decoder, logits: Tensor, step: int) -> None:
    """Raise NonFiniteLogits with the step and the probable cause where a logit is NaN or infinite."""
    if torch.isfinite(logits.float().sum()) or torch.isfinite(logits).all():
        return
    damaged = next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None)
    if damaged:
        cause, hint = f"the weight {damaged} holds NaN or infinite values", "The checkpoint is damaged or diverged."
    elif logits.dtype == torch.float16:
        cause, hint = "float16 overflowed (its largest number is 65,504)", "Try --dtype bfloat16 or float32."
    else:
        cause, hint = "the weights are finite, the computation overflowed", "Try --dtype float32."
    raise NonFiniteLogits(f"the logits of new token {step + 1} are not finite: {cause}", hint)


def allowed_ids(model: Decoder, tokenizer: Tokenizer) -> Tensor | None:
    """Which rows of the vocabulary are tokens, (V,) bool; None when all are."""
    ids = torch.tensor(sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values()))
    allowed = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    allowed[ids[ids < model.config.vocab_size]] = True
    return None if allowed.all() else allowed


class Text:
    """What a row says: token ids in, text out as soon as it is certain that it is no part of a stop text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stream = Stream(tokenizer)
        # The prompt goes through the decoder too: it takes up the leading space that a text's first token loses.
        for id in prompt:
            self._stream.push(id)
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, id: int) -> str:
        """Take one id, return the text to show."""
        return self._release(self._stream.push(id))

    def finish(self) -> str:
        """The text that was still held back."""
        return self._release(self._stream.finish()) + ("" if self.stopped else self._held)

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        self._held += new
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - kept]
        self._held = self._held[len(shown) :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` could be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
