"""Tokens on disk: made once, the same for the same text."""

from __future__ import annotations

import os
import shutil
import time
import tracemalloc
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from llmcli import corpus, data, tokenizer
from llmcli.config import DataConfig
from llmcli.corpus import Piece, Survey
from llmcli.errors import DataError, TokenizerError, UsageError

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmcli"


def prepared(tmp_path: Path, vocab_size: int = 300, **changes: object) -> data.Data:
    return data.finished(data.prepare(DataConfig(**changes), vocab_size, tmp_path / "fallback"))


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


# What is tokenised


def test_one_text_is_cut_at_the_character_that_nanogpt_cuts_it(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1234))
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", text), tokenizer="char")
    both = [made.tokenizer.decode(part) for part in (made.train, made.validation)]
    assert both == [text[: int(1234 * 0.9)], text[int(1234 * 0.9) :]]


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="Tiny Shakespeare is not here")
def test_tiny_shakespeare_by_characters_is_nanogpts_data(tmp_path: Path) -> None:
    made = prepared(tmp_path, path=str(SHAKESPEARE), tokenizer="char")
    assert (made.tokenizer.size, len(made.train), len(made.validation)) == (65, 1_003_854, 111_540)
    text = SHAKESPEARE.read_text(encoding="utf-8")
    table = {character: id for id, character in enumerate(sorted(set(text)))}
    assert made.train[:1000].tolist() == [table[character] for character in text[:1000]]
    assert made.validation[-9:].tolist() == [table[character] for character in text[-9:]]


def test_documents_stay_whole_and_end_in_the_end_token(tmp_path: Path) -> None:
    texts = [f"document {n:02} " * 5 for n in range(20)]
    for n, text in enumerate(texts):
        write(tmp_path / "texts" / f"{n:02}.txt", text)
    made = prepared(tmp_path, path=str(tmp_path / "texts"), tokenizer="byte")
    end = made.tokenizer.eos_id
    parts = [bytes(id if id != end else 0 for id in part).decode() for part in (made.train, made.validation)]
    assert parts[0].split("\0")[:-1] + parts[1].split("\0")[:-1] == texts
    assert [part[-1] for part in parts] == ["\0", "\0"]
    assert parts[1].count("\0") == 2


def test_a_single_text_is_not_closed(tmp_path: Path) -> None:
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", "abc" * 50), tokenizer="byte")
    assert made.tokenizer.eos_id not in [*made.train, *made.validation]


def test_where_the_last_document_would_take_all_the_tail_it_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "texts" / "a.txt", "short")
    write(tmp_path / "texts" / "b.txt", "x" * 995)
    made = prepared(tmp_path, path=str(tmp_path / "texts"), tokenizer="byte")
    assert len(made.validation) == 100 + 1
    assert len(made.train) == 900 + 1


def test_a_validation_text_of_its_own_leaves_the_training_text_whole(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "a.txt", "a" * 100), write(tmp_path / "b.txt", "b" * 50)
    made = prepared(tmp_path, path=train, validation_path=held_out, tokenizer="byte")
    assert set(made.train) == {ord("a"), 256} and set(made.validation) == {ord("b"), 256}
    assert made.info.train == data.Part(101, 100)
    assert made.info.validation == data.Part(51, 50)


def test_tokens_of_another_text_in_a_texts_place_are_made_anew(tmp_path: Path, cache: Path) -> None:
    one, other = (write(tmp_path / f"{name}.txt", name * 300) for name in ("one", "other"))
    wrong, right = (prepared(tmp_path, path=path, tokenizer="byte") for path in (one, other))
    wanted = right.train.tolist()
    shutil.copytree(cache / "tokens" / wrong.fingerprint, cache / "tokens" / right.fingerprint, dirs_exist_ok=True)
    assert prepared(tmp_path, path=other, tokenizer="byte").train.tolist() == wanted


def test_a_bpe_learns_no_token_that_reaches_from_one_document_into_the_next(tmp_path: Path) -> None:
    for name, text, joined in (("many.jsonl", '{"text": "xy"}\n' * 90, False), ("one.txt", "xy" * 90, True)):
        made = prepared(tmp_path, 260, path=write(tmp_path / name, text), tokenizer="bpe")
        assert made.tokenizer.id("xy") is not None and (made.tokenizer.id("xyxy") is not None) == joined


def test_a_text_begins_once_however_many_parts_it_is_encoded_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "BATCH", 64)
    backend = tokenizer.bytes_tokenizer().backend
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    (tmp_path / "tokenizer").mkdir()
    backend.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    text = "one two three " * 100
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", text), tokenizer=str(tmp_path / "tokenizer"))
    ids = [*made.train.tolist(), *made.validation.tolist()]
    assert made.tokenizer.add_bos and ids == [256, *text.encode()]


@pytest.mark.parametrize(("size", "itemsize"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_a_token_takes_two_bytes_as_long_as_every_id_fits(tmp_path: Path, size: int, itemsize: int) -> None:
    characters = [*range(0x3400, 0xD800), *range(0x20000, 0x30000)][:size]
    text = "".join(map(chr, characters))
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", text), tokenizer="char")
    assert made.tokenizer.size == size and made.train.itemsize == made.validation.itemsize == itemsize
    assert [*made.train.tolist(), *made.validation.tolist()] == list(range(size))


def test_a_bpe_learns_from_the_training_text_alone(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "a.txt", "the cat " * 50), write(tmp_path / "b.txt", "zebra " * 50)
    made = prepared(tmp_path, path=train, validation_path=held_out, tokenizer="bpe")
    assert made.tokenizer.id("Ġcat") is not None
    assert made.tokenizer.id("Ġzebra") is None


def test_a_tokenizer_of_characters_knows_the_validation_text_too(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "a.txt", "abc"), write(tmp_path / "b.txt", "xyz")
    assert prepared(tmp_path, path=train, validation_path=held_out, tokenizer="char").tokenizer.size == 6


def test_bos_stands_once_before_each_document_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    by = tokenizer.train_bpe(["one two three " * 20], 280)
    by.backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    by.save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n' * 10)
    made = prepared(tmp_path, path=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer"))
    assert made.tokenizer.add_bos
    first = made.tokenizer.encode("one two", special=False)
    # As it comes, the same token ends a document.
    assert made.train.tolist() == [0, *first, 0] * 9


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_text_longer_than_a_batch_is_encoded_as_if_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(data, "BATCH", 100)
    monkeypatch.setattr(corpus, "CHUNK", 70)
    text = "It was the best of times, it was the worst of times.\n\n  x\t y <|endoftext|> é🙂 " * 30
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", text), tokenizer=kind)
    cut = int(len(text) * 0.9)
    assert made.train.tolist() == made.tokenizer.encode(text[:cut], special=False)
    assert made.validation.tolist() == made.tokenizer.encode(text[cut:], special=False)


def test_a_text_streams_through_in_memory_that_does_not_grow_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "BATCH", 1 << 15)
    monkeypatch.setattr(corpus, "CHUNK", 1 << 14)
    peaks = []
    for size in (1, 8):
        path = tmp_path / f"{size}.txt"
        path.write_text("all the king's horses\n" * 12_000 * size)  # 264 kB, 2.1 MB
        tracemalloc.start()
        prepared(tmp_path, path=str(path), tokenizer="byte")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_a_tokenizer_that_may_not_be_cut_gets_documents_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, normalizers

    monkeypatch.setattr(data, "BATCH", 50)
    monkeypatch.setattr(corpus, "CHUNK", 40)
    backend = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁a": 3}, merges=[("▁", "a")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "ab ab ba " * 40
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", text), tokenizer=str(tmp_path / "tokenizer.json"))
    assert made.train.tolist() == made.tokenizer.encode(text[:324])


def test_ids_past_65535_are_kept(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    names = {chr(0x4E00 + i) if i else "a": i for i in range(3)} | {"b": 70_000}
    backend = Tokenizer(models.BPE(vocab=names, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", "ab" * 20), tokenizer=str(tmp_path / "tokenizer.json"))
    assert made.info.itemsize == 4
    assert made.train[:4].tolist() == [0, 70_000] * 2


def test_a_character_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    tokenizer.characters(["abc"]).save(tmp_path / "abc")
    with pytest.raises(TokenizerError, match="'d'"):
        prepared(tmp_path, path=write(tmp_path / "a.txt", "abcd" * 9), tokenizer=str(tmp_path / "abc"))


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such tokenizer"):
        prepared(tmp_path, tokenizer="bpee")


# Once


def test_the_same_text_is_tokenised_once_wherever_it_lies(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the quick brown fox " * 30
    first = prepared(tmp_path, path=write(tmp_path / "a.txt", text))
    monkeypatch.setattr(data, "_tokenise", None)
    monkeypatch.setattr(tokenizer, "train_bpe", None)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    second = prepared(tmp_path, path=str(tmp_path / "b.txt"))
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.train, second.train)
    assert isinstance(second.train, np.memmap)


@pytest.mark.parametrize(
    "change", [{"text": "b"}, {"validation_fraction": 0.2}, {"tokenizer": "char"}, {"vocab_size": 290}]
)
def test_what_changes_the_tokens_changes_the_fingerprint(tmp_path: Path, change: dict[str, object]) -> None:
    base: dict[str, object] = {"text": "a", "vocab_size": 270}

    def fingerprint(values: dict[str, object]) -> str:
        values = dict(values)
        path = write(
            tmp_path / "a.txt", f"words and words {values.pop('text')}, the many other words that make up a text " * 20
        )
        return prepared(tmp_path, path=path, **values).fingerprint  # type: ignore[arg-type]

    assert fingerprint(base) != fingerprint({**base, **change})


@pytest.mark.parametrize("damage", ["truncate", "info", "remove"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    path = write(tmp_path / "a.txt", "some text " * 50)
    first = prepared(tmp_path, path=path)
    wanted = first.train.tolist()
    folder = next((cache / "tokens").iterdir())
    if damage == "truncate":
        os.truncate(folder / "train.bin", 10)
    elif damage == "info":
        (folder / "info.json").write_text("{")
    else:
        (folder / "validation.bin").unlink()
    assert prepared(tmp_path, path=path).train.tolist() == wanted


def test_a_preparation_that_was_killed_leaves_nothing_that_is_taken_for_whole(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.txt", "some text " * 50)
    preparing = data.prepare(DataConfig(path=path, tokenizer="byte"), 300, tmp_path)
    while next(preparing).what != "tokenising":
        pass
    preparing.close()
    assert [folder.name for folder in (cache / "tokens").iterdir()] == []
    assert len(prepared(tmp_path, path=path, tokenizer="byte").train) == 450


def test_two_processes_may_tokenise_the_same_text_at_once(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.txt", "some text " * 50)
    slow = data.prepare(DataConfig(path=path), 300, tmp_path)
    while next(slow).what != "tokenising":  # written, not yet in its place
        pass
    first = prepared(tmp_path, path=path)
    folder = next(folder for folder in (cache / "tokens").iterdir() if not folder.name.startswith("."))
    inode = (folder / "train.bin").stat().st_ino
    second = data.finished(slow)
    assert np.array_equal(first.train, second.train)
    assert (folder / "train.bin").stat().st_ino == inode  # the first one's stays
    assert [folder] == list((cache / "tokens").iterdir())


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path, cache: Path) -> None:
    for name, age in (("old", 8 * 24 * 3600), ("new", 60)):
        folder = cache / "tokens" / f".writing-{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    prepared(tmp_path, path=write(tmp_path / "a.txt", "some text " * 50))
    assert [folder.name for folder in (cache / "tokens").glob(".*")] == [".writing-new"]


def test_a_cache_that_fills_the_disk_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written .No space left"):
        prepared(tmp_path, path=write(tmp_path / "a.txt", "some text " * 50))
    assert list((cache / "tokens").iterdir()) == []


def test_where_the_cache_cannot_be_written_the_runs_own_folder_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    prepared(tmp_path)
    assert (tmp_path / "fallback" / "tokens").is_dir()


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="no place for the tokens"):
        data.finished(data.prepare(DataConfig(), 300, tmp_path / "file" / "x"))


def test_progress_is_told_in_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "word " * 100)
    told = list(data.prepare(DataConfig(path=path), 300, tmp_path))
    assert [p.what for p in told] == ["reading", "learning the tokenizer", "tokenising"]
    assert (told[-1].done, told[-1].total) == (500, 500)


def test_a_text_that_is_too_short_is_refused_with_the_largest_context_that_fits(tmp_path: Path) -> None:
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", "a" * 20), tokenizer="byte")
    with pytest.raises(DataError, match="training text has 18 tokens; a context of 18 needs 19") as caught:
        data.check_length(made, 18)
    assert "train.context=17" in caught.value.hint
    data.check_length(made, 17)


def test_a_validation_text_without_a_prediction_is_refused(tmp_path: Path) -> None:
    made = prepared(tmp_path, path=write(tmp_path / "a.txt", "a" * 10), tokenizer="byte")
    with pytest.raises(DataError, match="validation text has 1 tokens"):
        data.check_length(made, 4)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.7])
def test_dividing_loses_no_character(fraction: float) -> None:
    pieces = [Piece("abc", False), Piece("de", True), Piece("f", True), Piece("ghij", False), Piece("klm", True)]
    for whole in (pieces, [*pieces[:2]]):
        text = "".join(piece.text for piece in whole)
        ends = [i for i, piece in enumerate(whole) if piece.ends]
        last = len("".join(piece.text for piece in whole[: ends[-2] + 1])) if len(ends) > 1 else 0
        seen = Survey(len(ends), len(text), len(text), last, "")
        parts = list(data.divide(iter(whole), seen, fraction))
        assert "".join(piece.text for _, piece in parts) == text
        held_out = [held_out for held_out, _ in parts]
        assert held_out == sorted(held_out) and set(held_out) == {False, True}


@pytest.mark.parametrize(("tokens", "hint"), [(0, "Give more text."), (1, "Give more text."), (2, "train.context=1;")])
def test_the_longest_context_that_fits_is_named_where_one_does(tokens: int, hint: str) -> None:
    made: Any = types.SimpleNamespace(train=[0] * tokens, validation=[0, 0])
    with pytest.raises(DataError) as refused:
        data.check_length(made, 8)
    assert hint in refused.value.hint and ("train.context=" in refused.value.hint) == (tokens > 1)
