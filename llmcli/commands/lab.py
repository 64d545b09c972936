"""llmcli lab: a page on which a model's data can be seen flowing."""

from __future__ import annotations

from typing import Annotated

import typer

from llmcli.commands import (
    Checkpoint,
    Device,
    Dtype,
    Keep,
    Offline,
    Revision,
    Tie,
    open_model,
    tokenizer_if_any,
)
from llmcli.errors import LlmcliError
from llmcli.output import note, warn, write

GROUP = "Look inside"


def run(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text that the page begins with.")] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=65535, help="Listen on this port, 0: on any; default: 8765, or any."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="Listen here; other than this machine itself only if you must.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Take prompts of so many tokens at most.")] = 512,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    offline: Offline = False,
) -> None:
    """Open a page that shows the data flow through a model, every stage of every pass.

    Example: llmcli lab runs/glasslm/best "Once upon a time"
    """
    try:
        from llmcli import server
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise LlmcliError(
            f"the lab needs {missing}, which is not installed", 'Install the extra: pip install "llmcli[lab]"'
        ) from None
    from llmcli.lab import Lab, Limits
    from llmcli.targets import find_checkpoint

    with server.listen(host, port) as listening:  # first: a port that is taken is known at once
        path = find_checkpoint(checkpoint, revision=revision, offline=offline)
        tokenizer = tokenizer_if_any(path)
        model, plan = open_model(str(path), tie, keep, dtype, device=device)
        lab = Lab(
            model,
            tokenizer,
            name=path.resolve().name,
            tie=plan.tie.reason,
            path=path,
            prompt=prompt,
            limits=Limits(prompt_tokens=max_tokens),
        )
        url = server.address(listening, host)
        if not server.is_loopback(host):
            warn(f"whoever reaches {host} can read this model's values here and let it compute: there is no password")
        write(f"{url}\n")
        note("Ctrl-C ends it")
        if browser:
            open_browser(url)
        server.serve(lab, listening, host)


def open_browser(url: str) -> None:
    """Show the page, if there is a browser; one that runs in the terminal would hold us up, so not here."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
