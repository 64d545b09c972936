"""The tokenizer's contracts: transformers' ids and text, streamed text that is whole, refusals that name names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcli import tokenizer as module
from llmcli.errors import TokenizerError
from llmcli.tokenizer import (
    END_OF_TEXT,
    Stream,
    Tokenizer,
    bytes_tokenizer,
    characters,
    check_ids,
    load,
    train_bpe,
)

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
CORPUS = (
    "The king and the queen said that she was the kindest of all kings. "
    "She said: the king's queen, the queen's king! Кошка и король, король и кошка. "
    "naïve café 你好 🙂🙂 👩‍👩‍👧 12 + 34 = 46\n\n  indented\ttext \u00a0 \ufffd end\r\n"
) * 4
SAMPLES = [
    "",
    " ",
    "   ",
    "she",
    " she",
    "  She said",
    "the king\n\n  and\t the queen's",
    "Кошка 🙂 и 👩‍👩‍👧 \x00\x7f",
    "日本語 with é and \ufffd",
    "▁she ▁",
    "Ġking",
    "a<s>b</s> c",
    f"one{END_OF_TEXT} two {END_OF_TEXT}",
    "trailing  ",
]
any_text = st.text(max_size=60) | st.lists(st.sampled_from(CORPUS.split(" ")), max_size=8).map(" ".join)


def llama(byte_fallback: bool = True, bos: bool = True) -> tokenizers.Tokenizer:
    """A small Llama tokenizer as transformers 5 writes it: metaspace, byte fallback, BOS by its post-processor."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *byte_tokens], show_progress=False)
    backend.train_from_iterator([CORPUS.replace("🙂", "").replace("你好", "")], trainer)
    state = json.loads(backend.to_str())
    state["model"].update(byte_fallback=byte_fallback, fuse_unk=True)
    state["pre_tokenizer"]["split"] = False
    state["added_tokens"] = state["added_tokens"][:3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    fallback = [decoders.ByteFallback()] if byte_fallback else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), *fallback, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def gemma() -> tokenizers.Tokenizer:
    """No prefix space: the normalizer writes ▁ for every space."""
    backend = llama()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """The decoder named Metaspace, which drops the first token's leading space itself."""
    backend = llama(byte_fallback=False, bos=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


def byte_level_with_added_tokens() -> tokenizers.Tokenizer:
    """Added tokens outside the byte alphabet, special and not, and one that takes in the space after it."""
    backend = train_bpe([CORPUS], 330).backend
    backend.add_special_tokens(["«конец»"])
    backend.add_tokens(["你好", tokenizers.AddedToken("<eat>", rstrip=True)])
    return backend


def gpt1_files(folder: Path) -> Path:
    """GPT-1's two files, learnt from the corpus: tokens that end a word end in </w>."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator([CORPUS], trainer)
    backend.model.save(str(folder))
    return folder


def gpt2_files(folder: Path) -> Path:
    train_bpe([CORPUS], 330).backend.model.save(str(folder))
    return folder


def write(folder: Path, **files: Any) -> Path:
    """Write each keyword as <name>.json: a dict as JSON, a string as it is, a tokenizer as tokenizer.json."""
    for name, content in files.items():
        text = content if isinstance(content, str) else None
        text = content.to_str() if isinstance(content, tokenizers.Tokenizer) else text
        (folder / f"{name}.json").write_text(json.dumps(content) if text is None else text, "utf-8")
    return folder


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {
        "bytes": bytes_tokenizer(),
        "characters": characters([CORPUS]),
        "characters with <unk>": characters([CORPUS[:40]], unknown=True),
        "bpe": train_bpe([CORPUS], 330),
        "bpe with added tokens": Tokenizer(byte_level_with_added_tokens()),
        "llama": Tokenizer(llama(), 1, [2]),
        "llama without byte fallback": Tokenizer(llama(byte_fallback=False), 1, [2]),
        "metaspace": Tokenizer(metaspace()),
        "gemma": Tokenizer(gemma(), 1, [2]),
        "gpt1": load(gpt1_files(tmp_path_factory.mktemp("gpt1"))),
        "gpt2": load(gpt2_files(tmp_path_factory.mktemp("gpt2"))),
    }
    if STORIES.exists():
        made["stories260K"] = load(STORIES)
    return made


KINDS = [
    "bytes",
    "characters",
    "characters with <unk>",
    "bpe",
    "bpe with added tokens",
    "llama",
    "llama without byte fallback",
    "metaspace",
    "gemma",
    "gpt1",
    "gpt2",
    pytest.param("stories260K", marks=pytest.mark.skipif(not STORIES.exists(), reason="stories260K is not here")),
]
every_kind = pytest.mark.parametrize("kind", KINDS)
patient = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    stream = Stream(tokenizer, skip_special)
    return "".join([*map(stream.push, ids), stream.finish()])


# Streaming


@every_kind
@pytest.mark.parametrize("skip_special", [True, False])
@patient
@given(data=st.data())
def test_streamed_text_is_the_whole_decode_for_any_ids(
    kinds: dict[str, Tokenizer], kind: str, skip_special: bool, data: st.DataObject
) -> None:
    tokenizer = kinds[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 1), max_size=40))
    assert streamed(tokenizer, ids, skip_special) == tokenizer.decode(ids, skip_special)


@every_kind
@patient
@given(text=any_text)
def test_streamed_text_is_the_whole_decode_for_any_text(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kinds[kind]
    if kind == "characters":
        text = "".join(c for c in text if tokenizer.id(c) is not None)
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "llama"])
@patient
@given(pieces=st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x99\x82", b"\xff", b"a", b" "])))
def test_lone_and_split_bytes_stream_as_they_decode(
    kinds: dict[str, Tokenizer], kind: str, pieces: list[bytes]
) -> None:
    tokenizer = kinds[kind]
    spelled = [byte if kind == "bytes" else tokenizer.id(f"<0x{byte:02X}>") for piece in pieces for byte in piece]
    ids = [id for id in spelled if id is not None]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    if kind == "bytes":
        assert tokenizer.decode(ids) == b"".join(pieces).decode("utf-8", "replace")


def test_a_streamed_character_is_never_split_nor_kept_back(kinds: dict[str, Tokenizer]) -> None:
    stream = Stream(kinds["bytes"])
    assert [stream.push(byte) for byte in "é🙂a".encode()] == ["", "é", "", "", "", "🙂", "a"]
    assert [stream.push(0xF0), stream.finish()] == ["", "\ufffd"]
    stream = Stream(kinds["gpt1"])
    words = [kinds["gpt1"].one_token(word) for word in ("the", "king")]
    assert [*map(stream.push, words), stream.finish()] == ["the", " king", ""]


def test_a_push_decodes_a_bounded_window(kinds: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = kinds["llama"]
    seen: list[int] = []
    whole = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, **rest: seen.append(len(ids)) or whole(self, ids, **rest)
    )
    streamed(tokenizer, tokenizer.encode(CORPUS))
    assert max(seen) < 30


# The same ids and text as transformers


def auto(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def assert_parity(tokenizer: Tokenizer, folder: Path) -> None:
    theirs = auto(folder)
    for text in SAMPLES:
        ids = theirs(text).input_ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert tokenizer.decode(ids, skip_special=False) == theirs.decode(ids), text
    for ours, token in ((tokenizer.bos_id, theirs.bos_token_id), (tokenizer.eos_id, theirs.eos_token_id)):
        assert ours == token


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "characters"])  # it refuses the samples
@pytest.mark.parametrize("model_type", [None, "llama", "gpt2", "gemma", "openai-gpt", "mistral", "llmcli-gpt"])
def test_a_saved_tokenizer_is_the_same_in_transformers(
    kinds: dict[str, Tokenizer], kind: str, model_type: str | None, tmp_path: Path
) -> None:
    tokenizer = kinds[kind]
    if model_type:
        write(tmp_path, config={"model_type": model_type})
    tokenizer.save(tmp_path)
    assert_parity(tokenizer, tmp_path)
    again = load(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.bos_id, again.eos_ids, again.add_bos, again.size) == (
        tokenizer.bos_id,
        tokenizer.eos_ids,
        tokenizer.add_bos,
        tokenizer.size,
    )


def test_a_saved_character_tokenizer_is_the_same_in_transformers(tmp_path: Path) -> None:
    tokenizer = characters([CORPUS])
    tokenizer.save(tmp_path)
    assert load(tmp_path).encode(CORPUS) == auto(tmp_path)(CORPUS).input_ids
    assert auto(tmp_path).decode(tokenizer.encode(CORPUS)) == CORPUS


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize("says", [True, False, None])
def test_bos_is_added_by_the_post_processor_and_by_nothing_else(
    name: str, rule: bool, says: bool | None, tmp_path: Path
) -> None:
    config = {"tokenizer_class": name, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    write(tmp_path, tokenizer=llama(bos=rule), tokenizer_config={**config, "add_bos_token": says})
    write(tmp_path, config={"model_type": "llama"})
    config["bos_token"] = "<s>"  # transformers wants the whole AddedToken or a string
    tokenizer = load(tmp_path)
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.eos_id) == (rule, 1, 2)
    write(tmp_path, tokenizer_config={**config, "add_bos_token": says})
    assert_parity(load(tmp_path), tmp_path)
    assert load(tmp_path).encode("she").count(1) == int(rule)


@pytest.mark.skipif(not STORIES.exists(), reason="stories260K is not here")
def test_stories260k_is_the_same_in_transformers_and_as_published() -> None:
    tokenizer = load(STORIES)
    assert_parity(tokenizer, STORIES)
    expected = json.loads((STORIES / "expected.json").read_text("utf-8"))
    assert (
        tokenizer.encode(expected["text"])[: len(expected["ids"])]
        == expected["ids"][: len(tokenizer.encode(expected["text"]))]
    )
    assert (tokenizer.size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (512, 1, (2,), True)


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_vocab_and_merges_are_gpt2s_byte_level_bpe(add_bos: bool | None, tmp_path: Path) -> None:
    gpt2_files(tmp_path)
    write(tmp_path, config={"model_type": "gpt2"})
    if add_bos is not None:
        write(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "add_bos_token": add_bos})
    tokenizer = load(tmp_path)
    assert_parity(tokenizer, tmp_path)
    assert tokenizer.encode("she").count(0) == int(bool(add_bos))
    assert tokenizer.encode(CORPUS, special=False) == train_bpe([CORPUS], 330).encode(CORPUS)


def test_vocab_and_merges_with_word_ends_are_gpt1s(tmp_path: Path) -> None:
    write(gpt1_files(tmp_path), config={"model_type": "openai-gpt"})
    tokenizer = load(tmp_path)
    assert_parity(tokenizer, tmp_path)
    assert tokenizer.decode(tokenizer.encode("The KING, she said")) == "the king , she said"


def test_truncation_and_padding_saved_by_a_training_run_are_not_kept(tmp_path: Path) -> None:
    backend = llama()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    write(tmp_path, tokenizer=backend)
    for text in ("she", CORPUS):
        assert load(tmp_path).encode(text) == llama().encode(text).ids


# BOS and EOS ids


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, 1, ()),
        ({"config": {"bos_token_id": 1, "eos_token_id": 2}}, 1, (2,)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [0, 2]}}, 1, (0, 2)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [0, 2]}}, 1, (2, 0)),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 2}}, 1, (2,)),
        ({"tokenizer_config": {"eos_token": "<gone>"}, "config": {"eos_token_id": [99999, 2, True]}}, 1, (2,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, 1, (2,)),
    ],
)
def test_bos_and_eos_come_from_the_first_file_that_names_them(
    files: dict[str, Any], bos: int, eos: tuple[int, ...], tmp_path: Path
) -> None:
    tokenizer = load(write(tmp_path, tokenizer=llama(), **files))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, eos)


def test_a_tokenizer_without_a_rule_has_no_bos() -> None:
    tokenizer = Tokenizer(llama(bos=False))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (None, None, False)


def test_an_eos_rule_is_kept_and_is_not_taken_for_bos() -> None:
    backend = llama(bos=False)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = Tokenizer(backend)
    assert not tokenizer.add_bos
    assert tokenizer.encode("she") == backend.encode("she").ids


# One token


@every_kind
def test_one_token_is_the_inverse_of_token_for_every_id(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    for id in range(tokenizer.size):
        if tokenizer.id(tokenizer.token(id)) is not None:
            assert tokenizer.one_token(tokenizer.token(id)) == id
    assert sum(tokenizer.id(tokenizer.token(id)) == id for id in range(tokenizer.size)) == len(
        tokenizer.backend.get_vocab()
    )


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        ("llama", [" king", "▁king"]),
        ("metaspace", [" king", "▁king"]),
        ("gemma", [" king", "▁king"]),
        ("bpe", [" king", "Ġking"]),
        ("gpt1", ["king</w>", " king", "King"]),
    ],
)
def test_text_and_spelling_of_a_word_are_the_same_token(
    kinds: dict[str, Tokenizer], kind: str, spellings: list[str]
) -> None:
    assert len({kinds[kind].one_token(text) for text in spellings}) == 1


def test_a_tokenizer_that_prepends_a_space_finds_the_word_with_and_without(tmp_path: Path) -> None:
    backend = llama()  # Llama 2's own file: the normalizer prepends, so " she" encodes with two spaces
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode(" queen", special=False)) > 1
    assert tokenizer.one_token(" queen") == tokenizer.one_token("▁queen")


def test_several_tokens_are_refused_with_their_pieces_and_the_form_with_a_space(kinds: dict[str, Tokenizer]) -> None:
    with pytest.raises(TokenizerError) as refused:
        kinds["bpe"].one_token("queen")
    ids = kinds["bpe"].encode("queen")
    assert len(ids) > 1
    assert f"is {len(ids)} tokens" in refused.value.message
    for id in ids:
        assert f"{kinds['bpe'].token(id)!r} (id {id})" in refused.value.message
    assert f"' queen' is one token: 'Ġqueen' (id {kinds['bpe'].id('Ġqueen')})" in refused.value.hint


def test_a_word_is_not_taken_for_the_one_with_a_space_where_the_space_is_a_token() -> None:
    assert module.bytes_tokenizer().one_token("a") == 97
    with pytest.raises(TokenizerError, match="' a' is 2 tokens") as refused:
        module.bytes_tokenizer().one_token(" a")
    assert "Without the leading space, 'a' is one token: 'a' (id 97)" in refused.value.hint


def test_of_many_pieces_the_first_twenty_are_shown() -> None:
    for count, end in ((3, "'a' (id 97)"), (20, "'a' (id 97)"), (21, "'a' (id 97), ...")):
        with pytest.raises(TokenizerError) as refused:
            module.bytes_tokenizer().one_token("a" * count)
        assert f"is {count} tokens" in refused.value.message
        assert refused.value.message.count("(id 97)") == min(count, 20) and refused.value.message.endswith(end)


def test_the_form_with_a_space_was_tried_and_what_it_is_is_said(kinds: dict[str, Tokenizer]) -> None:
    for text, other in (("zzqz", " zzqz"), (" zzqz", "zzqz")):
        with pytest.raises(TokenizerError) as refused:
            kinds["bpe"].one_token(text)
        assert f"{other!r} is {len(kinds['bpe'].encode(other, special=False))} tokens. " in refused.value.hint
    with pytest.raises(TokenizerError, match="tokens, not one") as refused:
        kinds["gpt1"].one_token("zzqz")
    assert kinds["gpt1"].encode(" zzqz") == kinds["gpt1"].encode("zzqz")
    assert "' zzqz' reads the same. " in refused.value.hint
    with pytest.raises(TokenizerError, match="tokens, not one") as refused:
        characters(["abc"]).one_token("ab")  # which has no space at all
    assert "' ab' is none either. " in refused.value.hint


@pytest.mark.parametrize(
    ("kind", "text"), [("bpe", ""), ("gpt1", "  "), ("gpt1", "日"), ("characters", "日"), ("characters", "ki")]
)
def test_no_token_and_unknown_text_are_refused(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    with pytest.raises(TokenizerError) as refused:
        kinds[kind].one_token(text)
    assert refused.value.hint


def test_rows_without_a_token_are_named_by_their_row() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[])))
    assert tokenizer.size == 6
    assert [tokenizer.token(id) for id in (0, 3, 5, 6, -1, 1 << 40)] == [
        "a",
        "<row 3>",
        "b",
        "<row 6>",
        "<row -1>",
        f"<row {1 << 40}>",
    ]
    assert tokenizer.decode([0, 3, 5, 99]) == "a b"


# Tokenizers made for training


@patient
@given(text=any_text)
def test_bytes_are_their_own_ids_and_come_back(text: str) -> None:
    tokenizer = BYTES
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


BYTES = bytes_tokenizer()


def test_bytes_end_a_text_with_their_own_token() -> None:
    assert (BYTES.size, BYTES.eos_id, BYTES.token(256), BYTES.add_bos) == (257, 256, END_OF_TEXT, False)
    assert BYTES.encode(f"a{END_OF_TEXT}b") == [97, 256, 98]


def test_characters_have_nanogpts_ids(kinds: dict[str, Tokenizer]) -> None:
    ids = {character: i for i, character in enumerate(sorted(set(CORPUS)))}
    tokenizer = characters([CORPUS[:100], CORPUS[100:]])
    assert tokenizer.encode(CORPUS) == [ids[character] for character in CORPUS]
    assert tokenizer.decode(tokenizer.encode(CORPUS)) == CORPUS
    assert tokenizer.size == len(ids)
    assert tokenizer.fingerprint == kinds["characters"].fingerprint


def test_a_character_unknown_is_refused_with_its_position_or_is_unk() -> None:
    with pytest.raises(TokenizerError, match=r"'c' \(position 2\)"):
        characters(["ab"]).encode("bacab")
    tokenizer = characters(["ab"], unknown=True)
    assert tokenizer.encode("bac🙂") == [1, 0, 2, 2]
    assert tokenizer.token(2) == "<unk>"


def test_no_lookup_where_unknown_characters_fuse_or_added_tokens_take_in_spaces() -> None:
    vocabulary = {"a": 0, " ": 1, "<unk>": 2}
    fused = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))
    eating = characters(["a b"]).backend
    eating.add_tokens([tokenizers.AddedToken("<eat>", rstrip=True)])
    for backend in (fused, eating):
        assert Tokenizer(backend).encode("a<eat> éé a") == backend.encode("a<eat> éé a").ids


@pytest.mark.parametrize("kind", ["bytes", "characters with <unk>", "bpe", "gpt2"])
@patient
@given(parts=st.lists(st.text(max_size=20) | st.sampled_from([END_OF_TEXT, "<unk>", "<|endof", "the king  \n"])))
def test_the_fast_paths_encode_as_the_library_does(kinds: dict[str, Tokenizer], kind: str, parts: list[str]) -> None:
    tokenizer = kinds[kind]
    assert (tokenizer._units is not None) == (kind in ("bytes", "characters with <unk>"))
    assert tokenizer.encode("".join(parts)) == tokenizer.backend.encode("".join(parts)).ids


def test_the_lookup_takes_the_longest_added_token_and_any_order_of_ids() -> None:
    alphabet = bytes_tokenizer().backend.get_vocab(with_added_tokens=False)
    for shift in (0, 1, 100):
        ids = {token: (id + shift) % 256 if shift != 1 else id + 1 for token, id in alphabet.items()}
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.add_special_tokens(["<a", "<a>", "<a>b"])
        assert Tokenizer(backend).encode("é<a>b<a>c<a<") == backend.encode("é<a>b<a>c<a<").ids


def test_an_unknown_characters_position_counts_from_the_start_of_the_text() -> None:
    backend = characters(["ab"]).backend
    backend.add_special_tokens([END_OF_TEXT])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode(f"a{END_OF_TEXT}b") == [0, 2, 1]
    with pytest.raises(TokenizerError, match=r"'c' \(position 15\)"):
        tokenizer.encode(f"a{END_OF_TEXT}bc")


@patient
@given(parts=st.lists(st.text(max_size=8) | st.sampled_from(["a", " ", "\n", "'s", "\u3000", "\x1c", "<eat>", "a b"])))
@example(parts=[" x\n\n  y \n\n \n  z <eat> <eat>\n x a b a  b"])
def test_a_text_cut_in_pieces_encodes_as_the_whole(kinds: dict[str, Tokenizer], parts: list[str]) -> None:
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 1)
        assert "".join(module._pieces(parts)) == text
        for tokenizer in (SPACES, SPACED, kinds["bpe with added tokens"]):
            assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids


@every_kind
@patient
@given(text=any_text)
def test_the_two_sides_of_the_last_cut_encode_apart(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kinds[kind]
    if kind == "characters":
        text = "".join(c for c in text if tokenizer.id(c) is not None)
    cut = tokenizer.last_cut(text)
    left, right = (tokenizer.encode(part, special=False) for part in (text[:cut], text[cut:]))
    assert left + right == tokenizer.encode(text, special=False)
    assert cut in (0, max((match.start() for match in re.finditer(r"(?<=\S)[ \n]", text)), default=0))


SPACED = train_bpe([CORPUS], 330)
SPACED.backend.add_tokens(["a b"])
SPACED = Tokenizer(SPACED.backend)  # an added token with a space in it
SPACES = train_bpe(["x\n\n  y \n\n \n  z" * 50], 280)  # it has tokens of several spaces and newlines


def test_a_long_text_encodes_as_the_library_does(kinds: dict[str, Tokenizer]) -> None:
    text = CORPUS * 200
    assert len(list(module._pieces([text]))) > 2
    assert kinds["bpe"].encode(text) == kinds["bpe"].backend.encode(text).ids


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bpe_is_the_same_file_however_the_text_is_cut(
    kinds: dict[str, Tokenizer], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 50)
    again = train_bpe((CORPUS[i : i + size] for i in range(0, len(CORPUS), size)), 330)
    assert again.backend.to_str() == kinds["bpe"].backend.to_str()


def test_bpe_is_the_same_file_in_another_process(kinds: dict[str, Tokenizer]) -> None:
    script = (
        "import sys, llmcli.tokenizer as t; print(t.train_bpe([sys.stdin.buffer.read().decode()], 330).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", script], input=CORPUS.encode(), capture_output=True, check=True)
    assert done.stdout.decode().strip() == kinds["bpe"].fingerprint


def test_bpe_counts_everything_in_its_size_and_knows_every_byte(kinds: dict[str, Tokenizer]) -> None:
    assert kinds["bpe"].size == 330
    assert (kinds["bpe"].eos_id, kinds["bpe"].token(0)) == (0, END_OF_TEXT)
    assert train_bpe(["abcd"], 5000).size == 257  # nothing in it occurs twice
    assert train_bpe([], 257).size == 257
    for text in (*SAMPLES[:11], bytes(range(128)).decode(), "𐍈\U0010ffff"):
        assert kinds["bpe"].decode(kinds["bpe"].encode(text)) == text
    with pytest.raises(TokenizerError, match="257"):
        train_bpe([CORPUS], 256)


@every_kind
def test_a_batch_encodes_as_its_texts_do(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    texts = [CORPUS[:50], "", CORPUS[50:], *([] if kind == "characters" else SAMPLES)]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


@every_kind
def test_text_that_is_not_unicode_is_refused(kinds: dict[str, Tokenizer], kind: str) -> None:
    for call in (kinds[kind].encode, kinds[kind].one_token):
        with pytest.raises(TokenizerError, match="position 1"):
            call("a\udc92b")


# Ids and files that are refused


@pytest.mark.parametrize(("ids", "bad"), [([0, 64], 64), ([3, -1, 99], -1)])
def test_an_id_without_a_row_is_refused(ids: list[int], bad: int) -> None:
    with pytest.raises(TokenizerError, match=rf"id {bad} .*vocab_size is 64.*size is 512") as refused:
        check_ids(ids, 64, 512)
    assert refused.value.hint
    check_ids([0, 63], 64, 512)
    check_ids([], 64)


def bend(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).write_bytes(content), None][1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("generation_config.json", b"not JSON"),
        ("config.json", b"\xff"),
        ("special_tokens_map.json", b"1"),
    ],
)
def test_a_damaged_file_is_refused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    write(tmp_path, tokenizer=llama())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"(?s){name}: damaged: .+") as refused:
        load(tmp_path)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [("vocab.json", b"{"), ("vocab.json", b'{"a": "b"}'), ("merges.txt", b"\xff"), ("merges.txt", b"x y z")],
)
def test_damaged_vocab_or_merges_are_refused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    gpt2_files(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent" / "tokenizer.json"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json.*vocab\.json.*merges\.txt.*tokenizer\.model"):
            load(path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"merges\.txt is missing"):
        load(tmp_path)


def test_a_file_given_is_read_with_the_configuration_beside_it(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=llama(), tokenizer_config={"eos_token": "</s>"})
    assert load(tmp_path / "tokenizer.json").eos_id == load(str(tmp_path)).eos_id == 2


# SentencePiece


def test_a_missing_sentencepiece_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sentencepiece", "sentencepiece.sentencepiece_model_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError) as refused:
        load(tmp_path)
    assert "tokenizer.model" in refused.value.message
    assert 'pip install "llmcli[sentencepiece]"' in refused.value.hint


def sentencepiece_folder(folder: Path, **options: Any) -> tuple[Path, Any]:
    package = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text("\n".join(CORPUS.splitlines()), "utf-8")
    package.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=options.pop("vocab_size", 400),
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **options,
    )
    return folder, package.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", **LLAMA},
        {"model_type": "bpe", **LLAMA, "add_dummy_prefix": False},
        {"model_type": "bpe", **LLAMA, "user_defined_symbols": ["<x>", "king"]},
        {"model_type": "bpe", "vocab_size": 120},
        {"model_type": "unigram", **LLAMA, "vocab_size": 330},
        {"model_type": "unigram", "vocab_size": 80},
    ],
    ids=["llama", "no prefix", "user-defined", "bpe", "unigram llama", "unigram"],
)
def test_a_sentencepiece_model_encodes_and_decodes_as_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    folder, theirs = sentencepiece_folder(tmp_path, **options)
    tokenizer = load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.size) == (1, 2, theirs.get_piece_size())

    @settings(max_examples=150, deadline=None)
    @given(text=any_text | st.text("the king<x> \n▁é", max_size=30))
    def same(text: str) -> None:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == theirs.decode(ids)
        assert streamed(tokenizer, ids) == theirs.decode(ids)

    same()
    tokenizer.save(tmp_path / "saved")
    assert auto(tmp_path / "saved")("She said").input_ids == tokenizer.encode("She said") == theirs.encode("She said")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_add_bos_token_counts_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    folder, theirs = sentencepiece_folder(tmp_path, model_type="bpe", **LLAMA)
    write(folder, tokenizer_config={"add_bos_token": True, "add_eos_token": True})
    assert load(folder).encode("She said") == [1, *theirs.encode("She said"), 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff", b"not a model"])
def test_a_damaged_sentencepiece_model_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: damaged"):
        load(tmp_path)
