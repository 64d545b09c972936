"""llmcli generate: what a model says after a prompt, once or in conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llmcli import output
from llmcli.commands import (
    OUTPUT,
    SAMPLING,
    AsJson,
    Checkpoint,
    Device,
    Dtype,
    Ids,
    Keep,
    Offline,
    Revision,
    Seed,
    Temperature,
    Tie,
    choose_sampling,
    given_ids,
    open_model,
    open_tokenizer,
    tokenizer_if_any,
    warn_of_length,
)
from llmcli.errors import DataError, LlmcliError, UsageError

if TYPE_CHECKING:
    from llmcli.generate import Answer, Piece, Sampling, Spoken
    from llmcli.model import Decoder
    from llmcli.tokenizer import Tokenizer

GROUP = "Ask a model"

MOST = 256
"""New tokens where nobody says how many."""

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to go on from; '-' or a pipe: stdin; empty: a new text."),
]
PromptFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Read the prompt from a file.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        min=0,
        help="Stop after so many tokens; default: 256, or what is left of the model's context.",
    ),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text. May be repeated.")]
NumSamples = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Give so many answers, as one batch.")]
TopK = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Draw among so many most probable tokens.", rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="X", min=0, max=1, help="Draw among the most probable tokens that reach X.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="X", min=0, max=1, help="Leave out what is below X times the most probable.", rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        metavar="X", min=0, max=1000, help="Make what was said less likely, above 1.", rich_help_panel=SAMPLING
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Show each token's probability and its N rivals'.", rich_help_panel=OUTPUT),
]
Cache = Annotated[bool, typer.Option(help="Keep keys and values, or compute all positions each time.")]

CONFIDENCE = ((0.8, "green"), (0.4, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""The colour of a token by its probability: at least so much."""


def run(
    checkpoint: Checkpoint,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    ids: Ids = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    num_samples: NumSamples = 1,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    logprobs: Logprobs = None,
    cache: Cache = True,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt, token by token; on a terminal without a prompt, in conversation.

    Example: llmcli generate runs/glasslm/best "Once upon a time" --temperature 0.5 --seed 1
    """
    if sum(given is not None for given in (prompt, prompt_file, ids)) > 1:
        raise UsageError("more than one prompt: an argument, --prompt-file and --ids", "Give one of them.")
    if "" in (stop or ()):
        raise UsageError("--stop '': an empty text ends nothing", "Give the text to end before, or leave --stop out.")
    talking = prompt is None and prompt_file is None and ids is None and sys.stdin.isatty() and not as_json
    given = None if talking else given_ids(ids) if ids is not None else _given_text(prompt, prompt_file)
    from llmcli import targets

    path = targets.find_checkpoint(checkpoint, revision=revision, offline=offline)
    tokenizer = tokenizer_if_any(path) if isinstance(given, list) else open_tokenizer(path)
    sampling = choose_sampling(
        max_new_tokens=MOST if max_new_tokens is None else max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        logprobs=logprobs if logprobs is not None or not as_json else 0,
    )
    import torch

    from llmcli import decode

    model = open_model(str(path), tie, keep, dtype, device=device)[0]
    torch.set_num_threads(decode.threads(model))
    if talking:
        assert tokenizer is not None
        _talk(model, tokenizer, sampling, stop or [])
        return
    prompt_ids = given if isinstance(given, list) else _encode(tokenizer, given or "")
    if max_new_tokens is None:  # nobody asked for more than the model was trained for
        left = model.config.max_position_embeddings - len(prompt_ids)
        sampling = msgspec.structs.replace(sampling, max_new_tokens=min(MOST, left) if left > 0 else MOST)
    _answer(model, tokenizer, prompt_ids, sampling, stop or [], num_samples, cache, as_json)


def _answer(
    model: Decoder,
    tokenizer: Tokenizer | None,
    prompt_ids: list[int],
    sampling: Sampling,
    stops: list[str],
    num_samples: int,
    use_cache: bool,
    as_json: bool,
) -> None:
    from llmcli.generate import Answer, complete

    answers = [Answer(prompt_ids) for _ in range(num_samples)]
    streamed = num_samples == 1 and not as_json
    if streamed and sys.stdout.isatty() and tokenizer is not None:
        output.paint(tokenizer.decode(prompt_ids), "dim")
    warn_of_length(model, len(prompt_ids), sampling.max_new_tokens)
    pieces = complete(model, tokenizer, [prompt_ids] * num_samples, sampling, stops=stops, use_cache=use_cache)
    if streamed:
        for piece in pieces:
            answers[0].add(piece)
            output.paint(piece.text, _confidence(piece) if sampling.logprobs is not None else "")
        output.write("\n")
    else:
        with output.progress("generating", num_samples * sampling.max_new_tokens, "tokens") as advance:
            for piece in pieces:
                answers[piece.row].add(piece)
                advance(1)
    if as_json:
        output.emit_json(answers[0] if num_samples == 1 else answers)
    else:
        _show(answers, sampling, streamed)
    if any(answer.finish_reason == "context" for answer in answers):
        output.note(f"the model's {model.config.max_position_embeddings:,} learned positions are used up")


def _show(answers: Sequence[Answer], sampling: Sampling, streamed: bool) -> None:
    for number, answer in enumerate(answers, 1):
        if not streamed:
            output.paint(f"--- sample {number} of {len(answers)} ({answer.finish_reason}) ---\n", "dim")
            output.paint(f"{answer.text}\n")
        if sampling.logprobs is not None:
            output.emit(answer, view, as_json=False)


def view(answer: Answer) -> output.Fit:
    """A line a token: its text, how probable it was, and what else could have stood there."""
    from rich.text import Text

    table = output.table()
    table.add_column("token")
    table.add_column("id", justify="right", style="dim")
    table.add_column("probability", justify="right")
    table.add_column("rivals")
    for piece in answer.tokens:
        rivals = "  ".join(f"{rival.text!r} {_percent(rival.logprob)}" for rival in piece.top)
        table.add_row(
            Text(repr(piece.text), _confidence(piece)), str(piece.id), _percent(piece.logprob), Text(rivals, "dim")
        )
    return output.Fit(table)


def _percent(logprob: float | None) -> str:
    from math import exp

    return "" if logprob is None else f"{exp(logprob):.1%}"


def _confidence(piece: Spoken | Piece) -> str:
    from math import exp

    return next(style for least, style in CONFIDENCE if exp(piece.logprob or 0.0) >= least)


def _given_text(prompt: str | None, file: Path | None) -> str:
    """The prompt as given, or from a file or stdin, where one newline at the end is left out."""
    from llmcli import corpus

    if file is not None:
        text = "".join(piece.text for piece in corpus.read(file))
    elif prompt is None or prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            byte = f"byte {error.object[error.start]:#04x} at offset {error.start:,}"
            raise DataError(f"stdin: not UTF-8 text ({byte})", corpus.CONVERT) from None
    else:
        return corpus.newline(prompt)
    return corpus.newline(text).removesuffix("\n")


def _encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """The prompt's ids by the tokenizer's own rule; those of no text are the token that begins one."""
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    if ids:
        return ids
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if first is None:
        raise UsageError("the tokenizer has no token that begins a text", "Give a prompt.")
    return [first]


HELP = """What you type goes on where the text ended, on a new line; the model goes on from there.
/reset             begin a new text
/temperature T     draw more freely (above 1) or less (below); 0: always the most probable token
/help, /quit       Ctrl-C stops an answer, Ctrl-D ends the conversation
"""


def _talk(model: Decoder, tokenizer: Tokenizer, sampling: Sampling, stops: list[str]) -> None:
    """The conversation: one text that user and model write in turns, computed once however long it grows."""
    import msgspec

    from llmcli.cache import new_cache
    from llmcli.decode import Packed
    from llmcli.generate import complete

    output.paint("/help for help, Ctrl-D to leave\n", "dim")
    ids: list[int] = []
    cache, packed = new_cache(model.config), Packed(model)
    for line in _lines("> "):
        command, _, value = line.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            ids, cache = [], new_cache(model.config)
        elif command == "/temperature":
            try:
                sampling = msgspec.structs.replace(
                    sampling, temperature=choose_sampling(temperature=float(value)).temperature
                )
            except (ValueError, UsageError):
                output.error(
                    UsageError(f"/temperature {value}: not a number from 0 up", "For example, /temperature 0.8.")
                )
        elif command.startswith("/"):
            output.write(HELP)
        elif line:
            try:
                ids += tokenizer.encode("\n" + line, special=False) if ids else _encode(tokenizer, line)
                for piece in complete(model, tokenizer, [ids], sampling, stops=stops, cache=cache, packed=packed):
                    ids.append(piece.id)
                    output.paint(piece.text, _confidence(piece) if sampling.logprobs is not None else "")
            except KeyboardInterrupt:  # in the midst of a forward pass layers may differ in length: see the text anew
                cache = new_cache(model.config)
            except LlmcliError as refusal:
                output.error(refusal)
                ids, cache = [], new_cache(model.config)
                output.note("a new text begins")
            output.write("\n")


def _lines(prompt: str) -> Iterable[str]:
    """Lines typed at a terminal, with history kept between conversations, until its end."""
    import os

    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "llmcli"
    history = state / "history"
    if readline is not None and history.is_file():
        readline.read_history_file(history)
    try:
        while True:
            try:
                yield input(prompt).strip()
            except KeyboardInterrupt:
                output.write("\n")
            except EOFError:
                output.write("\n")
                return
    finally:
        if readline is not None:
            try:
                state.mkdir(parents=True, exist_ok=True)
                readline.set_history_length(1000)
                readline.write_history_file(history)
            except OSError:
                pass  # a history that cannot be kept is no reason to complain
