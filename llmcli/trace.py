"""One forward pass with every stage recorded: what stands between the token ids and the next token's probabilities.

The model runs as it always does; the tracer listens at its modules. Only attention's weights are computed beside it,
from the recorded queries and keys, because no fused kernel gives them away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmcli.cache import LayerCache
from llmcli.errors import LlmcliError, UsageError
from llmcli.layers import (
    ACTIVATIONS,
    Attention,
    Block,
    Experts,
    GatedFeedForward,
    NormAfterSumBlock,
    RMSNorm,
    softcap,
    visible,
)
from llmcli.model import Decoder


class Kind(msgspec.Struct, frozen=True):
    """What a stage is, whichever block it stands in: its axes, and a line that says it in words."""

    axes: tuple[str, ...]
    meaning: str


POSITION, SEEN, WIDTH, HEAD, SIZE = "position", "visible position", "dimension", "head", "head dimension"
KINDS = {
    "ids": Kind((POSITION,), "the token ids"),
    "embed": Kind((POSITION, WIDTH), "each token's row of the embedding matrix E"),
    "embed_scaled": Kind((POSITION, WIDTH), "the rows times the root of the width"),
    "positions": Kind((POSITION, WIDTH), "each position's own learned row"),
    "residual": Kind((POSITION, WIDTH), "the residual stream"),
    "attention_norm": Kind((POSITION, WIDTH), "the norm at attention"),
    "q": Kind((HEAD, POSITION, SIZE), "queries: what each position looks for"),
    "k": Kind((HEAD, POSITION, SIZE), "keys: what each position offers"),
    "v": Kind((HEAD, POSITION, SIZE), "values: what each position hands over"),
    "q_norm": Kind((HEAD, POSITION, SIZE), "queries, normalised"),
    "k_norm": Kind((HEAD, POSITION, SIZE), "keys, normalised"),
    "q_rotated": Kind((HEAD, POSITION, SIZE), "queries turned by their position (RoPE)"),
    "k_rotated": Kind((HEAD, POSITION, SIZE), "keys turned by their position (RoPE)"),
    "keys": Kind((HEAD, SEEN, SIZE), "all keys that these positions may look at, the cached ones first"),
    "values": Kind((HEAD, SEEN, SIZE), "all values that these positions may take from"),
    "weights": Kind((HEAD, POSITION, SEEN), "attention: how much each position takes from each"),
    "mixed": Kind((POSITION, "heads' dimensions"), "the values as the weights mix them, the heads side by side"),
    "attention": Kind((POSITION, WIDTH), "attention's output"),
    "attention_post_norm": Kind((POSITION, WIDTH), "the norm of attention's output"),
    "attention_sum": Kind((POSITION, WIDTH), "the residual stream plus attention's output, before the norm"),
    "residual_middle": Kind((POSITION, WIDTH), "the residual stream after attention"),
    "feed_forward_norm": Kind((POSITION, WIDTH), "the norm at the feed-forward"),
    "router": Kind((POSITION, "expert"), "the router's probability of each expert"),
    "experts": Kind((POSITION, "rank"), "the experts that each position uses"),
    "expert_weights": Kind((POSITION, "rank"), "how much of each of them"),
    "gate": Kind((POSITION, "hidden dimension"), "the feed-forward's gate, before its activation"),
    "up": Kind((POSITION, "hidden dimension"), "the feed-forward's hidden layer, before gate or activation"),
    "hidden": Kind((POSITION, "hidden dimension"), "the feed-forward's hidden layer, after its activation"),
    "feed_forward": Kind((POSITION, WIDTH), "the feed-forward's output"),
    "feed_forward_post_norm": Kind((POSITION, WIDTH), "the norm of the feed-forward's output"),
    "feed_forward_sum": Kind((POSITION, WIDTH), "the residual stream plus the feed-forward's output, before the norm"),
    "final_norm": Kind((POSITION, WIDTH), "the state that the output scores"),
    "logits": Kind((POSITION, "token"), "a score for every token of the vocabulary"),
    "probabilities": Kind((POSITION, "token"), "the scores as the next token's probabilities"),
}


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded tensor in numbers. `name` is a kind, with `blocks.N.` in front where it stands in a block."""

    name: str
    meaning: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    mean: float
    rms: float
    min: float
    max: float


class Pass:
    """One forward pass: the new positions `start ...`, and every stage's tensor by name, the batch axis dropped."""

    def __init__(self, kind: Literal["prompt", "cached"], ids: Sequence[int], start: int) -> None:
        self.kind = kind
        self.ids = tuple(ids)
        self.start = start
        self.tensors: dict[str, Tensor] = {"ids": torch.tensor(list(ids))}

    def tensor(self, name: str) -> Tensor:
        """A stage's tensor. Raises UsageError naming the stages when there is none of that name."""
        if name not in self.tensors:
            blocks = sum(stage.endswith(".attention") for stage in self.tensors)
            kinds = dict.fromkeys(stage.rpartition(".")[2] for stage in self.tensors if stage.startswith("blocks."))
            outside = [stage for stage in self.tensors if not stage.startswith("blocks.")]
            inside = f"; blocks.0 to blocks.{blocks - 1}, each with {', '.join(kinds)}" if blocks else ""
            raise UsageError(f"no stage '{name}' in this model", f"Stages: {', '.join(outside)}{inside}.")
        return self.tensors[name]

    def stages(self) -> list[Stage]:
        """Every stage in the order of the pass."""
        return [stage(name, tensor) for name, tensor in self.tensors.items()]


def stage(name: str, tensor: Tensor) -> Stage:
    """A stage's statistics, summed in float64."""
    values = tensor if tensor.is_floating_point() else tensor.double()
    low, high = torch.aminmax(values)
    kind = KINDS[name.rpartition(".")[2]]
    return Stage(
        name=name,
        meaning=kind.meaning,
        axes=kind.axes,
        shape=tuple(tensor.shape),
        mean=float(values.sum(dtype=torch.float64)) / values.numel(),
        rms=float(torch.linalg.vector_norm(values, dtype=torch.float64)) / values.numel() ** 0.5,
        min=float(low),
        max=float(high),
    )


@torch.no_grad()
def record(model: Decoder, ids: Sequence[int], cache: Sequence[LayerCache] | None = None) -> Pass:
    """Run ids (n,) through a model in eval mode and record every stage; with a cache they continue what it has seen.

    The logits are those of an untraced pass, bit for bit. Raises UsageError for what the model itself refuses, and
    for no ids at all.
    """
    if not ids:
        raise UsageError("there is no token to trace", "Give a text, or a tokenizer with a BOS token.")
    start = cache[0].length if cache else 0
    made = Pass("cached" if start else "prompt", ids, start)
    batch = made.tensors["ids"].to(model.token_embeddings.weight.device)[None]
    model.check_ids(batch)
    made.tensors["embed"] = F.embedding(batch, model.token_embeddings.weight)[0]
    with _listening(model, made):
        logits = model(batch, cache)[0]
    made.tensors["logits"] = logits
    made.tensors["probabilities"] = logits.float().softmax(-1)
    return made


@contextmanager
def _listening(model: Decoder, made: Pass) -> Iterator[None]:
    """Hooks at every module whose output is a stage; gone when the block ends."""
    handles: list[Any] = []

    def keep(name: str, tensor: Tensor) -> None:
        made.tensors[name] = tensor.detach()[0]

    def at_output(module: nn.Module | None, name: str, shape: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        if module is not None:
            handles.append(module.register_forward_hook(lambda _m, _i, output: keep(name, shape(output))))

    def at_input(module: nn.Module | None, name: str) -> None:
        if module is not None:
            handles.append(module.register_forward_pre_hook(lambda _m, inputs: keep(name, inputs[0])))

    if model.token_embeddings.scaled:
        at_output(model.token_embeddings, "embed_scaled")
    at_output(model.position_embeddings, "positions", lambda rows: rows[None] if rows.dim() == 2 else rows)
    at_output(model.dropout, "residual")
    attentions = []
    for layer, module in enumerate(model.blocks):
        block, name = cast(Block, module), f"blocks.{layer}"
        attentions.append(block.attention)
        _listen_to_attention(block.attention, name, keep, at_output, at_input)
        if isinstance(block, NormAfterSumBlock):
            at_input(block.attention_norm, f"{name}.attention_sum")
            at_input(block.feed_forward, f"{name}.residual_middle")
            at_input(block.feed_forward_norm, f"{name}.feed_forward_sum")
        else:
            at_output(block.attention_norm, f"{name}.attention_norm")
            at_output(block.attention_post_norm, f"{name}.attention_post_norm")
            at_input(block.feed_forward_norm or block.feed_forward, f"{name}.residual_middle")
            at_output(block.feed_forward_norm, f"{name}.feed_forward_norm")
            at_output(block.feed_forward_post_norm, f"{name}.feed_forward_post_norm")
        feed_forward = block.feed_forward
        if isinstance(feed_forward, Experts):
            _listen_to_experts(feed_forward, name, keep, handles)
        else:
            at_output(getattr(feed_forward, "gate", None), f"{name}.gate")
            at_output(cast(nn.Module, feed_forward.up), f"{name}.up")
            at_input(cast(nn.Module, feed_forward.down), f"{name}.hidden")
        at_output(feed_forward, f"{name}.feed_forward")
        at_output(block, f"{name}.residual")
    at_output(model.final_norm, "final_norm")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for attention in attentions:
            vars(attention).pop("mix", None)


def _listen_to_attention(
    attention: Attention,
    name: str,
    keep: Callable[..., None],
    at_output: Callable[..., None],
    at_input: Callable[..., None],
) -> None:
    def by_head(x: Tensor) -> Tensor:  # (B, T, H * D) or (B, T, H, D) -> (B, H, T, D)
        return x.reshape(*x.shape[:2], -1, attention.head_size).transpose(1, 2)

    for part in ("q", "k", "v"):
        at_output(getattr(attention, part), f"{name}.{part}", by_head)
    at_output(attention.q_norm, f"{name}.q_norm", by_head)
    at_output(attention.k_norm, f"{name}.k_norm", by_head)
    at_input(attention.output, f"{name}.mixed")
    at_output(attention.output, f"{name}.attention")
    mix = attention.mix

    def recording(q: Tensor, k: Tensor, v: Tensor, empty: Tensor | None = None) -> Tensor:
        if attention.rope:
            keep(f"{name}.q_rotated", q)
            keep(f"{name}.k_rotated", k[:, :, k.shape[2] - q.shape[2] :])
        keep(f"{name}.keys", k)  # with a cache a view of it: a cache writes behind what it gave, or elsewhere
        keep(f"{name}.values", v)
        keep(f"{name}.weights", attention_weights(attention, q, k))
        return mix(q, k, v, empty)

    attention.mix = recording  # type: ignore[method-assign]


def attention_weights(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """softmax(q·k), scaled, capped and masked, in float32: (B, Hq, T, S) from (B, Hq, T, D) and (B, Hkv, S, D)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = softcap(torch.matmul(q.float(), k.float().mT) * attention.scale, attention.softcap)
    mask = visible(q.shape[2], k.shape[2], attention.window, q.device)
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)


def _listen_to_experts(experts: Experts, name: str, keep: Callable[..., None], handles: list[Any]) -> None:
    def recording(_module: nn.Module, _inputs: Any, scores: Tensor) -> None:
        probabilities = scores.float().softmax(-1)
        shares, chosen = probabilities.topk(experts.top_k, -1)
        keep(f"{name}.router", probabilities[None])
        keep(f"{name}.experts", chosen[None])
        keep(f"{name}.expert_weights", (shares / shares.sum(-1, keepdim=True) if experts.renormalise else shares)[None])

    handles.append(experts.router.register_forward_hook(recording))


def logit_lens(model: Decoder, made: Pass, positions: slice, top: int) -> list[tuple[str, Tensor, Tensor]]:
    """What the output would say of the residual stream: (stage, ids (n, top), probabilities (n, top)), in order.

    Each residual goes through the final norm and the output projection (nostalgebraist, 2020, "logit lens"). Not while
    a pass is recorded in another thread: it would take the norm's output for its own.
    """
    lens = []
    for name, tensor in made.tensors.items():
        if name.rpartition(".")[2] == "residual":
            with torch.no_grad():
                state = tensor[positions] if model.final_norm is None else model.final_norm(tensor[positions])
                found = model.scores(state).float().softmax(-1).topk(min(top, model.config.vocab_size), -1)
            lens.append((name, found.indices, found.values))
    return lens


class Node(msgspec.Struct, frozen=True):
    """A stage's place in the model: which stages it is made of, how, and with which of the model's weights."""

    name: str
    inputs: tuple[str, ...]
    how: str
    weights: tuple[str, ...] = ()


def graph(model: Decoder) -> list[Node]:
    """Every stage that a pass of this model has, in the order of the pass.

    When the output is tied, `embed` and `logits` name the same matrix.
    """
    config = model.config
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    nodes: list[Node] = []

    def add(name: str, inputs: Sequence[str], how: str, module: nn.Module | None = None) -> str:
        weights = tuple(names[id(parameter)] for parameter in module.parameters()) if module is not None else ()
        nodes.append(Node(name, tuple(inputs), how, weights))
        return name

    x = add("embed", [add("ids", (), "from the text")], "look up each id's row", model.token_embeddings)
    if model.token_embeddings.scaled:
        x = add("embed_scaled", [x], f"× √{config.embed_dim}")
    begins = [x]
    if model.position_embeddings is not None:
        begins.append(add("positions", (), "look up each position's row", model.position_embeddings))
    x = add("residual", begins, " + ".join(begins))
    for layer, module in enumerate(model.blocks):
        x = _block_graph(cast(Block, module), f"blocks.{layer}.", x, add)
    if model.final_norm is not None:
        x = add("final_norm", [x], _norm_name(model.final_norm), model.final_norm)
    cap = "" if config.logit_softcap is None else f", capped to ±{config.logit_softcap:g}"
    if model.output_projection is None:
        add("logits", [x], f"state · each row of E{cap}", model.token_embeddings)
    else:
        bias = " + bias" if config.head_bias else ""
        add("logits", [x], f"state · each row of the output matrix{bias}{cap}", model.output_projection)
    add("probabilities", ["logits"], "softmax")
    return nodes


def _block_graph(block: Block, at: str, x: str, add: Callable[..., str]) -> str:
    """One block's nodes, from the stream's stage `x`; gives back the stage in which the stream goes on."""
    attention, feed_forward = block.attention, block.feed_forward
    after_sum = isinstance(block, NormAfterSumBlock)

    def normed(name: str, norm: nn.Module | None, stage: str) -> str:
        return stage if norm is None or after_sum else add(at + name, [stage], _norm_name(norm), norm)

    def summed(stream: str, branch: str, part: str, norm: nn.Module | None, result: str) -> str:
        if after_sum and norm is not None:
            return add(at + result, [add(f"{at}{part}_sum", [stream, branch], "sum")], _norm_name(norm), norm)
        return add(at + result, [stream, branch], "sum")

    h = normed("attention_norm", block.attention_norm, x)
    q, k, v = (add(at + part, [h], f"W_{part} · x", getattr(attention, part)) for part in ("q", "k", "v"))
    if attention.q_norm is not None and attention.k_norm is not None:
        over = "each head" if attention.q_norm.weight.shape[0] == attention.head_size else "all heads together"
        q = add(at + "q_norm", [q], _norm_name(attention.q_norm, f" of {over}"), attention.q_norm)
        k = add(at + "k_norm", [k], _norm_name(attention.k_norm, f" of {over}"), attention.k_norm)
    if attention.rope:
        kind = ", the local one" if attention.rope == "local" else ""
        q, k = add(at + "q_rotated", [q], f"RoPE{kind}"), add(at + "k_rotated", [k], f"RoPE{kind}")
    keys, values = add(at + "keys", [k], "the cached ones, then these"), add(at + "values", [v], "likewise")
    cap = "" if attention.softcap is None else f", capped to ±{attention.softcap:g}"
    window = "" if attention.window is None else f", window {attention.window}"
    scale = round(attention.scale**-2, 3)
    weights = add(at + "weights", [q, keys], f"softmax(q · k / √{scale:g}{cap}){window}")
    mixed = add(at + "mixed", [weights, values], "weights · values")
    branch = add(at + "attention", [mixed], "W_o · x", attention.output)
    branch = normed("attention_post_norm", block.attention_post_norm, branch)
    x = summed(x, branch, "attention", block.attention_norm, "residual_middle")

    h = normed("feed_forward_norm", block.feed_forward_norm, x)
    if isinstance(feed_forward, Experts):
        router = add(at + "router", [h], "softmax(W_r · x)", feed_forward.router)
        chosen = add(at + "experts", [router], f"the {feed_forward.top_k} most probable")
        shares = "their shares, made to sum to 1" if feed_forward.renormalise else "their probabilities"
        parts = [h, chosen, add(at + "expert_weights", [router], shares)]
        branch = add(at + "feed_forward", parts, "weighted sum of the chosen experts", feed_forward.experts)
    else:
        activation = next(name for name, function in ACTIVATIONS.items() if function is feed_forward.activation)
        if isinstance(feed_forward, GatedFeedForward):
            gate = add(at + "gate", [h], "W_gate · x", feed_forward.gate)
            up = add(at + "up", [h], "W_up · x", feed_forward.up)
            hidden = add(at + "hidden", [gate, up], f"{activation.partition('_')[0]}(gate) × up")
        else:
            up = add(at + "up", [h], "W_up · x", feed_forward.up)
            hidden = add(at + "hidden", [up], f"{activation.partition('_')[0]}(up)")
        branch = add(at + "feed_forward", [hidden], "W_down · x", feed_forward.down)
    branch = normed("feed_forward_post_norm", block.feed_forward_post_norm, branch)
    return summed(x, branch, "feed_forward", block.feed_forward_norm, "residual")


def _norm_name(norm: nn.Module, over: str = "") -> str:
    if isinstance(norm, RMSNorm):
        return f"RMSNorm{over}, times 1 + w" if norm.plus_one else f"RMSNorm{over}"
    return "LayerNorm"


def save(recorded: Sequence[Pass], path: Path) -> None:
    """Every stage of every pass as it is, in one safetensors file: `embed`, or `3.embed` where passes are several.

    The file appears whole or not at all. Raises LlmcliError when it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {
        name if len(recorded) == 1 else f"{number}.{name}": tensor.clone(memory_format=torch.contiguous_format)
        for number, made in enumerate(recorded)
        for name, tensor in made.tensors.items()
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, aside, metadata={"format": "pt"})
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:  # which is how it says that it could not write
        said = getattr(error, "strerror", None) or error
        raise LlmcliError(f"{path}: cannot be written ({said})", "Choose another place.") from None
    finally:
        aside.unlink(missing_ok=True)
