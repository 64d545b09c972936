"""The folder of a training run: one writer at a time, what a run goes on from, what a killed one left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from llmcli import checkpoint, compute, distributed, tensors
from llmcli.config import Recipe
from llmcli.distributed import Processes
from llmcli.errors import CheckpointError, LlmcliError, TrainingError, UsageError, remedy, unwritable
from llmcli.events import METRICS
from llmcli.model import Decoder

STATE, MOMENTS = "training.json", "training.safetensors"
"""What makes a checkpoint one that training goes on from: the run's state, and AdamW's moments by our tensor names."""


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stands, as written beside the weights. `stale` counts evaluations since the best one.

    `seconds` is how long it took to come here, in all processes one after the other.
    """

    step: int = 0
    tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    stale: int = 0
    seconds: float = 0.0
    sequences: int
    data: str
    tokenizer: str
    recipe: Recipe
    way: compute.Way | None = None


def read_state(folder: Path) -> State:
    """The state of the run that wrote this checkpoint. Raises CheckpointError when there is none."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except OSError:
        raise CheckpointError(f"{folder}: no {STATE}: not a checkpoint to resume from", "Use --init-from.") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{folder / STATE}: damaged ({error})", "Use --init-from.") from None


def last_good(out: Path, notes: list[str]) -> Path | None:
    """The checkpoint to go on from: `last`, or if that is damaged the newest of those kept. None where none is."""
    kept = sorted(out.glob("step-*"), reverse=True)
    damaged: list[LlmcliError] = []
    for folder in (out / "last", out / ".last.old", *kept):  # .last.old: see checkpoint.recover
        if not folder.is_dir():
            continue
        try:
            read_state(folder)
            checkpoint.plan(folder)
            tensors.read_header(folder / MOMENTS)
        except LlmcliError as error:
            damaged.append(error)
            continue
        if damaged:
            notes.append(f"{damaged[0].message}: going on from {folder}")
        return folder
    if damaged:
        raise damaged[0]
    notes.append(f"{out}: nothing to go on from; this is a new run")
    return None


def resumable(old: State, new: State, processes: int, out: Path, notes: list[str]) -> State:
    """The state to go on from. Raises TrainingError where what would go on is another run than the one that stopped.

    A step keeps its sequences: on another number of processes it is put together from more or fewer micro-batches.
    """
    anew = f"To start anew from these weights: --init-from {out / 'last'} --out another folder."
    if old.tokenizer != new.tokenizer:
        sizes = [state.recipe.model.vocab_size for state in (old, new)]
        said = f": its vocabulary has {sizes[0]:,} tokens, the recipe's {sizes[1]:,}" if sizes[0] != sizes[1] else ""
        raise TrainingError(f"{out}: the run has another tokenizer than this recipe{said}", anew)
    if old.data != new.data:
        raise TrainingError(
            f"{out}: the run was trained on another text than this recipe's (its content differs)", anew
        )
    was, now = (cast(dict[str, Any], msgspec.to_builtins(state.recipe.model)) for state in (old, new))
    if differ := [f"{key} {was[key]} is now {now[key]}" for key in was if was[key] != now[key]]:
        raise TrainingError(f"{out}: the run's model is not this recipe's: {', '.join(differ)}", anew)
    size = new.recipe.train.batch_size
    if old.sequences % (size * processes):
        many = f" on {processes} processes" if processes > 1 else ""
        raise TrainingError(
            f"{out}: a step of the run has {old.sequences} sequences, which batches of {size}{many} do not make up",
            f"Choose a train.batch_size that does. {anew}",
        )
    if old.sequences != new.sequences:
        notes.append(
            f"a step keeps its {old.sequences} sequences: {old.sequences // (size * processes)} batches of {size}"
            f" on each of {processes} processes"
        )
    was, now = (cast(dict[str, Any], msgspec.to_builtins(state.recipe.train)) for state in (old, new))
    notes += [f"train.{key} was {was[key]}, is now {now[key]}" for key in was if was[key] != now[key]]
    ends = [plan.schedule_steps or plan.max_steps for plan in (old.recipe.train, new.recipe.train)]
    if ends[0] != ends[1] and new.recipe.train.schedule != "constant":
        notes.append(
            f"the learning rate's schedule moved: it ends at step {ends[1]:,} instead of {ends[0]:,} "
            "(train.schedule_steps keeps it where it was)"
        )
    if old.recipe.data.shuffle != new.recipe.data.shuffle:
        notes.append(f"data.shuffle was {old.recipe.data.shuffle}, is now {new.recipe.data.shuffle}")
    return msgspec.structs.replace(old, recipe=new.recipe)


def moments_of(model: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state, a tensor each under `<what>.<our name>`; with no step made yet there is only a mark."""
    values = {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return values or {"steps": torch.zeros(1)}


def read_moments(path: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Put AdamW's state back; a parameter that had none (never reached by a gradient) has none again."""
    from safetensors.torch import load_file

    values = load_file(path)
    for name, parameter in model.named_parameters():
        keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in values]
        if keys:
            optimizer.state[parameter] = {key: distributed.like(values[f"{key}.{name}"], parameter) for key in keys}


def keep_copy(out: Path, step: int, count: int) -> None:
    """Let `last` stand a second time as `step-...`, sharing its files, and leave only the newest `count` of these."""
    with checkpoint.writing(out / f"step-{step:08d}") as aside:
        for file in (out / "last").iterdir():
            try:
                os.link(file, aside / file.name)
            except OSError:  # a file system without links
                shutil.copyfile(file, aside / file.name)
    for old in sorted(out.glob("step-*"))[:-count]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def claimed(out: Path, resume: bool, processes: Processes) -> Iterator[None]:
    """Hold the folder of a run, so that no second one writes there. Raises TrainingError, UsageError."""
    with ExitStack() as held:
        failure: LlmcliError | None = None
        if processes.first:
            try:
                held.enter_context(locked(out, resume))
            except LlmcliError as error:
                failure = error
        processes.outcome(failure)
        yield


@contextmanager
def locked(out: Path, resume: bool) -> Iterator[None]:
    """The lock of a run's folder; it falls with who holds it. A run that wrote nothing leaves no folder."""
    path = out / ".lock"
    try:
        if (out / "config.json").exists():
            raise UsageError(
                f"{out}: a checkpoint, not the folder of a run",
                f"A run's checkpoints lie in its folder: --out {out.parent}."
                if (out / STATE).exists() or (out.parent / METRICS).exists()
                else "Choose another folder: --out. To start from its weights: --init-from.",
            )
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise unwritable(out, error, TrainingError, "Choose another folder: --out.") from None
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # its holder has just removed it
                raise FileNotFoundError
        except ImportError:  # Windows
            pass
        except OSError:
            file.seek(0)
            raise TrainingError(
                f"{out}: another run is writing there (process {file.read().strip() or 'unknown'})",
                "Wait for it, or choose another folder: --out.",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            tidy(out)
            if not resume and any((out / name).exists() for name in ("last", "best")):
                raise UsageError(
                    f"{out}: holds a run already", "Go on with it (--resume), or choose another folder: --out."
                )
            yield
        finally:
            with suppress(OSError):  # another run is there by now, or Windows keeps what is open
                if os.listdir(out) == [path.name]:
                    path.unlink()
                    for folder in made:
                        folder.rmdir()


def tidy(out: Path) -> None:
    """Finish or remove what a killed run left half written. Only the holder of the lock may do this."""
    for name in {"best", "last", *(folder.name for folder in out.glob("step-*"))}:
        checkpoint.recover(out / name)
    for stray in out.glob(".*.writing"):
        shutil.rmtree(stray, ignore_errors=True) if stray.is_dir() else stray.unlink(missing_ok=True)


def clean_metrics(path: Path, step: int) -> None:
    """Leave in metrics.jsonl what had happened when the checkpoint of `step` was written: the rest will come again.

    Raises TrainingError where the disk refuses; the file is then what it was.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:  # a line that was being written when the process died
            continue
        if event.get("step", 0) <= step and event.get("event") != "done":
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.write_bytes(b"".join(kept))
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        what = f"{path}: cannot be written ({error.strerror}); nothing was changed"
        raise TrainingError(what, remedy(error)) from None
