"""What attention remembers of the tokens before: one small object a layer, each knowing its own length."""

from __future__ import annotations

import torch
from torch import Tensor

from llmcli.config import ModelConfig

BLOCK = 256
"""Positions by which a cache grows: large enough that growing is rare, small enough to waste little."""


class LayerCache:
    """Keys and values of every position so far, in buffers that grow by blocks."""

    def __init__(self) -> None:
        self.length = 0
        """Positions seen so far."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Remember new keys and values (B, H, T, D); give back all that the new positions may look at (B, H, S, D)."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            self._keys, self._values = self._grown(self._keys, keys, end), self._grown(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _grown(self, old: Tensor | None, new: Tensor, end: int) -> Tensor:
        room = new.new_empty(*new.shape[:2], -(-end // BLOCK) * BLOCK, new.shape[3])
        if old is not None:
            room[:, :, : self.length] = old[:, :, : self.length]
        return room


class WindowCache:
    """Keys and values of the last `window - 1` positions: all that the next one may look at besides itself."""

    def __init__(self, window: int) -> None:
        self.length = 0
        """Positions seen so far, kept or not."""
        self._window = window
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `LayerCache.append`; what comes back are the kept positions and the new ones, however many those are."""
        self.length += keys.shape[2]
        if self._keys is not None and self._values is not None:
            keys, values = torch.cat((self._keys, keys), 2), torch.cat((self._values, values), 2)
        first = max(0, keys.shape[2] - self._window + 1)
        self._keys, self._values = keys[:, :, first:], values[:, :, first:]
        return keys, values


Cache = LayerCache | WindowCache


def new_cache(config: ModelConfig) -> list[Cache]:
    """An empty cache for a model: one object a layer."""
    windows = (config.window_of(layer) for layer in range(config.num_layers))
    return [WindowCache(window) if window else LayerCache() for window in windows]
