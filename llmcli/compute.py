"""How a training step computes: in which precision, and compiled or not. Found by measuring, once for a run.

Which way is faster depends on the processor and on the sizes: with AMX or on a GPU products in bfloat16 are several
times as fast, without them slower than in float32; compiling takes its time first. So the ways are tried on the model
itself, without changing it, and a run keeps the way it began with: another would round otherwise.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from llmcli.config import TrainConfig
from llmcli.events import Progress
from llmcli.layers import Block, Experts

Loss = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets, (B, T) each, to the summed loss."""


class Way(msgspec.Struct, frozen=True):
    """`precision` is that of matrix products; weights, moments and sums are float32."""

    precision: Literal["fp32", "bf16"]
    compiled: bool


class Prepared(msgspec.Struct, frozen=True):
    """The loss, computed in a way. Where no gradient is wanted it is not compiled: that would be done for itself."""

    loss_of: Loss
    way: Way


PEAK_SECONDS = 0.05
"""How long the peak of matrix products is looked for: at the start of a run and at each of its evaluations."""

SPEEDUP = {"fp32": 0.12, "bf16": 0.4}
"""The part of a step's time that compiling is expected to save, when it is to be waited for: from measurements."""

TOLERANCE = 0.02
"""Nats a token by which the loss in bfloat16 may differ from that in float32."""


def prepare(
    objective: nn.Module,
    config: TrainConfig,
    device: torch.device,
    batch: tuple[Tensor, Tensor],
    rounds: int,
    known: Way | None = None,
) -> Generator[Progress, None, tuple[Prepared, list[str]]]:
    """The way that takes least time for `rounds` more micro-batches like `batch`, as far as the config leaves it open.

    Yields what is being done; returns the loss and notes. `known` is a way that is settled: that of a run that goes on,
    or what several processes, which would each measure something else, have agreed on. Clears gradients; weights and
    optimiser stay as they are. Compiling that fails is a note, not an error.
    """
    precision: Literal["fp32", "bf16"] = "fp32"
    if config.precision != "auto":
        precision = config.precision
    elif known:
        precision = known.precision
    elif bf16_is_faster(device, batch[0].numel(), median_sizes(objective)):
        precision = "bf16"
    eager, notes = prepared(objective, Way(precision, False), device), list[str]()
    told = config.compile == "on" or (config.compile == "auto" and known is not None and known.compiled)
    if told:
        yield Progress("compiling", 0, 0)
        compiled = prepared(objective, Way(precision, True), device)
        failure = trial(objective, compiled, batch, 0).failure
        if failure is None:
            return compiled, []
        notes.append(f"the step is not compiled: {failure}")
        if known is not None and known.compiled:
            notes.append("the run was compiled before: from here on it is rounded otherwise")

    times = min(40, rounds // 10)  # what is short is not worth measuring
    settled = (told or config.compile == "off") and (precision == "fp32" or config.precision != "auto")
    if known or settled or not times:
        return eager, notes
    yield Progress("measuring", 0, 0)
    exact = prepared(objective, Way("fp32", False), device)
    ways = [exact, eager] if config.precision == "auto" and precision == "bf16" else [eager]
    tried = [trial(objective, way, batch, times) for way in ways]
    wait = min(t.seconds for t in tried) * rounds
    if config.time_limit:
        wait = min(wait, config.time_limit)
    if config.compile == "auto" and not told and compiling_pays(objective, wait, precision):
        yield Progress("compiling", 0, 0)
        tried.append(trial(objective, prepared(objective, Way(precision, True), device), batch, times))
        if tried[-1].failure:
            notes.append(f"the step is not compiled: {tried.pop().failure}")
    near = [t for t in tried if abs(t.loss - tried[0].loss) <= TOLERANCE]
    return min(near, key=lambda t: t.seconds, default=tried[0]).prepared, notes


def prepared(objective: nn.Module, way: Way, device: torch.device) -> Prepared:
    """The objective computed in that way."""
    compiled = torch.compile(objective, dynamic=False) if way.compiled else objective

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        run = compiled if torch.is_grad_enabled() else objective
        with torch.autocast(device.type, torch.bfloat16, enabled=way.precision == "bf16"):
            return cast(Tensor, run(inputs, targets))

    return Prepared(loss_of, way)


class Trial(msgspec.Struct, frozen=True):
    """What came of a way: the seconds of a micro-batch forward and backward, its mean loss; or why it does not work."""

    prepared: Prepared
    seconds: float = math.inf
    loss: float = math.nan
    failure: str | None = None


def trial(objective: nn.Module, way: Prepared, batch: tuple[Tensor, Tensor], times: int) -> Trial:
    """Try a way: once to set it up, then for the best time, a few times if it is slow and often if it is not."""
    inputs, targets = batch
    best, value, spent = math.inf, math.nan, 0.0
    try:
        for number in range(1 + times):
            begin = time.perf_counter()
            loss = way.loss_of(inputs, targets) / targets.numel()
            torch.autograd.backward(loss)
            objective.zero_grad(set_to_none=True)
            value = loss.item()  # waits for the device
            if number:
                seconds = time.perf_counter() - begin
                best, spent = min(best, seconds), spent + seconds
            if spent > (1.0 if number >= 3 else 5.0):  # in seconds; short times differ more from one to the next
                break
    except Exception as error:  # compilers fail with errors of every kind
        objective.zero_grad(set_to_none=True)
        if not way.way.compiled:
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return Trial(way, failure=f"{type(error).__name__}: {reason}")
    return Trial(way, best, value)


def compiling_pays(objective: nn.Module, seconds: float, precision: str) -> bool:
    """Whether compiling saves more than it takes (on CPUs 10 s and 3 a layer), of so many seconds uncompiled.

    Experts do not compile: which tokens they get, and so how many, differs in every step.
    """
    layers = sum(isinstance(module, Block) for module in objective.modules())
    sparse = any(isinstance(module, Experts) for module in objective.modules())
    return not sparse and seconds * SPEEDUP[precision] > 2 * (10 + 3 * layers)


def median_sizes(objective: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of the median linear layer: what the products of a step are like."""
    shapes = sorted((m.in_features, m.out_features) for m in objective.modules() if isinstance(m, nn.Linear))
    return shapes[len(shapes) // 2] if shapes else (1, 1)


def bf16_is_faster(device: torch.device, rows: int, sizes: tuple[int, int]) -> bool:
    """Whether products (rows, in) @ (in, out) are so much faster in bfloat16 that casting to it may pay."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    # Not too large to wait for, not too small to measure; by turns, and often: other processes come and go.
    rows, inner, outer = max(256, min(1024, rows)), max(256, sizes[0]), max(256, sizes[1])
    for _ in range(20):
        for dtype in best:
            x, weight = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, outer, dtype=dtype)
            begin = time.perf_counter()
            torch.mm(x, weight)
            best[dtype] = min(best[dtype], time.perf_counter() - begin)
    return best[torch.float32] > 1.5 * best[torch.bfloat16]


def matmul_peak(device: torch.device, precision: str) -> float:
    """Operations a second of a square matrix product on this device: the best of as many as fit into PEAK_SECONDS.

    Of three, on a machine that others use too, the best was between 211 and 331 GFLOP/s; of twenty, 321 and 343.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = 768 if device.type == "cpu" else 4096  # a hundredth of a second, and enough to be near the best
    a, took = torch.ones(size, size, device=device, dtype=dtype), list[float]()
    while len(took) < 3 or sum(took) < PEAK_SECONDS:
        began = time.perf_counter()
        float((a @ a)[0, 0])
        took.append(time.perf_counter() - began)
    return 2 * size**3 / min(took)


def memory_of(device: torch.device) -> int | None:
    """All the memory that a device has, in bytes; None where it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
