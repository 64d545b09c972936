"""llmcli nearest-tokens: which tokens' vectors point the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llmcli.commands import AsJson, Checkpoint
from llmcli.output import emit, note

if TYPE_CHECKING:
    from rich.table import Table

Tokens = Annotated[
    list[str],
    typer.Argument(metavar="TOKEN...", help="A token as the vocabulary spells it (▁she, Ġking), as text, or #id."),
]


class Token(msgspec.Struct, frozen=True):
    """A row of the matrix as the vocabulary spells it."""

    token: str
    id: int


class Neighbour(Token, frozen=True):
    """A token and its similarity to the query."""

    score: float


class Neighbours(msgspec.Struct, frozen=True):
    """A query and the tokens nearest to it, best first."""

    query: Token
    neighbours: list[Neighbour]


def run(
    checkpoint: Checkpoint,
    tokens: Tokens,
    k: Annotated[int, typer.Option("-k", help="How many neighbours.", min=0)] = 10,
    as_json: AsJson = False,
) -> None:
    """The tokens whose embeddings are most similar to a token's, by cosine. Reads one tensor, without torch.

    Example: llmcli nearest-tokens runs/glasslm " she" -k 5
    """
    from llmcli import probe, targets, tokenizer

    path = targets.find_checkpoint(checkpoint)
    matrix = probe.find_matrix(path)
    vocabulary = tokenizer.load(path)
    rows = min(matrix.rows, vocabulary.size)
    for text in matrix.notes:
        note(text)
    results = []
    for token in tokens:
        id = int(token[1:]) if token[:1] == "#" and token[1:].isdecimal() else vocabulary.one_token(token)
        tokenizer.check_ids([id], matrix.rows, vocabulary.size)
        hits = probe.nearest(matrix, matrix.vectors([id])[0], k, rows=rows, exclude=[id])
        results.append(
            Neighbours(
                Token(vocabulary.token(id), id), [Neighbour(vocabulary.token(h.id), h.id, h.score) for h in hits]
            )
        )
    emit(results[0] if as_json and len(results) == 1 else results, view, as_json)


def view(results: list[Neighbours] | Neighbours) -> Table:
    """One block of rows a query."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("query", "neighbour", "id", "cosine"):
        table.add_column(heading, justify="right" if heading in ("id", "cosine") else "left")
    for result in results if isinstance(results, list) else [results]:
        for place, hit in enumerate(result.neighbours):
            query = f"{result.query.token} #{result.query.id}" if place == 0 else ""
            table.add_row(query, hit.token, str(hit.id), f"{hit.score:.4f}")
    return table
