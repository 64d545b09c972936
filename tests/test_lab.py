"""lab: what the page is told is what the model computed, within bounds; and nobody but the page is told it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hf
import labs
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from llmcli import checkpoint, cli, lab, page, server, sketch, tokenizer, trace
from llmcli.errors import UsageError
from llmcli.generate import Sampling, generate
from llmcli.lab import Lab, Limits

GREEDY = Sampling(temperature=0)
Labs = Callable[[str], Lab]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: labs.make(kind, tmp_path_factory.mktemp("lab") / kind) for kind in labs.KINDS}


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> Labs:
    made = {kind: labs.open_lab(folder) for kind, folder in folders.items()}
    return lambda kind: made[kind]


# Answers


def test_a_text_grows_by_passes_and_their_new_tokens_are_those_of_generate(opened: Labs) -> None:
    for kind in ("tied", "untied", "capped"):
        one = opened(kind)
        text = one.start(labs.PROMPT)
        prompt = [token.id for token in text.passes[0].tokens]
        made = [one.step(text.id, GREEDY) for _ in range(4)]
        forbidden = torch.arange(labs.TOKENS, labs.ROWS)
        want = [
            token.id
            for token in generate(one.model, [prompt], Sampling(max_new_tokens=4, temperature=0), forbidden=forbidden)
        ]
        assert [step.tokens[0].id for step in made] == want
        assert [(step.number, step.kind, step.start) for step in made] == [
            (n + 1, "cached", len(prompt) + n) for n in range(4)
        ]
        assert all(step.chosen is not None and step.chosen.probability == 1 for step in made)
        shapes = {shape.name: shape.shape for shape in made[-1].stages}
        assert shapes["embed"] == (1, 32)
        assert shapes["logits"] == (1, labs.ROWS)
        seen = len(prompt) + 4 if kind == "tied" else 6
        assert shapes["blocks.0.keys"] == shapes["blocks.0.values"] == (2, seen, 8)
        assert [shape.name for shape in made[-1].stages] == [node.name for node in one.info().nodes]
        assert one.text_info(text.id).passes[1:] == made


def test_a_seed_draws_the_same_tokens_and_never_a_row_without_one(opened: Labs) -> None:
    one, wild = opened("tied"), Sampling(temperature=50, seed=7)
    drawn = []
    for _ in range(2):
        text = one.start("a cat")
        drawn.append([one.step(text.id, wild) for _ in range(12)])
    assert [step.tokens for step in drawn[0]] == [step.tokens for step in drawn[1]]
    ids = [step.tokens[0].id for step in drawn[0]]
    assert len(set(ids)) > 6
    assert max(ids) < labs.TOKENS
    first = drawn[0][0].chosen
    assert first is not None
    logits = one.recorded(text.id, 0).tensors["logits"][-1]
    assert first.rank == int((logits > logits[ids[0]]).sum()) + 1
    assert 0.8 < first.probability * labs.TOKENS < 1.3  # nearly even


def test_the_token_that_ends_a_text_is_said_to(opened: Labs) -> None:
    one = opened("tied")
    text = one.start("a cat")
    assert one.tokenizer is not None
    end = one.tokenizer.eos_ids[0]
    logits = one.recorded(text.id, 0).tensors["logits"]
    logits[-1, end] = logits.max() + 1
    step = one.step(text.id, GREEDY)
    assert step.tokens[0].id == end
    assert step.chosen is not None
    assert step.chosen.ends


def test_slices_are_numpys_and_say_which_tokens_they_stand_for(opened: Labs) -> None:
    one = opened("tied")
    text = one.start(labs.PROMPT)
    step = one.step(text.id, GREEDY)
    made = one.recorded(text.id, 0)
    words = [token.text for token in text.passes[0].tokens] + [step.tokens[0].text]
    assert words[:3] == ["Once", "·upon", "·a"]

    embed = one.values(text.id, 0, "embed", [slice(1, 4), slice(0, 32, 5)])
    np.testing.assert_array_equal(embed.values, made.tensors["embed"].numpy()[1:4, ::5])
    assert embed.labels == [words[1:4], None]
    assert embed.at == [(1, 4, 1), (0, 32, 5)]

    weights = one.values(text.id, 1, "blocks.2.weights", [slice(1, 3), slice(0, 1), slice(2, 99)])
    np.testing.assert_array_equal(weights.values, one.recorded(text.id, 1).tensors["blocks.2.weights"][1:3, :, 2:])
    assert weights.labels == [None, words[-1:], words[2:]]

    matrix = one.values(text.id, 0, "token_embeddings.weight", [slice(302, 306), slice(0, 2)])
    np.testing.assert_array_equal(matrix.values, one.model.token_embeddings.weight.detach()[302:306, :2])
    assert matrix.labels[0] is not None
    assert matrix.labels[0][2:] == ["<row·304>", "<row·305>"]

    logits = one.values(text.id, 0, "logits", [slice(0, 1), slice(3, 5)])
    assert one.tokenizer is not None
    assert logits.labels == [words[:1], [lab.readable(one.tokenizer, id) for id in (3, 4)]]
    statistics = one.stage(made, "token_embeddings.weight")
    assert (statistics.shape, statistics.axes) == ((labs.ROWS, 32), ("token", "dimension"))


def test_labels_of_a_window_begin_where_it_begins(opened: Labs) -> None:
    one = opened("untied")
    text = one.start(labs.PROMPT)
    words = [token.text for token in text.passes[0].tokens]
    step = one.step(text.id, GREEDY)
    keys = one.values(text.id, 1, "blocks.0.keys", [slice(0, 1), slice(0, 9), slice(0, 1)])
    assert keys.labels[1] == [*words[-5:], step.tokens[0].text]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.integers(0, 999),
)
def test_a_pooled_step_is_the_value_farthest_from_zero(shape: list[int], steps: list[int], seed: int) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    steps = steps[: len(shape)]
    pooled = sketch.farthest(tensor, steps)
    assert list(pooled.shape) == [-(-size // step) for size, step in zip(shape, steps, strict=True)]
    for place in np.ndindex(*pooled.shape):
        cell = tensor[tuple(slice(p * step, (p + 1) * step) for p, step in zip(place, steps, strict=True))].flatten()
        assert pooled[place] == cell[cell.abs().argmax()]


@pytest.mark.parametrize("kind", labs.KINDS)
def test_a_logit_is_what_the_product_view_says_it_is(kind: str, opened: Labs) -> None:
    one = opened(kind)
    text = one.start(labs.PROMPT)
    made = one.recorded(text.id, 0)
    matrix = one.matrices[
        "token_embeddings.weight" if "tied" not in one.info().tie and one.info().tied else one.head_name
    ]
    best = one.top(made, 5, 7, Sampling(temperature=1))
    logits, probabilities = made.tensors["logits"][5], made.tensors["probabilities"][5]
    order = logits.argsort(descending=True)[:7].tolist()
    assert [candidate.token.id for candidate in best] == order
    state = made.tensors["blocks.2.residual" if kind == "biased" else "final_norm"][5]
    for candidate in best:
        found = one.product(made, 5, candidate.token.id)
        np.testing.assert_array_equal(np.float32(found.state), state)
        np.testing.assert_array_equal(np.float32(found.row), matrix[candidate.token.id])
        dot = float(np.dot(np.float64(found.state), np.float64(found.row)))
        assert found.dot == candidate.dot == pytest.approx(dot, abs=1e-9)
        score = dot + found.bias
        score = score if found.cap is None else found.cap * np.tanh(score / found.cap)
        assert float(score) == pytest.approx(candidate.logit, abs=1e-4)
        assert candidate.logit == float(logits[candidate.token.id])
        assert candidate.probability == float(probabilities[candidate.token.id])
    assert (found.cap is not None) == (kind == "capped")
    assert (found.bias != 0) == (kind == "biased")
    assert found.matrix == ("output_projection.weight" if kind in ("untied", "biased") else "token_embeddings.weight")


def test_candidates_are_shown_as_the_sampling_would_draw_them(opened: Labs) -> None:
    one = opened("tied")
    made = one.recorded(one.start(labs.PROMPT).id, 0)
    best = one.top(made, 0, 5, Sampling(temperature=0.5, top_k=2))
    assert [candidate.drawn > 0 for candidate in best] == [True, True, False, False, False]
    assert best[0].drawn + best[1].drawn == pytest.approx(1)
    ratio = np.exp((best[0].logit - best[1].logit) / 0.5)
    assert best[0].drawn / best[1].drawn == pytest.approx(ratio, rel=1e-4)


def test_a_text_read_while_a_pass_is_added_is_whole(opened: Labs) -> None:
    one = opened("tied")
    text = one.start(labs.PROMPT).id
    read: list[Any] = []

    class Watched(list[trace.Pass]):
        def append(self, made: trace.Pass) -> None:
            super().append(made)
            read.append((one.text_info(text), one.values(text, 1, "ids", [slice(0, 1)]).labels))

    one.text(text).passes = Watched(one.text(text).passes)
    one.step(text, GREEDY)
    assert read == [(one.text_info(text), one.values(text, 1, "ids", [slice(0, 1)]).labels)]


def test_a_prompt_that_is_given_empty_stays_empty(opened: Labs) -> None:
    one = opened("tied")
    prompts = [Lab(one.model, one.tokenizer, name="x", prompt=prompt).info().prompt for prompt in ("", None)]
    assert prompts == ["", lab.DEFAULT_PROMPT]


def test_nearest_tokens_are_the_best_cosines(opened: Labs, folders: dict[str, Path]) -> None:
    one = opened("tied")
    rows = one.model.token_embeddings.weight.detach().double().numpy()[: labs.TOKENS]
    cosines = rows @ rows[17] / np.linalg.norm(rows, axis=1) / np.linalg.norm(rows[17])
    cosines[17] = -2
    want = np.argsort(-cosines)[:6]
    found = one.nearest(17, 6)
    assert [neighbour.token.id for neighbour in found] == want.tolist()
    np.testing.assert_allclose([neighbour.cosine for neighbour in found], cosines[want], atol=1e-9)
    few = labs.open_lab(folders["tied"], Limits(top=2))
    assert [neighbour.token.id for neighbour in few.nearest(17, 6)] == want[:2].tolist()
    with pytest.raises(UsageError, match="no token 304"):
        one.nearest(labs.TOKENS, 3)
    with pytest.raises(UsageError, match="file"):
        Lab(one.model, one.tokenizer, name="x").nearest(1, 1)


def test_the_lens_ends_with_what_the_model_says(opened: Labs) -> None:
    for kind in ("tied", "biased", "capped"):
        one = opened(kind)
        made = one.recorded(one.start(labs.PROMPT).id, 0)
        found = one.lens(made, 2, 5)
        assert found.stages == ["residual", *(f"blocks.{n}.residual" for n in range(3))]
        assert found.start == 2
        assert [len(stage) for stage in found.guesses] == [3] * 4
        for position, guesses in enumerate(found.guesses[-1]):
            best = made.tensors["probabilities"][2 + position].topk(5)
            assert [guess.token.id for guess in guesses] == best.indices.tolist()
            np.testing.assert_allclose([guess.probability for guess in guesses], best.values, rtol=1e-4)


@pytest.mark.parametrize("kind", labs.KINDS)
def test_sketches_are_small_and_bounded_whatever_the_stage(kind: str, opened: Labs) -> None:
    one = opened(kind)
    made = one.recorded(one.start(labs.PROMPT * 4).id, 0)
    names = [*made.tensors, *one.matrices]
    found = one.sketches(made, names)
    assert list(found) == names
    for name, panels in found.items():
        values = np.array(panels)
        assert values.ndim == 3
        assert values.shape[0] <= 8
        assert values.shape[1] <= 12
        assert values.size <= 8 * 12 * 12
        assert abs(values).max() <= 127
        if trace.KINDS.get(name.rpartition(".")[2]) and name.rpartition(".")[2] in sketch.POSITIVE:
            assert values.min() >= 0
            assert values.max() == 127


def test_one_look_through_the_lens_is_of_so_many_positions_at_most(folders: dict[str, Path]) -> None:
    one = labs.open_lab(folders["tied"], Limits(lens_positions=2))
    made = one.recorded(one.start(labs.PROMPT).id, 0)
    assert len(made.ids) > 4
    for start, stop, wanted in ((0, 1 << 30, 2), (1, 2, 1), (3, 1 << 30, 2), (len(made.ids) - 1, 1 << 30, 1)):
        found = one.lens(made, start, stop)
        assert found.start == start and {len(positions) for positions in found.guesses} == {wanted}


def test_a_sketch_of_many_rows_has_the_first_and_the_last() -> None:
    tensor = torch.zeros(100, 3)
    tensor[0], tensor[-1] = 1, -1
    (rows,) = sketch.sketch("embed", tensor)
    assert len(rows) == sketch.SKETCH_ROWS
    assert [row[0] > 0 for row in rows] == [True] + [False] * 11
    assert [row[0] < 0 for row in rows] == [False] * 11 + [True]


def test_the_numbers_of_experts_are_drawn_on_the_scale_of_the_largest() -> None:
    assert sketch.sketch("blocks.0.experts", torch.tensor([[0, 3], [2, 1]])) == [[[0, 127], [85, 42]]]


def test_a_sketch_survives_zeros_and_what_is_not_a_number() -> None:
    assert np.array(sketch.sketch("embed", torch.zeros(3, 4))).max() == 0
    assert np.array(sketch.sketch("embed", torch.full((3, 4), float("nan")))).shape == (1, 3, 4)
    assert np.array(sketch.sketch("embed", torch.tensor([[1.0, -1.0]]))).tolist() == [[[42, -42]]]


def test_tokens_read_as_text() -> None:
    def spelled(token: str, decoder: Any) -> str:
        backend = Backend(models.BPE(vocab={token: 0}, merges=[]))
        backend.decoder = decoder
        return lab.readable(tokenizer.Tokenizer(backend), 0)

    level, fallback = decoders.ByteLevel(), decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    assert spelled("Ġking", level) == "·king"
    assert spelled("Ċ", level) == "\\n"
    assert spelled("Ã©", level) == "é"
    assert spelled("Ã", level) == "Ã"  # half a character has no other name
    assert spelled("▁she", fallback) == "·she"
    assert spelled("<0x0A>", fallback) == "\\n"
    assert spelled("<0x41>", fallback) == "A"
    assert spelled("<0xE9>", fallback) == "<0xE9>"
    assert spelled("king</w>", decoders.BPEDecoder(suffix="</w>")) == "king·"


def test_a_model_without_a_tokenizer_is_asked_in_ids(tmp_path: Path) -> None:
    hf.make("llama", tmp_path)
    one = Lab(checkpoint.load(tmp_path)[0], None, name="tiny", path=tmp_path)
    text = one.start("5, 61 #7")
    assert [(token.id, token.text) for token in text.passes[0].tokens] == [(5, "#5"), (61, "#61"), (7, "#7")]
    assert one.start(one.prompt).passes[0].tokens
    for prompt in ("five", "1 -2", ""):
        with pytest.raises(UsageError):
            one.start(prompt)
    with pytest.raises(Exception, match="64"):
        one.start("64")


def test_an_empty_prompt_begins_with_the_token_that_begins_or_ends_a_text(opened: Labs) -> None:
    tokens = opened("tied").start("").passes[0].tokens
    assert [token.text for token in tokens] == ["<|endoftext|>"]


# Bounds


def test_what_is_too_much_is_refused_before_the_work(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(prompt_tokens=9, prompt_characters=50, passes=3, values=100, stages=2, texts=2, top=4)
    one = labs.open_lab(folders["tied"], limits)
    text = one.start(labs.PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "record", lambda *_: pytest.fail("a pass was run"))
        with pytest.raises(UsageError, match="51 characters"):
            one.start("a" * 51)
        with pytest.raises(UsageError, match=r"the prompt has \d+ tokens, the most is 9"):
            one.start("a b c d e f g h i j")
        with pytest.raises(UsageError, match="1,024 values"):
            one.values(text.id, 0, "token_embeddings.weight", [slice(0, 320, 10), slice(0, 999)])
        with pytest.raises(UsageError, match="3 stages"):
            one.sketches(one.recorded(text.id, 0), ["embed"] * 3)
        with pytest.raises(UsageError, match="2 axes"):
            one.values(text.id, 0, "embed", [slice(0, 1)])
        for position in (-1, 9):
            with pytest.raises(UsageError, match="no position"):
                one.top(one.recorded(text.id, 0), position, 1, GREEDY)
        for token in (-1, labs.ROWS):
            with pytest.raises(UsageError, match="no token"):
                one.product(one.recorded(text.id, 0), 0, token)
        with pytest.raises(UsageError, match="no pass 1"):
            one.recorded(text.id, 1)
    assert len(one.top(one.recorded(text.id, 0), 0, 99, GREEDY)) == 4
    one.step(text.id, GREEDY)
    one.step(text.id, GREEDY)
    with pytest.raises(UsageError, match="3 passes"):
        one.step(text.id, GREEDY)
    one.start("a cat")
    one.start("a dog")
    with pytest.raises(lab.UnknownText):
        one.step(text.id, GREEDY)


def test_memory_is_bounded_and_the_oldest_text_gives_way(folders: dict[str, Path]) -> None:
    model = checkpoint.load(folders["tied"])[0]
    one = labs.open_lab(folders["tied"], Limits(memory=int(2.5 * lab.pass_bytes(model, 8, 8))))
    with pytest.raises(UsageError, match="GB"):
        one.start("a b c d " * 12)
    first, second = one.start(labs.PROMPT), one.start(labs.PROMPT)
    assert one.text_info(first.id)
    third = one.start(labs.PROMPT)
    with pytest.raises(lab.UnknownText):
        one.text_info(first.id)
    assert one.text_info(second.id)
    assert one.text_info(third.id)


def test_the_estimate_of_a_pass_is_what_it_takes(opened: Labs) -> None:
    for kind in labs.KINDS:
        one = opened(kind)
        made = one.recorded(one.start(labs.PROMPT * 4).id, 0)
        held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in made.tensors.values()}
        estimate = lab.pass_bytes(one.model, len(made.ids), len(made.ids))
        assert 0.6 < estimate / sum(held.values()) < 1.8, kind


def test_learned_positions_end_and_the_text_stays_as_it_was(opened: Labs) -> None:
    one = opened("learned")
    text = one.start("a cat " * 20)
    count = len(text.passes[0].tokens)
    with pytest.raises(UsageError, match="learned positions"):
        for _ in range(65 - count):
            one.step(text.id, GREEDY)
    assert len(one.text_info(text.id).passes) == 65 - count
    assert len(one.text(text.id).ids) == 64


def test_a_text_whose_pass_broke_off_is_let_go(opened: Labs, monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened("tied")
    text = one.start("a cat")
    monkeypatch.setattr(lab, "record", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.step(text.id, GREEDY)
    with pytest.raises(lab.UnknownText):
        one.step(text.id, GREEDY)


# The page as one file


def tensors_in(html: str) -> dict[tuple[str, str], np.ndarray]:
    attributes = ' data-of="(.*?)" data-name="(.*?)" data-dtype="(.*?)" data-shape="(.*?)"'
    pattern = f'<script type="text/plain"{attributes}>(.*?)</script>'
    return {
        (of, name): np.frombuffer(base64.b64decode(data), dtype).reshape([int(size) for size in shape.split()])
        for of, name, dtype, shape, data in re.findall(pattern, html)
    }


def test_the_page_says_why_a_token_has_no_neighbours(tmp_path: Path) -> None:
    folder = labs.make("tied", tmp_path / "tied")
    token = labs.open_lab(folder).encode(labs.PROMPT)[0]
    model, _ = checkpoint.load(folder)
    with torch.no_grad():
        model.token_embeddings.weight[token] = 0
    checkpoint.save(model, folder, extra_files=tokenizer.load(folder).save)
    one = labs.open_lab(folder)
    html, _ = page.as_html(one, one.start(labs.PROMPT).id)
    recording = re.search(r'id="recording">(.*?)</script>', html)
    assert recording is not None
    nearest = json.loads(recording[1])["nearest"]
    assert "no direction" in nearest.pop(str(token))["error"]
    assert nearest and all(len(found) == page.NEIGHBOURS for found in nearest.values())


def test_the_page_holds_every_tensor_bit_for_bit_and_names_nothing_outside(opened: Labs) -> None:
    one = opened("untied")
    text = one.start(labs.PROMPT)
    one.step(text.id, GREEDY)
    html, rounded = page.as_html(one, text.id)
    assert not rounded
    found = tensors_in(html)
    for number in range(2):
        for name, tensor in one.recorded(text.id, number).tensors.items():
            if name != "probabilities":
                np.testing.assert_array_equal(found[str(number), name], tensor, err_msg=name)
    np.testing.assert_array_equal(found["model", "output_projection.weight"], one.matrices["output_projection.weight"])
    assert "connect-src 'none'" in html
    assert set(re.findall(r"https?://[^'\"\s)]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=\"(?!data:)", html)


def test_no_text_breaks_out_of_the_page(opened: Labs) -> None:
    one = opened("tied")
    wicked = "</script><script>alert(1)</script><!-- \u2028 &amp;"
    text = one.start(wicked)
    html, _ = page.as_html(one, text.id)
    assert "alert(1)</script>" not in html
    found = json.loads(re.search(r'id="recording">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert found["text"]["prompt"] == wicked
    assert html.count("<script") == html.count("</script>")


def test_a_large_recording_is_rounded_and_a_larger_one_refused(opened: Labs, monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened("tied")
    text = one.start(labs.PROMPT)
    made = one.recorded(text.id, 0)
    made.tensors["embed"][0, 0] = 1e5  # more than float16 has
    monkeypatch.setattr(page, "EXACT_BYTES", 1000)
    html, rounded = page.as_html(one, text.id)
    assert rounded
    found = tensors_in(html)
    assert found["0", "embed"].dtype == np.float32
    assert found["0", "logits"].dtype == np.float16
    np.testing.assert_allclose(found["0", "logits"], made.tensors["logits"], rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found["0", "ids"], made.tensors["ids"])
    monkeypatch.setattr(page, "MOST_BYTES", 1000)
    with pytest.raises(page.TooLarge):
        page.as_html(one, text.id)


def test_of_a_large_vocabulary_the_page_spells_the_texts_tokens_and_the_candidates(
    opened: Labs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_TOKENS", 1)
    monkeypatch.setattr(page, "TOP", 1)
    one = opened("tied")
    text = one.start(labs.PROMPT)
    html, _ = page.as_html(one, text.id)
    recording = json.loads(re.search(r'id="recording">(.*?)</script>', html)[1])  # type: ignore[index]
    read, candidates = set(one.text(text.id).ids), set(recording["candidates"])
    assert read - candidates, "a token that is no candidate"
    assert set(map(int, recording["tokens"])) == read | candidates


def test_a_large_matrix_leaves_the_rows_of_the_candidates_in_the_page(
    opened: Labs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SMALL", 1)
    one = opened("tied")
    text = one.start("a")
    for tensor in ("logits", "probabilities"):  # a vocabulary far larger than the text's other values
        assert one.recorded(text.id, 0).tensors[tensor].shape == (1, labs.ROWS)
    html, _ = page.as_html(one, text.id)
    found = tensors_in(html)
    assert ("model", "token_embeddings.weight") not in found
    ids = [candidate.token.id for candidate in one.top(one.recorded(text.id, 0), 0, page.TOP, Sampling())]
    rows = found["candidates", "token_embeddings.weight"]
    np.testing.assert_array_equal(rows, one.model.token_embeddings.weight.detach()[sorted(ids)])


# The server


@pytest.fixture(scope="module")
def served(opened: Labs) -> Any:
    with labs.serving(opened("untied")) as url:
        yield url


def test_the_best_tokens_come_with_what_the_sampling_asked_for_makes_of_them(served: str) -> None:
    text = labs.ask(served, "/api/texts", {"prompt": labs.PROMPT})[1]

    def drawn(options: str) -> list[float]:
        asked = f"/api/texts/{text['id']}/passes/0/top?position=0&count=100&temperature=1{options}"
        return [candidate["drawn"] for candidate in labs.ask(served, asked)[1]]

    whole = np.array(drawn(""))
    reach = 1 + int((np.cumsum(whole) < 0.3).sum())  # as few as hold three tenths
    assert 1 < reach < len(whole) - 3
    for options, kept in (("&top_k=3", 3), ("&top_p=0.3", reach)):
        found = np.array(drawn(options))
        np.testing.assert_allclose(found[:kept], whole[:kept] / whole[:kept].sum(), rtol=1e-5)
        assert (found[kept:] == 0).all()


def test_the_server_says_what_the_lab_says(served: str, opened: Labs) -> None:
    one = opened("untied")
    assert labs.ask(served, "/api/model")[1] == as_json(one.info())
    status, text, headers = labs.ask(served, "/api/texts", {"prompt": labs.PROMPT})
    assert status == 201
    assert headers["content-type"] == "application/json"
    at = f"/api/texts/{text['id']}"
    status, step, _ = labs.ask(served, f"{at}/next", {"temperature": 0, "top_k": 5, "top_p": 0.9, "seed": 1})
    assert status == 201
    assert (step["number"], step["kind"]) == (1, "cached")
    assert labs.ask(served, at)[1] == as_json(one.text_info(text["id"]))
    made, of = one.recorded(text["id"], 0), f"{at}/passes/0"
    questions = {
        "stage?name=blocks.1.router": one.stage(made, "blocks.1.router"),
        "values?name=blocks.0.q&at=0:2,1:3,0:8:4": one.values(
            text["id"], 0, "blocks.0.q", [slice(0, 2), slice(1, 3), slice(0, 8, 4)]
        ),
        "values?name=embed&at=0:9:2,0:8:4&pooled=true": one.values(
            text["id"], 0, "embed", [slice(0, 9, 2), slice(0, 8, 4)], pooled=True
        ),
        "sketches?names=embed,logits": one.sketches(made, ["embed", "logits"]),
        "top?position=2&count=3&temperature=0.5&top_k=2": one.top(made, 2, 3, Sampling(temperature=0.5, top_k=2)),
        "product?position=2&token=7": one.product(made, 2, 7),
        "lens?start=1&stop=3": one.lens(made, 1, 3),
    }
    for question, want in questions.items():
        assert labs.ask(served, f"{of}/{question}")[:2] == (200, as_json(want)), question
    assert labs.ask(served, "/api/nearest?token=9&count=3")[1] == as_json(one.nearest(9, 3))


def as_json(answer: Any) -> Any:
    return json.loads(msgspec.json.encode(answer))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/nothing", None, 404),
        ("/lab.html", None, 404),
        ("/../../etc/passwd", None, 404),
        ("/api/texts/../../../etc/passwd", None, 404),
        ("/api/texts/nothing", None, 404),
        ("/api/texts/nothing/next", {}, 404),
        ("/api/texts", None, 405),
        ("/api/texts", b"{", 400),
        ("/api/texts", {}, 400),
        ("/api/texts", {"prompt": 1}, 400),
        ("/api/texts", {"prompt": "a", "path": "/etc/passwd"}, 400),
        ("/api/texts", {"prompt": "a b c d " * 600}, 422),
        ("/api/texts", {"prompt": "\ud800"}, 400),
        ("/api/texts", b'{"prompt": "' + b"a" * 300_000 + b'"}', 413),
        ("{text}/next", {"temperature": -1}, 400),
        ("{text}/next", {"top_k": 0}, 400),
        ("{text}/next", {"max_new_tokens": 9}, 400),
        ("{text}/passes/1/stage?name=embed", None, 422),
        ("{text}/passes/x/stage?name=embed", None, 404),
        ("{text}/passes/0/stage", None, 400),
        ("{text}/passes/0/stage?name=../../etc/passwd", None, 422),
        ("{text}/passes/0/values?name=embed&at=0:1", None, 422),
        ("{text}/passes/0/values?name=embed&at=0:1,0:9:0", None, 422),
        ("{text}/passes/0/values?name=embed&at=0:1,-3:9", None, 422),
        ("{text}/passes/0/values?name=embed&at=__import__,0:9", None, 422),
        ("{text}/passes/0/values?name=token_embeddings.weight&at=0:99999,0:99999:0", None, 422),
        ("{text}/passes/0/sketches?names=embed,nothing", None, 422),
        ("{text}/passes/0/sketches?names=" + ",".join(["embed"] * 300), None, 422),
        ("{text}/passes/0/top?position=0&count=0", None, 400),
        ("{text}/passes/0/top?position=0&temperature=nan", None, 400),
        ("{text}/passes/0/top?position=99", None, 422),
        ("{text}/passes/0/product?position=0&token=-1", None, 422),
        ("{text}/passes/0/lens?start=-1", None, 400),
        ("/api/nearest?token=99999", None, 422),
        ("/api/nearest?token=1&count=-1", None, 400),
    ],
)
def test_nonsense_is_answered_in_json_with_a_reason(path: str, body: Any, status: int, served: str) -> None:
    text = labs.ask(served, "/api/texts", {"prompt": "a cat"})[1]["id"]
    found, answer, headers = labs.ask(served, path.format(text=f"/api/texts/{text}"), body)
    assert found == status, answer
    assert headers["content-type"] == "application/json"
    assert answer["error"]
    assert "Traceback" not in json.dumps(answer)


def test_values_that_are_not_numbers_are_null(opened: Labs, served: str) -> None:
    text = labs.ask(served, "/api/texts", {"prompt": "a cat"})[1]["id"]
    opened("untied").recorded(text, 0).tensors["embed"][0, 0] = float("nan")
    values = labs.ask(served, f"/api/texts/{text}/passes/0/values?name=embed&at=0:1,0:1")[1]["values"]
    assert values == [[None]]


def test_a_foreign_page_is_refused(served: str) -> None:
    port = served.rstrip("/").rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "192.168.0.7",
        "",
        "[",
        "localhost.evil",
    ):
        assert labs.ask(served, "/api/model", headers={"Host": host})[0] in (400, 403), host
    for host in (f"localhost:{port}", "LOCALHOST", "127.0.0.1", "127.0.0.9:1", "[::1]:80"):
        assert labs.ask(served, "/api/model", headers={"Host": host})[0] == 200, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://localhost:{port}"):
        assert labs.ask(served, "/api/texts", {"prompt": "a"}, headers={"Origin": origin})[0] == 403, origin
    assert labs.ask(served, "/api/texts", {"prompt": "a"}, headers={"Origin": served.rstrip("/")})[0] == 201
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert labs.ask(served, "/api/texts", b'{"prompt": "a"}', headers={"content-type": kind})[0] == 403, kind


@pytest.mark.parametrize(
    ("bound", "header", "known"),
    [
        ("127.0.0.1", "localhost:1", True),
        ("::1", "[::1]:1", True),
        ("127.0.0.1", "10.0.0.5:1", False),
        ("0.0.0.0", "10.0.0.5:1", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", socket.gethostname(), True),
        ("box.local", "box.local:8765", True),
        ("box.local", "other.local", False),
        ("0.0.0.0", "a]b[", False),
    ],
)
def test_a_host_is_known_when_no_name_server_can_have_made_it_up(bound: str, header: str, known: bool) -> None:
    assert server.is_known(header, bound) is known


def test_the_page_allows_its_own_script_and_style_and_nothing_else(served: str) -> None:
    status, html, headers = labs.ask(served, "/")
    assert status == 200
    assert html == page.PAGE.read_text("utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy, "no other page may show it inside its own"
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert html.count("<script>") == html.count("<style>") == 1
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers
    for path in ("/api/model", "/nothing"):
        assert labs.ask(served, path)[2]["cross-origin-resource-policy"] == "same-origin"


def test_twenty_at_once_wait_for_one_pass_at_a_time(served: str, opened: Labs, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most, plain, lens = 0, 0, trace.record, trace.logit_lens

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            time.sleep(0.005)
            try:
                return work(*arguments)
            finally:
                at_once -= 1

        return run

    monkeypatch.setattr(lab, "record", counted(plain))
    monkeypatch.setattr(lab, "logit_lens", counted(lens))
    alone = labs.ask(served, "/api/texts", {"prompt": labs.PROMPT})[1]

    def one(n: int) -> tuple[int, int]:
        if n % 4 == 3:
            return labs.ask(served, f"/api/texts/{alone['id']}/passes/0/lens")[0], 200
        return labs.ask(served, f"/api/texts/{alone['id']}/next", {"temperature": 0})[0], 201

    with ThreadPoolExecutor(20) as pool:
        assert all(found == want for found, want in pool.map(one, range(20)))
    assert most == 1
    text = labs.ask(served, f"/api/texts/{alone['id']}")[1]
    assert [step["start"] for step in text["passes"]] == [0, *range(8, 8 + 15)] or len(text["passes"]) == 16
    ids = [token["id"] for step in text["passes"] for token in step["tokens"]]
    whole = plain(opened("untied").model, ids).tensors["logits"]
    last = opened("untied").recorded(alone["id"], 15).tensors["logits"]
    np.testing.assert_allclose(last[0], whole[-1], atol=1e-4)


POST = b"POST /api/texts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_who_hangs_up_is_not_computed_for(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started, release, begun = threading.Event(), threading.Event(), []
    plain = Lab.start

    def slow(self: Lab, prompt: str) -> Any:
        begun.append(prompt)
        started.set()
        assert release.wait(30)
        return plain(self, prompt)

    monkeypatch.setattr(Lab, "start", slow)
    address = ("127.0.0.1", int(served.rstrip("/").rpartition(":")[2]))

    def send(prompt: str) -> socket.socket:
        connection = socket.create_connection(address)
        body = json.dumps({"prompt": prompt}).encode()
        connection.sendall(POST % len(body) + body)
        return connection

    first = send("first")
    assert started.wait(30)
    gone = [send(f"gone {n}") for n in range(5)]
    half = socket.create_connection(address)
    half.sendall(POST % 99 + b"{")
    time.sleep(0.2)
    for connection in (*gone, half):
        connection.close()
    time.sleep(0.2)
    last = send("last")
    release.set()
    for connection in (first, last):
        with connection:
            assert connection.recv(20).startswith(b"HTTP/1.1 201")
    assert begun == ["first", "last"]


def test_more_than_may_wait_are_told_to_come_back(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    plain = Lab.start
    monkeypatch.setattr(Lab, "start", lambda self, prompt: plain(self, prompt) if release.wait(30) else None)
    monkeypatch.setattr(server, "MOST_WAITING", 2)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(labs.ask, served, "/api/texts", {"prompt": "a"}) for _ in range(4)]
        deadline = time.monotonic() + 20
        while sum(one.done() for one in waiting) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        release.set()
        assert sorted(one.result()[0] for one in waiting) == [201, 201, 503, 503]


def test_a_fault_is_an_answer_too(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lab, "info", lambda self: 1 / 0)
    status, answer, _ = labs.ask(served, "/api/model")
    assert status == 500
    assert "ZeroDivisionError" in answer["error"]
    monkeypatch.undo()
    assert labs.ask(served, "/api/model")[0] == 200


# The command


@contextlib.contextmanager
def command(*arguments: str | Path) -> Any:
    environment = {**os.environ, "BROWSER": "true"}
    process = subprocess.Popen(
        [sys.executable, "-m", "llmcli", "lab", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("during", ["idle", "a request"])
def test_ctrl_c_closes_it_cleanly(during: str, folders: dict[str, Path]) -> None:
    with command(folders["tied"], "a cat", "--port", "0", "--no-browser") as process:
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert labs.ask(url, "/api/model")[1]["prompt"] == "a cat"
        kept = socket.create_connection(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])))
        if during == "a request":
            threading.Thread(target=lambda: contextlib.suppress(Exception) and keep_asking(url), daemon=True).start()
            time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        kept.close()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err
    assert "error" not in err.lower()


def keep_asking(url: str) -> None:
    with contextlib.suppress(OSError, Exception):
        while True:
            labs.ask(url, "/api/texts", {"prompt": labs.PROMPT * 10})


def test_a_port_that_is_taken_is_said_before_the_model_is_read(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["lab", str(folders["tied"]), "--port", str(port), "--no-browser"]) == 2
        said = capsys.readouterr().err
        assert f"port {port}" in said
        assert "--port" in said
        monkeypatch.setattr(server, "PORT", port)
        with server.listen("127.0.0.1", None) as other:  # nobody asked for a port: any will do
            assert other.getsockname()[1] not in (0, port)
    with pytest.raises(UsageError, match=r"^cannot listen on 192\.0\.2\.1: ") as caught:  # of an example network
        server.listen("192.0.2.1", None)
    assert caught.value.hint == "Choose another --host."
    assert cli.run(["lab", str(folders["tied"]), "--host", "no.such.host.invalid", "--no-browser"]) == 2
    assert cli.run(["lab", "/nowhere", "--port", "0", "--no-browser"]) == 2


def test_port_zero_is_any_and_not_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        usual = free.getsockname()[1]
    monkeypatch.setattr(server, "PORT", usual)  # free again: who may choose takes it
    with server.listen("127.0.0.1", 0) as listening:
        assert listening.getsockname()[1] != usual


def test_the_command_opens_the_browser_and_warns_of_other_hosts(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("llmcli.commands.lab.open_browser", opened.append)
    monkeypatch.setattr(server, "serve", lambda lab, listening, host: None)
    assert cli.run(["lab", str(folders["tied"]), "--port", "0"]) == 0
    shown = capsys.readouterr()
    assert opened == [shown.out.strip()]
    assert "warning" not in shown.err
    assert cli.run(["lab", str(folders["tied"]), "--port", "0", "--host", "0.0.0.0", "--no-browser"]) == 0
    shown = capsys.readouterr()
    assert "warning: whoever reaches 0.0.0.0" in shown.err
    assert shown.out.startswith("http://127.0.0.1:")
    assert len(opened) == 1


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_the_command_says_how_to_get_it(
    missing: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing or name == "llmcli.server"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("llmcli.server", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.run(["lab", str(folders["tied"])]) == 1
    said = capsys.readouterr().err
    assert missing in said
    assert 'pip install "llmcli[lab]"' in said
