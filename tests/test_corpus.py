"""Text of every kind: the same text whatever file it lies in, and a refusal that names the place otherwise."""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import importlib
import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli import corpus
from llmcli.errors import DataError, UsageError

TEXT = "Grüße, 世界!\nSecond line – 🙂\n"


def documents(path: Path, **options: str) -> list[str]:
    found, text = [], ""
    for piece in corpus.find(str(path), **options).pieces():
        text += piece.text
        if piece.ends:
            found.append(text)
            text = ""
    assert not text
    return found


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_text_is_the_same_in_every_marked_encoding_and_with_every_newline(
    tmp_path: Path, encoding: str, newline: str
) -> None:
    path = tmp_path / "a b=é.txt"
    path.write_bytes(TEXT.replace("\n", newline).encode(encoding))
    assert documents(path) == [TEXT]


@pytest.mark.parametrize("mark, encoding", [(codecs.BOM_UTF16_BE, "utf-16-be"), (codecs.BOM_UTF32_BE, "utf-32-be")])
def test_big_endian_marks_are_read_too(tmp_path: Path, mark: bytes, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(mark + TEXT.encode(encoding))
    assert documents(tmp_path / "a.txt") == [TEXT]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_named_encoding_swallows_its_own_mark(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"))
    assert documents(tmp_path / "a.txt", encoding=encoding) == [TEXT]


def test_one_byte_of_windows_text_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "quotes.txt"
    raw = "é".encode() * 700_000 + b"it\x92s"  # past the first chunk, where a character spans two chunks
    path.write_bytes(b"a" + raw)
    with pytest.raises(DataError, match=r"quotes\.txt.*0x92 at offset 1,400,003") as caught:
        documents(path)
    assert caught.value.hint == corpus.CONVERT  # evaluate and generate have no option for it
    with pytest.raises(DataError) as caught:
        documents(path, encoding="auto")
    assert all(part in caught.value.hint for part in (corpus.CONVERT, "--set data.encoding", "--encoding", "cp1252"))
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"it\x92s")
    with pytest.raises(DataError, match=r"0x92 at offset 5\)"):
        documents(tmp_path / "marked.txt")
    assert documents(path, encoding="cp1252")[0].endswith("it\u2019s")


def test_utf16_without_a_mark_is_refused_and_read_when_named(tmp_path: Path) -> None:
    path = tmp_path / "wide.txt"
    path.write_bytes("word".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"zero byte at offset 1\)") as caught:
        documents(path, encoding="auto")
    assert corpus.UTF_16 in caught.value.hint and "data.encoding" in caught.value.hint
    assert documents(path, encoding="utf-16-le") == ["word"]


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(UsageError, match="utf-9: no such encoding"):
        corpus.find(None, encoding="utf-9")


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60), size=st.integers(1, 7)
)
def test_reading_in_chunks_of_any_size_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("chunks") / "a.txt"
    path.write_bytes(text.encode("utf-8-sig"))
    wanted = text.replace("\r\n", "\n").replace("\r", "\n")
    with pytest.MonkeyPatch.context() as patch:
        # A mark longer than the chunk cannot be seen: real chunks are a million bytes.
        patch.setattr(corpus, "CHUNK", max(size, 3))
        assert "".join(documents(path)) == wanted


@pytest.mark.parametrize("suffix, compress", [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed_text_is_the_text_and_a_truncated_file_is_named(tmp_path: Path, suffix: str, compress: Any) -> None:
    path = tmp_path / f"a.txt{suffix}"
    whole = compress(TEXT.encode() * 100)
    path.write_bytes(whole)
    assert documents(path) == [TEXT * 100]
    path.write_bytes(whole[:-12])
    with pytest.raises(DataError, match=rf"a\.txt\{suffix}: damaged"):
        documents(path)


def test_zstd_is_read_through_its_extra(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    rows = b"".join(json.dumps({"text": TEXT}).encode() + b"\n" for _ in range(3))
    path.write_bytes(zstandard.compress(rows[:40]) + zstandard.compress(rows[40:]))  # two frames
    assert documents(path) == [TEXT] * 3
    path.write_bytes(zstandard.compress(rows)[:-9])
    with pytest.raises(DataError, match="damaged"):
        documents(path)
    path.write_bytes(b"no frame at all")
    with pytest.raises(DataError, match="damaged"):
        documents(path)


@pytest.mark.parametrize("name, package", [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow.parquet")])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match="not installed") as caught:
        documents(tmp_path / name)
    assert "pip install" in caught.value.hint


def test_parquet_gives_a_document_for_each_row(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), importlib.import_module("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": [TEXT, None, "b\r\n"], "n": [1, 2, 3]}), path)
    assert documents(path, field="body") == [TEXT, "b\n"]
    with pytest.raises(DataError, match=r"no column 'text' .it has body, n"):
        documents(path)
    with pytest.raises(DataError, match="'n' holds no text"):
        documents(path, field="n")


def test_a_line_of_json_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\r\\n"}\n\n{"text": ""}\n{"id": 3, "text": "two"}', encoding="utf-8-sig")
    assert documents(path) == ["one\n", "two"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 has no text under 'text' .it is no object"),
        ('{"body": "x"}', "line 2 has no text under 'text' .it has 'body'"),
        ('{"text": 5}', "line 2 has no text under 'text'"),
        ('{"text": "\\ud83d"}', "line 2 (holds half a character|is not JSON)"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=message) as caught:
        documents(tmp_path / "a.jsonl")
    if "no text under" in message:
        assert all(option in caught.value.hint for option in ("--set data.field", "--field"))


def test_a_folder_gives_its_texts_to_the_leaves_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "deep/er/c.TXT", "deep.txt", ".hidden/d.txt", "no.bin", "e.jsonl.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = corpus.find(str(tmp_path)).files
    names = ["a.md", "b.txt", "deep/er/c.TXT", "deep.txt", "e.jsonl.gz"]  # folder by folder, whatever parts their names
    assert [str(path.relative_to(tmp_path)) for path in found] == names


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_document_ends_with_its_last_piece_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(corpus, "CHUNK", 4)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * length}) + "\n")
    (tmp_path / "a.txt").write_text("x" * length)
    for name in ("a.jsonl", "a.txt"):
        pieces = list(corpus.read(tmp_path / name))
        assert "".join(piece.text for piece in pieces) == "x" * length
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_patterns_and_lists_are_joined_and_no_file_is_read_twice(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.log"):
        (tmp_path / name).write_text(name)
    found = corpus.find([f"{tmp_path}/*.txt", f"{tmp_path}/a.txt", f"{tmp_path}/c.log"]).files
    assert [path.name for path in found] == ["a.txt", "b.txt", "c.log"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert documents(tmp_path / "a[1].txt") == ["x"]


@pytest.mark.parametrize("name", ["nothing.txt", "*.nothing"])
def test_what_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no such file"):
        corpus.find(str(tmp_path / name))


def test_a_folder_that_may_not_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "deep/b.txt", ".hidden/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    scandir, shut = os.scandir, tmp_path / ".hidden"

    def refusing(path: str | Path) -> Any:
        if Path(path) == shut:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert len(corpus.find(str(tmp_path)).files) == 2  # what is hidden is not looked into
    shut = tmp_path / "deep"
    with pytest.raises(DataError, match="deep: cannot be read") as caught:
        corpus.find(str(tmp_path))
    assert caught.value.hint == "Check the permissions."


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match="a folder without text") as refusal:
        corpus.find(str(tmp_path))
    assert f"'{tmp_path}/*.py'" in (refusal.value.hint or "")


@pytest.mark.parametrize("content", [b"", codecs.BOM_UTF8])
def test_an_empty_file_has_no_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"empty\.txt: no text in it"):
        corpus.survey(corpus.find(str(tmp_path / "empty.txt")))


def test_the_survey_counts_and_its_digest_is_of_documents_not_of_files(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("äb")
    (tmp_path / "one" / "b.txt").write_text("cde")
    (tmp_path / "two.jsonl").write_text('{"text": "äb"}\n{"text": "cde"}\n')
    (tmp_path / "three.txt").write_text("äbcde")
    one, two, three = (corpus.survey(corpus.find(str(tmp_path / name))) for name in ("one", "two.jsonl", "three.txt"))
    assert (one.documents, one.characters, one.bytes, one.last) == (2, 5, 6, 2)
    assert one.digest == two.digest != three.digest


def test_the_embedded_corpus_is_there() -> None:
    text = corpus.embedded()
    assert len(text) > 300_000
    assert "expression" in text and "\r" not in text
