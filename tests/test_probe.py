"""Finding the matrix, and the rows near a vector: as exact as float64 over all rows, whatever way they were found."""

from __future__ import annotations

import hashlib
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import Values, as_read, matrix, plain, random, ranking, stored

from llmcli import dots, probe, tensors
from llmcli.errors import UsageError

KERNELS = ("Simd", "Pairs", "Wide")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so small that a few hundred rows are many chunks and panels."""
    monkeypatch.setattr(probe, "_PANEL", 6_000)
    monkeypatch.setattr(dots, "_CHUNK", 1_000)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of going over bfloat16 rows in turn, the others switched off."""
    name: str = request.param
    if name == "Simd":
        pytest.importorskip("simsimd")
    for other in ("Simd", "Pairs"):
        if other != name:
            monkeypatch.setattr(getattr(dots, other), "fits", staticmethod(lambda array: False))
    return name


def check(rows: probe.Rows, values: Values, query: int, k: int, metric: Any = "cosine") -> None:
    """The answer for one row is float64's, scores to 1e-9 and ids in order."""
    hits = rows.nearest(rows.vectors([query]), k, metric, [[query]])[0]
    scores = plain(values, values[query], metric)
    wanted = ranking(scores, (query,))[:k]
    assert [hit.id for hit in hits] == wanted
    shown = np.abs(scores[wanted]) if metric == "l2" else scores[wanted]
    np.testing.assert_allclose([hit.score for hit in hits], shown, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_answers_are_float64s_in_every_type_and_metric(
    tmp_path: Path, dtype: str, metric: Any, small_steps: None
) -> None:
    found = matrix(tmp_path, random(300, 24), dtype)
    rows = probe.Rows(found)
    for query in (0, 7, 299):  # the first query measures the rows, the later ones do not
        check(rows, as_read(found), query, 9, metric)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("rows", [1, 2, 40, 41, 83, 500])
def test_answers_are_float64s_by_every_kernel(
    tmp_path: Path, kernel: str, rows: int, metric: Any, small_steps: None
) -> None:
    found = matrix(tmp_path, random(rows, 12, seed=rows), "BF16")
    opened = probe.Rows(found)
    for query in {0, rows // 2, rows - 1}:
        check(opened, as_read(found), query, 5, metric)


@pytest.mark.parametrize(("width", "before"), [(24, 1), (25, 0), (25, 2), (1, 0), (2, 0)])
def test_rows_that_are_not_whole_aligned_pairs(tmp_path: Path, kernel: str, width: int, before: int) -> None:
    found = matrix(tmp_path, random(200, width), "BF16", before)
    rows = probe.Rows(found)
    for metric in ("cosine", "l2") if width > 1 else ("l2",):
        check(rows, as_read(found), 3, 6, metric)


def test_several_queries_are_answered_as_each_alone(tmp_path: Path, small_steps: None) -> None:
    for dtype in ("F32", "BF16"):
        found = matrix(tmp_path / dtype, random(150, 16), dtype)
        rows = probe.Rows(found)
        alone = [rows.nearest(rows.vectors([id]), 4)[0] for id in range(40)]
        for count in (2, 4, 5, 17, 40):
            assert rows.nearest(rows.vectors(range(count)), 4) == alone[:count]


FINITE16 = st.integers(0, 0xFFFF).filter(lambda bits: (bits & 0x7F80) != 0x7F80)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(st.lists(FINITE16, min_size=8, max_size=8), min_size=3, max_size=12),
    seed=st.integers(0, 1000),
)
def test_no_kernel_is_off_by_more_than_it_says(bits: list[list[int]], seed: int) -> None:
    array = np.array(bits, "<u2")
    true = tensors.as_float32(array, "BF16").astype(np.float64)
    unit = random(2, 8, seed).astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    kernels: list[dots.Kernel] = [dots.Wide(array, "BF16", None), dots.Pairs(array)]
    if dots.Simd.fits(array):
        kernels.append(dots.Simd(array))
    lengths = np.linalg.norm(true, axis=1)
    fair = (lengths > 1e-15) & (lengths < 1e15)  # beyond, rows are left to float64
    for kernel in kernels:
        with np.errstate(all="ignore"):
            products, squares = kernel.run(unit.astype(np.float32), 0, len(array), True)
            assert squares is not None
            wrong = np.abs(products - unit @ true.T) / lengths
            assert (wrong[:, fair] <= kernel.error).all(), type(kernel).__name__
            assert (np.abs(np.sqrt(squares) / lengths - 1)[fair] <= kernel.error).all(), type(kernel).__name__


def test_the_noise_of_pairs_reaches_its_bound_on_one_side_only_when_the_shrinking_is_left_out() -> None:
    # The worst case: odd columns of 1, even columns that fill all the bits below them.
    array = np.tile(np.array([0x3FFF, 0x3F80], "<u2"), (9, 8))
    true = tensors.as_float32(array, "BF16").astype(np.float64)
    unit = np.zeros((1, 16))
    unit[0, 1::2] = 8**-0.5
    products, _ = dots.Pairs(array).run(unit.astype(np.float32), 0, 9, False)
    off = (products[0] - true @ unit[0]) / (true @ unit[0])
    assert 0.001 < abs(off[1:]).max() <= dots.Pairs(array).error


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_close_rows_that_float32_cannot_tell_apart_are_told_apart(tmp_path: Path, metric: Any) -> None:
    # Cosines within 1e-10 of each other: only float64 orders them.
    base = random(1, 16).astype(np.float64)
    values = base + 1e-5 * np.random.default_rng(1).standard_normal((400, 16))
    found = matrix(tmp_path, values, "F64")
    check(probe.Rows(found), as_read(found), 5, 10, metric)


@pytest.mark.parametrize("kind", ["cosine", "dot", "l2", "mul"])
def test_the_bounds_of_a_score_hold_it_however_its_parts_are_off(kind: str) -> None:
    draw = np.random.default_rng(2)
    values, queries, slack = draw.standard_normal((500, 6)), 3 * draw.standard_normal((3, 6)), 1e-3
    values[:3] = queries  # a distance of zero
    kinds = {"cosine": probe._Cosine, "dot": probe._Dot, "l2": probe._Distance}
    score: Any = probe.Product(queries[None], (-1, 1, 1)) if kind == "mul" else kinds[kind](queries)
    lengths = np.linalg.norm(values, axis=1)
    for signs in draw.choice([-1, 1], (20, 2, 500)):
        dots = score.unit @ values.T + slack * lengths * signs[0]
        low, high = score.bounds(dots, lengths * (1 + slack * signs[1]), slack)
        for query in range(score.queries):
            exact = score.exact(values, lengths, query)
            exact = -(exact**2) if kind == "l2" else exact
            assert (low[query] <= exact).all() and (exact <= high[query]).all()


def test_rows_far_too_long_or_short_for_float32_are_scored_all_the_same(tmp_path: Path) -> None:
    values = random(60, 8).astype(np.float64)
    values[3] *= 1e-25
    values[4] *= 1e25
    values[5] *= 1e-150
    found = matrix(tmp_path, values, "F64")
    rows = probe.Rows(found)
    for query in (3, 4, 5, 10):
        check(rows, as_read(found), query, 59)
        check(rows, as_read(found), query, 3)
    assert len(rows.unusable()) == 0


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_zero_and_not_finite_rows_are_left_out_and_counted(tmp_path: Path, dtype: str, small_steps: None) -> None:
    values = random(120, 8)
    values[[5, 77]] = 0
    values[11, 3] = np.nan
    values[12, 2], values[13, 5] = np.inf, -np.inf
    rows = probe.Rows(matrix(tmp_path, values, dtype))
    bad = {5, 11, 12, 13, 77}
    hits = rows.nearest(rows.vectors([0]), 200)[0]
    assert len(hits) == 115 and not bad & {hit.id for hit in hits}
    assert not bad & {hit.id for hit in rows.nearest(rows.vectors([0]), 10)[0]}
    assert set(rows.unusable().tolist()) == bad
    for metric in ("cosine", "dot", "l2"):
        for query in (5, 11, 12):
            with pytest.raises(UsageError, match="zero or not finite"):
                rows.nearest(rows.vectors([query]), 3, metric)  # type: ignore[arg-type]


def test_centred_rows_that_are_the_mean_are_left_out(tmp_path: Path) -> None:
    values = np.tile(np.array([[0.1, 0.7, -0.3]]), (7, 1))
    rows = probe.Rows(matrix(tmp_path, values, "F64"), center=True)
    assert len(rows.unusable()) == 7
    values = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0], [2.0, -1.0], [2.0, 0.0], [0.0, 0.0]])
    rows = probe.Rows(matrix(tmp_path / "b", values, "F64"), center=True)
    np.testing.assert_array_equal(rows.mean, [2.0, 0.0])  # of the five that are not zero
    assert rows.unusable().tolist() == [4, 5]  # a row that was zero has no direction of its own afterwards either
    assert [hit.id for hit in rows.nearest(rows.vectors([0]), 9)[0]] == [0, 2, 3, 1]


def test_zero_rows_stay_left_out_of_centred_answers_of_many_rows(tmp_path: Path, small_steps: None) -> None:
    values = random(300, 6)
    values[[4, 290]] = 0
    values[8, 1] = np.inf
    rows = probe.Rows(matrix(tmp_path, values), center=True)
    hits = rows.nearest(rows.vectors([4]) * 0 - rows.mean, 5)[0]  # where a zero row would come first
    assert not {4, 8, 290} & {hit.id for hit in hits}
    assert rows.unusable().tolist() == [4, 8, 290]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_centred_answers_are_those_of_the_rows_less_their_mean(tmp_path: Path, dtype: str, small_steps: None) -> None:
    found = matrix(tmp_path, random(200, 16) + 3, dtype)
    values = as_read(found) - as_read(found).mean(0)
    rows = probe.Rows(found, center=True)
    for metric in ("cosine", "dot", "l2"):
        check(rows, values, 9, 8, metric)


def test_centred_answers_are_exact_where_the_mean_is_far_longer_than_what_is_left(
    tmp_path: Path, small_steps: None
) -> None:
    found = matrix(tmp_path, random(3000, 8).astype(np.float64) + 5000, "F64")  # float32 is off by 1e-4 of what is left
    values = as_read(found) - as_read(found).mean(0)
    rows = probe.Rows(found, center=True)
    queries = list(range(200))
    answers = rows.nearest(rows.vectors(queries), 40, "cosine", [[query] for query in queries])
    for query, hits in zip(queries, answers, strict=True):
        assert [hit.id for hit in hits] == ranking(plain(values, values[query]), (query,))[:40]


SMALL = st.integers(-40, 40)


@st.composite
def tables(draw: st.DrawFn) -> Values:
    """Small whole numbers, so that sums and differences are exact and ties are common."""
    rows, width = draw(st.integers(2, 12)), draw(st.integers(2, 4))
    flat = draw(st.lists(SMALL, min_size=rows * width, max_size=rows * width))
    return np.array(flat, np.float64).reshape(rows, width)


def good(values: Values) -> list[int]:
    return [int(id) for id in np.flatnonzero(np.abs(values).sum(1))]


@settings(max_examples=40, deadline=None)
@given(values=tables(), data=st.data())
def test_a_permutation_of_the_rows_permutes_the_answer(
    tmp_path_factory: pytest.TempPathFactory, values: Values, data: st.DataObject
) -> None:
    if not good(values):
        return
    query = data.draw(st.sampled_from(good(values)))
    order = data.draw(st.permutations(range(len(values))))
    folder = tmp_path_factory.mktemp("m")
    before = probe.Rows(matrix(folder / "a", values)).nearest(values[[query]], len(values))[0]
    after = probe.Rows(matrix(folder / "b", values[list(order)])).nearest(values[[query]], len(values))[0]
    renamed = {order[hit.id]: hit.score for hit in after}
    assert renamed == {hit.id: hit.score for hit in before}
    assert [hit.score for hit in after] == [hit.score for hit in before]


@settings(max_examples=40, deadline=None)
@given(values=tables(), constant=SMALL, data=st.data())
def test_a_constant_vector_added_changes_nothing_when_centred(
    tmp_path_factory: pytest.TempPathFactory, values: Values, constant: int, data: st.DataObject
) -> None:
    values = np.concatenate([values, values[::-1] + 100, values + 300])  # none is zero, before or after
    moved = values + 1000 + constant
    values = values + 50
    folder = tmp_path_factory.mktemp("m")
    a = probe.Rows(matrix(folder / "a", values, "F64"), center=True)
    b = probe.Rows(matrix(folder / "b", moved, "F64"), center=True)
    np.testing.assert_array_equal(a.unusable(), b.unusable())
    query = data.draw(st.sampled_from([id for id in range(len(values)) if id not in a.unusable()]))
    left, right = (rows.nearest(rows.vectors([query]), len(values))[0] for rows in (a, b))
    scores = [{hit.id: hit.score for hit in hits} for hits in (left, right)]
    assert scores[0].keys() == scores[1].keys()
    np.testing.assert_allclose(
        [scores[0][id] for id in sorted(scores[0])], [scores[1][id] for id in sorted(scores[1])], atol=1e-9
    )


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@settings(max_examples=30, deadline=None)
@given(values=tables(), copies=st.integers(2, 6), data=st.data())
def test_duplicates_come_in_the_order_of_their_ids(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, values: Values, copies: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(list(range(len(values))) * copies))
    spread = values[list(order)]
    if not good(spread):
        return
    rows = probe.Rows(matrix(tmp_path_factory.mktemp("m"), spread, dtype))
    query = data.draw(st.sampled_from(good(spread)))
    hits = rows.nearest(rows.vectors([query]), len(spread))[0]
    by_score: dict[float, list[int]] = {}
    for hit in hits:
        by_score.setdefault(hit.score, []).append(hit.id)
    assert all(ids == sorted(ids) for ids in by_score.values())
    same = [id for id in range(len(spread)) if np.array_equal(spread[id], spread[query])]
    assert [hit.id for hit in hits if hit.id in same] == same


@settings(max_examples=20, deadline=None)
@given(values=tables(), data=st.data())
def test_k_of_zero_one_v_and_more(
    tmp_path_factory: pytest.TempPathFactory, values: Values, data: st.DataObject
) -> None:
    if not good(values):
        return
    query = data.draw(st.sampled_from(good(values)))
    rows = probe.Rows(matrix(tmp_path_factory.mktemp("m"), values))
    asked = rows.vectors([query])
    everything = rows.nearest(asked, len(values))[0]
    assert rows.nearest(asked, 0) == [[]]
    assert rows.nearest(asked, 1)[0] == everything[:1]
    assert rows.nearest(asked, len(values) + 9)[0] == everything
    assert sorted(hit.id for hit in everything) == good(values)
    with pytest.raises(UsageError, match="not negative"):
        rows.nearest(asked, -1)


def test_among_and_exclude(tmp_path: Path) -> None:
    values = random(80, 6)
    rows = probe.Rows(matrix(tmp_path, values))
    scores = plain(values, values[0])
    among = np.array([70, 3, 9, 3, 0])
    hits = rows.nearest(rows.vectors([0]), 10, exclude=[[0]], among=among)[0]
    assert [hit.id for hit in hits] == [id for id in ranking(scores, (0,)) if id in (70, 3, 9)]
    hits = rows.nearest(rows.vectors([0, 1]), 3, exclude=[[0, 5, 6], [1]])
    assert [hit.id for hit in hits[0]] == ranking(scores, (0, 5, 6))[:3]
    assert [hit.id for hit in hits[1]] == ranking(plain(values, values[1]), (1,))[:3]


def test_three_cos_mul_is_its_definition(tmp_path: Path, small_steps: None) -> None:
    values = random(200, 10)
    rows = probe.Rows(matrix(tmp_path, values))
    cosines = [(1 + plain(values, values[id])) / 2 for id in (4, 8, 15)]
    wanted = cosines[1] * cosines[2] / (cosines[0] + 0.001)
    hits = rows.best(probe.Product(rows.vectors([4, 8, 15])[None], (-1, 1, 1)), 6, [(4, 8, 15)])[0]
    assert [hit.id for hit in hits] == ranking(wanted, (4, 8, 15))[:6]
    np.testing.assert_allclose([hit.score for hit in hits], wanted[[hit.id for hit in hits]], rtol=1e-9)


def test_random_pairs_are_those_of_the_rows(tmp_path: Path) -> None:
    values = random(60, 8)
    values[7] = 0
    rows = probe.Rows(matrix(tmp_path, values))
    kept = [id for id in range(60) if id != 7]
    pairs = [(a, b) for n, a in enumerate(kept) for b in kept[n + 1 :]]
    for metric in ("cosine", "dot", "l2"):
        scores = np.array([plain(values[[b]], values[a], metric)[0] for a, b in pairs])
        spread = rows.random_pairs(metric)  # type: ignore[arg-type]
        assert spread.pairs == len(pairs)
        assert spread.mean == pytest.approx(abs(scores.mean()) if metric == "l2" else scores.mean(), abs=1e-9)
        assert spread.std == pytest.approx(scores.std(), abs=1e-9)
    assert probe.Rows(matrix(tmp_path / "one", values[:1])).random_pairs().pairs == 0


def test_rows_that_are_the_same_are_no_distance_apart_in_random_pairs(tmp_path: Path) -> None:
    values = np.repeat(random(40, 33).astype(np.float64) * 7, 2, axis=0)
    values[::2] *= 1 + 1e-13  # the square of such a distance is rounding alone, of either sign
    apart = probe.Rows(matrix(tmp_path, values, "F64")).pairs("l2")
    wanted = np.linalg.norm(values[:, None] - values, axis=2)[np.triu_indices(80, 1)]
    np.testing.assert_allclose(apart, wanted, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_file_is_not_changed_and_rows_are_read_only(tmp_path: Path, dtype: str) -> None:
    found = matrix(tmp_path, random(100, 8), dtype)
    before = hashlib.sha256(found.info.file.read_bytes()).hexdigest()
    modified = found.info.file.stat().st_mtime_ns
    rows = probe.Rows(found, center=True)
    rows.nearest(rows.vectors([1]), 5)
    probe.Rows(found).nearest(rows.vectors([1]), 5, "l2")
    assert hashlib.sha256(found.info.file.read_bytes()).hexdigest() == before
    assert found.info.file.stat().st_mtime_ns == modified
    assert not tensors.read_array(found.info).flags.writeable


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_memory_is_bounded_by_a_chunk_and_not_by_the_matrix(tmp_path: Path, dtype: str) -> None:
    found = matrix(tmp_path, random(40_000, 512), dtype)
    size = found.info.end - found.info.start
    rows = probe.Rows(found)
    query = rows.vectors([5])
    tracemalloc.start()
    try:
        rows.nearest(query, 10)
        rows.nearest(query, 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4


def test_an_error_in_one_thread_is_raised_and_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_cores", lambda: 2)
    done: list[int] = []
    before = threading.active_count()

    def work(start: int) -> None:
        if start == 3:
            raise RuntimeError("here")
        done.append(start)

    with pytest.raises(RuntimeError, match="here"):
        probe.share(work, range(1000))
    assert len(done) < 999
    assert threading.active_count() == before
    done.clear()
    probe.share(done.append, range(1000))
    assert sorted(done) == list(range(1000))


def test_the_helpers_bits_are_bfloat16s() -> None:
    # What the tests above rest on: 1.0, -2.5 and the largest bfloat16, as their bits.
    assert stored(np.array([1.0, -2.5]), "BF16").tolist() == [0x3F80, 0xC020]
    assert json.loads(json.dumps(dots._bfloat16(np.array([1.00390625, 1.01171875], np.float32)).tolist())) == [
        0x3F80,
        0x3F82,
    ]  # ties to even
