"""What refusals are made of."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmcli.errors import DataError, UsageError, clip, dimensions, listing, unreadable, unwritable


@pytest.mark.parametrize(
    ("number", "read", "written"),
    [
        (errno.EACCES, "Check the permissions.", "Check the permissions, or choose another folder."),
        (errno.EPERM, "Check the permissions.", "Check the permissions, or choose another folder."),
        (errno.ENOSPC, "Make room on the disk.", "Make room on the disk, or choose another folder."),
        (errno.EIO, "Check the path.", "Choose another folder."),
    ],
)
def test_a_hint_depends_on_what_the_system_says(number: int, read: str, written: str, tmp_path: Path) -> None:
    error = OSError(number, os.strerror(number))
    for refusal, hint, word in (
        (unreadable(tmp_path, error, DataError), read, "read"),
        (unwritable(tmp_path, error, DataError, "Choose another folder."), written, "written"),
    ):
        assert type(refusal) is DataError and refusal.hint == hint
        assert refusal.message == f"{tmp_path}: cannot be {word} ({error.strerror})"
    there = unwritable(tmp_path, IsADirectoryError(errno.EISDIR, "x"), DataError, "Choose another folder.")
    assert type(there) is UsageError and there.hint == "Choose another folder."


def test_texts_of_a_file_are_made_fit_for_a_message() -> None:
    assert clip("plain") == "plain"
    assert clip("a\x1b[31m\nb") == "a\\x1b[31m\\nb"
    assert clip("x" * 1000) == "x" * 200 + "…"
    assert listing(["a", "b"]) == "a, b"
    assert listing((str(n) for n in range(60)), 3) == "0, 1, 2 and 57 more"
    assert [dimensions(shape) for shape in ((32000, 4096), (7,), ())] == ["32000 x 4096", "7", "scalar"]
