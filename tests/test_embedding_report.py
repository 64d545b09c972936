"""embedding-report: each figure against its definition, and what a trained and an untrained matrix look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf
import numpy as np
import pytest
from matrices import NAME, Values, config, matrix, write

from llmcli import cli, embeddings, probe, tokenizer
from llmcli.matrix import find_matrix
from llmcli.names import Names

STORIES = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
stories = pytest.mark.skipif(not STORIES.is_dir(), reason="needs the shared stories260K")
Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command with --json: what it printed, as JSON."""

    def call(*arguments: Any) -> Any:
        capsys.readouterr()
        code = cli.run(["embedding-report", *map(str, arguments), "--json"])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return json.loads(shown.out)

    return call


def draw(rows: int, width: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal((rows, width))


def report(folder: Path, values: Values, dtype: str = "F32") -> embeddings.EmbeddingReport:
    found = matrix(folder, values, dtype)
    return embeddings.report(found, Names(folder, found.rows))[0]


@pytest.fixture(params=[False, True], ids=["one panel", "many panels"])
def panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows in one step, or in many on several threads."""
    if request.param:
        monkeypatch.setattr(probe, "_PANEL", 3_000)


def test_every_figure_is_its_definition(tmp_path: Path, panels: None) -> None:
    values = draw(300, 12) + 0.7
    found = report(tmp_path, values, "F64")
    norms = np.linalg.norm(values, axis=1)
    said = found.norms
    assert (said.mean, said.std) == pytest.approx((norms.mean(), norms.std()))
    assert (said.min, said.max, found.scale.norm) == pytest.approx((norms.min(), norms.max(), norms.mean()))
    assert sum(found.norms.histogram.counts) == 300 and len(found.norms.histogram.edges) == 21
    assert found.scale.rms == pytest.approx(np.sqrt((values**2).mean()))
    assert found.scale.rms_scaled == pytest.approx(12**0.5 * found.scale.rms)
    assert found.scale.norm_scaled == pytest.approx(12**0.5 * norms.mean())
    upper = np.triu_indices(300, 1)
    for array, mean, std in (
        (values, found.anisotropy.mean_cosine, found.anisotropy.std_cosine),
        (values - values.mean(0), found.anisotropy.mean_cosine_centered, found.anisotropy.std_cosine_centered),
    ):
        unit = array / np.linalg.norm(array, axis=1, keepdims=True)
        assert mean == pytest.approx((unit @ unit.T)[upper].mean(), abs=1e-9)
        assert std == pytest.approx((unit @ unit.T)[upper].std(), abs=1e-9)
    assert found.anisotropy.mean_norm == pytest.approx(np.linalg.norm(values.mean(0)) / norms.mean())
    for array, rank in ((values, found.rank.effective), (values - values.mean(0), found.rank.centered)):
        singular = np.linalg.svd(array, compute_uv=False)
        share = singular / singular.sum()
        assert rank == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-6)
    assert found.rank.rows == 300


def test_a_fresh_matrix_has_the_norm_and_rms_of_its_draw(tmp_path: Path) -> None:
    found = report(tmp_path, 0.02 * draw(600, 2048), "F32")
    assert found.scale.norm == pytest.approx(0.905, abs=0.002)
    assert found.scale.rms == pytest.approx(0.02, abs=1e-4)
    assert found.scale.root == pytest.approx(45.25, abs=0.01)
    assert found.scale.rms_scaled == pytest.approx(0.905, abs=0.002)
    assert found.scale.norm_scaled == pytest.approx(41, abs=0.1)
    assert abs(found.anisotropy.mean_cosine) < 1e-3
    assert found.anisotropy.std_cosine == pytest.approx(2048**-0.5, rel=0.02)
    assert found.under_trained.rows == 0  # nothing stands apart where nothing was trained


def test_the_effective_rank_counts_directions(tmp_path: Path) -> None:
    assert report(tmp_path / "a", np.eye(8)[np.arange(80) % 8]).rank.effective == pytest.approx(8)
    flat = draw(200, 3) @ np.linalg.qr(draw(10, 3))[0].T
    assert report(tmp_path / "b", flat, "F64").rank.effective == pytest.approx(3, abs=0.05)
    one = report(tmp_path / "c", np.ones((20, 4)))
    assert one.rank.effective == pytest.approx(1) and one.rank.centered == 0


def test_the_rank_of_a_large_matrix_is_taken_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_RANK_WORK", 1)
    found = report(tmp_path, draw(500, 8))
    assert found.rank.rows == 32
    assert found.rank.effective == pytest.approx(8, abs=0.5)
    values = draw(500, 8)
    values[:100] *= np.eye(8)[0]  # the first rows have one direction: a sample of them alone would say so of all
    assert report(tmp_path, values).rank.effective > 6


def test_anisotropy_goes_away_with_the_mean(tmp_path: Path) -> None:
    found = report(tmp_path, draw(400, 16) + 2)
    assert found.anisotropy.mean_cosine > 0.7
    assert abs(found.anisotropy.mean_cosine_centered) < 0.01
    assert found.anisotropy.mean_norm > 0.8


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_zero_not_finite_and_duplicate_rows_are_listed(tmp_path: Path, dtype: str, panels: None) -> None:
    values = draw(200, 8)
    values[[3, 150]] = 0
    values[7, 2], values[8, 0] = np.nan, np.inf
    values[[20, 199]] = values[10]
    values[31] = values[30]
    found = report(tmp_path, values, dtype)
    assert found.zero == (3, 150) and found.not_finite == (7, 8)
    assert found.duplicates == ((10, 20, 199), (30, 31))
    assert sum(found.norms.histogram.counts) == 196
    assert np.isfinite([found.norms.mean, found.anisotropy.mean_cosine, found.rank.effective]).all()


def test_rows_without_a_token_are_listed_and_not_measured(tmp_path: Path) -> None:
    values = draw(260, 4)
    values[257:] = 1e6
    write(tmp_path, {NAME: values})
    tokenizer.bytes_tokenizer().save(tmp_path)
    found = find_matrix(tmp_path)
    result, norms = embeddings.report(found, Names(tmp_path, found.rows))
    assert result.without_token == (257, 258, 259)
    assert result.norms.max < 10 and len(norms) == 257


def test_rows_pushed_the_same_way_are_found_as_under_trained(tmp_path: Path) -> None:
    values = draw(500, 32)
    values[100:160] = 3 * np.ones(32) / 32**0.5 + 0.05 * draw(60, 32, 1)
    found = report(tmp_path, values).under_trained
    assert set(found.ids) == set(range(100, 160))
    assert found.alike is not None and found.alike.rows == 60
    assert found.alike.cosine >= embeddings.ALIKE


def test_rows_that_keep_one_norm_are_found_as_under_trained(tmp_path: Path) -> None:
    values = draw(1000, 16) * np.exp(0.4 * draw(1000, 1, 2))
    kept = draw(80, 16, 1)
    values[400:480] = 2.0 * kept / np.linalg.norm(kept, axis=1, keepdims=True)
    found = report(tmp_path, values).under_trained
    assert found.alike is None and found.shared_norm is not None
    assert found.shared_norm.norm == pytest.approx(2.0, rel=embeddings.SHARED)
    assert set(range(400, 480)) <= set(found.ids) and len(found.ids) < 100


def test_a_crowd_of_one_norm_has_at_least_eight_rows() -> None:
    others = np.geomspace(1, 1e6, 30)  # each 60 % longer than the last
    for count in (7, 10):
        norms = np.concatenate([others, np.full(count, 523.0)])
        shared, members = embeddings.shared_norm(norms)
        assert members.tolist() == list(range(30, 30 + count))
        assert (shared.rows if shared else None) == (10 if count == 10 else None)


@pytest.mark.parametrize("count", [2, 3])
def test_rows_that_point_the_same_way_are_at_least_three(tmp_path: Path, count: int) -> None:
    values = draw(60, 64, 1)  # all others far apart
    values[50 : 50 + count] = np.linspace(0.8, 1.3, count)[:, None] * values[50]
    alike = report(tmp_path, values).under_trained.alike
    assert (alike.rows if alike else None) == (3 if count == 3 else None)


def test_rows_of_one_fingerprint_are_compared_before_they_are_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        embeddings._Survey, "prints", property(lambda self: np.zeros(6), lambda self, value: None), False
    )
    values = np.array([[3, 4], [4, 3], [3, 4], [5, 0], [1, 1], [2, 1]])  # four of norm 5
    assert report(tmp_path, values).duplicates == ()


def test_rows_that_decayed_are_found_as_under_trained(tmp_path: Path) -> None:
    values = draw(400, 16)
    values[[5, 9, 200]] *= 1e-3
    values[7] = 0
    found = report(tmp_path, values).under_trained
    assert found.ids == (5, 7, 9, 200) and found.short == 3


def crowd(rows: int, norm: float, spread: float, seed: int) -> Values:
    return norm * np.exp(spread * np.random.default_rng(seed).standard_normal(rows))


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (crowd(160, 0.2, 0.06, 0), crowd(864, 0.43, 0.1, 1)),  # half the median lies within the lower crowd
        (crowd(160, 0.2, 0.2, 0), crowd(864, 0.8, 0.2, 1)),
        (crowd(400, 1.0, 0.02, 2), crowd(600, 1.7, 0.05, 3)),
        (crowd(3, 0.01, 0.3, 4), crowd(400, 1.0, 0.15, 5)),
        (crowd(10, 0.3, 0.05, 6), crowd(20_000, 1.0, 0.1, 7)),  # too few to be seen as a crowd
    ],
)
def test_of_two_crowds_of_norms_the_lower_one_is_short_and_whole(few: Values, many: Values) -> None:
    norms = np.concatenate([many, few])
    places = np.random.default_rng(9).permutation(len(norms))
    found = embeddings.short_rows(norms[places])
    assert set(places[found]) == set(range(len(many), len(norms)))


def test_crowds_are_parted_at_the_widest_gap_between_them() -> None:
    low, strays, high = np.linspace(0, 0.1, 100), [0.9, 1.0], np.linspace(2, 2.1, 200)
    assert 1.0 < embeddings.valley(np.concatenate([high, strays, low])) < 2.0
    strays = [1.1, 1.2]
    assert 0.1 < embeddings.valley(np.concatenate([high, strays, low])) < 1.1


@pytest.mark.parametrize(
    "norms",
    [
        crowd(1000, 1.0, 0.02, 0),
        crowd(1000, 1.0, 0.5, 1),
        np.random.default_rng(2).uniform(0.2, 3, 1000),
        np.concatenate([np.random.default_rng(3).uniform(1.4, 2.7, 280), crowd(232, 2.76, 0.002, 4)]),  # a long tail
        np.concatenate([crowd(850, 0.3, 0.2, 5), crowd(150, 0.85, 0.05, 6)]),  # the rest is the lower one
        np.concatenate([crowd(100, 1.0, 0.03, 7), crowd(900, 1.25, 0.03, 8)]),  # two crowds, but hardly shorter
        np.ones(50),
    ],
    ids=["narrow", "wide", "even", "tail", "crowd above", "near", "one"],
)
def test_of_one_crowd_of_norms_no_row_is_short(norms: Values) -> None:
    assert len(embeddings.short_rows(norms)) == 0


def test_an_anisotropic_matrix_is_not_under_trained_for_that(tmp_path: Path) -> None:
    values = draw(600, 24) * np.exp(0.2 * draw(600, 1, 2)) + 4
    found = report(tmp_path, values).under_trained
    assert found.rows == 0


@stories
def test_in_stories260K_174_rows_share_one_norm(run: Run) -> None:
    found = run(STORIES)
    assert found["rows"] == 512 and found["width"] == 64 and found["tied"]
    shared = found["under_trained"]["shared_norm"]
    assert shared["rows"] == 174
    assert 2.75 < shared["norm"] < 2.78
    names = tokenizer.load(STORIES)
    under = {names.token(id) for id in found["under_trained"]["ids"]}
    assert {"<unk>", "</s>", "<0x00>", "<0xFF>"} <= under
    assert not {"▁she", "▁Lily", "e", ".", "▁the"} & under
    assert sum(token.startswith("<0x") for token in under) >= 240


@stories
def test_the_table_shows_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["embedding-report", str(STORIES)]) == 0
    out = capsys.readouterr().out
    for text in ("tied to the output", "174 share the norm 2.76", "<0x00>", "effective rank", "cosine of random pairs"):
        assert text in out


def test_the_table_names_the_first_of_many_and_says_that_there_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmcli.commands.embedding_report.MOST", 3)
    monkeypatch.setattr(embeddings, "_RANK_WORK", 1)  # four rows for each of the eight dimensions
    values = draw(120, 8)
    values[:4] = 0
    values[41:51:2] = values[40:50:2]
    write(tmp_path / "many", {NAME: values})
    write(tmp_path / "few", {NAME: draw(30, 8)})
    lines = {}
    for name in ("many", "few"):
        assert cli.run(["embedding-report", str(tmp_path / name)]) == 0
        lines[name] = dict(re.findall(r"^(.+?) {2,}(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert lines["many"]["zero rows"] == "4  <row 0> <row 1> <row 2> ..."
    pairs = "; ".join(f"<row {n}> <row {n + 1}>" for n in (40, 42, 44, 46))
    assert lines["many"]["duplicate rows"] == f"10 in 5 groups: {pairs} ..."
    assert lines["many"]["effective rank"].endswith("(of 32 rows)")
    assert lines["few"]["zero rows"] == lines["few"]["duplicate rows"] == "0"
    assert "rows" not in lines["few"]["effective rank"], "taken of all"


def test_gemmas_scale_is_said(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    hf.make("gemma", tmp_path)
    found = run(tmp_path)
    assert found["scale"]["by_model"] and found["scale"]["root"] == 4
    hf.make("llama", tmp_path / "llama")
    assert not run(tmp_path / "llama")["scale"]["by_model"]
    for folder, said in ((tmp_path, "which the model does"), (tmp_path / "llama", "which this model does not do")):
        assert cli.run(["embedding-report", str(folder)]) == 0
        assert f"; {said}\n" in capsys.readouterr().out


def test_the_output_matrix_on_request(tmp_path: Path, run: Run) -> None:
    model = hf.make("mistral", tmp_path)
    found = run(tmp_path, "--matrix", "output")
    norms = model.lm_head.weight.norm(dim=1)
    assert found["tensor"] == "lm_head.weight" and not found["tied"]
    assert found["norms"]["mean"] == pytest.approx(norms.mean().item(), rel=1e-5)


@pytest.mark.parametrize("values", [np.zeros((3, 4)), np.full((2, 4), np.nan), np.ones((1, 4)), np.ones((2, 1))])
def test_hardly_any_rows_at_all(tmp_path: Path, values: Values, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {NAME: values})
    config(tmp_path, *values.shape)
    assert run(tmp_path)["rows"] == len(values)
    assert cli.run(["embedding-report", str(tmp_path)]) == 0
    assert "fault" not in capsys.readouterr().err


def test_the_picture_sets_the_under_trained_rows_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    pytest.importorskip("matplotlib")
    values = draw(400, 16)
    values[100:140] *= 2 / np.linalg.norm(values[100:140], axis=1, keepdims=True)
    values[5] = 0  # under-trained too, but no norm of a row that is drawn
    write(tmp_path, {NAME: values})
    figures: list[Any] = []
    monkeypatch.setattr("llmcli.plot._save", lambda figure, path: figures.append(figure))
    assert run(tmp_path, "--plot", tmp_path / "report.svg")["under_trained"]["rows"] == 41
    legend = figures[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["359 other rows", "40 under-trained rows"]


@stories
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str, run: Run) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"report{suffix}"
    run(STORIES, "--plot", path)
    assert path.stat().st_size > 5_000
