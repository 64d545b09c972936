"""Every picture: one style, a file that is whole or not there, and text that is what it says."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from llmcli import plot
from llmcli.errors import LlmcliError, UsageError


def test_a_picture_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a picture.svg"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), plot.drawing(path, 3, 2) as figure:
        figure.add_subplot().bar(0, 1 / 0)
    assert path.read_text() == "before"
    with plot.drawing(path, 3, 2) as figure:
        figure.add_subplot().bar(0, 1)
    assert path.read_text().startswith("<?xml")
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~plot._umask()


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_the_same_picture_is_the_same_file_whenever_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    drawn = []
    for name, seconds in (("a", 1), ("b", 1_000_000_000)):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(seconds))  # matplotlib's clock
        with plot.drawing(tmp_path / f"{name}{suffix}", 3, 2) as figure:
            axes = figure.add_subplot()
            axes.plot([0, 1], [1, 0], marker="o", label="a line")
            axes.legend()
        drawn.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert drawn[0] == drawn[1]


def test_a_picture_that_cannot_be_written_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(LlmcliError, match="No space left"), plot.drawing(tmp_path / "x.png", 3, 2):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "x.jpg", "x.svg.gz", ".svg"])
def test_what_is_no_pictures_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.svg, \.png or \.pdf"):
        plot.check(tmp_path / name)


def test_a_place_that_is_none_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "nowhere" / "x.png", tmp_path / "folder.png"):
        with pytest.raises(UsageError, match="folder"):
            plot.check(path)
    assert plot.check(str(tmp_path / "X.PNG")) == tmp_path / "X.PNG"


@pytest.mark.parametrize(
    ("text", "told"),
    [("▁she", "▁she"), ("Ġé$x$", "Ġé$x$"), ("a\nb", "aU+000Ab"), ("中", "U+4E2D"), ("\u202e", "U+202E"), ("", "")],
)
def test_text_that_the_font_lacks_is_told_by_number(text: str, told: str) -> None:
    assert plot.readable(text) == told


def test_dollar_signs_are_no_mathematics_and_the_style_stays_inside(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with plot.drawing(tmp_path / "x.svg", 3, 2) as figure:
        figure.text(0, 0, "$\\undefined_{ $x")
    assert dict(matplotlib.rcParams) == before


# What dichromats see of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
DICHROMACY = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


@pytest.mark.parametrize("kind", DICHROMACY)
def test_the_palette_stays_apart_for_colour_blind_readers(kind: str) -> None:
    """Any two colours differ by 15 in CIELAB, where 2 is just seen."""

    def lab(colour: str) -> np.ndarray:
        coded = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
        linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
        seen = np.clip(np.array(DICHROMACY[kind]) @ linear, 0, 1)
        x, y, z = np.cbrt(XYZ @ seen / (0.95047, 1, 1.08883))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    pairs = itertools.combinations(map(lab, plot.PALETTE), 2)
    assert min(np.linalg.norm(a - b) for a, b in pairs) > 15
