"""Spellings read from a tokenizer.json without the tokenizer: the same as the tokenizer's, for every token and id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcli import tokenizer, vocabulary

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"


def same(folder: Path) -> None:
    """Every id, every spelling, and a few that are not there, as the tokenizer says."""
    found = vocabulary.load(folder / "tokenizer.json")
    real = tokenizer.load(folder)
    assert found is not None
    assert found.size == real.size
    for id in (*range(real.size + 3), -1, 10**12):
        assert found.token(id) == real.token(id), id
    for token in (*real.backend.get_vocab(), "not there", "", '"', "\ud800"):
        assert found.id(token) == real.id(token), token


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the shared stories260K")
def test_stories260K() -> None:
    same(STORIES)


def test_a_byte_level_bpe(tmp_path: Path) -> None:
    tokenizer.train_bpe(['He said "no": 5, \\n {"a": 1} ' * 30, "über Ünï 中文"], 400).save(tmp_path)
    same(tmp_path)


def test_bytes(tmp_path: Path) -> None:
    tokenizer.bytes_tokenizer().save(tmp_path)
    same(tmp_path)


TRICKY = [
    '":5',
    '\\":',
    '"',
    "\\",
    '\\\\"',
    "a",
    '":',
    '"x":1,"y',
    "é",
    "\n",
    "\u2028",
    "中",
    "😀",
    ' "',
    "a b",
    ":",
    ",",
]


@pytest.mark.parametrize("style", [{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}])
def test_spellings_that_look_like_json_in_every_style_of_json(tmp_path: Path, style: dict[str, Any]) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({t: 2 * n for n, t in enumerate(TRICKY)}, unk_token="a"))
    made.add_special_tokens(["<end>", "a"])  # one that is new, one that is there
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str()), **style), "utf-8")
    same(tmp_path)


@settings(max_examples=60, deadline=None)
@given(words=st.sets(st.text(max_size=6), max_size=12), seed=st.integers(0, 3), plain=st.booleans())
@example(words={"\\", '\\"', '"'}, seed=0, plain=False)
def test_any_table(tmp_path_factory: pytest.TempPathFactory, words: set[str], seed: int, plain: bool) -> None:
    folder = tmp_path_factory.mktemp("v")
    table = {word: (n * 7 + seed) % 1000 for n, word in enumerate(sorted(words))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="?"))
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str()), ensure_ascii=plain), "utf-8")
    same(folder)


def test_what_is_for_the_tokenizer_to_read_or_refuse(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    assert vocabulary.load(file) is None
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", -1.0), ("b", -2.0)]))
    for text in (unigram.to_str(), "", "{", '{"model": {"type": "BPE"}}', '{"model": {"vocab": {"a": "b"}}}',
                 '{"model": {"vocab": {"a": 12345678901}}}', '{"model": {"vocab": {"a": -1}}}'):  # fmt: skip
        file.write_text(text)
        assert vocabulary.load(file) is None, text
    file.write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    empty = vocabulary.load(file)
    assert empty is not None and empty.size == 0 and empty.id("a") is None and empty.token(0) == "<row 0>"
