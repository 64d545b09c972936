"""llmcli generate: what a model says after a prompt."""

from __future__ import annotations

from typing import Annotated

import typer

from llmcli import output
from llmcli.commands import AsJson, Checkpoint, Keep, Tie


def run(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from; none begins a text.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Stop after so many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token; 1: as learned.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among the k most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the most probable tokens that reach p.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; default: the file's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt, token by token.

    Example: llmcli generate runs/default/best "Once upon a time" --temperature 0
    """
    from llmcli import checkpoint as checkpoints
    from llmcli import targets, tokenizer
    from llmcli.config import parse
    from llmcli.errors import UsageError
    from llmcli.generate import Sampling, Text, allowed_ids, generate

    sampling = parse(
        {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "logprobs": 0 if as_json else None,
        },
        Sampling,
        "generate",
    )
    path = targets.find_checkpoint(checkpoint)
    coder = tokenizer.load(path)
    model, plan = checkpoints.load(path, dtype=dtype, device=device, tie=tie, keep=keep)
    for warning in plan.warnings:
        output.warn(warning)
    ids = coder.encode(prompt) if prompt else []
    first = coder.bos_id if coder.bos_id is not None else coder.eos_id
    if not ids and first is None:
        raise UsageError("the tokenizer has no token that begins a text", "Give a prompt.")
    ids = ids or [first or 0]
    tokenizer.check_ids(ids, model.config.vocab_size, coder.size)

    text = Text(coder, ids)
    new, said, tokens, finish = [], "", [], "length"
    stream = generate(
        model, [ids], sampling, allowed=allowed_ids(model, coder), ends=lambda row, id: id in coder.eos_ids
    )
    for token in stream:
        piece = text.push(token.id)
        new.append(token.id)
        said += piece
        tokens.append({"id": token.id, "text": piece, "logprob": token.logprob, "top": []})
        finish = token.finish or finish
        if not as_json:
            output.write(piece)
    rest = text.finish()
    if as_json:
        output.emit_json(
            {"prompt_ids": ids, "ids": new, "text": said + rest, "finish_reason": finish, "tokens": tokens}
        )
    else:
        output.write(rest + "\n")
        if finish == "context":
            output.note(f"the model's {model.config.max_position_embeddings} learned positions are used up")
