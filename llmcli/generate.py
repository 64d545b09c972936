"""Text from a model, token by token: the next token's distribution, a draw from it, and the loop around both."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from llmcli import checkpoint
from llmcli.cache import LayerCache, new_cache
from llmcli.decode import Packed, Step
from llmcli.errors import LlmcliError, UsageError
from llmcli.model import Decoder
from llmcli.tokenizer import Stream, Tokenizer, check_ids

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
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.8
    top_k: Annotated[int, Meta(ge=1)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=1e3)] = 1.0
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


def distribution(logits: Tensor, sampling: Sampling, seen: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """The tokens that may come next, ids (K,) in ascending order, and their probabilities (K,) float64, sum 1.

    `logits` are (V,), -inf for what must not come. The repetition penalty divides the logits of the ids `seen` where
    they are positive and multiplies them where negative (CTRL, arXiv:1909.05858, as in transformers).
    """
    logits = logits.detach().to("cpu", torch.float32)
    if sampling.repetition_penalty != 1.0 and seen:
        logits = logits.clone()
        known = torch.tensor(list(set(seen)))
        scores = logits[known]
        penalty = sampling.repetition_penalty
        logits[known] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True), torch.ones(1, dtype=torch.float64)
    # The largest logit is taken off before the division: with a tiny temperature the others underflow to 0.
    weights = ((logits - logits.max()) / max(sampling.temperature, 1e-30)).exp()
    ids: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < len(weights):
        weights, ids = weights.topk(sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        weights, order = _nucleus(weights, sampling.top_p)
        ids = order if ids is None else ids[order]
    if sampling.min_p:
        kept = (weights >= sampling.min_p * weights.max()).nonzero().view(-1)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if ids is None:
        ids = torch.arange(len(weights))
    else:  # by id and not by rank: two logits that differ in the last bit must not change places between two runs
        ids, order = ids.sort()
        weights = weights[order]
    weights = weights.double()
    return ids, weights / weights.sum()


def _nucleus(weights: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The largest weights that together reach `p` of the sum, the crossing one included, and their places."""
    enough = p * weights.sum(dtype=torch.float64)
    count = min(128, len(weights))  # most distributions are narrow, and a whole sort of a large one is slow
    while True:
        largest, places = weights.topk(count)
        reached = largest.cumsum(0, dtype=torch.float64)
        if reached[-1] >= enough or count == len(weights):
            kept = max(1, int((reached - largest < enough).sum()))
            return largest[:kept], places[:kept]
        count = min(32 * count, len(weights))


def draw(ids: Tensor, probabilities: Tensor, uniform: float) -> int:
    """The id at which the cumulated probabilities pass `uniform`, a number from [0, 1)."""
    cumulated = probabilities.cumsum(0)
    place = int(torch.searchsorted(cumulated, uniform * float(cumulated[-1]), right=True))
    return int(ids[place]) if place < len(ids) else int(ids[probabilities.argmax()])


def choose(logits: Tensor, sampling: Sampling, seen: Sequence[int], generator: random.Random) -> int:
    """The next token's id, drawn with one number of `generator` or, at temperature 0, the most probable one."""
    if sampling.temperature == 0 and sampling.repetition_penalty == 1.0:
        return int(logits.detach().to("cpu", torch.float32).numpy().argmax())  # twenty times as fast as torch's
    ids, probabilities = distribution(logits, sampling, seen)
    return int(ids[0]) if len(ids) == 1 else draw(ids, probabilities, generator.random())


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = DEFAULT,
    *,
    forbidden: Tensor | None = None,
    ends: Callable[[int, int], bool] = lambda row, id: False,
    use_cache: bool = True,
    cache: list[LayerCache] | None = None,
    packed: Packed | None = None,
) -> Iterator[Token]:
    """The tokens that follow each prompt, one row each, as they are chosen: every row's first, then the second, ...

    `forbidden` ids are never chosen: the rows that are no tokens. `ends(row, id)` is asked once for each new token and
    says whether the row ends with it. A `cache` that has seen the beginning of the one prompt need not see it again;
    `packed` keeps what one generation has laid out anew for the next.
    Raises UsageError for an empty prompt, an id without a row or a prompt longer than the learned positions, all
    before the first forward pass; NonFiniteLogits, naming the step, when it comes to that.
    """
    rows = [list(prompt) for prompt in prompts]
    for ids in rows:
        if not ids:
            raise UsageError("the prompt is empty: there is no token to go on from", "Give a prompt or ids.")
        model.check_ids(torch.tensor(ids))
        model.check_position(len(ids) - 1)
    generators = [random.Random(None if sampling.seed is None else f"{sampling.seed}/{n}") for n in range(len(rows))]
    if not rows or sampling.max_new_tokens == 0:
        return
    running = list(range(len(rows)))
    predict = _Predictions(model, rows, use_cache, cache, Packed(model) if packed is None else packed)
    for step in range(1, sampling.max_new_tokens + 1):
        logits = predict(running)
        require_finite(model, logits, step)
        scores = logits if forbidden is None else logits.index_fill(1, forbidden, -torch.inf)
        going_on = []
        for n, row in enumerate(running):
            id = choose(scores[n], sampling, rows[row], generators[row])
            rows[row].append(id)
            finish: Finish | None = None
            if ends(row, id):
                finish = "stop"
            elif step == sampling.max_new_tokens:
                finish = "length"
            elif len(rows[row]) > positions(model):
                finish = "context"
            else:
                going_on.append(row)
            logprob, top = (None, ()) if sampling.logprobs is None else rivals(logits[n], id, sampling.logprobs)
            yield Token(row, id, logprob, top, finish)
        if not going_on:
            return
        running = going_on


def positions(model: Decoder) -> float:
    """How many tokens the model can take in: learned positions end, rotary ones do not."""
    return math.inf if model.position_embeddings is None else model.config.max_position_embeddings


class _Predictions:
    """The logits (B, V) that follow the rows asked for, which grow by one id between calls and may drop out."""

    def __init__(
        self,
        model: Decoder,
        rows: list[list[int]],
        use_cache: bool,
        cache: list[LayerCache] | None,
        packed: Packed,
    ) -> None:
        self._model, self._rows, self._use_cache = model, rows, use_cache
        self._cache, self._packed = cache, packed
        self._running: list[int] = []
        self._step: Step | None = None

    def __call__(self, running: list[int]) -> Tensor:
        if not self._use_cache:
            with torch.inference_mode():
                return torch.cat([self._model(self._ids([self._rows[row]]))[:, -1] for row in running])
        if self._step is None:
            return self._prefill(running)
        if running != self._running:
            assert self._cache is not None
            for layer in self._cache:
                layer.select([self._running.index(row) for row in running])
            self._start(running)
        return self._step(self._ids([self._rows[row][-1] for row in running]))

    @torch.inference_mode()
    def _prefill(self, running: list[int]) -> Tensor:
        """All prompts at once, the shorter ones padded in front, equal ones once."""
        model = self._model
        prompts = [tuple(self._rows[row]) for row in running]
        distinct = list(dict.fromkeys(prompts))
        length = max(map(len, distinct))
        padding = [length - len(prompt) for prompt in distinct]
        ids = self._ids([[0] * empty + list(prompt) for empty, prompt in zip(padding, distinct, strict=True)])
        if self._cache is None:
            self._cache = new_cache(model.config, padding)
        known = self._cache[0].length if self._cache else 0
        width = max(1, PREFILL // len(distinct))
        for start in range(known, length, width):
            hidden = model.hidden(ids[:, start : start + width], self._cache)
        logits = model.scores(hidden[:, -1])
        if len(distinct) < len(prompts):
            places = [distinct.index(prompt) for prompt in prompts]
            for layer in self._cache:
                layer.select(places)
            logits = logits[places]
        self._start(running)
        return logits

    def _start(self, running: list[int]) -> None:
        assert self._cache is not None
        self._running = list(running)
        self._step = Step(self._model, self._cache, len(running), self._packed)

    def _ids(self, ids: list[list[int]] | list[int]) -> Tensor:
        return torch.tensor(ids, device=self._model.token_embeddings.weight.device)


def rivals(logits: Tensor, id: int, count: int) -> tuple[float, tuple[Rival, ...]]:
    """The log-probability of `id`, and the `count` most probable tokens with theirs."""
    logs = logits.float().log_softmax(-1)
    values, best = logs.topk(min(count, len(logs)))
    return float(logs[id]), tuple(Rival(int(i), float(v)) for i, v in zip(best, values, strict=True))


def require_finite(model: Decoder, logits: Tensor, step: int | None = None) -> None:
    """Raise NonFiniteLogits with the step (of generation) and the probable cause where a logit is NaN or infinite."""
    if math.isfinite(float(logits.float().sum())) or torch.isfinite(logits).all():
        return
    damaged = next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None)
    if damaged:
        cause = f"the weight {checkpoint.in_file(model, damaged)} holds NaN or infinite values"
        hint = "The checkpoint is damaged or diverged: llmcli inspect --full names all such tensors."
    elif logits.dtype == torch.float16:
        cause, hint = "float16 overflowed (its largest number is 65,504)", "Try --dtype bfloat16 or float32."
    else:
        cause, hint = "the weights are finite, the computation overflowed", "Try --dtype float32."
    which = "the logits" if step is None else f"the logits of new token {step}"
    raise NonFiniteLogits(f"{which} are not finite: {cause}", hint)


def rows_without_token(model: Decoder, tokenizer: Tokenizer) -> Tensor | None:
    """The ids that have a row in the model and no token to stand for; None where there are none."""
    ids = torch.tensor(sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values()))
    empty = torch.ones(model.config.vocab_size, dtype=torch.bool)
    empty[ids[ids < model.config.vocab_size]] = False
    return empty.nonzero().view(-1).to(model.token_embeddings.weight.device) if empty.any() else None


class Candidate(msgspec.Struct, frozen=True):
    """A token that could have stood at a position, and the text it would have added there."""

    id: int
    text: str
    logprob: float


class Piece(msgspec.Struct, frozen=True):
    """One new token of one row: the text that became certain with it, its log-probability, and its rivals."""

    row: int
    id: int
    text: str
    logprob: float | None = None
    top: tuple[Candidate, ...] = ()
    finish: Finish | None = None


class Spoken(msgspec.Struct, frozen=True):
    """A token of an answer; `logprob` is null where none was asked for."""

    id: int
    text: str
    logprob: float | None
    top: tuple[Candidate, ...]


class Answer(msgspec.Struct):
    """All of one row, put together from its pieces. `ids` are the new ones, an end token included."""

    prompt_ids: list[int]
    ids: list[int] = []
    text: str = ""
    finish_reason: Finish = "length"
    tokens: list[Spoken] = []

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.ids.append(piece.id)
        self.text += piece.text
        self.tokens.append(Spoken(piece.id, piece.text, piece.logprob, piece.top))
        self.finish_reason = piece.finish or self.finish_reason


def complete(
    model: Decoder,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = DEFAULT,
    *,
    stops: Sequence[str] = (),
    use_cache: bool = True,
    cache: list[LayerCache] | None = None,
    packed: Packed | None = None,
) -> Iterator[Piece]:
    """`generate` as text: a row ends with an end token or a stop text, neither of which is shown.

    A row's pieces joined are what decoding prompt and answer together adds to the prompt, up to the stop text. Raises
    as `generate` does, and TokenizerError for an id that the model has no row for. Without a tokenizer the text is
    the ids.
    """
    for prompt in prompts:
        check_ids(prompt, model.config.vocab_size, tokenizer.size if tokenizer else None)
    texts = [Text(tokenizer, prompt, stops) for prompt in prompts]
    end_ids = tokenizer.eos_ids if tokenizer else ()
    said = [""] * len(texts)
    last = [prompt[-1] if prompt else 0 for prompt in prompts]

    def ends(row: int, id: int) -> bool:
        if id in end_ids:
            said[row] = ""
            return True
        said[row] = texts[row].push(id)
        return texts[row].stopped

    forbidden = rows_without_token(model, tokenizer) if tokenizer else None
    tokens = generate(
        model, prompts, sampling, forbidden=forbidden, ends=ends, use_cache=use_cache, cache=cache, packed=packed
    )
    for token in tokens:
        row = token.row
        top = tuple(Candidate(r.id, _adds(tokenizer, last[row], r.id), r.logprob) for r in token.top)
        text = said[row] + (texts[row].finish() if token.finish else "")
        last[row] = token.id
        yield Piece(row, token.id, text, token.logprob, top, token.finish)


def _adds(tokenizer: Tokenizer | None, before: int, id: int) -> str:
    """The text that `id` adds after `before`; its spelling where that is none or half a character."""
    if tokenizer is None:
        return str(id)
    start = tokenizer.decode([before], skip_special=False)
    both = tokenizer.decode([before, id], skip_special=False)
    added = both[len(start) :] if both.startswith(start) else ""
    return added if added and "\ufffd" not in added else tokenizer.token(id)


class Text:
    """What a row says: token ids in, text out as soon as it is certain that it is no part of a stop text."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stream = Stream(tokenizer) if tokenizer else None
        # The prompt goes through the decoder too: it takes up the leading space that a text's first token loses.
        if self._stream:
            for id in prompt:
                self._stream.push(id)
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, id: int) -> str:
        """Take one id, return the text to show."""
        return self._release(self._stream.push(id) if self._stream else f"{id} ")

    def finish(self) -> str:
        """The text that was still held back."""
        return self._release(self._stream.finish() if self._stream else "") + ("" if self.stopped else self._held)

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
