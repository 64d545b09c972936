"""What refusals are made of."""

from __future__ import annotations

from llmcli.errors import clip, dimensions, listing


def test_texts_of_a_file_are_made_fit_for_a_message() -> None:
    assert clip("plain") == "plain"
    assert clip("a\x1b[31m\nb") == "a\\x1b[31m\\nb"
    assert clip("x" * 1000) == "x" * 200 + "…"
    assert listing(["a", "b"]) == "a, b"
    assert listing((str(n) for n in range(60)), 3) == "0, 1, 2 and 57 more"
    assert [dimensions(shape) for shape in ((32000, 4096), (7,), ())] == ["32000 x 4096", "7", "scalar"]
