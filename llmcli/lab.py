"""What the lab's page asks of a model and of the passes recorded of it.

The page never gets a whole tensor: it asks for a slice, a sketch, the best few. `server` hands the questions over.
"""

from __future__ import annotations

import math
import random
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import decoders
from torch import Tensor

from llmcli import compute, probe
from llmcli import tokenizer as tokenizers
from llmcli.cache import LayerCache, new_cache
from llmcli.config import ModelConfig
from llmcli.errors import LlmcliError, UsageError
from llmcli.generate import Sampling, choose, distribution, require_finite, rows_without_token
from llmcli.mapping import EMBEDDING, HEAD
from llmcli.matrix import find_matrix
from llmcli.model import Decoder
from llmcli.sketch import POSITIVE, farthest, sketch
from llmcli.tokenizer import Tokenizer
from llmcli.trace import (
    KINDS,
    POSITION,
    SEEN,
    WIDTH,
    Kind,
    Node,
    Pass,
    Stage,
    graph,
    logit_lens,
    record,
    stage,
)

DEFAULT_PROMPT = "Once upon a time"
POSITIONS = "position_embeddings.weight"


def half_of_memory() -> int:
    """Half of this machine's memory in bytes; 4 GiB where it does not say."""
    return (compute.memory_of(torch.device("cpu")) or 8 << 30) // 2


class Limits(msgspec.Struct, frozen=True):
    """The most that one request may ask, and that all texts together may hold."""

    prompt_tokens: int = 512
    prompt_characters: int = 20_000
    passes: int = 512
    """Passes recorded of one text."""
    values: int = 16_384
    top: int = 100
    lens_positions: int = 32
    stages: int = 256
    """Stages sketched at once."""
    texts: int = 8
    memory: int = half_of_memory()
    """Bytes of all recorded passes; the oldest texts give way."""


class Token(msgspec.Struct, frozen=True):
    """A token as the page shows it (spaces as ·), and as the vocabulary spells it."""

    id: int
    text: str
    spelling: str


class Shape(msgspec.Struct, frozen=True):
    """A recorded stage, or a matrix of the model, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Chosen(msgspec.Struct, frozen=True):
    """How a new token was drawn: its probability among those that the sampling left, its rank for the model itself."""

    probability: float
    rank: int
    ends: bool
    """Whether the token ends a text."""


class PassInfo(msgspec.Struct, frozen=True):
    """A pass without its values."""

    number: int
    kind: str
    start: int
    tokens: list[Token]
    stages: list[Shape]
    chosen: Chosen | None


class TextInfo(msgspec.Struct, frozen=True):
    """A text: what was typed, and the passes recorded of it so far."""

    id: str
    prompt: str
    passes: list[PassInfo]


class BlockInfo(msgspec.Struct, frozen=True):
    """What may differ from block to block."""

    window: int | None
    rope: str | None


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the page shows it: what it is, and its graph."""

    name: str
    config: ModelConfig
    parameters: int
    tied: bool
    tie: str
    blocks: list[BlockInfo]
    nodes: list[Node]
    kinds: dict[str, Kind]
    positive: list[str]
    matrices: list[Shape]
    limits: Limits
    prompt: str
    """What the page begins with."""
    recorded: bool = False
    """Whether all answers are in the page: there is no server to ask."""


class Values(msgspec.Struct, frozen=True):
    """A slice of a tensor: [start, stop, step] of each axis, and the values, nested."""

    name: str
    at: list[tuple[int, int, int]]
    values: Any
    labels: list[list[str] | None]
    """The token at each of those places, for each axis that runs over positions or the vocabulary."""


class Candidate(msgspec.Struct, frozen=True):
    """A token that may come next. `dot` is the state's product with the token's row, before bias and cap."""

    token: Token
    logit: float
    probability: float
    drawn: float
    """Its probability under the sampling asked for."""
    dot: float


class Product(msgspec.Struct, frozen=True):
    """How one logit comes about: cap(state · row + bias)."""

    token: Token
    state: list[float]
    row: list[float]
    dot: float
    bias: float
    cap: float | None
    logit: float
    state_stage: str
    matrix: str


class Guess(msgspec.Struct, frozen=True):
    """A token with a probability."""

    token: Token
    probability: float


class Lens(msgspec.Struct, frozen=True):
    """The best guesses of each residual stage at each position asked for: guesses[stage][position]."""

    stages: list[str]
    start: int
    guesses: list[list[list[Guess]]]


class Neighbour(msgspec.Struct, frozen=True):
    """A token and the cosine of its row of E with another's."""

    token: Token
    cosine: float


class Text:
    """A text as it grows: its ids, its cache, and a recorded pass for each step."""

    def __init__(self, prompt: str) -> None:
        self.id = secrets.token_urlsafe(9)
        self.prompt = prompt
        self.ids: list[int] = []
        self.cache: list[LayerCache] = []
        self.passes: list[Pass] = []
        self.chosen: list[Chosen | None] = []
        self.memory = 0


class Lab:
    """A model, its vocabulary, and the texts whose passes are recorded.

    `start`, `step` and `lens` run the model and must not overlap; all else only reads what is recorded.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        *,
        name: str,
        tie: str = "",
        path: Path | None = None,
        prompt: str | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> None:
        self.model, self.tokenizer, self.name, self.tie, self.limits = model, tokenizer, name, tie, limits
        self.prompt = (DEFAULT_PROMPT if tokenizer else "0 1 2") if prompt is None else prompt
        self._path = path
        self._nodes = graph(model)
        parameters = dict(model.named_parameters())
        self.matrices = {name: parameters[name].detach() for name in (EMBEDDING, POSITIONS, HEAD) if name in parameters}
        self.head_name = EMBEDDING if model.output_projection is None else HEAD
        self.state = next(node.inputs[0] for node in self._nodes if node.name == "logits")
        self._texts: OrderedDict[str, Text] = OrderedDict()
        self._empty = None if tokenizer is None else rows_without_token(model, tokenizer)
        self._rows: probe.Rows | None = None
        self._probing = threading.Lock()  # an open matrix answers one question at a time

    # What the model is

    def info(self) -> Info:
        """The model and its graph."""
        config = self.model.config
        return Info(
            name=self.name,
            config=config,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            tied=self.model.output_projection is None,
            tie=self.tie,
            blocks=[BlockInfo(config.window_of(n), config.rope_of(n)) for n in range(config.num_layers)],
            nodes=self._nodes,
            kinds=KINDS,
            positive=sorted(POSITIVE),
            matrices=[_shape(name, matrix) for name, matrix in self.matrices.items()],
            limits=self.limits,
            prompt=self.prompt,
        )

    def token(self, id: int) -> Token:
        """A token in words; a row without a token, or a model without a tokenizer, shows the id."""
        if self.tokenizer is None:
            return Token(id, f"#{id}", f"#{id}")
        return Token(id, readable(self.tokenizer, id), self.tokenizer.token(id))

    # Texts and their passes

    def encode(self, prompt: str) -> list[int]:
        """A prompt's ids; of a model without a tokenizer the prompt is ids. Raises a subclass of LlmcliError."""
        if self.tokenizer is None:
            parts = prompt.replace(",", " ").replace("#", " ").split()
            if not all(part.isascii() and part.isdecimal() for part in parts):
                raise UsageError("this model has no tokenizer: a prompt is token ids", "For example: 1 5 12")
            ids = [int(part) for part in parts]
        else:
            ids = self.tokenizer.encode(prompt)
            first = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
            if not ids and first is not None:
                ids = [first]
        if not ids:
            raise UsageError("the prompt is empty, and no token begins a text", "Type something.")
        return ids

    def start(self, prompt: str, ids: list[int] | None = None) -> TextInfo:
        """Begin a text: the pass of a prompt, or of ids. Raises UsageError for what is too long, before any work."""
        limits = self.limits
        if len(prompt) > limits.prompt_characters:
            raise UsageError(
                f"the prompt has {len(prompt):,} characters, the most is {limits.prompt_characters:,}",
                "Shorten it.",
            )
        ids = self.encode(prompt) if ids is None else ids
        tokenizers.check_ids(ids, self.model.config.vocab_size, self.tokenizer.size if self.tokenizer else None)
        if len(ids) > limits.prompt_tokens:
            raise UsageError(
                f"the prompt has {len(ids):,} tokens, the most is {limits.prompt_tokens:,}",
                "Shorten it, or start the lab with a larger --max-tokens.",
            )
        text = Text(prompt)
        text.cache = new_cache(self.model.config)
        self._record(text, ids, None)
        self._texts[text.id] = text
        while len(self._texts) > limits.texts:
            self._texts.popitem(last=False)
        return self._text_info(text)

    def step(self, of: str, sampling: Sampling) -> PassInfo:
        """Choose a text's next token and record its pass. Raises UsageError where the text cannot go on."""
        text = self.text(of)
        if len(text.passes) >= self.limits.passes:
            raise UsageError(f"the text has {len(text.passes)} passes, which is the most", "Begin a new one.")
        logits = text.passes[-1].tensors["logits"][-1]
        require_finite(self.model, logits, len(text.passes))
        scores = self._masked(logits)
        seed = None if sampling.seed is None else f"{sampling.seed}/{len(text.ids)}"
        id = choose(scores, sampling, text.ids, random.Random(seed))
        ids, probabilities = distribution(scores, sampling, text.ids)
        ends = self.tokenizer is not None and id in self.tokenizer.eos_ids
        chosen = Chosen(float(probabilities[ids == id]), int((logits > logits[id]).sum()) + 1, ends)
        self._record(text, [id], chosen)
        return self._pass_info(text, len(text.passes) - 1)

    def _record(self, text: Text, ids: list[int], chosen: Chosen | None) -> None:
        size = pass_bytes(self.model, len(ids), len(text.ids) + len(ids))
        if size + text.memory > self.limits.memory:
            raise UsageError(
                f"the recorded values would take {(size + text.memory) / 1e9:.3g} GB, the most is "
                f"{self.limits.memory / 1e9:.3g} GB",
                "Take a shorter prompt.",
            )
        others = [other for other in self._texts.values() if other is not text]
        held = size + text.memory + sum(other.memory for other in others)
        for other in others:  # the oldest first
            if held > self.limits.memory:
                del self._texts[other.id]
                held -= other.memory
        try:
            made = record(self.model, ids, text.cache)
        except LlmcliError:
            raise
        except BaseException:  # in the midst of a pass the layers' caches may differ in length
            self._texts.pop(text.id, None)
            raise
        text.chosen.append(chosen)
        text.ids += ids
        text.memory += size
        text.passes.append(made)  # last: who reads meanwhile finds all that belongs to the passes there are

    def text(self, id: str) -> Text:
        """A text by its id. Raises UnknownText when it was let go, or never was."""
        text = self._texts.get(id)
        if text is None:
            raise UnknownText("this text is no longer held", "Run the prompt again.")
        return text

    def text_info(self, id: str) -> TextInfo:
        """A text's passes."""
        return self._text_info(self.text(id))

    def _text_info(self, text: Text) -> TextInfo:
        return TextInfo(text.id, text.prompt, [self._pass_info(text, n) for n in range(len(text.passes))])

    def _pass_info(self, text: Text, number: int) -> PassInfo:
        made = text.passes[number]
        return PassInfo(
            number=number,
            kind=made.kind,
            start=made.start,
            tokens=[self.token(id) for id in made.ids],
            stages=[_shape(name, tensor) for name, tensor in made.tensors.items()],
            chosen=text.chosen[number],
        )

    def recorded(self, id: str, number: int) -> Pass:
        """One pass of a text. Raises UsageError when there is none of that number."""
        passes = self.text(id).passes
        if not 0 <= number < len(passes):
            raise UsageError(f"there is no pass {number}", f"The text has passes 0 to {len(passes) - 1}.")
        return passes[number]

    # Questions about a pass

    def stage(self, made: Pass, name: str) -> Stage:
        """A stage's statistics, or a matrix's."""
        matrices = self.matrices
        if name not in matrices:
            return stage(name, made.tensor(name))
        return msgspec.structs.replace(
            stage("embed", matrices[name]), name=name, axes=self._axes(name), meaning="a matrix of the model"
        )

    def values(self, of: str, number: int, name: str, at: Sequence[slice], pooled: bool = False) -> Values:
        """The slice `at` of a stage or of a matrix; `pooled`, a step gives its value farthest from zero, not its first.

        Raises UsageError for more values than one request may ask.
        """
        made, matrix = self.recorded(of, number), self.matrices.get(name)
        tensor = made.tensor(name) if matrix is None else matrix
        if len(at) != tensor.dim():
            raise UsageError(f"{name} has {tensor.dim()} axes, the slice has {len(at)}", "Give a slice for each axis.")
        ranges = [range(*part.indices(size)) for part, size in zip(at, tensor.shape, strict=True)]
        if (count := math.prod(map(len, ranges))) > self.limits.values:
            raise UsageError(f"{count:,} values at once, the most is {self.limits.values:,}", "Ask for fewer.")
        ids = self.text(of).ids[: made.start + len(made.ids)]
        labels: list[list[str] | None] = []
        for axis, size, places in zip(self._axes(name), tensor.shape, ranges, strict=True):
            if axis == "token":
                labels.append([self.token(place).text for place in places])
            elif axis in (POSITION, SEEN) and name != POSITIONS:
                labels.append([self.token(ids[len(ids) - size + place]).text for place in places])
            else:
                labels.append(None)
        if pooled:
            tensor = tensor[tuple(slice(r.start, r.stop) for r in ranges)]
            picked = farthest(tensor, [r.step for r in ranges])
        else:
            picked = tensor[tuple(slice(r.start, r.stop, r.step) for r in ranges)]
        return Values(name, [(r.start, r.stop, r.step) for r in ranges], picked.tolist(), labels)

    def _axes(self, name: str) -> tuple[str, ...]:
        if name in self.matrices:
            return (POSITION if name == POSITIONS else "token", WIDTH)
        return KINDS[name.rpartition(".")[2]].axes

    def sketches(self, made: Pass, names: Sequence[str]) -> dict[str, list[list[list[int]]]]:
        """A small picture of each stage or matrix."""
        if len(names) > self.limits.stages:
            raise UsageError(f"{len(names)} stages at once, the most is {self.limits.stages}", "Ask for fewer.")
        matrices = self.matrices
        return {name: sketch(name, matrices[name] if name in matrices else made.tensor(name)) for name in names}

    def top(self, made: Pass, position: int, count: int, sampling: Sampling) -> list[Candidate]:
        """The most probable tokens after a position of the pass, the best first."""
        logits = self._row(made, "logits", position)
        best = logits.float().topk(min(count, self.limits.top, len(logits))).indices.tolist()
        ids, shares = distribution(self._masked(logits), sampling)
        drawn = dict(zip(ids.tolist(), shares.tolist(), strict=True))
        probabilities = made.tensors["probabilities"][position]
        state, matrix = self._row(made, self.state, position), self.matrices[self.head_name]
        return [
            Candidate(
                token=self.token(id),
                logit=float(logits[id]),
                probability=float(probabilities[id]),
                drawn=drawn.get(id, 0.0),
                dot=float(torch.dot(state.double(), matrix[id].double())),
            )
            for id in best
        ]

    def product(self, made: Pass, position: int, id: int) -> Product:
        """The state and the token's row whose dot product a logit is."""
        logits = self._row(made, "logits", position)
        if not 0 <= id < len(logits):
            raise UsageError(f"there is no token {id}", f"The vocabulary has {len(logits):,}.")
        state, row = self._row(made, self.state, position), self.matrices[self.head_name][id]
        return Product(
            token=self.token(id),
            state=state.tolist(),
            row=row.tolist(),
            dot=float(torch.dot(state.double(), row.double())),
            bias=self.biases([id])[0],
            cap=self.model.config.logit_softcap,
            logit=float(logits[id]),
            state_stage=self.state,
            matrix=self.head_name,
        )

    def lens(self, made: Pass, start: int, stop: int, count: int = 5) -> Lens:
        """What the output would say after each block, for some positions."""
        positions = slice(*slice(start, min(stop, start + self.limits.lens_positions)).indices(len(made.ids)))
        looked = logit_lens(self.model, made, positions, min(count, self.limits.top))
        return Lens(
            [name for name, _, _ in looked],
            positions.start,
            [
                [
                    [Guess(self.token(id), share) for id, share in zip(ids, shares, strict=True)]
                    for ids, shares in zip(every_ids.tolist(), every_share.tolist(), strict=True)
                ]
                for _, every_ids, every_share in looked
            ],
        )

    def nearest(self, id: int, count: int) -> list[Neighbour]:
        """The tokens whose rows of E point most nearly the same way. Raises UsageError without a file to ask."""
        with self._probing:
            if self._rows is None:
                if self._path is None:
                    raise UsageError(
                        "the nearest tokens are looked up in a checkpoint's file, and there is none",
                        "Open a checkpoint.",
                    )
                size = self.tokenizer.size if self.tokenizer else None
                self._rows = probe.Rows(find_matrix(self._path), size)
            if not 0 <= id < self._rows.count:
                raise UsageError(f"there is no token {id}", f"The vocabulary has {self._rows.count:,}.")
            hits = self._rows.nearest(self._rows.vectors([id]), min(count, self.limits.top), exclude=[[id]])[0]
        return [Neighbour(self.token(hit.id), hit.score) for hit in hits]

    def _row(self, made: Pass, name: str, position: int) -> Tensor:
        tensor = made.tensor(name)
        if not 0 <= position < len(tensor):
            raise UsageError(f"there is no position {position} in this pass", f"It has {len(tensor)}.")
        return tensor[position]

    def biases(self, ids: Sequence[int]) -> list[float]:
        """What the output adds to some tokens' scores."""
        head = self.model.output_projection
        return [0.0] * len(ids) if head is None or head.bias is None else head.bias.detach()[list(ids)].tolist()

    def _masked(self, logits: Tensor) -> Tensor:
        return logits if self._empty is None else logits.index_fill(0, self._empty, -torch.inf)


class UnknownText(UsageError):
    """A text that is not, or no longer, held."""


def readable(tokenizer: Tokenizer, id: int) -> str:
    """A token as a reader knows it: spaces as ·, line ends as \\n, bytes as characters where they are whole ones."""
    spelling = tokenizer.token(id)
    if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
        text = tokenizer.decode([id], skip_special=False)
        spelling = spelling if "\ufffd" in text or not text else text
    elif (byte := re.fullmatch(r"<0x([0-7][0-9A-Fa-f])>", spelling)) is not None:
        spelling = chr(int(byte[1], 16))
    spelling = spelling.replace("▁", " ").replace("</w>", " ").replace(" ", "·")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in spelling)


def pass_bytes(model: Decoder, new: int, seen: int) -> int:
    """About how many bytes the record of a pass takes: `new` positions that look at `seen`, themselves included."""
    config = model.config
    size = model.token_embeddings.weight.itemsize
    heads = 4 * config.num_heads * seen  # attention's weights are float32
    streams = size * (10 * config.embed_dim + 3 * config.q_dim + 5 * config.kv_dim + 3 * (config.hidden_dim or 0))
    return new * (config.num_layers * (heads + streams) + (size + 4) * config.vocab_size)


def _shape(name: str, tensor: Tensor) -> Shape:
    return Shape(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
