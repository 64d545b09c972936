"""The lab's page: as the server hands it out, or with a recording and all answers about it inside."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
from torch import Tensor

from llmcli.errors import LlmcliError
from llmcli.generate import Sampling
from llmcli.lab import Lab, Lens, Neighbour
from llmcli.sketch import sketch
from llmcli.trace import Pass

PAGE = Path(__file__).with_name("lab.html")


class TooLarge(LlmcliError):
    """A recording that would not fit in a page."""


TOP, NEIGHBOURS, GUESSES = 10, 8, 5
"""How many of each the self-contained page holds for every position."""
EXACT_BYTES, MOST_BYTES = 24 << 20, 192 << 20
FLOAT16_MAX = 65504
RECORDING = "<!-- recording -->"
"""Where in the page a recording stands."""
SMALL = 1 << 18
"""Values of a matrix that goes into the self-contained page in any case; of a larger one than all else, some rows."""
MOST_TOKENS = 70_000
"""Up to this many spellings go into the self-contained page whole."""


def as_html(lab: Lab | None = None, text: str = "") -> tuple[str, bool]:
    """The page; with a lab's text, all its passes and the answers about them inside, so that it needs no server.

    Values beyond 24 MiB are rounded to float16, which the second result says. Raises TooLarge beyond 192 MiB.
    """
    template = PAGE.read_text("utf-8")
    if lab is None:
        return template, False
    passes = [lab.recorded(text, number) for number in range(len(lab.text(text).passes))]
    tensors = {
        (str(number), name): tensor
        for number, made in enumerate(passes)
        for name, tensor in made.tensors.items()
        if name != "probabilities"  # the page works them out from the logits
    }
    top = [[lab.top(made, position, TOP, Sampling()) for position in range(len(made.ids))] for made in passes]
    candidates = sorted({candidate.token.id for made in top for best in made for candidate in best})
    total = sum(tensor.numel() for tensor in tensors.values())
    for name, matrix in lab.matrices.items():
        if matrix.numel() <= max(total, SMALL):
            tensors["model", name] = matrix
            total += matrix.numel()
    if ("model", lab.head_name) not in tensors:
        tensors["candidates", lab.head_name] = lab.matrices[lab.head_name][candidates]
    rounded = 4 * total > EXACT_BYTES
    if 2 * total > MOST_BYTES:
        raise TooLarge(
            f"the recording holds {total:,} values, too many for a page", "Trace a shorter text, or fewer new tokens."
        )
    size = lab.model.config.vocab_size
    used = {*candidates, *lab.text(text).ids}
    answers = {
        "info": msgspec.structs.replace(lab.info(), recorded=True),
        "text": lab.text_info(text),
        "passes": [
            {
                "statistics": {name: lab.stage(made, name) for name in made.tensors},
                "sketches": {name: sketch(name, tensor) for name, tensor in made.tensors.items()},
                "top": best,
                "lens": _whole_lens(lab, made),
            }
            for made, best in zip(passes, top, strict=True)
        ],
        "matrices": {
            name: {"statistics": lab.stage(passes[0], name), "sketch": sketch(name, matrix)}
            for name, matrix in lab.matrices.items()
        },
        "candidates": candidates,
        "nearest": {str(id): _nearest(lab, id) for id in sorted(set(lab.text(text).ids))},
        "tokens": {str(id): lab.token(id) for id in (range(size) if size <= MOST_TOKENS else sorted(used))},
        "biases": lab.biases(candidates),
        "output": {"head": lab.head_name, "state": lab.state, "cap": lab.model.config.logit_softcap},
        "rounded": rounded,
    }
    parts = [_script('type="application/json" id="recording"', msgspec.json.encode(answers).decode())]
    for (owner, name), tensor in tensors.items():
        raw, dtype = _raw(tensor, rounded)
        shape = " ".join(map(str, tensor.shape))
        attributes = f'type="text/plain" data-of="{owner}" data-name="{name}" data-dtype="{dtype}" data-shape="{shape}"'
        parts.append(_script(attributes, base64.b64encode(raw).decode()))
    whole = template.replace(RECORDING, "\n".join(parts)).replace("connect-src 'self'", "connect-src 'none'")
    return whole, rounded


def _whole_lens(lab: Lab, made: Pass) -> Lens:
    step = lab.limits.lens_positions
    parts = [lab.lens(made, start, start + step, GUESSES) for start in range(0, len(made.ids), step)]
    stages = zip(*(part.guesses for part in parts), strict=True)
    return Lens(parts[0].stages, 0, [[guess for part in stage for guess in part] for stage in stages])


def _nearest(lab: Lab, id: int) -> list[Neighbour] | dict[str, str]:
    """A token's neighbours; or, as the server says it, why there are none: a row of zeros, a file of pickles."""
    try:
        return lab.nearest(id, NEIGHBOURS)
    except LlmcliError as error:
        return {"error": error.message, "hint": error.hint}


def _raw(tensor: Tensor, rounded: bool) -> tuple[bytes, str]:
    """A tensor's values in little-endian bytes, and their type: int32, float32, or float16 where all fit it."""
    tensor = tensor.cpu()
    if not tensor.is_floating_point():
        return tensor.contiguous().numpy().astype("<i4").tobytes(), "int32"
    values = tensor.float().contiguous().numpy()
    if rounded and abs(values).max() < FLOAT16_MAX:
        return values.astype("<f2").tobytes(), "float16"
    return values.astype("<f4").tobytes(), "float32"


def _script(attributes: str, content: str) -> str:
    # In JSON "<" may be written as an escape; then no text in it can end the script.
    return f"<script {attributes}>{content.replace('<', chr(92) + 'u003c')}</script>"
