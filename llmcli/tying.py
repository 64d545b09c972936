"""Is the output projection the embedding matrix? The decision for every way a file and its config can disagree."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from llmcli.errors import CheckpointError, UsageError, dimensions

Decision = Literal["tie", "untie"]
Request = Literal["auto", "tie", "untie"]
Side = Literal["input", "output"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the two matrices: what the file holds, what the config says, what the family means by silence.

    `equal` compares the two where both exist; None there means that their values are out of reach (still on the Hub).
    `max_difference` is needed only where two different ones are meant to be tied.
    """

    embedding: tuple[int, ...] | None
    head: tuple[int, ...] | None
    equal: bool | None
    max_difference: float | None = None
    flag: bool | None
    tied_in_family: bool


class Tie(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, why, and from which of the file's matrices the input and the output side are filled.

    `head_from` is None when the output is tied. `warning` is set when the file and its config disagree.
    """

    decision: Decision
    reason: str
    embedding_from: Side
    head_from: Side | None
    warning: str | None = None


def decide(evidence: Evidence, request: Request = "auto", keep: Side | None = None) -> Tie:
    """The tie table as one pure function.

    Tensors beat flags: two really different matrices are both kept, whatever the flag says. Raises CheckpointError
    where file and config cannot be reconciled (the message names the option that settles it), and UsageError where
    `--tie tie` would have to drop one of two different matrices and `keep` does not say which one stays.
    """
    e = evidence
    if request not in get_args(Request) or keep not in (None, *get_args(Side)):
        raise UsageError(f"tie = {request!r}, keep = {keep!r}", "Tie: auto, tie or untie. Keep: input or output.")
    if keep and request != "tie":
        raise UsageError(f"--keep {keep} without --tie tie: no matrix would be dropped", f"Leave out --keep {keep}.")
    said = {True: "config says tied", False: "config says untied", None: "config does not say"}[e.flag]
    means = e.flag if e.flag is not None else e.tied_in_family
    if e.flag is None:
        said += f", the family's default is {'tied' if e.tied_in_family else 'untied'}"
    if e.embedding is None and e.head is None:
        raise CheckpointError("neither an embedding nor an output matrix in the file", "The checkpoint is incomplete.")
    if e.embedding and e.head and e.embedding != e.head:
        raise CheckpointError(
            f"the embedding has shape {dimensions(e.embedding)} and the output matrix {dimensions(e.head)}",
            "One side was resized without the other; resize both to the same number of rows and save again.",
        )
    if request == "tie":
        return _tied(e, said, keep)
    if request == "untie":
        return _untied(e, said)

    if e.head is None:
        if means:
            return _tie("no output matrix in the file", said, tied=True)
        raise CheckpointError(
            f"no output matrix in the file, and {said}",
            "Either the model is tied and the flag is wrong: load with --tie tie. Or the file lost its output matrix: "
            "get a complete one. (--tie untie starts the output as a copy of the embedding.)",
        )
    if e.embedding is None:
        if means:
            warning = "no embedding in the file: the output matrix serves as both"
            return _tie("only the output matrix is in the file", said, tied=True, source="output", warning=warning)
        raise CheckpointError(
            f"no embedding matrix in the file, and {said}",
            "Either the model is tied: load with --tie tie. Or the file lost its embedding: get a complete one.",
        )
    if e.equal is None:
        if means:
            raise CheckpointError(
                f"{said}, and the file holds two matrices, whose values are out of reach here",
                "Whether they are equal decides: get the whole checkpoint.",
            )
        return _tie("two matrices in the file, not compared", said, tied=False)
    if e.equal:
        if means:
            return _tie("embedding and output matrix are equal in the file", said, tied=True)
        hint = " and could be tied (--tie tie)" if e.flag is False else ""
        return _tie(f"embedding and output matrix are equal in the file{hint}", said, tied=False)
    if e.flag:
        warning = (
            f"config says tied, but the file holds two different matrices ({_difference(e)}): "
            "both are kept and the model is untied"
        )
        return _tie("two different matrices in the file", said, tied=False, warning=warning)
    return _tie("two different matrices in the file", said, tied=False)


def _tied(e: Evidence, said: str, keep: Side | None) -> Tie:
    """`--tie tie`: one matrix stays."""
    if e.embedding is None or e.head is None:
        source: Side = "input" if e.embedding else "output"
        if keep and keep != source:
            raise UsageError(f"--keep {keep}: the file holds only the {source} matrix", f"Leave out --keep {keep}.")
        return _tie("asked for with --tie tie", said, tied=True, source=source)
    if not e.equal and keep is None:
        raise UsageError(
            f"--tie tie: embedding and output matrix differ ({_difference(e)}), one would be lost",
            "Say which one stays: --keep input or --keep output.",
        )
    asked = "asked for with --tie tie" + (f" --keep {keep}" if keep else "")
    return _tie(asked, said, tied=True, source=keep or "input")


def _untied(e: Evidence, said: str) -> Tie:
    """`--tie untie`: the output gets a matrix of its own, a copy where the file has only one."""
    head: Side = "output" if e.head else "input"
    embedding: Side = "input" if e.embedding else "output"
    reason = "asked for with --tie untie"
    if head == embedding:
        reason += ", the output starts as a copy" if e.embedding else ", the embedding starts as a copy"
    return Tie(decision="untie", reason=f"{reason} ({said})", embedding_from=embedding, head_from=head)


def _tie(reason: str, said: str, *, tied: bool, source: Side = "input", warning: str | None = None) -> Tie:
    return Tie(
        decision="tie" if tied else "untie",
        reason=f"{reason}; {said}",
        embedding_from=source,
        head_from=None if tied else "output",
        warning=warning,
    )


def _difference(e: Evidence) -> str:
    return "not compared" if e.max_difference is None else f"max difference {e.max_difference:.3g}"
