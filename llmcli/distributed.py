"""Many processes on PyTorch's own engine: what torchrun says, DDP or FSDP2, and the few exchanges that a run needs.

Every process computes the same number of passes; what is summed is summed over all. Weights leave a sharded model one
whole tensor at a time, so that there is one checkpoint format however many processes wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from llmcli.errors import LlmcliError, TrainingError, UsageError

PATIENCE = timedelta(hours=1)
"""How long a process waits for the others: the first one may be tokenising."""


def rank() -> int:
    """This process's number among all, 0 where there is only one."""
    return _number("RANK", 0)


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default


class Processes:
    """This process and its number among all of them; with one, every exchange is the identity."""

    def __init__(self, rank: int, count: int, local: int, device: torch.device) -> None:
        self.rank, self.count, self.local, self.device = rank, count, local, device
        self.first = rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def agree(self, word: str | None, words: tuple[str, ...]) -> str | None:
        """The word that any process says, of several the last in `words`; None when all say None."""
        if self.count == 1:
            return word
        place = torch.tensor(words.index(word) + 1 if word else 0, device=self.device)
        dist.all_reduce(place, dist.ReduceOp.MAX)
        return words[int(place) - 1] if int(place) else None

    def require_equal(self, what: str, value: str) -> None:
        """Raise TrainingError unless every process has the same value."""
        if self.count == 1:
            return
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        if differ := [str(n) for n, other in enumerate(values) if other != values[0]]:
            raise TrainingError(
                f"processes {', '.join(differ)} have another {what} than process 0",
                "Give all of them the same files, and a folder for the run that all of them see.",
            )

    @contextmanager
    def in_turn(self, leads: bool) -> Iterator[None]:
        """Let those that lead do the block first, the others after them."""
        if self.count > 1 and not leads:
            self.barrier()
        yield
        if self.count > 1 and leads:
            self.barrier()

    def barrier(self) -> None:
        """Wait until every process is here, or has failed: then raise TrainingError."""
        self.outcome(None)

    def outcome(self, failure: LlmcliError | None) -> None:
        """Tell the others whether what this process did alone went well. Raises what failed, here and there."""
        if self.count > 1:
            failed = torch.tensor(float(failure is not None), device=self.device)
            dist.all_reduce(failed)
            if failure is None and failed:
                raise TrainingError("another process of the run had to stop", "Its own message says why.")
        if failure is not None:
            raise failure


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone. Raises UsageError for a device that is not there.

    What PyTorch reports when another process dies becomes a TrainingError.
    """
    count, local = _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    place = find_device(device, local)
    if count == 1:
        yield Processes(0, 1, 0, place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = {"cuda": "nccl", "cpu": "gloo"}.get(place.type)
    if backend is None:
        raise UsageError(f"train.device = '{place.type}': not for several processes", "Use cuda or cpu.")
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
        yield Processes(dist.get_rank(), count, local, place)
        dist.barrier()  # nobody takes the connections down under another's last exchange
    except RuntimeError as error:  # all of PyTorch's own are RuntimeErrors
        if not _is_lost_connection(error):
            raise
        raise TrainingError(
            f"process {rank()}: another process of the run is gone ({str(error).splitlines()[0][:200]})",
            "Start the run again with --resume: it goes on from its last checkpoint.",
        ) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_lost_connection(error: RuntimeError) -> bool:
    words = ("connection", "gloo", "nccl", "socket", "timed out", "peer")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def gpu_present() -> bool:
    """Whether there is any accelerator that PyTorch can use."""
    return torch.accelerator.is_available()


def find_device(name: str, local: int = 0) -> torch.device:
    """The device of that name; `auto` is this process's GPU, else the CPU. Raises UsageError for one not there."""
    if name == "auto":
        name = cast(torch.device, torch.accelerator.current_accelerator()).type if gpu_present() else "cpu"
    try:
        device = torch.device(name, local) if name == "cuda" else torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"train.device = '{name}': {str(error).splitlines()[0]}", "Use auto, cpu, cuda or mps."
        ) from None
    return device


def spread(objective: nn.Module, blocks: nn.ModuleList, strategy: str, processes: Processes, sparse: bool) -> nn.Module:
    """The objective over all processes: copied (DDP) or in shards (FSDP2, arXiv:2304.11277).

    Each block is a unit of its own; the rest, embeddings, final norm and output, is the root unit's, so a tied matrix
    is one parameter in one unit. `sparse` says that a step may leave parameters without gradient (experts).
    """
    if processes.count == 1:
        return objective
    if strategy != "fsdp":
        return DistributedDataParallel(objective, find_unused_parameters=sparse)
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh).set_reduce_scatter_unused_params(sparse)
    return objective


def exchanging(objective: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Gradients are exchanged with the last micro-batch of a step; before, they only add up here."""
    if isinstance(objective, FSDPModule):
        objective.set_requires_gradient_sync(last)
    elif isinstance(objective, DistributedDataParallel) and not last:
        return cast("AbstractContextManager[None]", objective.no_sync())
    return nullcontext()


def is_sharded(objective: nn.Module) -> bool:
    """Whether each process holds only its part of the weights."""
    return isinstance(objective, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, on the CPU; every process must ask for it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """Whole values as the parameter is kept: on its device, and this process's shard of them."""
    values = values.to(parameter.device)
    if isinstance(parameter, DTensor) and values.shape == parameter.shape:
        return distribute_tensor(values, parameter.device_mesh, parameter.placements)
    return values.clone()


def scalar(value: Tensor) -> Tensor:
    """A number that may be partial in each process, as the whole."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Gathering:
    """Whole tensors in a fixed order, for one process that writes and others that help.

    If writing fails, `finish` asks for the rest, so that nobody waits for a process that gave up.
    """

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        self.waiting = dict(tensors)

    def __call__(self, name: str) -> Tensor:
        """The whole tensor of that name, on the CPU; the writer asks in the order in which `finish` would."""
        return whole(self.waiting.pop(name))

    def finish(self) -> None:
        """Help with all that was not asked for here."""
        for name, tensor in list(self.waiting.items()):
            if isinstance(tensor, DTensor):
                self(name)
