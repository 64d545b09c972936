"""Which tokens a step sees: each window once an epoch, in an order that needs no memory and no state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcli import batches


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_shuffle_is_a_permutation_of_any_size(size: int, key: int) -> None:
    index = np.arange(size, dtype=np.uint64)
    shuffled = batches.permuted(index, size, np.array([key], dtype=np.uint64))
    assert np.array_equal(np.sort(shuffled), index)


def test_the_shuffle_is_even() -> None:
    # Where each of 8 items lands over 4,000 keys: 64 cells of 500 each, chi-squared of 49 degrees of freedom.
    keys = np.arange(4000, dtype=np.uint64)
    table = np.array(
        [np.bincount(batches.permuted(np.full(4000, i, np.uint64), 8, keys).astype(int), minlength=8) for i in range(8)]
    )
    assert ((table - 500) ** 2 / 500).sum() < 95  # beyond is less than one in 10,000


def test_an_epoch_visits_each_window_once_and_each_epoch_in_its_own_order() -> None:
    tokens, context = 1000, 7
    size = batches.windows(tokens, context)
    assert size == 142  # 142 · 7 + 1 = 995 ≤ 1000
    orders = [batches.starts(tokens, context, epoch * size, size, 5, "windows") for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, 994, 7))
    assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[1], orders[2])


def test_no_sequence_leaves_the_text_and_its_last_token_is_reached() -> None:
    tokens = np.arange(50, dtype=np.uint16)
    for shuffle in ("windows", "random"):
        begin = batches.starts(50, 7, 0, 3000, 1, shuffle)
        both = batches.sequences(tokens, 7, begin)
        assert both.shape == (3000, 8)
        assert np.array_equal(both, begin[:, None] + np.arange(8))
        assert both.min() == 0 and both.max() == 49
    assert set(begin) == set(range(43))  # random: anywhere


@given(first=st.integers(0, 10**9), parts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_step_is_the_same_however_it_is_divided(first: int, parts: list[int]) -> None:
    for shuffle in ("windows", "random"):
        whole = batches.starts(12_345, 10, first, sum(parts), 3, shuffle)
        places = np.cumsum([0, *parts])
        pieces = [
            batches.starts(12_345, 10, first + int(at), n, 3, shuffle) for at, n in zip(places, parts, strict=False)
        ]
        assert np.array_equal(whole, np.concatenate(pieces))


@given(asked=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_places_computed_ahead_are_those_computed_when_asked(asked: list[tuple[int, int]]) -> None:
    for shuffle in ("windows", "random"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "AHEAD", 10)
            order = batches.Order(100, 7, 3, shuffle)
            for first, count in asked:
                assert np.array_equal(order(first, count), batches.starts(100, 7, first, count, 3, shuffle))


def test_places_are_computed_for_thousands_of_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = batches.starts

    def starts(tokens: int, context: int, first: int, count: int, seed: int, shuffle: str) -> batches.Ids:
        asked.append(count)
        return real(tokens, context, first, count, seed, shuffle)

    monkeypatch.setattr(batches, "starts", starts)
    order = batches.Order(10**6, 7, 3, "windows")
    for first in range(0, 5000, 8):
        order(first, 8)
    assert asked == [batches.AHEAD] * 2


@pytest.mark.parametrize("length", range(8, 30))
def test_windows_fill_a_text_of_any_length_and_never_leave_it(length: int) -> None:
    size = batches.windows(length, 7)
    assert size * 7 + 1 <= length < (size + 1) * 7 + 1
    begin = batches.starts(length, 7, 0, size, 1, "windows")
    assert batches.sequences(np.arange(length, dtype=np.uint16), 7, begin).max() == size * 7


def test_another_seed_is_another_order() -> None:
    for shuffle in ("windows", "random"):
        assert not np.array_equal(*(batches.starts(9999, 10, 0, 50, seed, shuffle) for seed in (1, 2)))


@pytest.mark.parametrize("length", [2, 9, 10, 11, 100, 101, 102])
def test_evaluation_predicts_every_token_once(length: int) -> None:
    tokens = np.arange(1000, 1000 + length, dtype=np.uint16)
    seen = []
    for both in batches.held_out(tokens, 10, 4, 0):
        assert both.shape == (4, 11)
        targets, inputs = both[:, 1:], both[:, :-1]
        counted = targets != -100
        assert np.array_equal(inputs[counted] + 1, targets[counted])
        seen += targets[counted].tolist()
    assert seen == list(range(1001, 1000 + length))


def test_a_limited_evaluation_is_spread_over_the_text() -> None:
    found = list(batches.held_out(np.arange(10_001, dtype=np.uint16), 10, 4, 8))
    first = np.concatenate(found)[:, 0]
    assert len(found) == 2 and first[0] == 0 and first[-1] == 9990
    assert np.ptp(np.diff(first)) <= 10


def test_processes_share_the_evaluation_in_the_same_number_of_rounds() -> None:
    tokens = np.arange(51, dtype=np.uint16)
    shares = [list(batches.shared(batches.held_out(tokens, 10, 1, 0), rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    counted = [row[0, 0] for share in shares for row in share if (row != -100).any()]
    assert sorted(counted) == [0, 10, 20, 30, 40]
