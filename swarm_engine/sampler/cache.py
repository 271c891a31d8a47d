"""Keys and values of every context that runs or may come back, and which of them a new prompt can start from.

Rows below `num_slots` are slots, where requests run; the rows above them are parked: what a slot held before another
prompt took it. A row's keys and values belong to one version of the weights, and rows of an older one match nothing, so
a stale prefix can't be served.

Axes: L layer, R row, K key/value head, T position, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_engine.models.decoder import DecoderConfig

INITIAL_TOKENS = 512
"""Positions a row has room for at first; it grows to the model's context where a prompt needs it."""

PARKED_PER_SLOT = 3
"""Several agents in an episode take turns on one slot; each gets its own context back."""

PARKED_BYTES = 256 << 20
"""Memory the parked rows may take."""

ALIGNMENT = 64
"""Bytes; what torch's own allocator gives."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest start of a prompt that some row holds."""

    row: int
    num_shared: int
    """Tokens whose keys and values can be taken over now."""
    num_promised: int
    """The same, with what rows now being filled will hold: waiting for them may be cheaper than computing."""


class KeyValueCache:
    """The rows and their bookkeeping. Nothing here reads the weights."""

    def __init__(
        self, config: DecoderConfig, num_slots: int, *, keeps_prefixes: bool, like: Tensor, version: int
    ) -> None:
        """Empty.

        Args:
            like: a weight; keys and values are of its numbers' type, where it is.
        """
        self.num_slots = num_slots
        self.version = version
        """Of the weights now. Raising it is all it takes to forget: rows of an older version match nothing."""
        self._keeps_prefixes = keeps_prefixes
        self._max_tokens = config.max_context
        room = min(INITIAL_TOKENS, config.max_context)
        row_bytes = 2 * config.num_layers * config.num_kv_heads * (room + 1) * config.head_dim * like.dtype.itemsize
        parked = min(PARKED_PER_SLOT * num_slots, PARKED_BYTES // row_bytes) if keeps_prefixes else 0
        self.num_rows = num_slots + parked
        shape = (2, config.num_layers, self.num_rows, config.num_kv_heads, room + 1, config.head_dim)
        self.kv_2_L_R_K_T_D = _zeros(shape, like)
        self.tokens_R_T: NDArray[np.int64] = np.full((self.num_rows, room), -1, np.int64)
        self.lengths_R: NDArray[np.int64] = np.zeros(self.num_rows, np.int64)
        """Positions whose keys and values are there."""
        self._promised_R: NDArray[np.int64] = np.zeros(self.num_rows, np.int64)
        self._versions_R: NDArray[np.int64] = np.zeros(self.num_rows, np.int64)
        self._used_R: NDArray[np.int64] = np.zeros(self.num_rows, np.int64)
        self._is_running_R: NDArray[np.bool_] = np.zeros(self.num_rows, np.bool_)
        self._clock = 0

    @property
    def scratch(self) -> int:
        """A position that no context reaches, where rows that sit out a step write."""
        return self.kv_2_L_R_K_T_D.shape[4] - 1

    @property
    def num_free(self) -> int:
        """Slots that can take a request."""
        return self.num_slots - int(self._is_running_R.sum())

    def match(self, prompt_T: NDArray[np.int64]) -> Match:
        """The row that shares the longest prefix with `prompt_T`; its last token is never shared, for it gives the
        logits of the reply's first token."""
        if not self._keeps_prefixes:
            return Match(0, 0, 0)
        length = min(len(prompt_T) - 1, self.tokens_R_T.shape[1])
        is_other_R_T = self.tokens_R_T[:, :length] != prompt_T[:length]
        common_R = np.where(is_other_R_T.any(1), is_other_R_T.argmax(1), length) if length else 0 * self._used_R
        is_fresh_R = self._versions_R == self.version
        shared_R = np.minimum(common_R, self.lengths_R) * is_fresh_R
        promised_R = np.minimum(common_R, self._promised_R) * is_fresh_R
        # Among equals an idle row that ends there comes first: going on in place copies nothing.
        can_go_on_R = ~self._is_running_R & (shared_R == self.lengths_R)
        can_go_on_R[self.num_slots :] = False
        row = int((2 * shared_R + can_go_on_R).argmax())
        return Match(row, int(shared_R[row]), int(promised_R.max()))

    def claim(self, prompt_T: NDArray[np.int64], match: Match) -> int:
        """Take a free slot for a prompt and put the matched prefix into it; the caller fills the rest."""
        # First, for growing keeps only what rows are known to hold, and a prefix just copied is not yet among that.
        self.reserve(len(prompt_T))
        source, shared = match.row, match.num_shared
        is_free_S = ~self._is_running_R[: self.num_slots]
        can_go_on = source < self.num_slots and is_free_S[source] and shared == self.lengths_R[source]
        if shared and can_go_on:
            slot = source
        else:
            is_held_S = self._is_held()[: self.num_slots]
            age_S = np.where(is_held_S, self._used_R[: self.num_slots], 0)
            slot = int(np.where(is_free_S, age_S, np.iinfo(np.int64).max).argmin())
            if is_held_S[slot] and self.num_rows > self.num_slots:
                self._park(slot, spare=source if shared else None)
            if shared and slot != source:
                self._copy(source, slot, shared)
        self.tokens_R_T[slot, : len(prompt_T)] = prompt_T
        self.lengths_R[slot] = shared
        self._promised_R[slot] = len(prompt_T)
        self._versions_R[slot] = self.version
        self._is_running_R[slot] = True
        self._touch(slot)
        return slot

    def release(self, slot: int) -> None:
        """The slot's request has ended; its prefix stays until another prompt needs the slot."""
        self._is_running_R[slot] = False
        self._promised_R[slot] = self.lengths_R[slot]
        self._touch(slot)

    def reserve(self, num_tokens: int) -> None:
        """Make room for contexts of `num_tokens`."""
        room = self.tokens_R_T.shape[1]
        if num_tokens <= room:
            return
        wider = min(self._max_tokens, max(2 * room, num_tokens))
        old = self.kv_2_L_R_K_T_D
        self.kv_2_L_R_K_T_D = _zeros((*old.shape[:4], wider + 1, old.shape[5]), old)
        # Row by row, and those alone that hold something: an empty row's memory isn't there yet, and need not be.
        for row in np.flatnonzero(self._is_held()).tolist():
            self.kv_2_L_R_K_T_D[:, :, row, :, :room] = old[:, :, row, :, :room]
        tokens_R_T = np.full((self.num_rows, wider), -1, np.int64)
        tokens_R_T[:, :room] = self.tokens_R_T
        self.tokens_R_T = tokens_R_T

    def append(self, slots_B: NDArray[np.int64], tokens_B: NDArray[np.int64]) -> None:
        """One more position of each slot is filled."""
        self.tokens_R_T[slots_B, self.lengths_R[slots_B]] = tokens_B
        self.lengths_R[slots_B] += 1
        self._promised_R[slots_B] = self.lengths_R[slots_B]

    def fill(self, slot: int, num_tokens: int) -> None:
        """The first `num_tokens` positions of the slot are filled with keys and values of the current weights."""
        self.lengths_R[slot] = num_tokens
        self._versions_R[slot] = self.version

    def _is_held(self) -> NDArray[np.bool_]:
        is_held_R: NDArray[np.bool_] = (self.lengths_R > 0) & (self._versions_R == self.version)
        return is_held_R

    def _touch(self, row: int) -> None:
        self._clock += 1
        self._used_R[row] = self._clock

    def _park(self, slot: int, spare: int | None) -> None:
        """Copy what `slot` holds to the parked row used longest ago, but not over the row `spare`."""
        used_P = self._used_R[self.num_slots :].copy()
        if spare is not None and spare >= self.num_slots:
            used_P[spare - self.num_slots] = np.iinfo(np.int64).max
        row = self.num_slots + int(used_P.argmin())
        if row == spare:
            return
        length = int(self.lengths_R[slot])
        self._copy(slot, row, length)
        self.tokens_R_T[row] = self.tokens_R_T[slot]
        self.lengths_R[row] = self._promised_R[row] = length
        self._versions_R[row] = self.version
        self._used_R[row] = self._used_R[slot]

    def _copy(self, source: int, target: int, length: int) -> None:
        self.kv_2_L_R_K_T_D[:, :, target, :, :length] = self.kv_2_L_R_K_T_D[:, :, source, :, :length]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros whose memory a CPU's system hands out when it is written: torch.zeros would touch all of it.

    Zeros they must be: a masked position still multiplies its value by 0, and 0 times NaN is NaN. Aligned, for the
    last bit of a matrix product may depend on it.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(like.dtype).view(shape)
