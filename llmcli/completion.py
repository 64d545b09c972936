"""What a shell offers when Tab is pressed: presets, checkpoints, and keys of a recipe. Fast, and silent about faults.

Where nothing is offered, the shell falls back to files of its own accord.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda", "mps")

MOST_ENTRIES = 5_000
"""How many names of files are looked at for one answer, so that a large disk is no wait."""
DEEPEST = 4
"""How many folders down a checkpoint is looked for."""


def checkpoints(incomplete: str) -> list[str]:
    """The folders that hold a checkpoint and whose path begins so."""
    return [_typed(path) for path in _checkpoints(incomplete)]


def targets(incomplete: str) -> list[str]:
    """Presets and checkpoints."""
    return presets(incomplete) + checkpoints(incomplete)


def presets(incomplete: str) -> list[str]:
    """The presets whose name begins so."""
    from llmcli.config import presets

    return [name for name in presets() if name.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """The names of number types."""
    return [name for name in DTYPES if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """The kinds of devices."""
    return [name for name in DEVICES if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """The keys of a recipe as `--set` takes them; after `=` the values of those that have a few."""
    from llmcli.config import Recipe

    name, equals, _ = incomplete.partition("=")
    found = _keys(Recipe)
    if not equals:
        return [f"{key}=" for key in found if key.startswith(incomplete)]
    return [given for value in _values(name, found.get(name)) if (given := f"{name}={value}").startswith(incomplete)]


def _keys(recipe: Any) -> dict[str, Any]:
    """Every "section.key" with its type."""
    import msgspec

    return {
        f"{section.name}.{field.name}": field.type
        for section in msgspec.structs.fields(recipe)
        for field in msgspec.structs.fields(section.type)
    }


def _values(name: str, kind: Any) -> list[str]:
    import typing

    if name == "model.family":
        from llmcli import families

        return list(families.names())
    kinds = [kind, *typing.get_args(kind)]
    if bool in kinds:
        return ["true", "false"]
    return [str(value) for one in kinds if typing.get_origin(one) is typing.Literal for value in typing.get_args(one)]


def _checkpoints(incomplete: str) -> Iterator[str]:
    """Paths as they would be typed, nearest first."""
    start = incomplete[: incomplete.rfind("/") + 1]
    with_hidden = incomplete[len(start) :].startswith(".")
    waiting, looked = deque([(start, 0)]), 0
    while waiting and looked < MOST_ENTRIES:
        folder, depth = waiting.popleft()
        try:
            with os.scandir(os.path.expanduser(folder) or ".") as found:
                entries = list(islice(found, MOST_ENTRIES - looked))
        except OSError:
            continue
        looked += len(entries)
        if depth and any(entry.name == "config.json" or entry.name.endswith(".safetensors") for entry in entries):
            yield folder.removesuffix("/")
        if depth < DEEPEST:
            inner = (entry for entry in entries if with_hidden or not entry.name.startswith("."))
            paths = (f"{folder}{entry.name}/" for entry in inner if entry.is_dir())
            waiting.extend((path, depth + 1) for path in sorted(paths) if path.startswith(incomplete))


def _typed(path: str) -> str:
    """A path as the asking shell must be given it: bash puts what it gets into the line as it is."""
    if not os.environ.get("_LLMCLI_COMPLETE", "").endswith("bash"):
        return path
    return re.sub(r"[^\w@%+,./:=~-]", lambda found: "\\" + found[0], path)
