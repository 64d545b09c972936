"""What attention remembers of the tokens before: one small object a layer, each knowing its own length.

Rows of a batch end at the same position. A shorter one begins later: its first `padding` positions hold nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmcli.config import ModelConfig

BLOCK = 256
"""Positions by which a cache grows: large enough that growing is rare, small enough to waste little."""


class LayerCache:
    """Keys and values of one layer, in one buffer with room for more: of every position, or of a window's.

    `length` counts the positions seen, kept or not. With a `window`, `window - 1` of them are all that the next one
    may look at besides itself; older ones give way when the buffer is full, so its size is bounded by the window.
    `padding` (B,) are the empty positions in front of each row, None where no row has any.
    """

    def __init__(self, window: int | None = None, padding: Tensor | None = None) -> None:
        self.window = window
        self.padding = padding
        self.length = 0
        self._end = 0  # of what the buffer holds
        self._buffer: Tensor | None = None  # (2, B, H, room, D): keys and values

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Remember new keys and values (B, H, T, D); give back all that these positions may look at (B, H, S, D).

        What comes back ends with the new ones and is a view. It stays as it is: later calls write behind it, or into
        another buffer.
        """
        count = keys.shape[2]
        buffer = self._room(count, keys)
        start, self._end = self._end, self._end + count
        buffer[0, :, :, start : self._end] = keys
        buffer[1, :, :, start : self._end] = values
        return self._seen(buffer, count)

    def append_one(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """`append` of one position whose keys and values lie side by side: (2, B, H, D)."""
        buffer = self._buffer
        if buffer is None or self._end == buffer.shape[3]:
            buffer = self._room(1, both[0].unsqueeze(2))
        buffer.select(3, self._end).copy_(both)
        self._end += 1
        return self._seen(buffer, 1)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; a row may be asked for several times.

        Positions that are empty in front of all of them go, and `length` counts from the longest row's first one.
        """
        kept, cut = list(rows), 0
        if self.padding is not None:
            padding = self.padding[kept]
            empty = int(padding.min())
            cut = max(0, empty - (self.length - self._end))  # what is left of them in the buffer
            self.length, self._end = self.length - empty, self._end - cut
            self.padding = padding - empty if int(padding.max()) > empty else None
        if self._buffer is not None:
            self._buffer = self._buffer[:, kept, :, cut:]

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def _seen(self, buffer: Tensor, count: int) -> tuple[Tensor, Tensor]:
        self.length += count
        start = 0 if self.window is None else max(0, self._end - count - self.window + 1)
        keys, values = buffer.narrow(3, start, self._end - start).unbind()
        return keys, values

    def _room(self, count: int, like: Tensor) -> Tensor:
        """The buffer with room for `count` more positions: the same, or a new one with what must be kept."""
        buffer = self._buffer
        if buffer is not None and self._end + count <= buffer.shape[3]:
            return buffer
        kept = self._end if self.window is None else min(self._end, self.window - 1)
        batch, heads, _, size = like.shape
        grown = like.new_empty(2, batch, heads, -(-(kept + count) // BLOCK) * BLOCK, size)
        if buffer is not None:
            grown[:, :, :, :kept] = buffer[:, :, :, self._end - kept : self._end]
        self._buffer, self._end = grown, kept
        return grown


def new_cache(config: ModelConfig, padding: Sequence[int] | None = None) -> list[LayerCache]:
    """An empty cache for a model: one object a layer. `padding`: the empty positions in front of each row."""
    empty = torch.tensor(padding) if padding is not None and any(padding) else None
    return [LayerCache(config.window_of(layer), empty) for layer in range(config.num_layers)]
