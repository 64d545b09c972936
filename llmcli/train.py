"""Training: the loop on one page, and all that a step needs. It yields events and shows nothing.

Everything that a step does follows from the recipe, the weights, AdamW's moments and the step's number: the sequences,
the learning rate and the random numbers of dropout too. So a run that goes on from a checkpoint is, bit for bit, the
run that never stopped.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from llmcli import batches, checkpoint, compute, costs, data, distributed, families, hf_config, loss, params, tokenizer
from llmcli import model as models
from llmcli.config import Recipe, TrainConfig
from llmcli.data import Data
from llmcli.distributed import Processes, joined
from llmcli.errors import ConfigError, LlmcliError, TokenizerError, TrainingError, remedy
from llmcli.events import METRICS, Done, Eval, Event, Group, Sample, Saved, Start, Step
from llmcli.model import Decoder
from llmcli.run_folder import (
    MOMENTS,
    STATE,
    State,
    claimed,
    clean_metrics,
    keep_copy,
    last_good,
    moments_of,
    read_moments,
    read_state,
    resumable,
)
from llmcli.tokenizer import Tokenizer

REASONS = ("no improvement", "time limit", "finished", "SIGPIPE", "SIGHUP", "SIGINT", "SIGTERM")
"""Why a run ends; where processes disagree, what stands later holds."""


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    init_from: Path | None = None,
    stop: Callable[[], str | None] = lambda: None,
) -> Iterator[Event]:
    """Train the recipe's model into the folder `out`, yielding what happens as it happens.

    `resume` goes on from `out/last`; `init_from` starts anew from a checkpoint's weights. `stop` is asked after every
    step: a reason ends the run, saved. Raises a subclass of LlmcliError for everything that cannot be.
    """
    with joined(recipe.train.device) as processes, claimed(out, resume, processes):
        require_room(recipe, processes)
        with processes.in_turn(processes.local == 0):  # the first process of a machine tokenises, the others find it
            text = yield from data.prepare(recipe.data, recipe.model.vocab_size, out / "cache")
        # Nothing here keeps the run: what holds on to other processes must be gone before their connections are.
        yield from loop(Run(recipe, out, text, processes, resume, init_from), stop)


def loop(run: Run, stop: Callable[[], str | None]) -> Iterator[Event]:
    """Step after step until there is a reason to end: evaluate, save and report when it is time."""
    yield from run.settle()
    config, state, told = run.config, run.state, run.told
    first = state.step
    yield told(run.start())
    while True:
        step, reason = state.step, run.processes.agree(run.over(state) or stop(), REASONS)
        if step > first or config.max_steps == 0:  # what a resumed run starts with has been judged and saved
            if step % config.eval_every == 0 or reason == "finished":
                value = run.evaluate(step)
                yield told(value)
                state, better = judged(state, value)
                if better:
                    yield told(run.save(state, "best"))
                reason = reason or run.processes.agree(run.over(state), REASONS)
            if reason or step % (config.save_every or config.eval_every) == 0:
                yield told(run.save(msgspec.structs.replace(state, seconds=run.seconds_in_all()), "last"))
            if config.sample_every and step % config.sample_every == 0:
                yield told(run.sample(step))
        if reason:
            break
        update = run.update(step)
        state = msgspec.structs.replace(state, step=step + 1, tokens=state.tokens + run.step_tokens)
        if state.step % config.log_every == 0 or state.step in (first + 1, config.max_steps):
            yield told(run.report(state, update))
    yield told(run.done(state, reason))


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run will take from where it stands; `start` is how it would begin, or go on.

    `seconds` and `epochs` are of the `steps` that are left and their evaluations. `memory` is the most that was held in
    a few steps, `computed_memory` follows from sizes.
    """

    start: Start
    parameters: int
    steps: int
    seconds_per_step: float
    tokens_per_second: float
    seconds: float
    epochs: float
    memory: int
    computed_memory: int
    checkpoint_bytes: int


def dry_run(recipe: Recipe, *, resume: Path | None = None, init_from: Path | None = None, steps: int = 2) -> Estimate:
    """A run's time and memory, from a few steps and one batch of evaluation; nothing but the cache is written.

    `resume` is the folder of a run that would be gone on with: what is left of it is estimated.
    """
    with joined(recipe.train.device) as processes, tempfile.TemporaryDirectory() as folder:
        require_room(recipe, processes)
        text = data.finished(data.prepare(recipe.data, recipe.model.vocab_size, Path(folder)))
        run = Run(recipe, resume or Path(folder), text, processes, resume is not None, init_from, writes=False)
        for _ in run.settle():
            pass
        config, size = run.config, run.config.batch_size * processes.count
        first = run.state.step
        for step in range(1 + steps):
            if step == 1:  # the first step also sets things up
                run.spent = 0.0
            run.update(first + step)
        each = run.spent / steps
        began = time.perf_counter()
        run.evaluate(0, size)
        windows = -(-(len(text.validation) - 1) // run.context)
        rounds = -(-min(windows, config.eval_batches * run.sequences or windows) // size)
        left = max(0, config.max_steps - first)
        times = evaluations_left(config, first)
        evaluations = (time.perf_counter() - began) * rounds * times
        model, batch = run.recipe.model, config.batch_size
        memory = costs.training_memory(model, dtype="float32", context=run.context, batch=batch)
        count = params.count(model).total
        return Estimate(
            start=run.start(),
            parameters=count,
            steps=left,
            seconds_per_step=each,
            tokens_per_second=run.step_tokens / each,
            seconds=each * left + evaluations,
            epochs=left * run.sequences / batches.windows(len(text.train), run.context),
            memory=compute.peak_memory(run.device),
            computed_memory=memory.total_chunked,
            checkpoint_bytes=3 * 4 * count,  # weights and two moments in float32
        )


def evaluations_left(config: TrainConfig, step: int) -> int:
    """How often a run that stands at a step is still evaluated: at multiples of `eval_every`, and at the end."""
    if step >= config.max_steps:
        return int(step == 0)  # of no steps at all the start is judged
    return -(-config.max_steps // config.eval_every) - step // config.eval_every


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the update that follows `step` others: up to `lr` over the warm-up, then down to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    down_from, end = config.warmup_steps, config.schedule_steps or config.max_steps
    if config.schedule == "wsd":
        down_from = max(down_from, end - round(end * config.decay_fraction))
    progress = min(1.0, max(0.0, (step - down_from) / max(1, end - down_from)))
    kept = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + kept * (config.lr - config.min_lr)


def judged(state: State, value: Eval) -> tuple[State, bool]:
    """The state after an evaluation, and whether that was the best one so far."""
    if state.best_loss is None or value.val_loss < state.best_loss:
        return msgspec.structs.replace(state, best_loss=value.val_loss, best_step=value.step, stale=0), True
    return msgspec.structs.replace(state, stale=state.stale + 1), False


class Objective(nn.Module):
    """A model with its loss: what is compiled, and spread over processes, as one."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) -> summed loss in nats, float32
        hidden = self.model.hidden(inputs)
        head = self.model.output_projection
        weight = self.model.token_embeddings.weight if head is None else head.weight
        bias = None if head is None else head.bias
        return loss.cross_entropy(hidden, weight, bias, targets, softcap=self.model.config.logit_softcap)


class Run:
    """All that a step needs: model, optimiser and data, at the place where the run stands."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        text: Data,
        processes: Processes,
        resume: bool,
        init_from: Path | None,
        writes: bool = True,
    ) -> None:
        self.began = time.monotonic()
        self.processes, self.device = processes, processes.device
        processes.require_equal("text or tokenizer", text.fingerprint)
        self.notes: list[str] = []
        self.recipe = recipe = fitted(recipe, text.tokenizer, self.notes)
        self.config, self.context = recipe.train, cast(int, recipe.train.context)
        data.check_length(text, self.context)
        require_room(recipe, processes, settled=True)
        self.opening = opening(recipe, text) if self.config.sample_every else []
        self.out, self.text = out, text
        self.state = State(
            sequences=self.config.batch_size * self.config.accumulation * processes.count,
            data=text.fingerprint,
            tokenizer=text.tokenizer.fingerprint,
            recipe=recipe,
        )
        self.model = models.build(recipe.model, self.config.seed)
        source = last_good(out, self.notes) if resume else None
        if source:
            self.state = resumable(read_state(source), self.state, processes.count, out, self.notes)
            reason = self.over(self.state) or ""
            if key := {"finished": "max_steps", "no improvement": "patience"}.get(reason):
                self.notes.append(
                    f"nothing is left to do: {reason} at step {self.state.step:,}; --set train.{key}=N trains on"
                )
        processes.require_equal("checkpoint to go on from", f"step {self.state.step}")
        self.sequences = self.state.sequences
        self.accumulation = self.sequences // (self.config.batch_size * processes.count)
        self.step_tokens = self.sequences * self.context
        if source or init_from:
            fill(self.model, cast(Path, source or init_from), text.tokenizer)
        self.model.to(self.device).train()
        self.objective = distributed.spread(
            Objective(self.model), self.model.blocks, self.config.strategy, processes, bool(recipe.model.num_experts)
        )
        self.order = batches.Order(len(text.train), self.context, self.config.seed, recipe.data.shuffle)
        self.weights = list(self.model.parameters())  # as spread; looking for them takes longer than a small product
        self.optimizer, self.groups = make_optimizer(self.model, self.config)
        if source:
            read_moments(source / MOMENTS, self.model, self.optimizer)
        self.flops = costs.flops(recipe.model, context=self.context).training
        self.spent, self.since = 0.0, 0  # seconds and tokens of training since the last report
        if processes.first and writes:
            clean_metrics(out / METRICS, self.state.step if source else -1)

    def settle(self) -> Iterator[Event]:
        """Choose how steps are computed: as before in a run that goes on, else by measuring."""
        config, known = self.config, self.state.way
        if self.processes.count > 1 and known is None:
            sizes = compute.median_sizes(self.objective)
            faster = compute.bf16_is_faster(self.device, config.batch_size * self.context, sizes)
            known = compute.Way(
                "bf16" if self.processes.agree("bf16" if faster else None, ("bf16",)) else "fp32", False
            )
        rounds = (config.max_steps - self.state.step) * self.accumulation
        batch = self.batch(self.state.step, 0)
        self.prepared, notes = yield from compute.prepare(self.objective, config, self.device, batch, rounds, known)
        self.notes += notes
        self.state = msgspec.structs.replace(self.state, way=self.prepared.way)
        self.peak = compute.matmul_peak(self.device, self.prepared.way.precision)

    def update(self, step: int) -> tuple[float, float, float]:
        """One step: the mean loss, the gradient's norm before clipping, the learning rate.

        Raises TrainingError when loss or gradient is not finite; the weights are then those of before.
        """
        began, rate = time.perf_counter(), learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.recipe.model.dropout:
            torch.manual_seed(seed_of(self.config.seed, step, self.processes.rank))
        total = torch.zeros((), device=self.device)
        for micro in range(self.accumulation):
            with distributed.exchanging(self.objective, last=micro + 1 == self.accumulation):
                value = self.prepared.loss_of(*self.batch(step, micro))
                torch.autograd.backward(value * (self.processes.count / self.step_tokens))  # DDP and FSDP take the mean
            total += value.detach()
        weights = [weight for weight in self.weights if weight.grad is not None]
        norm = distributed.scalar(nn.utils.get_total_norm([cast(Tensor, weight.grad) for weight in weights]))
        mean, size = torch.stack((self.processes.total(total) / self.step_tokens, norm)).tolist()
        if not (math.isfinite(mean) and math.isfinite(size)):
            what = f"loss is {mean}" if not math.isfinite(mean) else f"gradient's norm is {size}"
            raise TrainingError(f"step {step + 1}: the {what}", self.advice())
        if self.config.grad_clip:
            nn.utils.clip_grads_with_norm_(weights, self.config.grad_clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.spent += time.perf_counter() - began
        self.since += self.step_tokens
        return mean, size, rate

    def batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one micro-batch, (B, T) each."""
        size = self.config.batch_size
        first = step * self.sequences + (micro * self.processes.count + self.processes.rank) * size
        both = torch.from_numpy(batches.sequences(self.text.train, self.context, self.order(first, size)))
        return both[:, :-1].to(self.device), both[:, 1:].to(self.device)

    @torch.no_grad()
    def evaluate(self, step: int, windows: int | None = None) -> Eval:
        """The loss on the validation text: on all of it, or always on the same windows of it."""
        # Again, for what else the machine did may have slowed the first measurement.
        self.peak = max(self.peak, compute.matmul_peak(self.device, self.prepared.way.precision))
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)  # loss and tokens
        size, count = self.config.batch_size, self.processes.count
        limit = self.config.eval_batches * self.sequences if windows is None else windows
        every = batches.held_out(self.text.validation, self.context, size, limit)
        for both in batches.shared(every, self.processes.rank, count):
            inputs, targets = torch.from_numpy(both[:, :-1]).clamp(min=0), torch.from_numpy(both[:, 1:])
            sums[0] += self.prepared.loss_of(inputs.to(self.device), targets.to(self.device)).double().cpu()
            sums[1] += (targets >= 0).sum()
        self.model.train()
        total, tokens = self.processes.total(sums.to(self.device) if count > 1 else sums).tolist()
        mean = total / tokens
        if not math.isfinite(mean):
            raise TrainingError(f"step {step}: the validation loss is {mean}", self.advice())
        perplexity = math.exp(mean) if mean < 700 else math.inf
        bits = mean / math.log(2) / self.text.bytes_per_token
        return Eval(step=step, val_loss=mean, perplexity=perplexity, bits_per_byte=bits)

    def save(self, state: State, name: str) -> Saved:
        """Write `out/name`, whole or not at all; `last` with all that a run needs to go on from it."""
        norm = distributed.scalar(nn.utils.get_total_norm(self.weights))
        if not math.isfinite(float(norm)):
            raise TrainingError(f"step {state.step}: a weight is not finite", self.advice())
        moments = moments_of(self.model, self.optimizer) if name != "best" else {}
        ids = {"bos_token_id": self.text.tokenizer.bos_id, "eos_token_id": self.text.tokenizer.eos_id}
        weights = self.model.state_dict()
        ordered = [(key, weights[key]) for key in checkpoint.order(self.model.config)]
        gather = distributed.Gathering([*ordered, *moments.items()])

        def extra(folder: Path) -> None:
            self.text.tokenizer.save(folder)
            (folder / "generation_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(ids)) + b"\n")
            if moments:
                (folder / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
                infos = [(key, value.dtype, tuple(value.shape)) for key, value in moments.items()]
                checkpoint.write_tensors(folder / MOMENTS, infos, gather)

        failure: LlmcliError | None = None
        if self.processes.first:
            try:
                checkpoint.save(self.model, self.out / name, extra_config=ids, extra_files=extra, weights=gather)
                if name == "last" and self.config.keep:
                    keep_copy(self.out, state.step, self.config.keep)
            except LlmcliError as error:
                failure = error
        gather.finish()
        self.processes.outcome(failure)
        return Saved(step=state.step, path=printable(self.out / name), best=name == "best")

    def sample(self, step: int) -> Sample:
        """What the model writes after the prompt of the recipe, always with the same draw."""
        from llmcli import generate

        sampling = generate.Sampling(max_new_tokens=self.config.sample_tokens, seed=self.config.seed)
        model, text = self.whole_model(), ""
        if self.processes.first:
            pieces = generate.complete(model.eval(), self.text.tokenizer, [self.opening], sampling)
            text = "".join(piece.text for piece in pieces)
        self.model.train()
        return Sample(step=step, prompt=self.config.sample_prompt, text=text)

    def whole_model(self) -> Decoder:
        """The model; where it is in shards, a copy on the CPU, for the first process."""
        if not distributed.is_sharded(self.objective):
            return self.model
        weights = {name: distributed.whole(value) for name, value in self.model.state_dict().items()}
        with torch.device("meta"):
            copy = Decoder(self.recipe.model)
        copy.load_state_dict(weights, assign=True)
        return copy

    def start(self) -> Start:
        """What is going to be trained, and how."""
        count = params.count(self.recipe.model)
        return Start(
            step=self.state.step,
            max_steps=self.config.max_steps,
            out=printable(self.out),
            parameters=count.total,
            tie_word_embeddings=self.recipe.model.tie_word_embeddings,
            vocab_size=self.recipe.model.vocab_size,
            context=self.context,
            source=self.text.source,
            train_tokens=len(self.text.train),
            validation_tokens=len(self.text.validation),
            step_tokens=self.step_tokens,
            device=str(self.device),
            precision=self.prepared.way.precision,
            compiled=self.prepared.way.compiled,
            processes=self.processes.count,
            groups=self.groups,
            notes=tuple(map(printable, self.notes)),
        )

    def report(self, state: State, update: tuple[float, float, float]) -> Step:
        """The last update, with the speed since the report before."""
        (mean, norm, rate), speed = update, self.since / max(self.spent, 1e-9)
        self.spent, self.since = 0.0, 0
        return Step(
            step=state.step,
            loss=mean,
            lr=rate,
            grad_norm=norm,
            tokens=state.tokens,
            tokens_per_second=speed,
            mfu=speed * self.flops / self.peak,
            memory=compute.peak_memory(self.device),
        )

    def over(self, state: State) -> str | None:
        """Why the run ends here by its own rules, or None."""
        if state.step >= self.config.max_steps:
            return "finished"
        if self.config.patience and state.stale >= self.config.patience:
            return "no improvement"
        if self.config.time_limit and time.monotonic() - self.began >= self.config.time_limit:
            return "time limit"
        return None

    def done(self, state: State, reason: str) -> Done:
        """The end of the run."""
        return Done(
            step=state.step,
            reason=reason,
            tokens=state.tokens,
            best_loss=state.best_loss,
            best_step=state.best_step,
            seconds=time.monotonic() - self.began,
            seconds_in_all=self.seconds_in_all(),
            out=printable(self.out),
        )

    def seconds_in_all(self) -> float:
        """How long the run has taken, with what it took before it was gone on with."""
        return self.state.seconds + time.monotonic() - self.began

    def told(self, event: Event) -> Event:
        """The event, written to metrics.jsonl as well."""
        if not self.processes.first:
            return event
        try:
            with (self.out / METRICS).open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            said = f"{self.out / METRICS}: cannot be written ({error.strerror})"
            raise TrainingError(said, f"{remedy(error)} {self.saved()}") from None
        return event

    def advice(self) -> str:
        """What a run whose numbers went wrong leaves behind, and how to go on."""
        return f"{self.saved()} Try a lower train.lr, a longer train.warmup_steps, or fp32."

    def saved(self) -> str:
        """What a run that had to stop leaves behind."""
        try:
            step = read_state(self.out / "last").step
        except LlmcliError:
            return "Nothing was saved yet."
        return f"{self.out / 'last'} holds step {step}: --resume goes on from there."


def fitted(recipe: Recipe, by: Tokenizer, notes: list[str]) -> Recipe:
    """The recipe with all that hangs on tokenizer, model and place filled in: vocab_size, context, whole paths.

    A tokenizer made from the text decides vocab_size; one that exists must fit into it. Raises ConfigError.
    """
    config, text = recipe.model, recipe.data
    if text.tokenizer in ("bpe", "char", "byte"):
        if by.size != config.vocab_size:
            notes.append(
                f"vocab_size is {by.size:,} instead of {config.vocab_size:,}: the text's tokenizer has so many"
            )
            config = msgspec.structs.replace(config, vocab_size=by.size)
    else:
        text = msgspec.structs.replace(text, tokenizer=whole_path(text.tokenizer))
        if by.size > config.vocab_size:
            raise ConfigError(
                f"the tokenizer {recipe.data.tokenizer} has {by.size:,} tokens, the model {config.vocab_size:,} rows",
                f"Use --set model.vocab_size={by.size}.",
            )
        if by.size < config.vocab_size:
            notes.append(f"{config.vocab_size - by.size:,} of the model's {config.vocab_size:,} rows have no token")
    for key in ("path", "validation_path"):
        if (value := getattr(text, key)) is not None:
            path = whole_path(value) if isinstance(value, str) else tuple(map(whole_path, value))
            text = msgspec.structs.replace(text, **{key: path})
    config = families.complete(config)
    if reasons := hf_config.private_reasons(config):
        notes.append(
            f"transformers has no such {config.family}: {', '.join(reasons)}. The checkpoints open here, not there "
            f"(model_type {hf_config.PRIVATE}{config.family})"
        )
    context = recipe.train.context or min(config.max_position_embeddings, 1024)
    if context > config.max_position_embeddings:
        raise ConfigError(
            f"train.context {context} is more than the model's {config.max_position_embeddings} positions",
            f"Use --set train.context={config.max_position_embeddings}, or a model with more positions.",
        )
    changed = msgspec.structs.replace(recipe.train, context=context)
    return msgspec.structs.replace(recipe, model=config, data=text, train=changed)


MOST_TOKENS = 1_000_000_000
"""The most tokens of one step: some fifty times as many as in the largest public runs."""


def require_room(recipe: Recipe, processes: Processes, settled: bool = False) -> None:
    """Refuse sizes that no step can have, before there is work. Raises ConfigError.

    Until it is `settled`, a vocabulary that the text has yet to decide counts as the smallest there is.
    """
    config, model = recipe.train, families.complete(recipe.model)
    context = config.context or min(model.max_position_embeddings, 1024)
    if (tokens := config.batch_size * config.accumulation * context * processes.count) > MOST_TOKENS:
        raise ConfigError(
            f"a step of {tokens:,} tokens: more than {MOST_TOKENS:,}",
            f"Take a smaller train.batch_size (now {config.batch_size:,}), train.accumulation (now "
            f"{config.accumulation:,}) or train.context (now {context:,}).",
        )
    if not settled and recipe.data.tokenizer in ("bpe", "char", "byte"):
        model = msgspec.structs.replace(model, vocab_size=min(model.vocab_size, 257))
    shared = processes.count if config.strategy == "fsdp" else 1
    if memory := compute.memory_of(processes.device):
        costs.require_room(model, context=context, batch=config.batch_size, memory=memory * shared)


def opening(recipe: Recipe, text: Data) -> list[int]:
    """The ids that samples go on from: the prompt's; without one what ends a text, a new line, or the text's first.

    Raises ConfigError for a prompt that the tokenizer cannot spell, or the model has no positions for.
    """
    prompt, by, model = recipe.train.sample_prompt, text.tokenizer, recipe.model
    if not prompt and by.eos_id is not None:
        return [by.eos_id]
    try:
        ids = by.encode(prompt or "\n")
    except TokenizerError as error:
        if prompt:
            raise ConfigError(f"train.sample_prompt: {error.message}", error.hint) from None
        ids = []
    if not prompt:
        return ids[:1] or [int(text.train[0])]
    most = model.max_position_embeddings
    if families.get(model.family).learned_positions and len(ids) > most:
        raise ConfigError(
            f"train.sample_prompt has {len(ids):,} tokens, the model {most:,} learned positions", "Shorten it."
        )
    return ids


def whole_path(path: str | Path) -> str:
    """A path from the root that JSON can hold: a name that is no UTF-8 has its bytes spelled out."""
    return printable(os.path.abspath(path))


def printable(path: str | Path) -> str:
    """A path that JSON can hold."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def make_optimizer(model: Decoder, config: TrainConfig) -> tuple[torch.optim.AdamW, tuple[Group, ...]]:
    """AdamW (arXiv:1711.05101): weight decay on matrices, never on norms and biases, on embeddings as configured."""
    sorts: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "norms and biases": []}
    for name, parameter in model.named_parameters():
        embedding = name.split(".")[0] in ("token_embeddings", "position_embeddings")
        sorts["norms and biases" if parameter.ndim < 2 else "embeddings" if embedding else "matrices"].append(parameter)
    decay = {
        "matrices": config.weight_decay,
        "embeddings": config.weight_decay if config.decay_embeddings else 0.0,
        "norms and biases": 0.0,
    }
    sorts = {name: members for name, members in sorts.items() if members}
    by_decay: dict[float, list[nn.Parameter]] = {}  # each of the optimiser's own groups is a call more in every step
    for name, members in sorts.items():
        by_decay.setdefault(decay[name], []).extend(members)
    optimizer = torch.optim.AdamW(
        [{"params": members, "weight_decay": value} for value, members in by_decay.items()],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    groups = tuple(
        Group(name, decay[name], len(members), sum(parameter.numel() for parameter in members))
        for name, members in sorts.items()
    )
    return optimizer, groups


def seed_of(*numbers: int) -> int:
    """One seed for torch's generator from several numbers."""
    return batches.mixed(*numbers) & (2**63 - 1)


def fill(model: Decoder, path: Path, by: Tokenizer) -> None:
    """Copy a checkpoint's weights into a model of the same tensors and tokens. Raises TrainingError if they differ."""
    loaded, _ = checkpoint.load(path, dtype=torch.float32)
    try:
        theirs_by = tokenizer.load(path)
    except TokenizerError:  # it has none: whoever gave one knows why
        theirs_by = by
    if theirs_by.fingerprint != by.fingerprint:
        raise TrainingError(
            f"{path}: its tokenizer is not the recipe's, so its rows stand for other tokens",
            f"Use the checkpoint's: --set data.tokenizer={path}.",
        )
    theirs, ours = loaded.config, model.config
    if theirs.family != ours.family or theirs.tie_word_embeddings != ours.tie_word_embeddings:
        what = "family" if theirs.family != ours.family else "tie_word_embeddings"
        raise TrainingError(
            f"{path}: its {what} is {getattr(theirs, what)}, the recipe's {getattr(ours, what)}".lower(),
            "Leave the recipe's [model] to the checkpoint.",
        )
    values, wanted = loaded.state_dict(), model.state_dict()
    differ = [name for name in wanted.keys() | values.keys() if name not in values or name not in wanted]
    differ += [name for name in wanted if name in values and values[name].shape != wanted[name].shape]
    if differ:
        raise TrainingError(
            f"{path}: its tensors are not the recipe's: {', '.join(sorted(differ)[:8])}",
            "Leave the recipe's [model] to the checkpoint.",
        )
    model.load_state_dict(values)
