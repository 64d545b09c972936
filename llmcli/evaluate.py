"""How well a model predicts a text it is given: the loss of every token once."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmcli.errors import DataError, UsageError
from llmcli.generate import require_finite
from llmcli.model import Decoder
from llmcli.tokenizer import Stream, Tokenizer, check_ids

PASS = 4096
"""Positions in a forward pass, all windows of the batch together."""
LOGITS = 1 << 24
"""Logits that exist at a time (64 MB in float32), however many positions are scored."""
CONTEXT = 2048
"""The longest context taken unasked: attention's cost grows with its square, the loss hardly falls beyond."""

Numbers = npt.NDArray[np.float64]


class Document(NamedTuple):
    """One text and its token ids, (N,) int64, of which the first is predicted from nothing and so not at all."""

    text: str
    ids: npt.NDArray[np.int64]


class Evaluation(msgspec.Struct, frozen=True):
    """A model's loss over a text, in nats a token; `bits_per_byte` and `bits_per_character` compare any two models.

    `tokens`, `bytes` (of UTF-8) and `characters` are those that were predicted. Each token was predicted once, from at
    least `context - stride` tokens before it where there are as many.
    """

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    bits_per_character: float
    bytes: int
    characters: int
    context: int
    stride: int
    losses: tuple[Numbers, ...]
    """Of each document, the loss of each token, (N,) float64; NaN where there was nothing to predict it from."""
    curve: tuple[Numbers, npt.NDArray[np.int64]]
    """Sum of the losses, and number of tokens, by how many tokens stood before in the window: [0] is one."""


class Bin(msgspec.Struct, frozen=True):
    """The mean loss of tokens with `start` to `end` tokens before them."""

    start: int
    end: int
    tokens: int
    loss: float


class TokenLoss(msgspec.Struct, frozen=True):
    """One token's loss, and where the token begins: document, line and column count from 1."""

    id: int
    token: str
    loss: float
    document: int
    line: int
    column: int


def encode(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> list[Document]:
    """Texts as documents, by the tokenizer's own rule of BOS and EOS. Raises TokenizerError for an id without a row."""
    documents = []
    for text in texts:
        ids = tokenizer.encode(text)
        check_ids(ids, vocab_size, tokenizer.size)
        documents.append(Document(text, np.array(ids, dtype=np.int64)))
    return documents


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The passes over a text of `length` tokens, as (begin, end, fresh): tokens `begin` to `end` go in.

    They predict tokens `begin + 1` to `end` (included), of which those from `fresh` on are scored there.
    """
    begin, fresh = 0, 1
    while fresh < length:
        end = min(begin + context, length - 1)
        yield begin, end, fresh
        begin, fresh = begin + stride, end + 1


def evaluate(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    context: int | None = None,
    stride: int | None = None,
    curve: bool = False,
) -> Generator[int, None, Evaluation]:
    """Score every token once; yields how many were scored with each pass, returns the result.

    `context` None is the model's own, up to CONTEXT; `stride` None is half of it. With `curve`, every pass scores all
    of its window for the loss by position. Raises UsageError for sizes that do not fit, DataError when there is
    nothing to predict, NonFiniteLogits.
    """
    longest = model.config.max_position_embeddings
    context = min(longest, CONTEXT) if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride <= context:
        raise UsageError(f"stride {stride} does not fit a context of {context}", f"Choose from 1 to {context}.")
    if model.position_embeddings is not None and context > longest:
        raise UsageError(f"context {context} is longer than the model's {longest} learned positions", "Choose less.")
    losses = tuple(np.full(len(document.ids), np.nan) for document in documents)
    positions = min(context, max((len(document.ids) for document in documents), default=0))  # where a loss may stand
    sums, counts = np.zeros(positions), np.zeros(positions, dtype=np.int64)
    for batch in _batches(documents, context, stride):
        done = 0
        for (number, begin, end, fresh), values in zip(batch, _losses(model, documents, batch, curve), strict=True):
            losses[number][fresh : end + 1] = values[len(values) - (end + 1 - fresh) :]
            done += end + 1 - fresh
            if curve:
                sums[: end - begin] += values
                counts[: end - begin] += 1
        yield done
    return _summary(tokenizer, documents, losses, context, stride, (sums, counts))


Window = tuple[int, int, int, int]
"""A document's number, and a window of it."""


def _batches(documents: Sequence[Document], context: int, stride: int) -> Iterator[list[Window]]:
    """Windows of similar length together, so that little of a pass is padding."""
    waiting: list[Window] = []

    def flush() -> Iterator[list[Window]]:
        waiting.sort(key=lambda window: window[1] - window[2])
        while waiting:
            width = waiting[0][2] - waiting[0][1]
            count = max(1, PASS // width)
            yield waiting[:count]
            del waiting[:count]

    for number, document in enumerate(documents):
        for begin, end, fresh in windows(len(document.ids), context, stride):
            waiting.append((number, begin, end, fresh))
            if len(waiting) == 256:
                yield from flush()
    yield from flush()


@torch.inference_mode()
def _losses(model: Decoder, documents: Sequence[Document], batch: list[Window], whole: bool) -> list[Numbers]:
    """The losses of each window's tokens: of all of them, or of those to be scored there."""
    width = max(end - begin for _, begin, end, _ in batch)
    ids = np.zeros((len(batch), width), dtype=np.int64)  # filled up behind, where causal attention never looks
    for row, (number, begin, end, _) in enumerate(batch):
        ids[row, : end - begin] = documents[number].ids[begin:end]
    hidden = model.hidden(torch.from_numpy(ids).to(model.token_embeddings.weight.device))
    states, targets = [], []
    for row, (number, begin, end, fresh) in enumerate(batch):
        first = begin + 1 if whole else fresh
        states.append(hidden[row, first - begin - 1 : end - begin])
        targets.append(documents[number].ids[first : end + 1])
    losses = token_losses(model, torch.cat(states), torch.from_numpy(np.concatenate(targets)))
    cuts = np.cumsum([len(target) for target in targets])[:-1]
    return list(np.split(losses, cuts))


def token_losses(model: Decoder, hidden: Tensor, targets: Tensor) -> Numbers:
    """Cross-entropy (N,) of targets (N,) given the states (N, d) that predict them, in nats, summed in float64."""
    losses = []
    rows = max(1, LOGITS // model.config.vocab_size)
    for start in range(0, len(targets), rows):
        logits = model.scores(hidden[start : start + rows]).float()
        require_finite(model, logits)
        below = logits - logits.amax(-1, keepdim=True)  # exact where it matters: near the largest
        wanted = below.gather(-1, targets[start : start + rows, None].to(logits.device))[:, 0]
        losses.append((below.exp_().sum(-1, dtype=torch.float64).log() - wanted.double()).cpu().numpy())
    return np.concatenate(losses)


def _summary(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    losses: tuple[Numbers, ...],
    context: int,
    stride: int,
    curve: tuple[Numbers, npt.NDArray[np.int64]],
) -> Evaluation:
    tokens = sum(max(0, len(document.ids) - 1) for document in documents)
    if not tokens:
        raise DataError("the text is too short: there is no token to predict from another", "Give more text.")
    total = math.fsum(float(np.nansum(values)) for values in losses)
    # The first token of a text without BOS is not predicted, and its characters are none of the predicted ones.
    unseen = [tokenizer.decode(document.ids[:1].tolist()) for document in documents]
    texts = [document.text for document in documents]
    count = sum(map(_bytes, texts)) - sum(map(_bytes, unseen))
    characters = sum(map(len, texts)) - sum(map(len, unseen))
    loss = total / tokens
    return Evaluation(
        tokens=tokens,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=total / math.log(2) / count if count > 0 else math.inf,
        bits_per_character=total / math.log(2) / characters if characters > 0 else math.inf,
        bytes=count,
        characters=characters,
        context=context,
        stride=stride,
        losses=losses,
        curve=curve,
    )


def _bytes(text: str) -> int:
    return len(text.encode())


def bins(evaluation: Evaluation) -> list[Bin]:
    """The loss by how many tokens stood before, in bins that double: 1, 2, 3–4, 5–8, ..."""
    sums, counts = evaluation.curve
    found, start = [], 1
    while start <= len(counts) and counts[start - 1]:
        end = min(max(1, 2 * (start - 1)), len(counts))
        tokens = int(counts[start - 1 : end].sum())
        last = start - 1 + int(np.count_nonzero(counts[start - 1 : end]))  # a short text fills no bin to its end
        found.append(Bin(start, last, tokens, float(sums[start - 1 : end].sum()) / tokens))
        start = end + 1
    return found


def by_token(tokenizer: Tokenizer, documents: Sequence[Document], evaluation: Evaluation) -> Iterator[TokenLoss]:
    """Every predicted token with its loss and its place, in the text's order."""
    for number, (document, losses) in enumerate(zip(documents, evaluation.losses, strict=True), 1):
        stream, line, column = Stream(tokenizer), 1, 1
        for id, loss in zip(document.ids.tolist(), losses.tolist(), strict=True):
            piece = stream.push(id)
            if not math.isnan(loss):
                yield TokenLoss(id, tokenizer.token(id), loss, number, line, column)
            newlines = piece.count("\n")
            line += newlines
            column = len(piece) - piece.rindex("\n") if newlines else column + len(piece)
