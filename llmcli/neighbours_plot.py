"""Pictures of tokens that lie near each other: similarities as a heat map, places in their principal plane."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from llmcli.errors import UsageError
from llmcli.names import Token, visible
from llmcli.neighbours import Answer, Neighbour
from llmcli.plot import PALETTE, SEQUENTIAL, drawing, readable
from llmcli.probe import Floats, Rows

MOST_DRAWN = 40
"""How many rows a picture shows: more labels than that cover each other."""


def draw(answers: Sequence[Answer], made_of: Sequence[Sequence[Token]], rows: Rows, path: Path) -> int:
    """Save a picture of the rows that each query is made of and of its neighbours: the cosine of each pair, and a map.

    Every query comes before any neighbour, and the nearest of all before the second of any. Returns how many tokens
    found no room. Raises UsageError where there are fewer than two rows, and as `plot.drawing` does.
    """
    lists = [[(place, row) for row in parts] for place, parts in enumerate(made_of)]
    asked = {row.id for parts in made_of for row in parts}
    ranks = zip_longest(*([(place, row) for row in answer.neighbours] for place, answer in enumerate(answers)))
    ordered = [*chain(*lists), *(one for rank in ranks for one in rank if one is not None)]
    first: dict[int, tuple[int, Token | Neighbour]] = {}
    for place, row in ordered:
        if row.id is not None:
            first.setdefault(row.id, (place, row))
    drawn = sorted(list(first.items())[:MOST_DRAWN], key=lambda item: item[1][0])  # each query beside its own
    group = {id: place for id, (place, _) in drawn}
    labels = {id: readable(visible(row.token)) for id, (_, row) in drawn}
    if len(labels) < 2:
        raise UsageError("--plot: there are fewer than two tokens to draw", "Ask for more neighbours with -k.")
    ids = list(labels)
    block = rows.vectors(ids)
    unit = block / np.maximum(np.linalg.norm(block, axis=1, keepdims=True), 1e-300)  # a sum may hold a row of zeros
    cosine = unit @ unit.T
    places, shares = plane(unit)
    count = len(ids)
    side = max(4.5, 0.24 * count + 1.6)
    with drawing(path, side + 7.2, max(side, 5.2)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[side, 6.4])
        low = min(0.0, float(cosine.min()))
        image = left.imshow(cosine, cmap=SEQUENTIAL, vmin=low, vmax=1)
        ticks = [labels[id] for id in ids]
        left.set_xticks(range(count), ticks, rotation=90)
        left.set_yticks(range(count), ticks)
        for spine in left.spines.values():
            spine.set_visible(False)
        for axis in (left.get_xticklabels(), left.get_yticklabels()):
            for label, id in zip(axis, ids, strict=True):
                label.set_fontweight("bold" if id in asked else "normal")
        if count <= 14:
            for (y, x), value in np.ndenumerate(cosine):
                dark = (value - low) / (1 - low) < 0.6
                left.text(x, y, f"{value:z.2f}", ha="center", va="center", size=7, color="white" if dark else "black")
        left.set_title("cosine similarity" + (", centred" if rows.mean is not None else ""))
        figure.colorbar(image, ax=left, shrink=0.6)
        markers = "osD^vP*X"
        last = len(PALETTE) - 1  # the last kind is that of all further queries, where there are any
        for n, id in enumerate(ids):
            kind = min(group[id], last)
            right.scatter(
                *places[n], s=70 if id in asked else 28, color=PALETTE[kind], marker=markers[kind], zorder=3,
                edgecolor="black" if id in asked else "#444444", linewidth=1 if id in asked else 0.4,
            )  # fmt: skip
        if len(answers) > 1:
            for kind in range(min(len(answers), last + 1)):
                more = kind == last and len(answers) > len(PALETTE)
                name = "any further one" if more else f"{readable(visible(answers[kind].query.token))}"
                right.scatter(
                    [], [], color=PALETTE[kind], marker=markers[kind], label=f"near {name}",
                    edgecolor="#444444", linewidth=0.4,
                )  # fmt: skip
            right.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, fontsize=8)
        right.set_title("map: first two principal axes")
        right.set_xlabel(f"axis 1 ({shares[0]:.0%} of the variance)")
        right.set_ylabel(f"axis 2 ({shares[1]:.0%})")
        right.margins(0.15)
        right.grid(True)
        _label(right, places, [labels[id] for id in ids], [id in asked for id in ids])
    return len(first) - len(drawn)


def plane(points: Floats) -> tuple[Floats, Floats]:
    """Points (n, d) in the plane of their first two principal axes, (n, 2), and each axis's share of the variance."""
    left, values, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    places = np.zeros((len(points), 2))
    found = min(2, len(values))
    places[:, :found] = left[:, :found] * values[:found]
    # The sign of an axis is anybody's choice: the point farthest out lies on the positive side.
    places *= np.where(places[np.abs(places).argmax(0), range(2)] < 0, -1, 1)
    shares = np.zeros(2)
    shares[:found] = (values**2 / max(float((values**2).sum()), 1e-300))[:found]
    return places, shares


def _label(axes: Any, places: Floats, labels: Sequence[str], bold: Sequence[bool]) -> None:
    """Each point's label beside it, where it covers no other label and no other point, as far as there is room."""
    figure = axes.figure
    figure.draw_without_rendering()
    points = axes.transData.transform(places)
    taken: list[Any] = []
    scale = figure.dpi / 72
    near: list[tuple[float, float, str]] = [(6, 0, "left"), (-6, 0, "right"), (0, 9, "center"), (0, -9, "center")]
    near += [(7, 7, "left"), (7, -7, "left"), (-7, 7, "right"), (-7, -7, "right")]
    near += [(x * f, y * f, side) for f in (1.8, 2.7, 3.6) for x, y, side in near]
    for point, place, label, strong in zip(points, places, labels, bold, strict=True):
        best = None
        for x, y, align in near:
            text = axes.annotate(
                label, place, (x, y), textcoords="offset points", ha=align, va="center", size=8,
                fontweight="bold" if strong else "normal",
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#888888", "shrinkA": 0, "shrinkB": 2}
                if max(abs(x), abs(y)) > 10 else None,
            )  # fmt: skip
            box = text.get_window_extent().padded(1.0 * scale)
            clash = sum(box.overlaps(other) for other in taken)
            room = box.padded(4 * scale)  # a mark is wider than its centre
            clash += sum(room.contains(*other) for other in points if tuple(other) != tuple(point))
            if best is None or clash < best[0]:
                if best is not None:
                    best[1].remove()
                best = (clash, text, box)
            else:
                text.remove()
            if clash == 0:
                break
        if best is not None:
            taken.append(best[2])
