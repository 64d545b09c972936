"""llmcli load-hf: any checkpoint checked, loaded and, if asked, written clean."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from llmcli.commands import OUTPUT, AsJson, Checkpoint, Dtype, Keep, Offline, Revision, Tie
from llmcli.output import emit, facts, progress, quantity, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from llmcli.mapping import Plan
    from llmcli.verify import Verification

GROUP = "Checkpoints"

Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write a clean checkpoint to this folder.", rich_help_panel=OUTPUT)
]
Check = Annotated[bool, typer.Option("--check", help="Stop after the headers: read no weights.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare logits with transformers, where it is installed.")]
Head = Annotated[
    Literal["none", "copy"],
    typer.Option(
        help="Write a tied output a second time (copy), for tools that look for it by name.", rich_help_panel=OUTPUT
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Split the weights into files of at most this size: 500MB; default: 5GB.",
        rich_help_panel=OUTPUT,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the checkpoint that is already at --out.", rich_help_panel=OUTPUT)
]


class TieReport(msgspec.Struct, frozen=True):
    """What was decided about the output matrix, and why."""

    decision: str
    reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds and what became of it; `verify` only where it was asked for."""

    family: str
    parameters: int
    tie: TieReport
    ignored: tuple[str, ...]
    warnings: tuple[str, ...]
    out: str | None
    verify: Verification | msgspec.UnsetType = msgspec.UNSET


def run(
    source: Checkpoint,
    out: Out = None,
    check: Check = False,
    verify: Verify = False,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    head: Head = "none",
    shard_size: ShardSize = None,
    force: Force = False,
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> int:
    """Check a checkpoint against its family, load it, and say how; --out writes it clean.

    Nothing is filled in and nothing dropped unsaid: what does not fit is refused, and all of it is named.
    Exits with 1 where values are not finite, as inspect --full does; --out has them as they are.

    Example: llmcli load-hf ./gpt2 --tie untie --out ./gpt2-untied
    """
    from llmcli import targets

    _refuse_combinations(out, check, verify, tie, keep, dtype, head, shard_size, force)
    verification: Verification | None = None
    problems: list[str] = []
    odd: list[str] = []
    if check:
        plan = _plan(source, tie, keep, revision, offline)
    else:
        shard_bytes = parse_size(shard_size) if shard_size else None
        path = targets.find_checkpoint(source, revision=revision, offline=offline)
        if out:
            _refuse_target(path, out, force)
        plan, problems, odd = _load(path, out, tie, keep, dtype, head, shard_bytes)
        if verify:
            from llmcli.verify import verify as compare

            if out and (dtype or tie != "auto" or keep):  # the source holds something else
                verification = msgspec.structs.replace(compare(out), written=True)
            else:
                verification = compare(path, out)
    report = summary(plan, [*odd, *problems], out, verification)
    if as_json or _apart():  # the report goes elsewhere: what matters is said here
        for warning in report.warnings:
            warn(warning)
    emit(report, lambda result: view(result, plan.notes, problems), as_json)
    if verification and not verification.agrees:
        from llmcli.errors import CheckpointError

        if verification.max_logit == verification.max_difference == 0:
            raise CheckpointError(
                "every logit is 0, llmcli's and transformers': nothing was verified",
                "See which tensors hold only zeros: inspect --full.",
            )
        said = "; what transformers said of it is above" if verification.remarks else ""
        raise CheckpointError(
            f"llmcli's logits and transformers' differ by {verification.max_difference:.3g}, "
            f"more than the {verification.tolerance:.3g} that rounding explains",
            f"One of the two reads the checkpoint wrongly{said}.",
        )
    return int(bool(problems))


def _apart() -> bool:
    """Whether stdout and stderr end in two places."""
    try:
        return not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or no files at all
        return True


def _refuse_combinations(
    out: Path | None,
    check: bool,
    verify: bool,
    tie: Tie,
    keep: Keep,
    dtype: str | None,
    head: str,
    shard_size: str | None,
    force: bool,
) -> None:
    from llmcli.errors import UsageError

    needs_out = {"--head copy": head == "copy", "--shard-size": shard_size is not None, "--force": force}
    for option, given in needs_out.items():
        if given and out is None:
            raise UsageError(f"{option} says how to write, and nothing is written", "Add --out DIR.")
    for option, given in {"--out": out is not None, "--verify": verify, "--dtype": dtype is not None}.items():
        if check and given:
            raise UsageError(f"--check reads no weights, {option} needs them", "Leave one of them out.")
    changes = {f"--tie {tie}": tie != "auto", f"--keep {keep}": keep is not None}
    for option, given in changes.items():
        if verify and given and out is None:
            raise UsageError(
                f"{option}: --verify compares with transformers, which has the checkpoint as it is",
                "Add --out DIR: what is written is then compared.",
            )


def _refuse_target(source: Path, out: Path, force: bool) -> None:
    """Refuse an output folder whose replacement would lose something."""
    from llmcli.errors import UsageError

    target, origin = out.resolve(), source.resolve()
    if target == origin or target in origin.parents:
        raise UsageError(
            f"--out {out}: the source itself is there", "A source is never overwritten: name a new folder."
        )
    if target.exists() and not target.is_dir():
        raise UsageError(f"--out {out}: a file is where a folder belongs", "Name a new folder.")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise UsageError(f"--out {out}: is there already, and is no checkpoint", "Name a new folder.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(f"--out {out}: is there already", "Name a new folder, or replace the checkpoint with --force.")


def _plan(source: str, tie: Tie, keep: Keep, revision: str | None, offline: bool) -> Plan:
    """How the checkpoint would be loaded; of one on the Hub only the headers are fetched, and torch is not needed."""
    from llmcli import mapping, targets, tensors, weight_files

    path = None if targets.repo_id(source, revision) else targets.find_checkpoint(source)
    if path and any(file.suffix in weight_files.PICKLES for file in weight_files.find_files(path).paths):
        from llmcli import checkpoint

        return checkpoint.plan(path, tie, keep)
    headers = targets.read_headers(source, revision=revision, offline=offline)
    hf = targets.read_hf_config(headers.path)
    read = tensors.read_rows if headers.here else None
    return mapping.plan(headers.checkpoint, hf, source, request=tie, keep=keep, read=read)


def _load(
    path: Path, out: Path | None, tie: Tie, keep: Keep, dtype: str | None, head: str, shard_bytes: int | None
) -> tuple[Plan, list[str], list[str]]:
    """Load, look at every value once, and write; how it was loaded, what is wrong with values, and what is odd."""
    from llmcli import checkpoint

    model, plan = checkpoint.load(path, dtype=dtype, tie=tie, keep=keep)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with progress("reading", size, "B") as advance:

        def read() -> Iterator[checkpoint.Finding]:
            for finding in checkpoint.findings(model, plan):
                advance(finding.size)
                yield finding

        found = list(read())
    problems = checkpoint.not_finite(found, f" as {dtype}" if dtype else "")
    odd = [*checkpoint.only_zeros(found), *_tokenizer_remarks(path, plan.config.vocab_size)]
    if out:
        with progress("writing", size, "B") as advance:
            checkpoint.save(
                model,
                out,
                head_copy=head == "copy",
                extra_config=_carried_keys(path),
                extra_files=lambda folder: checkpoint.carry(path, folder),
                shard_bytes=shard_bytes or checkpoint.SHARD_BYTES,
                on_bytes=advance,
            )
    return plan, problems, odd


def _tokenizer_remarks(path: Path, rows: int) -> list[str]:
    """What is wrong with the tokenizer that lies beside the weights, if one does that can be read here."""
    from llmcli.errors import TokenizerError
    from llmcli.names import Names

    names = Names(path, rows)
    try:
        if not names.known:
            return []
        size = names.tokenizer.size
    except TokenizerError as error:
        return [f"its tokenizer cannot be read: {error.message}"]
    return [f"its tokenizer has {size:,} tokens, the model {rows:,} rows"] if size > rows else []


def _carried_keys(path: Path) -> dict[str, Any]:
    """What of the source's config.json goes along although the model has no use for it."""
    from llmcli import config, weight_files
    from llmcli.checkpoint import CARRIED_KEYS

    file = weight_files.inside(path if path.is_dir() else path.parent, "config.json")
    table = config.read_table(file) if file else {}
    inner = table.get("text_config")
    table = {**table, **inner} if isinstance(inner, dict) else table
    ids = {key: table[key] for key in CARRIED_KEYS if key in table}
    return {k: v for k, v in ids.items() if all(type(n) is int for n in (v if isinstance(v, list) else [v]))}


def parse_size(text: str) -> int:
    """ "5GB", "500 MB", "4096": a number of bytes (powers of ten). Raises UsageError."""
    from llmcli.errors import UsageError

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?)[bB]?\s*", text)
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
    size = int(float(found[1]) * factor[found[2].lower()]) if found else 0
    if size < 1:
        raise UsageError(f"--shard-size {text}: not a size", "For example 5GB or 500MB.")
    return size


def summary(
    plan: Plan, warnings: Iterable[str] = (), out: Path | None = None, verification: Verification | None = None
) -> Report:
    """A plan, and what was found on the way, as the command shows it."""
    from llmcli.params import count

    remarks = verification.remarks if verification else ()
    return Report(
        family=plan.config.family,
        parameters=count(plan.config).total,
        tie=TieReport(plan.tie.decision, plan.tie.reason),
        ignored=plan.ignored,
        warnings=(*plan.warnings, *warnings, *remarks),
        out=str(out) if out else None,
        verify=verification or msgspec.UNSET,
    )


def view(report: Report, notes: Iterable[str] = (), problems: Iterable[str] = ()) -> RenderableType:
    """One line a fact; `problems` are those of the warnings for which the command exits with 1."""
    from rich.text import Text

    from llmcli.mapping import grouped

    rows = facts()

    def row(label: str, text: str, style: str = "") -> None:
        rows.add_row(Text(label, style), text)

    row("family", report.family)
    row("parameters", f"{report.parameters:,} ({quantity(report.parameters)})")
    decision = "tied to the token embeddings" if report.tie.decision == "tie" else "untied"
    row("output", f"{decision}: {report.tie.reason}")
    if report.ignored:
        row("ignored", ", ".join(grouped(report.ignored)))
    for text in notes:
        row("note", text, "cyan")
    for text in report.warnings:
        row(*(("problem", text, "red") if text in problems else ("warning", text, "yellow")))
    if report.verify:
        found = report.verify
        both = "; both read what was written" if found.written else ""
        label = "verified" if found.agrees else "differs" if found.max_logit or found.max_difference else "not verified"
        row(
            label,
            f"largest difference of logits from transformers {found.max_difference:.3g}, "
            f"tolerated {found.tolerance:.3g} "
            f"(largest logit {found.max_logit:.3g}, {found.tokens:,} positions, float32{both})",
            "green" if found.agrees else "red",
        )
    if report.out:
        row("written to", report.out)
    return rows
