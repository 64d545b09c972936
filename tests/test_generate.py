"""Generation: the cache changes nothing, rows do not see each other, streamed text is the text, refusals are early."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import hf
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from llmcli import checkpoint, cli, decode, output
from llmcli import tokenizer as tokens
from llmcli.cache import LayerCache, new_cache
from llmcli.config import ModelConfig
from llmcli.decode import Step
from llmcli.errors import LlmcliError, TokenizerError, UsageError
from llmcli.generate import NonFiniteLogits, Sampling, Text, complete, generate
from llmcli.layers import Block, FeedForward, GatedFeedForward, RMSNorm, Rope
from llmcli.model import Decoder, build
from llmcli.tokenizer import Tokenizer

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
GREEDY = Sampling(temperature=0, max_new_tokens=30)
TINY = ModelConfig(
    family="llama",
    vocab_size=64,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=24,
    max_position_embeddings=64,
)


@pytest.fixture(params=hf.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return randomised(request.param, tmp_path_factory)


MADE: dict[str, Decoder] = {}


def randomised(family: str, folders: pytest.TempPathFactory) -> Decoder:
    """A tiny model of the family with every parameter at random, through its files."""
    if family not in MADE:
        folder = folders.mktemp(family)
        hf.make(family, folder)
        MADE[family] = checkpoint.load(folder)[0]
    return MADE[family]


def wild(seed: int = 0, **changes: object) -> Decoder:
    """A tiny LLaMA whose weights are large enough for its texts to differ."""
    made = build(ModelConfig(**{**{f: getattr(TINY, f) for f in TINY.__struct_fields__}, **changes}), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return made


def some_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(wanted.abs().max())))


# ---- the cache


@pytest.mark.parametrize("pieces", [[60], [13, 1, 31, 15], [1] * 60], ids=["whole", "chunks", "one by one"])
@torch.inference_mode()
def test_cached_logits_are_the_uncached_ones_before_and_past_the_window(model: Decoder, pieces: list[int]) -> None:
    ids = some_ids(2, 60)
    layers, parts = new_cache(model.config), []
    for piece in torch.split(ids, pieces, dim=1):
        parts.append(model(piece, layers))
    assert_close(torch.cat(parts, 1), model(ids))


@pytest.mark.parametrize("prefilled", [0, 5, 20])
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_the_flat_step_computes_what_the_model_does(model: Decoder, rows: int, prefilled: int) -> None:
    ids = some_ids(rows, 60)
    wanted = model(ids)
    layers = new_cache(model.config)
    if prefilled:
        model(ids[:, :prefilled], layers)
    step = Step(model, layers, rows)
    for position in range(prefilled, 60):
        assert_close(step(ids[:, position]), wanted[:, position])


@torch.inference_mode()
def test_a_block_of_a_kind_that_is_not_known_is_called_as_it_is() -> None:
    class Doubled(Block):
        def forward(self, x: Tensor, ropes: Mapping[str, Rope], cache: LayerCache | None) -> Tensor:
            return 2 * super().forward(x, ropes, cache)

    made, ids = wild(), some_ids(2, 20)
    before = made(ids)
    made.blocks[0].__class__ = Doubled
    wanted, layers = made(ids), new_cache(made.config)
    assert (wanted - before).abs().max() > 0.1
    step = Step(made, layers, 2)
    assert_close(torch.stack([step(ids[:, n]) for n in range(20)], 1), wanted)


@torch.inference_mode()
def test_left_padded_rows_get_what_each_gets_alone(model: Decoder) -> None:
    ids, padding = some_ids(3, 45), [7, 0, 19]
    wanted = model(ids)
    padded = torch.zeros(3, 30, dtype=torch.long)
    for row, empty in enumerate(padding):
        padded[row, empty:] = ids[row, : 30 - empty]
    layers = new_cache(model.config, padding)
    together = torch.cat([model(padded[:, :24], layers), model(padded[:, 24:], layers)], 1)
    step = Step(model, layers, 3)
    for row, empty in enumerate(padding):
        assert_close(together[row, empty:], wanted[row, : 30 - empty])
    for further in range(15):
        new = torch.stack([ids[row, 30 - empty + further] for row, empty in enumerate(padding)])
        logits = step(new)
        for row, empty in enumerate(padding):
            assert_close(logits[row], wanted[row, 30 - empty + further])


@torch.inference_mode()
def test_a_step_in_bfloat16_is_as_near_as_the_model_s_own() -> None:
    exact, made = wild(), wild().to(torch.bfloat16)
    ids = some_ids(1, 30)
    wanted, own = exact(ids), made(ids).float()
    step = Step(made, new_cache(made.config), 1)
    stepped = torch.stack([step(ids[:, n]) for n in range(30)], 1).float()
    assert (stepped - wanted).square().mean() < 1.5 * (own - wanted).square().mean()


needs_bfloat16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor has no instructions for bfloat16"
)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_a_step_through_packed_matrices_is_as_near_as_without(
    model: Decoder, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "COPIED", 0)
    monkeypatch.setattr(decode, "SHARE", 1e-9)  # a matrix a step: steps before, amidst and after all copies
    made = copy.deepcopy(model).to(torch.bfloat16)
    ids = some_ids(rows, 60)
    wanted = model(ids)

    def error(patience: int) -> Tensor:
        monkeypatch.setattr(decode, "PATIENCE", patience)
        packed = decode.Packed(made)
        step = Step(made, new_cache(made.config), rows, packed)
        stepped = torch.stack([step(ids[:, n]) for n in range(60)], 1).float()
        assert len(packed._copies) == (0 if patience else matrices(made))
        return (stepped - wanted).square().mean()

    assert error(0) < 1.5 * error(1000)


def matrices(model: Decoder) -> int:
    """Matrices that a step reads whole, those of one input as one; experts are called as they are."""
    feeds = [type(block.feed_forward) in (FeedForward, GatedFeedForward) for block in model.blocks]
    return sum(2 + 2 * feed for feed in feeds) + 1


@needs_bfloat16
@torch.inference_mode()
def test_matrices_are_packed_once_used_often_and_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = wild(embed_dim=384, hidden_dim=400).to(torch.bfloat16)  # the vocabulary's matrix stays small
    long, short = (Sampling(temperature=0, max_new_tokens=n) for n in (decode.PATIENCE + 16, decode.PATIENCE + 1))
    packed = decode.Packed(made)
    first = texts(made, [[1, 2, 3]], short, packed=packed)
    assert not packed._copies
    first = texts(made, [[1, 2, 3]], long, packed=packed)
    kept = dict(packed._copies)
    assert len(kept) == 2 * 4
    assert texts(made, [[1, 2, 3]], long, packed=packed) == first
    assert all(packed._copies[key] is value for key, value in kept.items())
    monkeypatch.setattr(decode, "_free_memory", lambda: sum(p.nbytes for p in made.parameters()))
    poor = decode.Packed(made)
    texts(made, [[1, 2, 3]], long, packed=poor)
    assert not poor._copies


@pytest.mark.parametrize("plus_one", [False, True])
@torch.inference_mode()
def test_a_norm_of_one_row_is_the_norm(plus_one: bool) -> None:
    norm = RMSNorm(24, 1e-2, plus_one)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 24, generator=torch.Generator().manual_seed(1)) * 0.1
    torch.testing.assert_close(decode._norm(norm, x)(x), norm(x), rtol=1e-5, atol=1e-6)


# ---- generate


def texts(model: Decoder, prompts: list[list[int]], sampling: Sampling, **options: object) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for token in generate(model, prompts, sampling, **options):  # type: ignore[arg-type]
        rows[token.row].append(token.id)
    return rows


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=5, max_new_tokens=30)], ids=["greedy", "drawn"])
def test_one_seed_gives_one_text_with_and_without_a_cache(model: Decoder, sampling: Sampling) -> None:
    prompt = some_ids(1, 12)[0].tolist()
    assert texts(model, [prompt], sampling) == texts(model, [prompt], sampling, use_cache=False)


def test_the_first_of_several_samples_is_the_single_one_and_the_others_differ() -> None:
    sampling = Sampling(seed=3, max_new_tokens=40, temperature=1.5)
    single = texts(wild(), [[1, 2, 3]], sampling)
    several = texts(wild(), [[1, 2, 3]] * 4, sampling)
    assert several[0] == single[0]
    assert len({tuple(text) for text in several}) == 4


def test_without_a_seed_two_texts_differ() -> None:
    free = Sampling(max_new_tokens=40, temperature=2.0)
    assert texts(wild(), [[1]], free) != texts(wild(), [[1]], free)


def test_unequal_prompts_in_one_batch_give_each_its_own_text(model: Decoder) -> None:
    prompts = [some_ids(1, length, seed=length)[0].tolist() for length in (3, 21, 12, 3)]
    sampling = Sampling(seed=1, max_new_tokens=20)
    together = texts(model, prompts, sampling)
    assert together == texts(model, prompts, sampling, use_cache=False)
    assert together[0] == texts(model, prompts[:1], sampling)[0]


def test_rows_that_end_leave_the_others_alone() -> None:
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [4], [5, 6]]
    whole = texts(wild(), prompts, GREEDY)
    ends = {0: 9, 1: 4, 2: 20, 3: 30}
    count = dict.fromkeys(ends, 0)

    def end(row: int, id: int) -> bool:
        count[row] += 1
        return count[row] == ends[row]

    reasons = {}
    rows: dict[int, list[int]] = {row: [] for row in ends}
    for token in generate(wild(), prompts, GREEDY, ends=end):
        rows[token.row].append(token.id)
        reasons[token.row] = token.finish
    assert [rows[row] for row in ends] == [whole[row][: ends[row]] for row in ends]
    assert set(reasons.values()) == {"stop"}


def test_a_cache_that_knows_the_beginning_changes_nothing() -> None:
    made, prompt = wild(), some_ids(1, 20)[0].tolist()
    layers = new_cache(made.config)
    first = texts(made, [prompt[:9]], Sampling(temperature=0, max_new_tokens=5), cache=layers)[0]
    ids = prompt[:9] + first
    assert layers[0].length == len(ids) - 1
    assert texts(made, [ids + prompt], GREEDY, cache=layers) == texts(made, [ids + prompt], GREEDY)


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [some_ids(1, length)[0].tolist() for length in (50, 33)]
    whole = texts(wild(), prompts, GREEDY)
    monkeypatch.setattr("llmcli.generate.PREFILL", 14)
    assert texts(wild(), prompts, GREEDY) == whole


def test_nothing_is_asked_for_nothing_is_given() -> None:
    assert texts(wild(), [[1]], Sampling(max_new_tokens=0)) == [[]]
    assert texts(wild(), [], GREEDY) == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_layers_generates(tied: bool) -> None:
    made = wild(num_layers=0, tie_word_embeddings=tied)
    assert texts(made, [[3], [5, 4]], GREEDY) == texts(made, [[3], [5, 4]], GREEDY, use_cache=False)


def test_learned_positions_end_and_say_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = randomised("gpt2", tmp_path_factory)
    produced = list(generate(made, [[1] * 60], Sampling(temperature=0, max_new_tokens=30)))
    assert [token.finish for token in produced] == [None] * 4 + ["context"]  # 64 positions predict a 65th token
    produced = list(generate(made, [[1] * 64, [1]], Sampling(temperature=0, max_new_tokens=5)))
    assert {token.row: token.finish for token in produced} == {0: "context", 1: "length"}
    with pytest.raises(UsageError, match="64 learned positions"):
        next(generate(made, [[1] * 65]))


def test_rotary_positions_do_not_end() -> None:
    assert len(texts(wild(), [[1] * 60], GREEDY)[0]) == 30


def test_an_id_without_a_row_and_an_empty_prompt_are_refused_before_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = wild()
    monkeypatch.setattr(Decoder, "hidden", lambda *_: pytest.fail("the model was asked"))
    with pytest.raises(UsageError, match="64"):
        next(generate(made, [[1], [64]]))
    with pytest.raises(UsageError, match="empty"):
        next(generate(made, [[1], []]))
    with pytest.raises(TokenizerError, match=r"99.*64.*257"):
        next(complete(made, tokens.bytes_tokenizer(), [[99]]))


def test_rows_without_a_token_are_never_produced() -> None:
    made = wild(family="gpt2", head_bias=True, vocab_size=300, num_kv_heads=None, hidden_dim=None)
    with torch.no_grad():
        made.output_projection.bias[257:] = 1000.0  # type: ignore[union-attr]
    coder = tokens.bytes_tokenizer()
    for temperature in (0.0, 5.0):
        ids = [piece.id for piece in complete(made, coder, [[65]] * 3, Sampling(temperature=temperature, seed=0))]
        assert len(ids) > 100 and max(ids) <= 256
    raw = texts(made, [[65]], GREEDY)[0]
    assert min(raw) >= 257  # they would have been


def test_an_end_token_ends_the_text_and_is_no_part_of_it() -> None:
    made = wild(family="gpt2", head_bias=True, vocab_size=257, num_kv_heads=None, hidden_dim=None)
    with torch.no_grad():  # an a, or in one case of ten the end
        made.output_projection.weight.zero_()  # type: ignore[union-attr, operator]
        made.output_projection.bias.fill_(-100)  # type: ignore[union-attr, operator]
        made.output_projection.bias[[97, 256]] = torch.tensor([9.0, 1.0]).log()  # type: ignore[union-attr, index]
    lengths = set()
    for seed in range(8):
        pieces = list(complete(made, tokens.bytes_tokenizer(), [[65]], Sampling(seed=seed, temperature=1)))
        assert [piece.id for piece in pieces] == [97] * (len(pieces) - 1) + [256]
        assert [piece.text for piece in pieces] == ["a"] * (len(pieces) - 1) + [""]
        assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        lengths.add(len(pieces))
    assert max(lengths) > 2


def test_non_finite_logits_stop_with_the_step_and_the_cause() -> None:
    made = wild()
    stream = generate(made, [[1, 2]], Sampling(temperature=0))
    next(stream), next(stream)
    with torch.no_grad():
        made.blocks[1].feed_forward_norm.weight[3] = math.nan  # type: ignore[union-attr, index]
    with pytest.raises(NonFiniteLogits, match=r"new token 3 .*blocks\.1\.feed_forward_norm\.weight"):
        next(stream)
    half = wild().half()
    with torch.no_grad():
        half.output_projection.weight *= 3e4  # type: ignore[union-attr, operator]
        half.final_norm.weight *= 1e3  # type: ignore[union-attr, operator]
    with pytest.raises(NonFiniteLogits, match="float16 overflowed"):
        next(generate(half, [[1, 2]], GREEDY))


def test_log_probabilities_are_the_model_s_own() -> None:
    made = wild()
    rows = list(generate(made, [[1, 2]], Sampling(temperature=0.3, seed=1, max_new_tokens=6, logprobs=3)))
    with torch.inference_mode():
        logs = made(torch.tensor([[1, 2] + [token.id for token in rows]]))[0].log_softmax(-1)
    for position, token in enumerate(rows, 1):
        assert token.logprob == pytest.approx(float(logs[position, token.id]), abs=1e-4)
        values, ids = logs[position].topk(3)
        assert [rival.id for rival in token.top] == ids.tolist()
        assert [rival.logprob for rival in token.top] == pytest.approx(values.tolist(), abs=1e-4)


# ---- text


@cache
def coders() -> dict[str, Tokenizer]:
    """A tokenizer of each way to spell: bytes, metaspace with byte fallback, `</w>`."""
    letters = "abcdeé жшя🌍"
    space = {"<s>": 0, "</s>": 1, **{f"<0x{n:02X}>": n + 2 for n in range(256)}, "▁": 258}
    for character in letters.replace(" ", ""):
        space |= {character: len(space), f"▁{character}": len(space) + 1}
    metaspace = tokenizers.Tokenizer(models.BPE(space, [], byte_fallback=True, fuse_unk=True))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = decoders.Strip(" ", 1, 0)
    metaspace.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    metaspace.add_special_tokens(["<s>", "</s>"])
    words = {"<unk>": 0}
    for character in letters.replace(" ", ""):
        words |= {character: len(words), f"{character}</w>": len(words) + 1}
    ends = tokenizers.Tokenizer(models.BPE(words, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    ends.pre_tokenizer, ends.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder(suffix="</w>")
    return {
        "bytes": tokens.bytes_tokenizer(),
        "metaspace": Tokenizer(metaspace, bos_id=0, eos_ids=[1]),
        "</w>": Tokenizer(ends),
    }


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "</w>"])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_streamed_pieces_join_to_the_whole_decode(kind: str, data: st.DataObject) -> None:
    coder = coders()[kind]
    single = st.integers(0, coder.size + 1).map(lambda id: [id])  # any token, lone bytes too, and ids without one
    text = st.text("abcdeé жшя🌍 ", min_size=1, max_size=6).map(lambda text: coder.encode(text, special=False))
    ids = [id for part in data.draw(st.lists(single | text, max_size=12)) for id in part]
    cut = data.draw(st.integers(0, len(ids)))
    whole, prompt = coder.decode(ids), Text(coder, [])
    before = "".join(prompt.push(id) for id in ids[:cut])
    answer = Text(coder, ids[:cut])
    pieces = [answer.push(id) for id in ids[cut:]]
    assert before + "".join(pieces) + answer.finish() == whole


@settings(deadline=None)
@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", max_size=3), max_size=3))
def test_a_stop_text_ends_the_text_before_it_and_no_part_of_it_is_shown(text: str, stops: list[str]) -> None:
    coder = tokens.bytes_tokenizer()
    stream, shown = Text(coder, [], stops), ""
    for id in coder.encode(text):
        shown += stream.push(id)
        assert text.startswith(shown)
        if stream.stopped:
            break
    shown += stream.finish()
    real = [stop for stop in stops if stop]
    complete = next((n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in real)), None)
    assert stream.stopped == (complete is not None)
    if complete is None:
        assert shown == text
    else:  # of those complete at once, the one that begins first
        assert shown == text[: min(complete - len(stop) for stop in real if text[:complete].endswith(stop))]


def test_text_is_shown_as_soon_as_it_can_be_no_stop_text() -> None:
    coder = tokens.bytes_tokenizer()
    stream = Text(coder, [], ["\n\nQ:"])
    assert [stream.push(id) for id in b"a\n\nb\n\nQ:"] == ["a", "", "", "\n\nb", "", "", "", ""]
    assert stream.stopped and stream.finish() == ""


def test_a_space_that_a_text_s_first_token_loses_is_kept_after_a_prompt() -> None:
    coder = coders()["metaspace"]
    text = Text(coder, coder.encode("a"))
    assert text.push(coder.one_token("▁b")) == " b"
    assert Text(coder, []).push(coder.one_token("▁b")) == "b"


# ---- stories260K


needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="the trained model is not here")


@needs_stories
def test_the_published_greedy_text_token_for_token(capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((STORIES / "expected.json").read_text())
    ids = expected["greedy_from_bos_ids"]
    arguments = ["generate", str(STORIES), "", "--temperature", "0", "-n", str(len(ids) - 1)]
    assert cli.run([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_ids"] + answer["ids"] == ids
    assert answer["text"] == expected["greedy_from_bos_text"]
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out == expected["greedy_from_bos_text"] + "\n"


# ---- the command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of ours with a tokenizer of bytes; rotary, 300 rows."""
    made = wild(vocab_size=300)
    checkpoint.save(made, tmp_path / "model", extra_files=tokens.bytes_tokenizer().save)
    return tmp_path / "model"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, object]:
    assert cli.run(["generate", *map(str, arguments), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_these_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, folder, "ab", "-n", "4", "--seed", "1", "--logprobs", "2")
    assert list(found) == ["prompt_ids", "ids", "text", "finish_reason", "tokens"]
    assert found["prompt_ids"] == [97, 98] and found["finish_reason"] == "length"
    assert [token["id"] for token in found["tokens"]] == found["ids"]  # type: ignore[attr-defined]
    assert "".join(token["text"] for token in found["tokens"]) == found["text"]  # type: ignore[attr-defined]
    for token in found["tokens"]:  # type: ignore[attr-defined]
        assert list(token) == ["id", "text", "logprob", "top"]
        assert token["logprob"] < 0 and len(token["top"]) == 2


def test_several_samples_are_a_list_whose_first_is_the_single_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["ab", "-n", "12", "--seed", "1"]
    single = answer(capsys, folder, *options)
    several = answer(capsys, folder, *options, "--num-samples", "3")
    assert isinstance(several, list) and len(several) == 3
    assert several[0]["ids"] == single["ids"] != several[1]["ids"]
    assert answer(capsys, folder, *options, "--no-cache")["ids"] == single["ids"]


def test_a_prompt_comes_from_the_line_a_file_stdin_or_ids(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfab\r\ncd\r\n")

    def asked(*arguments: str, stdin: bytes = b"") -> object:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return answer(capsys, folder, *arguments, "-n", "1")["prompt_ids"]

    assert asked("ab") == list(b"ab")
    assert asked("--prompt-file", str(file)) == list(b"ab\ncd")
    assert asked(stdin=b"ab\r\ncd\n") == asked("-", stdin=b"ab\r\ncd") == list(b"ab\ncd")
    assert asked("--ids", "97, 98 99") == [97, 98, 99]
    assert asked() == asked("") == [256]  # nothing: the token that stands between texts begins one
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\x92")))
    assert cli.run(["generate", str(folder)]) == 1
    assert "0x92 at offset 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["x", "--temperature", "-1"], 2, "--temperature"),
        (["x", "--top-p", "0"], 2, "--top-p"),
        (["x", "--top-k", "0"], 2, "--top-k"),
        (["x", "--ids", "1"], 2, "more than one prompt"),
        (["--ids", "1,two"], 2, "--ids 1,two"),
        (["--ids", "300"], 1, "300"),
        (["x", "--temperature", "nan"], 2, "--temperature"),
        (["x", "--device", "cuda"], 2, "cuda"),
        (["x", "--dtype", "int8"], 2, "int8"),
        (["--prompt-file", "/nowhere"], 2, "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert cli.run(["generate", str(folder), *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and "hint" in shown.err


def test_an_empty_stop_text_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(folder), "x", "--stop", "y", "--stop", ""]) == 2
    assert "--stop '': an empty text ends nothing" in capsys.readouterr().err


def test_past_the_trained_length_there_is_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(folder), "x" * 60, "-n", "4"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert cli.run(["generate", str(folder), "x" * 60, "-n", "5"]) == 0
    assert "65 tokens, prompt and new ones, are more than the 64" in capsys.readouterr().err


def test_a_file_of_weights_is_read_with_the_tokenizer_beside_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("text", "-n", "3", "--temperature", "0")
    assert answer(capsys, folder / "model.safetensors", *asked) == answer(capsys, folder, *asked)


@pytest.mark.parametrize("command", ["generate", "logits", "trace"])
def test_a_folder_without_weights_is_no_checkpoint_before_it_lacks_a_tokenizer(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, str(tmp_path), "text"]) == 1
    assert "no model.safetensors" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_speaks_in_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    found = answer(capsys, folder, "--ids", "5", "-n", "3", "--temperature", "0")
    assert found["text"] == "".join(f"{id} " for id in found["ids"])  # type: ignore[attr-defined]
    assert cli.run(["generate", str(folder), "text"]) == 1
    capsys.readouterr()
    (folder / "tokenizer.model").write_bytes(b"damaged")
    assert cli.run(["generate", str(folder), "--ids", "5", "-n", "3"]) == 0
    assert f"note: {folder / 'tokenizer.model'}: " in capsys.readouterr().err, (
        "there is one: why it is not used is said"
    )


def test_the_table_shows_each_token_and_its_rivals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(folder), "ab", "-n", "3", "--seed", "1", "--logprobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == ["token", "id", "probability", "rivals"]
    assert all(line.count("%") == 3 for line in lines[-3:])


def test_on_a_terminal_a_text_cannot_steer_it_and_in_a_pipe_it_is_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b[2Jb\r\x9bc\x7f é🌍\n\td"
    output.paint(text, "red")
    assert capsys.readouterr().out == text
    for style in ("", "red"):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        output.paint(text, style)
        shown = capsys.readouterr().out
        assert "a\\x1b[2Jb\\x0d\\x9bc\\x7f é🌍" in shown and "\x1b[2J" not in shown


# ---- in conversation


class Terminal:
    """`llmcli generate` on a terminal of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.control, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmcli", "generate", str(folder), *options],
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "XDG_STATE_HOME": str(folder.parent / "state")},
        )
        os.close(end)
        self.shown = ""

    def expect(self, text: str, timeout: float = 60) -> str:
        """Everything shown up to and with `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.shown:
            ready, _, _ = select.select([self.control], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"waited for {text!r}, saw {self.shown!r}"
            try:
                self.shown += os.read(self.control, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                assert text in self.shown, self.shown
        seen, _, self.shown = self.shown.partition(text)
        return seen + text

    def type(self, text: str) -> None:
        os.write(self.control, text.encode())


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    made = Terminal(folder, "--temperature", "0", "-n", "2000", "--dtype", "float32")
    yield made
    made.process.kill()
    made.process.wait()
    os.close(made.control)


def test_in_conversation_control_c_stops_the_answer_and_not_the_program(terminal: Terminal, folder: Path) -> None:
    terminal.expect("> ")
    terminal.type("/temperature cold\n")
    terminal.expect("a number from 0 up")
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("hello\r\n")
    time.sleep(0.5)  # in the midst of 2,000 tokens
    terminal.type("\x03")
    terminal.expect("> ")
    terminal.type("/reset\n")
    terminal.expect("> ")
    terminal.type("/help\n")
    terminal.expect("/temperature T")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert (folder.parent / "state" / "llmcli" / "history").read_text().splitlines()[-3:] == [
        "hello",
        "/reset",
        "/help",
    ]


def test_every_refusal_is_one_of_ours() -> None:
    assert issubclass(NonFiniteLogits, LlmcliError)


def test_nobody_who_does_not_ask_gets_more_than_the_model_was_trained_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(wild(), tmp_path / "made")  # rotary positions, trained for 64
    assert cli.run(["generate", str(tmp_path / "made"), "--ids", "1,2,3", "--seed", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)["ids"]) == 61 and "get worse" not in said.err
    assert cli.run(["generate", str(tmp_path / "made"), "--ids", "1,2,3", "--seed", "1", "--json", "-n", "70"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)["ids"]) == 70 and "expect the text to get worse" in said.err


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_learned_positions_that_are_used_up_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: list[str]
) -> None:
    hf.make("gpt2", tmp_path)  # 64 positions
    for count, used in ((5, False), (100, True)):
        arguments = ["--ids", "1,2,3", "--max-new-tokens", str(count), "--temperature", "0", *as_json]
        assert cli.run(["generate", str(tmp_path), *arguments]) == 0
        assert ("the model's 64 learned positions are used up" in capsys.readouterr().err) == used


def test_of_a_prompts_file_one_newline_at_the_end_is_left_out(tmp_path: Path) -> None:
    from llmcli.commands import generate as command

    for content, read in ((b"a\n", "a"), (b"a\r\n\r\n", "a\n"), (b"a", "a"), (b"\n\na\n\n\n", "\n\na\n\n")):
        (tmp_path / "prompt.txt").write_bytes(content)
        assert command._given_text(None, tmp_path / "prompt.txt") == read
