"""The cache gives back what attention may look at, in memory bounded by the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmcli import cache
from llmcli.cache import LayerCache, new_cache
from llmcli.config import ModelConfig
from llmcli.families import complete

MISTRAL = complete(
    ModelConfig(
        family="mistral",
        vocab_size=64,
        embed_dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=24,
        window_size=9,
    )
)


def numbered(start: int, count: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Keys and values (B, 3, T, 4) that tell where they come from."""
    places = torch.arange(start, start + count, dtype=torch.float32)[None, None, :, None]
    keys = places + torch.arange(rows)[:, None, None, None] * 1000 + torch.zeros(rows, 3, count, 4)
    return keys, -keys


def append(layer: LayerCache, keys: Tensor, values: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """One position or several, by either way in."""
    return layer.append_one(torch.stack((keys, values))[:, :, :, 0]) if one else layer.append(keys, values)


@settings(deadline=None)
@given(
    window=st.none() | st.integers(1, 12),
    pieces=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    block=st.integers(1, 8),
)
def test_what_comes_back_is_all_that_the_new_positions_may_look_at(
    window: int | None, pieces: list[tuple[int, bool]], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "BLOCK", block)
        layer, seen = LayerCache(window), 0
        for count, one in pieces:
            count = 1 if one else count
            keys, values = append(layer, *numbered(seen, count), one)
            seen += count
            first = 0 if window is None else max(0, seen - count - (window - 1))
            wanted = numbered(first, seen - first)
            assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])
            assert layer.length == seen


def test_memory_is_bounded_by_the_window_and_a_block() -> None:
    layer = LayerCache(window=100)
    for start in range(0, 5000, 50):
        layer.append(*numbered(start, 50))
    for position in range(5000, 6000):
        append(layer, *numbered(position, 1), one=True)
    per_position = 2 * 2 * 3 * 4 * 4  # keys and values, rows, heads, dimensions, bytes
    assert 99 * per_position <= layer.nbytes <= (99 + 50 + cache.BLOCK) * per_position


def test_a_full_cache_grows_by_blocks_and_not_by_positions() -> None:
    layer = LayerCache()
    sizes = set()
    for position in range(3 * cache.BLOCK):
        append(layer, *numbered(position, 1), one=True)
        sizes.add(layer.nbytes)
    assert len(sizes) == 3


def test_selected_rows_go_on_as_if_alone() -> None:
    layer = LayerCache(padding=torch.tensor([0, 1, 2]))
    layer.append(*numbered(0, 5, rows=3))
    layer.select([2, 0, 2])
    assert layer.padding is not None and layer.padding.tolist() == [2, 0, 2] and layer.length == 5
    keys, values = layer.append(*numbered(5, 1, rows=3))
    assert keys[:, 0, 4, 0].tolist() == [2004, 4, 2004]
    assert values[:, 0, 5, 0].tolist() == [-5, -1005, -2005]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("seen", [5, 9])
def test_positions_empty_in_every_selected_row_are_forgotten(
    window: int | None, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "BLOCK", 2)
    layer = LayerCache(window, padding=torch.tensor([0, 2, 3]))
    for position in range(seen):
        layer.append(*numbered(position, 1, rows=3))
    layer.select([2, 1])
    assert layer.length == seen - 2
    assert layer.padding is not None and layer.padding.tolist() == [1, 0]
    keys, _ = layer.append(*numbered(seen, 1))
    first = 2 if window is None else max(2, seen - window + 1)
    assert keys[1, 0, :, 0].tolist() == [*(1000 + place for place in range(first, seen)), 1000 + seen]
    layer.select([1])
    assert layer.padding is None


def test_a_model_s_cache_has_the_window_of_each_layer_and_no_padding_where_rows_are_equal() -> None:
    layers = new_cache(MISTRAL, padding=[0, 0])
    assert [layer.window for layer in layers] == [9, 9]
    assert all(layer.padding is None and layer.nbytes == 0 for layer in layers)
