"""Draws the pictures of docs/embeddings.md, docs/embeddings-*.svg; every number in them is computed here.

    .venv/bin/python scripts/diagrams.py [--check]

Plain SVG with its text as text, on a white ground of its own, so that it reads in light and dark pages. Colours stay
apart for colour-blind readers, and never say alone what a label does not say too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np

from llmcli import count, read_config
from llmcli.output import quantity
from llmcli.plot import PALETTE

DOCS = Path(__file__).parent.parent / "docs"
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = PALETTE
INK, FAINT, LINE = "#1A1A1A", "#595959", "#767676"


class Picture:
    """Shapes in the order in which they are drawn; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str, told: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif" font-size="14" role="img">',
            f"<title>{escape(title)}</title><desc>{escape(told)}</desc>",
            '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto-start-reverse"'
            f' markerUnits="userSpaceOnUse"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#FFFFFF"/>',
        ]
        self.text(24, 32, title, size=17, weight="bold")

    def text(self, x: float, y: float, what: str, *, anchor: str = "start", size: int = 14, fill: str = INK,
             weight: str = "normal") -> None:  # fmt: skip
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
            f' font-weight="{weight}">{escape(what)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", rx: int = 0
    ) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rx}" fill="{fill}"'
            f' stroke="{stroke}"/>'
        )

    def stage(self, x: float, y: float, width: float, name: str) -> None:
        """A named step, centred at x."""
        self.box(x - width / 2, y, width, 30, "#F2F2F2", LINE, 4)
        self.text(x, y + 20, name, anchor="middle")

    def line(self, *points: tuple[float, float], colour: str = INK, tip: bool = True, dash: str = "", width: float = 1.6
             ) -> None:  # fmt: skip
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}{end}/>'
        )

    def matrix(self, x: float, y: float, name: str, colour: str, shape: str, marked: tuple[int, ...] = ()) -> None:
        """A matrix of eight rows, 110 by 136; `marked` rows are filled."""
        for row in range(8):
            self.box(x, y + 17 * row, 110, 15, colour if row in marked else "#FFFFFF", colour)
        self.text(x + 55, y - 10, name, anchor="middle", weight="bold")
        self.text(x + 55, y + 154, shape, anchor="middle", size=13, fill=FAINT)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def tied_untied() -> str:
    """One matrix with two uses, and two with one each."""
    gemma, llama = read_config("gemma-2b"), read_config("llama-7b")
    picture = Picture(
        860, 420, "One matrix or two", "A tied model reads and scores with E; an untied one has W to score."
    )
    for left, name, config_, tied in ((0, "Gemma 2B: tied", gemma, True), (430, "LLaMA 7B: untied", llama, False)):
        counted = count(config_)
        one = config_.vocab_size * config_.embed_dim
        picture.text(left + 24, 64, name, weight="bold", size=15)
        shape = f"{config_.vocab_size:,} × {config_.embed_dim:,}"
        middle = left + 320
        picture.stage(middle, 88, 130, "token ids")
        picture.stage(middle, 166, 130, "blocks")
        picture.stage(middle, 244, 130, "logits")
        picture.line((middle, 118), (middle, 163))
        picture.line((middle, 196), (middle, 241))
        if tied:
            picture.matrix(left + 40, 114, "E", BLUE, shape, (2, 5))
            picture.line((left + 154, 140), (middle - 4, 140))
            picture.line((left + 154, 218), (middle - 4, 218))
        else:
            for row in range(5):  # lower matrices, so that two fit
                picture.box(left + 40, 112 + 13 * row, 110, 11, BLUE if row in (1, 3) else "#FFFFFF", BLUE)
                picture.box(left + 40, 212 + 13 * row, 110, 11, "#FFFFFF", RED)
            picture.text(left + 95, 102, "E", anchor="middle", weight="bold")
            picture.text(left + 95, 202, "W", anchor="middle", weight="bold")
            picture.text(left + 95, 294, f"{shape} each", anchor="middle", size=13, fill=FAINT)
            picture.line((left + 154, 140), (middle - 4, 140))
            picture.line((left + 154, 232), (middle - 34, 232), (middle - 34, 218), (middle - 4, 218))
        picture.text(left + 164, 133, "rows looked up", size=13, fill=FAINT)
        picture.text(left + 164, 211, "all rows scored", size=13, fill=FAINT)
        held = one if tied else 2 * one
        picture.text(left + 40, 330, f"{held:,} numbers, {held / counted.total:.0%} of the model")
        saved = f"Tying saves {counted.saved_by_tying:,}." if tied else f"Tying would save {counted.saved_by_tying:,}."
        picture.text(left + 40, 354, saved)
        picture.text(left + 40, 378, f"Scores cost {2 * one:,} operations a token.")
    picture.line((430, 56), (430, 396), colour="#CCCCCC", tip=False)
    return picture.svg()


def gradients() -> str:
    """Which rows of E each path of the gradient reaches, in a made-up step with eight tokens."""
    chance = np.random.default_rng(3)
    V, d, read, come = 8, 16, [1, 4, 6], [4, 6, 2]
    hidden, E = chance.standard_normal((3, d)), 0.3 * chance.standard_normal((V, d))
    scores = hidden @ E.T
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = (p - np.eye(V)[come]) / len(come)
    by_output = error.T @ hidden
    by_input = np.zeros((V, d))
    np.add.at(by_input, read, error @ E)  # blocks that change nothing
    picture = Picture(860, 400, "Two paths of a gradient into one matrix",
                      "The input path reaches rows that were read, the output path all rows.")  # fmt: skip
    picture.text(24, 58, "Norm of the gradient of each row of E, for one step with eight tokens and three positions",
                 size=13, fill=FAINT)  # fmt: skip
    columns = (
        ("input path", by_input, BLUE),
        ("output path", by_output, ORANGE),
        ("sum (tied)", by_input + by_output, GREEN),
    )
    widest = max(np.linalg.norm(part, axis=1).max() for _, part, _ in columns)
    for row in range(V):
        said = [word for word, rows in (("read", read), ("predicted", come)) if row in rows]
        picture.text(24, 121 + 26 * row, f"row {row}", weight="bold" if said else "normal")
        picture.text(76, 121 + 26 * row, ", ".join(said), size=12, fill=FAINT)
    for place, (name, part, colour) in enumerate(columns):
        left = 200 + 220 * place
        norms = np.linalg.norm(part, axis=1)
        picture.text(left, 92, name, weight="bold")
        for row, norm in enumerate(norms):
            picture.box(left, 108 + 26 * row, 150 * norm / widest, 17, colour)
            picture.text(left + 150 * norm / widest + 6, 121 + 26 * row, f"{norm:.2f}" if norm else "0", size=12)
        picture.text(left, 338, f"{int((norms > 0).sum())} of {V} rows", size=13, fill=FAINT)
    picture.text(24, 376, "input path: what arrives where the token was read", size=13)
    picture.text(420, 376, "output path: (p \u2212 y) · h, for every row", size=13)
    return picture.svg()


def shares() -> str:
    """Where the parameters are, by model, from the smallest to the largest."""
    names = ["gpt1", "gpt2", "qwen2.5-0.5b", "gemma3-1b", "llama-3.2-1b", "gpt2-xl", "gemma-2b", "llama-7b",
             "llama-3.1-8b", "gemma2-27b"]  # fmt: skip
    counts = sorted(((name, count(name)) for name in names), key=lambda pair: pair[1].total)
    parts = (
        ("embedding", BLUE, "#FFFFFF"),
        ("output", SKY, INK),
        ("attention", ORANGE, INK),
        ("feed_forward", YELLOW, INK),
    )
    picture = Picture(
        860, 120 + 34 * len(names), "Where the parameters are", "Shares of the parts in published models."
    )
    for place, (part, colour, _) in enumerate(parts):
        picture.box(240 + 150 * place, 52, 14, 14, colour, LINE)
        picture.text(260 + 150 * place, 64, part.replace("_", " "), size=13)
    for row, (name, counted) in enumerate(counts):
        y = 84 + 34 * row
        picture.text(24, y + 18, name)
        picture.text(216, y + 18, quantity(counted.total), anchor="end", fill=FAINT)
        left = 236.0
        for part, colour, ink in parts:
            share = counted.parts.get(part, 0) / counted.total
            picture.box(left, y, 600 * share, 26, colour, "#FFFFFF")
            if share >= 0.04:
                picture.text(left + 300 * share, y + 18, f"{share:.0%}", anchor="middle", size=13, fill=ink)
            left += 600 * share
    picture.text(24, 106 + 34 * len(names), "No output part: tied. Positions and norms (not drawn) are below 1%.",
                 size=13, fill=FAINT)  # fmt: skip
    assert all(
        sum(n for part, n in c.parts.items() if part in ("positions", "norms")) < c.total / 100 for _, c in counts
    )
    return picture.svg()


def scale() -> str:
    """The RMS of a coordinate that enters the first block, by width, with and without the factor."""
    gemma = read_config("gemma-2b")
    std, chosen = gemma.initializer_range, gemma.embed_dim
    left, right, top, bottom = 90, 640, 84, 330
    widths = [64 * 2**n for n in range(8)]

    def x(d: float) -> float:
        return left + (right - left) * math.log2(d / widths[0]) / math.log2(widths[-1] / widths[0])

    def y(rms: float) -> float:
        return bottom - (bottom - top) * math.log10(rms / 0.01) / math.log10(2 / 0.01)

    picture = Picture(860, 400, f"RMS of a coordinate going in, rows of N(0, {std})",
                      "Unscaled it stays the same at every width; times the root of d it grows.")  # fmt: skip
    for rms in (0.01, 0.1, 1):
        picture.line((left, y(rms)), (right, y(rms)), colour="#DDDDDD", tip=False, width=1)
        picture.text(left - 10, y(rms) + 5, f"{rms:g}", anchor="end", size=13)
    for d in widths:
        picture.text(x(d), bottom + 22, f"{d:,}", anchor="middle", size=13)
    picture.text((left + right) / 2, bottom + 46, "width d", anchor="middle", size=13, fill=FAINT)
    scaled: Callable[[int], float] = lambda d: std * math.sqrt(d)  # noqa: E731
    picture.line(*((x(d), y(scaled(d))) for d in widths), colour=RED, tip=False, width=2.5)
    picture.line((x(widths[0]), y(std)), (x(widths[-1]), y(std)), colour=BLUE, tip=False, width=2.5, dash="7 4")
    picture.line((x(chosen), y(std) - 8), (x(chosen), y(scaled(chosen)) + 10), width=1.4)
    picture.text(x(chosen) + 8, (y(std) + y(scaled(chosen))) / 2, f"× √{chosen:,} = {math.sqrt(chosen):.2f}", size=13)
    for rms, colour in ((std, BLUE), (scaled(chosen), RED)):
        picture.parts.append(f'<circle cx="{x(chosen):.1f}" cy="{y(rms):.1f}" r="5" fill="{colour}"/>')
    picture.text(right + 16, y(scaled(widths[-1])) + 4, "times √d", weight="bold")
    picture.text(right + 16, y(scaled(widths[-1])) + 26, f"d = {chosen:,}: RMS {scaled(chosen):.3f},", size=13)
    picture.text(right + 16, y(scaled(widths[-1])) + 44, f"norm {std * chosen:.1f}", size=13)
    picture.text(right + 16, y(std) - 14, "as stored", weight="bold")
    picture.text(right + 16, y(std) + 8, f"d = {chosen:,}: RMS {std:g},", size=13)
    picture.text(right + 16, y(std) + 26, f"norm {std * math.sqrt(chosen):.3f}", size=13)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "embeddings-tied-untied.svg": tied_untied,
    "embeddings-gradients.svg": gradients,
    "embeddings-shares.svg": shares,
    "embeddings-scale.svg": scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a picture is not as drawn")
    check = parser.parse_args().check
    stale = []
    for name, draw in PICTURES.items():
        path, drawn = DOCS / name, draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(name)
            if not check:
                path.write_text(drawn, encoding="utf-8")
    if stale:
        print(f"{'not as drawn' if check else 'drawn'}: {', '.join(stale)}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
