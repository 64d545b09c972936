"""nearest-tokens through its real entry point: names, queries, options, pictures, exports, refusals."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf
import numpy as np
import pytest
import tokenizers
from matrices import NAME, Values, config, plain, ranking, write

from llmcli import cli, neighbours, neighbours_plot, plot, tensors, tokenizer
from llmcli.matrix import find_matrix
from llmcli.names import Names, visible

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
stories = pytest.mark.skipif(not STORIES.is_dir(), reason="needs the shared stories260K")

WORDS = ["<unk>", "king", "man", "woman", "queen", " she", " he", "she", "a", "b", "c", "boy", "girl", "prince", "x y"]
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with sockets blocked."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "__init__", refuse)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command with --json: what it printed, as JSON. Notes and warnings stay in `run.said`."""

    def call(*arguments: Any) -> Any:
        code, out, err = said(capsys, *arguments, "--json")
        assert code == 0, err
        call.said = err  # type: ignore[attr-defined]
        return json.loads(out)

    return call


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["nearest-tokens", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def vocabulary(folder: Path, words: list[str], **ids: int) -> None:
    """A tokenizer of whole words beside the weights, in which a text is one token or unknown letters."""
    table = {word: id for id, word in enumerate(words)} | ids
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unk>"))
    tokenizer.Tokenizer(made).save(folder)


def vectors(rows: int = len(WORDS), width: int = 8, seed: int = 3) -> Values:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tied checkpoint whose vocabulary is WORDS."""
    folder = write(tmp_path / "words", {NAME: vectors()})
    config(folder, len(WORDS), 8)
    vocabulary(folder, WORDS)
    return folder


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """A checkpoint of the same vocabulary with an output matrix of its own."""
    folder = write(tmp_path / "untied", {NAME: vectors(), "lm_head.weight": vectors(seed=4)})
    config(folder, len(WORDS), 8, tie_word_embeddings=False)
    vocabulary(folder, WORDS)
    return folder


def ids(answer: Any, key: str = "neighbours") -> list[int]:
    return [hit["id"] for hit in answer[key]]


@stories
def test_the_neighbours_that_are_published_for_stories260K(run: Run) -> None:
    nearest = json.loads((STORIES / "expected.json").read_text())["nearest"]
    for token, wanted in nearest.items():
        answer = run(STORIES, token, "-k", len(wanted))
        assert [(hit["token"], hit["id"]) for hit in answer["neighbours"]] == [(token, id) for token, id, _ in wanted]
        np.testing.assert_allclose([hit["score"] for hit in answer["neighbours"]], [s for *_, s in wanted], atol=1e-5)


@stories
def test_json_has_exactly_the_promised_keys_and_a_list_for_several(run: Run) -> None:
    one = run(STORIES, " she", "-k", 3)
    assert list(one) == ["query", "neighbours"]
    assert one["query"] == {"token": "▁she", "id": 358}
    assert all(list(hit) == ["token", "id", "score"] for hit in one["neighbours"])
    assert run(STORIES, "▁she", "#317", "-k", 3) == [one, run(STORIES, "▁Lily", "-k", 3)]


@stories
def test_scores_of_an_fp32_file_are_float64s_to_1e_6(run: Run) -> None:
    values = np.array(tensors.read_array(find_matrix(STORIES).info), np.float64)
    for metric in ("cosine", "dot", "l2"):
        scores = plain(values, values[300], metric)
        answer = run(STORIES, "#300", "-k", 600, "--metric", metric)
        assert len(answer["neighbours"]) == 511
        shown = [-hit["score"] if metric == "l2" else hit["score"] for hit in answer["neighbours"]]
        assert ids(answer) == ranking(scores, (300,))
        np.testing.assert_allclose(shown, scores[ids(answer)], atol=1e-6)


@stories
def test_torch_is_not_imported_nor_a_socket_opened_and_the_file_is_unchanged() -> None:
    before = hashlib.sha256((STORIES / "model.safetensors").read_bytes()).hexdigest()
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise AssertionError('socket')\n"
        "socket.socket.__init__ = socket.getaddrinfo = refuse\n"
        "from llmcli import cli\n"
        "for extra in (['▁he', '--center', '--matrix', 'both'], ['--analogy', '▁he - ▁his + ▁her']):\n"
        "    assert cli.run(['nearest-tokens', sys.argv[1], *extra]) == 0\n"
        "assert cli.run(['embedding-report', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'huggingface_hub'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(STORIES)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert hashlib.sha256((STORIES / "model.safetensors").read_bytes()).hexdigest() == before


def test_a_token_is_named_by_its_spelling_by_text_or_by_its_id(words: Path, run: Run) -> None:
    by_spelling = run(words, " she")
    assert by_spelling["query"] == {"token": " she", "id": 5}
    assert run(words, "#5") == by_spelling
    assert run(words, "she")["query"]["id"] == 7
    scores = plain(vectors(), vectors()[5])
    assert ids(by_spelling) == ranking(scores, (5,))[:10]


@stories
def test_several_tokens_are_refused_with_their_pieces_and_the_form_with_a_space(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = said(capsys, STORIES, "king")
    assert code == 1 and not out
    assert "not one" in err and "id 409" in err and "'ing' (id 299)" in err
    assert "' king' reads the same" in err and "--text king --mean" in err
    assert said(capsys, STORIES, "--text", "king", "--mean")[0] == 0


def test_a_byte_level_word_says_which_form_is_one_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tokenizer.train_bpe([" king king " * 50 + "zz queen"], 262)
    folder = write(tmp_path / "bpe", {NAME: vectors(trained.size)})
    trained.save(folder)
    assert trained.id("Ġking") is not None
    code, _, err = said(capsys, folder, "king")
    if code:
        assert "'Ġking'" in err and "' king' is one token" in err
    code, out, _ = said(capsys, folder, " king", "-k", 1, "--json")
    assert code == 0 and json.loads(out)["query"]["token"] == "Ġking"


def test_ids_that_have_no_row_are_refused(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, words, f"#{len(WORDS)}")
    assert code == 1
    assert f"id {len(WORDS)}" in err and f"vocab_size is {len(WORDS)}" in err and "size is 15" in err
    code, _, err = said(capsys, words, "#99999999999999999999999999")
    assert code == 1 and "Traceback" not in err


def test_padding_rows_are_left_out_and_said_and_kept_on_request(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "padded", {NAME: vectors(20)})
    vocabulary(folder, WORDS)
    answer = run(folder, "king", "-k", 100)
    assert max(ids(answer)) == 14 and len(answer["neighbours"]) == 14
    assert "5 rows without a token are left out (15 to 19)" in run.said  # type: ignore[attr-defined]
    answer = run(folder, "king", "-k", 100, "--all-rows")
    assert len(answer["neighbours"]) == 19
    assert {hit["token"] for hit in answer["neighbours"] if hit["id"] > 14} == {f"<row {id}>" for id in range(15, 20)}
    assert run(folder, "#17", "-k", 1)["query"] == {"token": "<row 17>", "id": 17}


@pytest.mark.parametrize("command", [["nearest-tokens", "#3", "-k", "2"], ["embedding-report"]])
def test_rows_go_by_number_where_the_extra_that_reads_their_names_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    for name in ("sentencepiece", "sentencepiece.sentencepiece_model_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    folder = write(tmp_path / "m", {NAME: vectors(9)})
    (folder / "tokenizer.model").write_bytes(b"")
    assert cli.run([command[0], str(folder), *command[1:]]) == 0
    err = capsys.readouterr().err
    assert "tokenizer.model: a SentencePiece model" in err and "rows go by number. Install the extra" in err
    for asked in (["king"], ["--text", "king"], ["--analogy", "king - man + woman"]):
        code, _, err = said(capsys, folder, *asked)
        assert code == 1 and 'pip install "llmcli[sentencepiece]"' in err


def test_a_row_in_a_gap_of_the_vocabulary_is_named_by_its_number(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "gap", {NAME: vectors(64)})
    vocabulary(folder, [f"t{n}" for n in range(62)], last=63, **{"<unk>": 0})
    answer = run(folder, "t1", "-k", 64)
    assert next(hit["token"] for hit in answer["neighbours"] if hit["id"] == 62) == "<row 62>"


def test_rows_of_a_checkpoint_without_a_tokenizer_go_by_number(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "bare", {NAME: vectors(9)})
    answer = run(folder, "#3", "-k", 2)
    assert answer["query"]["token"] == "<row 3>"
    assert [hit["token"] for hit in answer["neighbours"]] == [f"<row {id}>" for id in ids(answer)]
    for asked in (["king"], ["--text", "king"]):
        code, _, err = said(capsys, folder, *asked)
        assert code == 1 and ("no tokenizer" in err or "there is none" in err)


def test_zero_and_not_finite_rows_are_left_out_counted_and_refused_as_queries(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    values = vectors()
    values[8] = 0
    values[9, 2] = np.nan
    folder = write(tmp_path / "bad", {NAME: values})
    vocabulary(folder, WORDS)
    for more in ([], ["--center"]):
        answer = run(folder, "king", "-k", 100, *more)
        assert len(answer["neighbours"]) == 12 and not {8, 9} & set(ids(answer))
        assert "2 rows of the input matrix" in run.said  # type: ignore[attr-defined]
        code, _, err = said(capsys, folder, "a", *more)
        assert code == 2 and "a (row 8) is zero or not finite" in err


def test_k_of_zero_and_below(words: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words, "king", "-k", 0) == {"query": {"token": "king", "id": 1}, "neighbours": []}
    assert said(capsys, words, "king", "-k", 0)[0] == 0
    assert said(capsys, words, "king", "-k", -1)[0] == 2


def test_the_tokens_of_a_text_each_or_their_mean(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    values = vectors(257)
    folder = write(tmp_path / "bytes", {NAME: values})
    tokenizer.bytes_tokenizer().save(folder)
    each = run(folder, "--text", "abba", "-k", 2)
    assert [answer["query"]["id"] for answer in each] == [97, 98]
    mean = run(folder, "c", "--text", "ab", "--mean", "-k", 4)
    assert mean["query"] == {"token": "mean of c, a, b", "id": None}
    assert mean["left_out"] == ["c", "a", "b"]
    wanted = plain(values, values[[99, 97, 98]].astype(np.float64).mean(0))
    assert ids(mean) == ranking(wanted, (97, 98, 99))[:4]
    np.testing.assert_allclose([hit["score"] for hit in mean["neighbours"]], wanted[ids(mean)], atol=1e-9)
    assert said(capsys, folder, "--mean")[0] == 2
    assert said(capsys, folder, "--text", "")[0] == 2


def test_a_vector_from_a_file(words: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    asked = vectors(2, seed=9).astype(np.float64)
    np.save(tmp_path / "v.npy", asked)
    (tmp_path / "v.json").write_text(json.dumps(asked.tolist()))
    (tmp_path / "one.json").write_text(json.dumps(asked[0].tolist()))
    answers = run(words, "--vector", tmp_path / "v.npy", "-k", 3)
    assert [answer["query"]["token"] for answer in answers] == ["v.npy[0]", "v.npy[1]"]
    assert [ids(answer) for answer in answers] == [ranking(plain(vectors(), row))[:3] for row in asked]
    assert [ids(answer) for answer in run(words, "--vector", tmp_path / "v.json", "-k", 3)] == [*map(ids, answers)]
    alone = run(words, "--vector", tmp_path / "one.json", "-k", 3)
    assert alone["query"] == {"token": "one.json", "id": None} and ids(alone) == ids(answers[0])
    centred = run(words, "--vector", tmp_path / "one.json", "-k", 3, "--center")
    mean = vectors().astype(np.float64).mean(0)
    assert ids(centred) == ranking(plain(vectors() - mean, asked[0] - mean))[:3]
    bad = {"a.json": "[1, 2]", "b.json": '{"a": 1}', "c.json": "[1, 2", "d.json": '["x"]', "e.npy": "junk"}
    bad |= {"f.json": "[]", "g.json": "[[0,0,0,0,0,0,0,0]]", "h.json": "[[1],[1,2]]"}
    for name, content in bad.items():
        (tmp_path / name).write_text(content)
        code, _, err = said(capsys, words, "--vector", tmp_path / name)
        assert code == (2 if name == "g.json" else 1) and "hint" in err, name
    np.save(tmp_path / "o.npy", np.array([object()]), allow_pickle=True)
    assert said(capsys, words, "--vector", tmp_path / "o.npy")[0] == 1
    assert said(capsys, words, "--vector", tmp_path / "none.npy")[0] == 2


def test_input_and_output_side_by_side_with_their_overlap(untied: Path, run: Run) -> None:
    wanted = {
        side: ranking(plain(m, m[1]), (1,))[:5] for side, m in (("input", vectors()), ("output", vectors(seed=4)))
    }
    both = run(untied, "king", "-k", 5, "--matrix", "both")
    assert list(both) == ["query", "input", "output", "overlap"]
    assert ids(both, "input") == wanted["input"] and ids(both, "output") == wanted["output"]
    assert both["overlap"] == len(set(wanted["input"]) & set(wanted["output"])) / 5
    assert ids(run(untied, "king", "-k", 5, "--matrix", "output")) == wanted["output"]


def test_a_tied_output_is_the_same_matrix_and_says_so(words: Path, run: Run) -> None:
    both = run(words, "king", "-k", 5, "--matrix", "both")
    assert both["input"] == both["output"] and both["overlap"] == 1
    assert "tied" in run.said  # type: ignore[attr-defined]


def test_answers_only_from_among_the_tokens_of_a_file(
    words: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "among.txt"
    file.write_bytes("\ufeffqueen\r\n she\r\n\r\nnot a token\r\n#2\r\nking\r\n".encode())
    answer = run(words, "king", "--among", file)
    assert ids(answer) == [id for id in ranking(plain(vectors(), vectors()[1]), (1,)) if id in (4, 5, 2)]
    assert "1 lines are not one token" in run.said and "'not a token'" in run.said  # type: ignore[attr-defined]
    for content, text in ((b"nothing\n", "none of its"), (b"\x92", "not UTF-8")):
        file.write_bytes(content)
        code, _, err = said(capsys, words, "king", "--among", file)
        assert code == 1 and text in err
    assert said(capsys, words, "king", "--among", tmp_path / "none")[0] == 2


def test_a_padding_row_is_an_answer_only_where_all_rows_are(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "m", {NAME: vectors(len(WORDS) + 2)})
    vocabulary(folder, WORDS)
    file = _file(tmp_path, f"queen\n#{len(WORDS)}\n")
    assert ids(run(folder, "king", "--among", file)) == [4]
    assert sorted(ids(run(folder, "king", "--among", file, "--all-rows"))) == [4, len(WORDS)]
    for more, mentioned in ([], True), (["--all-rows"], False):
        run(folder, "king", *more)
        assert ("rows without a token are left out (15 to 16)" in run.said) == mentioned  # type: ignore[attr-defined]


@pytest.mark.parametrize("option", ["--among", "--vector", "--analogies"])
def test_a_file_longer_than_is_read_is_refused(
    words: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(neighbours, "MOST_BYTES", 1000)
    file = tmp_path / "long.json"
    file.write_text("[" + ", ".join(["0.5"] * 8) + "]" + "\n" * 1000)
    code, out, err = said(capsys, words, *(["king"] if option == "--among" else []), option, file)
    assert code == 1 and not out and "more than 1,000 bytes" in err


def test_in_a_picture_each_query_stands_beside_its_own_neighbours(
    words: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    values = vectors()
    near = {id: ranking(plain(values, values[id]), (id,))[:2] for id in range(len(WORDS))}
    a, b = next((a, b) for a in near for b in near if len({a, b, *near[a], *near[b]}) == 6)
    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: figures.append(figure))
    run(words, f"#{a}", f"#{b}", "-k", 2, "--plot", tmp_path / "a.svg")
    for labels in (figures[0].axes[0].get_xticklabels(), figures[0].axes[0].get_yticklabels()):
        assert [label.get_text() for label in labels] == [visible(WORDS[id]) for id in (a, *near[a], b, *near[b])]
        assert [label.get_fontweight() for label in labels] == ["bold", "normal", "normal"] * 2


def test_side_by_side_it_is_said_how_much_of_both_lists_is_the_same(
    untied: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = set()
    for word in ("king", "queen", "boy", "b"):
        share = run(untied, word, "-k", 5, "--matrix", "both")["overlap"]
        assert f"in both lists: {round(100 * share)}%\n" in said(capsys, untied, word, "-k", 5, "--matrix", "both")[1]
        shares.add(share)
    assert len(shares) > 1


def test_rows_left_out_are_not_mentioned_where_the_answers_are_given(tmp_path: Path, run: Run) -> None:
    values = vectors()
    values[2] = 0
    folder = write(tmp_path / "m", {NAME: values})
    vocabulary(folder, WORDS)
    for more, mentioned in ([], True), (["--among", _file(tmp_path, "queen\n")], False), (["-k", 0], False):
        run(folder, "king", *more)
        assert ("of the input matrix" in run.said) == mentioned  # type: ignore[attr-defined]


def test_of_two_matrices_a_row_that_one_lacks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "m", {NAME: vectors(), "lm_head.weight": vectors(len(WORDS) - 2, seed=4)})
    assert said(capsys, folder, "#12", "--matrix", "both")[0] == 0
    code, out, err = said(capsys, folder, "#13", "--matrix", "both")
    assert code == 1 and not out and "token id 13 has no row in the model: its vocab_size is 13" in err


def test_a_vector_given_is_centred_as_the_rows_are(words: Path, tmp_path: Path, run: Run) -> None:
    values = vectors().astype(np.float64)
    mean = values.mean(0)
    given = 3 * mean + 0.2 * values[3]
    np.save(tmp_path / "v.npy", given)
    wanted = ranking(plain(values - mean, given - mean))
    assert ids(run(words, "--vector", tmp_path / "v.npy", "--center", "-k", 15)) == wanted
    assert wanted != ranking(plain(values - mean, given)), "it makes a difference"


@pytest.mark.parametrize("length", [1e-20, 1e20])
def test_a_vector_given_has_a_direction_however_short_or_long_it_is(
    words: Path, tmp_path: Path, run: Run, length: float
) -> None:
    direction = np.arange(-3.0, 5)
    np.save(tmp_path / "v.npy", direction * length)
    answer = run(words, "--vector", tmp_path / "v.npy", "-k", 15)
    assert ids(answer) == ranking(plain(vectors(), direction))


def test_a_token_that_is_spelled_like_a_number_of_no_row_is_a_token(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "m", {NAME: vectors(3)})
    vocabulary(folder, ["<unk>", "#-1", "#+2"])
    assert run(folder, "#-1")["query"] == {"token": "#-1", "id": 1}
    assert run(folder, "#2")["query"] == {"token": "#+2", "id": 2}, "a number of a row is one, whatever is spelled"
    code, _, err = said(capsys, folder, "#-2")
    assert code == 1 and "there is no such row" in err and "#0 to #2" in err


def test_a_damaged_tokenizer_is_said_to_be_and_rows_do_not_go_by_number_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentencepiece")
    folder = write(tmp_path / "m", {NAME: vectors(3)})
    (folder / "tokenizer.model").write_bytes(b"\xff\xff not a model")
    code, out, err = said(capsys, folder, "#1")
    assert code == 1 and not out and "tokenizer.model: damaged" in err and "by number" not in err


def test_a_distance_is_headed_as_one(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for metric, heading in (("l2", "distance"), ("dot", "dot"), ("cosine", "cosine")):
        _, out, _ = said(capsys, words, "king", "-k", 1, "--metric", metric)
        assert [line.split() for line in out.splitlines()][1] == ["token", "id", heading]


def test_the_baseline_is_shown_and_in_json_on_request(
    words: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = run(words, "king", "--baseline")["baseline"]
    values = vectors().astype(np.float64)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    pairs = (unit @ unit.T)[np.triu_indices(len(WORDS), 1)]
    assert spread["pairs"] == len(pairs)
    assert (spread["mean"], spread["std"]) == pytest.approx((pairs.mean(), pairs.std()), abs=1e-9)
    out = said(capsys, words, "king")[1]
    assert f"random pairs of rows, cosine: {pairs.mean():.3f} ± {pairs.std():.3f}" in out


def test_an_analogy_is_the_sum_of_unit_vectors_without_its_own_words(words: Path, run: Run) -> None:
    values = vectors().astype(np.float64)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    wanted = plain(values, unit[1] - unit[2] + unit[3])
    answer = run(words, "--analogy", "king - man + woman", "-k", 4)
    assert answer["query"] == {"token": "king - man + woman", "id": None}
    assert answer["left_out"] == ["king", "man", "woman"]
    assert ids(answer) == ranking(wanted, (1, 2, 3))[:4]
    quoted = run(words, "--analogy", "' she' + 'x y' - \"king\"", "-k", 4)
    assert ids(quoted) == ranking(plain(values, unit[5] + unit[14] - unit[1]), (1, 5, 14))[:4]
    assert (
        ids(run(words, "--analogy", "- king + man", "-k", 1)) == ranking(plain(values, unit[2] - unit[1]), (1, 2))[:1]
    )
    assert run(words, "--analogy", "she - king + #14")["query"]["token"] == " she - king + x y"  # a word has its space
    assert run(words, "--analogy", "'she' - king")["query"]["token"] == "she - king"
    moved = [(1 + plain(values, values[id])) / 2 for id in (1, 2, 3)]
    product = run(words, "--analogy", "king - man + woman", "--method", "mul", "-k", 4)
    mixed = run(words, "queen", "--analogy", "king - man + woman", "--method", "mul", "-k", 4)
    assert mixed == [run(words, "queen", "-k", 4), product]
    assert ids(product) == ranking(moved[0] * moved[2] / (moved[1] + 0.001), (1, 2, 3))[:4]


@pytest.mark.parametrize(
    "text", ["", "king", "king man", "king +", "+ - king", "- king - man", "king - nothing", "king - king"]
)
def test_what_is_no_analogy_is_refused(words: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, words, "--analogy", text)
    assert code in (1, 2) and not out and "error" in err and "fault in llmcli" not in err


@pytest.mark.parametrize("method", ["add", "mul"])
def test_a_file_of_analogies_is_scored_by_section(
    tmp_path: Path, method: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["<unk>", "man", "king", "woman", " queen", "boy", "prince", "girl", "princess", "odd"]
    # The first two questions are made to come out, the last not to.
    table = np.eye(8)[[7, 0, 1, 2, 0, 3, 4, 5, 0, 6]]
    table[4] = [-1, 1, 1, 0, 0, 0, 0, 0]
    table[8] = [0, 0, 0, -1, 1, 1, 0, 0]
    folder = write(tmp_path / "m", {NAME: table})
    vocabulary(folder, names)
    file = tmp_path / "questions.txt"
    file.write_text(
        ": family\nman king woman queen\nboy prince girl princess\nman king aunt queen\n\n: wrong\nman king woman odd\n"
    )
    result = run(folder, "--analogies", file, "--method", method)
    assert result["method"] == method
    assert result["sections"] == [
        {"name": "family", "asked": 2, "correct": 2, "skipped": 1, "accuracy": 1.0},
        {"name": "wrong", "asked": 1, "correct": 0, "skipped": 0, "accuracy": 0.0},
    ]
    assert result["total"] == {"name": "total", "asked": 3, "correct": 2, "skipped": 1, "accuracy": 2 / 3}
    code, out, _ = said(capsys, folder, "--analogies", file)
    assert code == 0 and "66.7%" in out
    file.write_text("man king woman\n")
    code, _, err = said(capsys, folder, "--analogies", file)
    assert code == 1 and "line 1" in err
    file.write_text("man king aunt queen\n")
    assert run(folder, "--analogies", file)["total"]["accuracy"] is None
    file.write_text(": nothing\n\n")
    code, _, err = said(capsys, folder, "--analogies", file)
    assert code == 1 and "holds no questions" in err
    (folder / "tokenizer.json").unlink()
    code, _, err = said(capsys, folder, "--analogies", file)
    assert code == 1 and "needs a tokenizer" in err


def test_a_question_with_a_word_of_no_direction_is_asked_and_not_answered(tmp_path: Path, run: Run) -> None:
    values = vectors()
    values[2] = 0
    folder = write(tmp_path / "m", {NAME: values})
    vocabulary(folder, WORDS)
    file = _file(tmp_path, ": all\nking man woman queen\n")
    total = run(folder, "--analogies", file)["total"]
    assert (total["asked"], total["correct"], total["skipped"]) == (1, 0, 0)


def test_a_word_whose_token_has_no_row_takes_no_part_in_an_analogy(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "m", {NAME: vectors()[:4]})
    vocabulary(folder, WORDS)  # ids 0 to 14, and four rows
    file = tmp_path / "questions.txt"
    file.write_text("king man woman <unk>\nking man queen woman\nking man woman queen\n")
    total = run(folder, "--analogies", file)["total"]
    assert (total["asked"], total["skipped"]) == (1, 2)
    code, out, err = said(capsys, folder, "--analogy", "king - queen")
    assert code == 1 and not out and "token id 4 has no row in the model: its vocab_size is 4" in err


def test_lines_of_standard_input_are_answered_one_by_one(
    words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("king\n\n she\n"))
    code, out, _ = said(capsys, words, "--stdin", "-k", 2, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["query"]["id"] for line in lines] == [1, 5]
    monkeypatch.setattr(sys, "stdin", io.StringIO("king\nnothing\n she\n"))
    code, out, _ = said(capsys, words, "--stdin", "-k", 2, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and [line["query"]["id"] for line in lines] == [1, None, 5] and "error" in lines[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("nothing\nking\n"))
    code, out, err = said(capsys, words, "--stdin", "-k", 2)
    assert code == 1 and "'nothing'" in err and "king  #1" in out


def test_tokens_with_markup_and_control_characters_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[bold red]", "[/]", "\n", "\x1b[31m", "a b", "<unk>"]
    folder = write(tmp_path / "odd", {NAME: vectors(6)})
    vocabulary(folder, names)
    code, out, _ = said(capsys, folder, "[bold red]", "-k", 6)
    assert code == 0
    for shown in ("[bold red]", "[/]", "\\n", "\\x1b[31m", "a b"):
        assert shown in out
    assert "\x1b" not in out


def test_options_that_do_not_go_together_are_refused(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in (
        [],
        ["king", "--method", "mul"],
        ["--analogy", "king - man", "--method", "mul", "--metric", "dot"],
        ["king", "--matrix", "both", "--plot", tmp_path / "a.png"],
        ["king", "--matrix", "both", "--export", tmp_path / "e"],
        ["king", "--plot", tmp_path / "a.txt"],
    ):
        code, out, err = said(capsys, words, *asked)
        assert code == 2 and not out and "hint" in err, asked
    assert said(capsys, tmp_path / "nowhere", "king")[0] == 2


def test_export_reads_back_as_the_rows_and_overwrites_nothing(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a", "b c", "\t", "\n", "\u2028", "d", "d ", "", "<unk>"]
    values = vectors(10, 4)
    folder = write(tmp_path / "m", {NAME: values})
    vocabulary(folder, names)
    out = tmp_path / "new" / "export"
    result = run(folder, "--export", out, "--all-rows")
    assert (result["rows"], result["width"]) == (10, 4)
    rows = np.loadtxt(out / "vectors.tsv", delimiter="\t", dtype=np.float32)
    np.testing.assert_array_equal(rows, values)
    metadata = (out / "metadata.tsv").read_text().split("\n")
    assert metadata[0] == "token\tid" and metadata[-1] == "" and len(metadata) == 12
    spellings = [line.split("\t")[0] for line in metadata[1:-1]]
    assert [line.split("\t")[1] for line in metadata[1:-1]] == [str(id) for id in range(10)]
    assert len(set(spellings)) == 10 and spellings[1] == "b\\x20c" and spellings[9] == "<row\\x209>"
    words = (out / "word2vec.txt").read_bytes().decode().split("\n")
    assert words[0] == "10 4" and words[-1] == ""
    read = [line.rstrip().split(" ") for line in words[1:-1]]  # as gensim does
    assert [parts[0] for parts in read] == spellings
    np.testing.assert_array_equal(np.array([parts[1:] for parts in read], np.float32), values)
    code, _, err = said(capsys, folder, "--export", out)
    assert code == 2 and "there already" in err
    assert run(folder, "--export", tmp_path / "few", "--among", _file(tmp_path, "d\na\na\n"))["rows"] == 2
    assert (tmp_path / "few" / "metadata.tsv").read_text() == "token\tid\na\t0\nd\t5\n", "each once, by id"


@pytest.mark.parametrize("names", [["b\\x20c", "b c", "b\\x20c#1"], ["b\\x20c#2", "b\\x20c", "b c"]])
def test_every_row_is_exported_under_a_name_of_its_own(tmp_path: Path, run: Run, names: list[str]) -> None:
    folder = write(tmp_path / "m", {NAME: vectors(4, 4)})
    vocabulary(folder, [*names, "<unk>"])
    run(folder, "--export", tmp_path / "out")
    lines = (tmp_path / "out" / "metadata.tsv").read_text().splitlines()[1:]
    assert len({line.split("\t")[0] for line in lines}) == len(lines) == 4


def test_gensim_reads_what_is_exported(tmp_path: Path, run: Run) -> None:
    models = pytest.importorskip("gensim.models")
    names = ["a", "b c", "\t", "\n", "\u2028", "d", "d ", "", "<unk>", "\x85", "\xa0", "日本"]
    folder = write(tmp_path / "m", {NAME: vectors(len(names), 4)})
    vocabulary(folder, names)
    run(folder, "--export", tmp_path / "export")
    read = models.KeyedVectors.load_word2vec_format(str(tmp_path / "export" / "word2vec.txt"))
    np.testing.assert_array_equal(read.vectors, vectors(len(names), 4))
    assert read.index_to_key[0] == "a" and read.index_to_key[-1] == "日本"
    assert len(set(read.index_to_key)) == len(names)
    answers = run(folder, "#0", "-k", 5)["neighbours"]
    for hit, (name, score) in zip(answers, read.most_similar("a", topn=5), strict=True):
        assert read.key_to_index[name] == hit["id"]
        assert score == pytest.approx(hit["score"], abs=1e-6)


def _file(folder: Path, text: str) -> Path:
    (folder / "list.txt").write_text(text)
    return folder / "list.txt"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_picture_is_drawn(words: Path, tmp_path: Path, suffix: str, run: Run) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"map{suffix}"
    run(words, "king", " she", "-k", 6, "--plot", path)
    start = path.read_bytes()[:200]
    assert {".png": b"PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix] in start


def test_a_picture_of_one_token_is_refused(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = said(capsys, words, "king", "-k", 0, "--plot", tmp_path / "a.png")
    assert code == 2 and "fewer than two" in err and not (tmp_path / "a.png").exists()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pictures drawn, instead of files of them."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: drawn.append(figure))
    return drawn


def test_a_picture_holds_all_that_was_asked_and_says_what_it_left_out(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = ["--plot", tmp_path / "a.png"]
    asked = ["king", "queen", "boy", "a"]
    monkeypatch.setattr(neighbours_plot, "MOST_DRAWN", 6)
    code, out, err = said(capsys, words, *asked, "-k", 3, "--json", *picture)
    answers = json.loads(out)
    shown = [text.get_text() for text in figures[0].axes[0].get_yticklabels()]
    everything = {visible(word) for answer in answers for word in [answer["query"]["token"], *_tokens(answer)]}
    assert code == 0 and len(shown) == 6 and set(asked) < set(shown) < everything
    assert set(shown) - set(asked) <= {visible(_tokens(answer)[0]) for answer in answers}, "the nearest come first"
    assert f"there is room for 6 tokens, {len(everything) - 6} more are left out" in err
    assert "left out" not in said(capsys, words, "king", "-k", 5, *picture)[2]


def _tokens(answer: Any) -> list[str]:
    return [hit["token"] for hit in answer["neighbours"]]


@pytest.mark.parametrize(
    ("query", "parts"),
    [
        (["--analogy", "king - man + woman"], ["king", "man", "woman"]),
        (["--text", "she", "--text", "boy", "--mean"], ["she", "boy"]),
    ],
)
def test_a_picture_of_a_sum_shows_what_it_is_made_of(
    words: Path, tmp_path: Path, run: Run, figures: list[Any], query: list[str], parts: list[str]
) -> None:
    found = _tokens(run(words, *query, "-k", 2, "--plot", tmp_path / "a.png"))
    labels = figures[0].axes[0].get_yticklabels()
    assert [text.get_text() for text in labels] == [*parts, *map(visible, found)]
    assert [text.get_fontweight() for text in labels] == ["bold"] * len(parts) + ["normal"] * 2


def test_more_queries_than_colours_share_the_last_and_the_legend_says_so(
    words: Path, tmp_path: Path, run: Run, figures: list[Any]
) -> None:
    for count, last in ((8, "near b"), (9, "near any further one")):
        run(
            words,
            *("king", "man", "woman", "queen", "boy", "girl", "a", "b", "c")[:count],
            "--plot",
            tmp_path / "a.png",
        )
        texts = [text.get_text() for text in figures[-1].axes[1].get_legend().get_texts()]
        assert len(texts) == 8 and texts[0] == "near king" and texts[-1] == last


def test_labels_of_a_map_do_not_cover_each_other() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    places = np.array([[0, 0], [0.01, 0.005], [0.005, 0.01], [1, 1], [0.99, 1.01], [0.5, 0]], float)
    figure = Figure(figsize=(6, 5))
    axes = figure.add_subplot()
    axes.scatter(*places.T)
    neighbours_plot._label(axes, places, ["one", "two", "three", "four", "five", "six"], [False] * 6)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[n + 1 :])


def test_the_plane_is_the_one_of_largest_variance() -> None:
    points = np.random.default_rng(0).standard_normal((30, 5)) * [1, 5, 1, 3, 1] + 7
    places, shares = neighbours_plot.plane(points)
    centred = points - points.mean(0)
    values = np.linalg.eigvalsh(centred.T @ centred)[::-1]
    np.testing.assert_allclose((places**2).sum(0), values[:2])
    np.testing.assert_allclose(shares, values[:2] / values.sum())
    assert (places[np.abs(places).argmax(0), [0, 1]] > 0).all()
    assert neighbours_plot.plane(points[:1])[0].tolist() == [[0, 0]]


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_every_family_without_a_tokenizer(family: str, tmp_path: Path, run: Run) -> None:
    model = hf.make(family, tmp_path / "m")
    values = model.get_input_embeddings().weight.detach().numpy()
    assert ids(run(tmp_path / "m", "#7", "-k", 5)) == ranking(plain(values, values[7]), (7,))[:5]


def test_names_reads_no_tokenizer_that_it_does_not_need(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {NAME: vectors(4)})
    assert Names(folder, 4).count == 4
    vocabulary(folder, ["a", "b", "c"])
    assert Names(folder, 4).count == 3
    assert Names(folder / "model.safetensors", 4).of(1) == "b"


def test_overlap_is_a_share() -> None:
    hits = [neighbours.Neighbour("", id, 0.0) for id in range(4)]
    assert neighbours.overlap(hits[:2], hits[1:3]) == 0.5
    assert neighbours.overlap([], []) == 0
