"""What happens in a training run, as it is told to whoever listens: a pipe, a terminal, metrics.jsonl."""

from __future__ import annotations

import msgspec

METRICS = "metrics.jsonl"
"""The file in a run's folder that keeps its events, a line each."""


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="event"):
    """How far a preparation is; `done` and `total` in characters."""

    what: str
    done: float
    total: float


class Group(msgspec.Struct, frozen=True):
    """Parameters that AdamW treats alike."""

    name: str
    weight_decay: float
    tensors: int
    parameters: int


class Source(msgspec.Struct, frozen=True):
    """What text was read, held-out text included; `bytes` as UTF-8. No file: the corpus that Python carries."""

    files: int
    documents: int
    characters: int
    bytes: int


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="event"):
    """What is going to be trained. `step` is where it goes on from; `tokens` are counted, `step_tokens` per step."""

    step: int
    max_steps: int
    out: str
    parameters: int
    tie_word_embeddings: bool
    vocab_size: int
    context: int
    source: Source
    train_tokens: int
    validation_tokens: int
    step_tokens: int
    device: str
    precision: str
    compiled: bool
    processes: int
    groups: tuple[Group, ...]
    notes: tuple[str, ...]


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="event"):
    """One update. `loss` is the mean over its tokens in nats, `grad_norm` is before clipping, `tokens` all so far.

    `mfu` is the share of the device's measured matmul speed that the model's own operations make up; `memory` the most
    bytes that the process has held.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    mfu: float
    memory: int


class Eval(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="event"):
    """The loss on held-out text: per token in nats, as perplexity, and in bits for each byte of the text."""

    step: int
    val_loss: float
    perplexity: float
    bits_per_byte: float


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved", tag_field="event"):
    """A checkpoint that now stands on the disk; `best` when it is the one of the lowest validation loss."""

    step: int
    path: str
    best: bool


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample", tag_field="event"):
    """What the model writes at this step."""

    step: int
    prompt: str
    text: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", tag_field="event"):
    """Why and where the run ended. `best_step` is None when nothing was evaluated.

    `seconds` are this process's, `seconds_in_all` those of the processes that it went on from too.
    """

    step: int
    reason: str
    tokens: int
    best_loss: float | None
    best_step: int | None
    seconds: float
    seconds_in_all: float
    out: str


Event = Progress | Start | Step | Eval | Saved | Sample | Done
