"""A ring of pinned host memory, within a budget: where tensors land before they are written.

Blocks are filled one after the other and used again when everything in them has been given back.
Knows bytes only.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import threading
import time

import torch

from driftline.adapters.torch.device.places import Place

BLOCK = 128 << 20
ALIGNMENT = 64


class _Block:
    __slots__ = ("memory", "out", "size", "used")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size = memory.numel()
        self.used = 0
        self.out = 0


class Region:
    """Bytes that were lent; give them back once."""

    __slots__ = ("_block", "_ring", "memory", "size")

    def __init__(self, ring: Ring, block: _Block, memory: torch.Tensor, size: int) -> None:
        self._ring = ring
        self._block = block
        self.memory = memory
        self.size = size

    def give_back(self) -> None:
        self._ring.give_back(self._block, self.size)


class Ring:
    """Lends regions of pinned memory, at most `budget` bytes in all.

    Attributes:
        lent: Bytes that are out.
    """

    def __init__(self, place: Place, budget: int) -> None:
        self._place = place
        self.budget = budget
        self.lent = 0
        self._blocks: list[_Block] = []
        self._current: _Block | None = None
        self._changed = threading.Condition(threading.Lock())

    def lend(self, size: int) -> Region | None:
        """A region of so many bytes; None if there is no room now.

        Raises:
            RuntimeError: The system has no more memory to pin.
        """
        step = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        with self._changed:
            block = self._with_room(step)
            if block is None:
                return None
            start = block.used
            block.used += step
            block.out += 1
            self.lent += size
            return Region(self, block, block.memory[start : start + size], size)

    def wait_for(self, size: int, seconds: float) -> Region | None:
        """The same; waits so long for somebody to give something back."""
        until = time.monotonic() + seconds
        while True:
            region = self.lend(size)
            if region is not None:
                return region
            with self._changed:
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, 0.05))

    def give_back(self, block: _Block, size: int) -> None:
        with self._changed:
            block.out -= 1
            self.lent -= size
            if not block.out:
                block.used = 0
            self._changed.notify_all()

    def free(self) -> None:
        """Let go of what is not lent."""
        with self._changed:
            self._blocks = [block for block in self._blocks if block.out]
            self._current = None

    def _with_room(self, step: int) -> _Block | None:
        current = self._current
        if current is not None and current.size - current.used >= step:
            return current
        for block in self._blocks:
            if not block.out and block.size >= step:
                block.used = 0
                self._current = block
                return block
        held = sum(block.size for block in self._blocks)
        size = min(max(step, BLOCK), self.budget)
        if size < step:
            return None
        if held + size > self.budget:
            # Idle blocks that are too small make room for one that is not.
            idle = [block for block in self._blocks if not block.out]
            if held - sum(block.size for block in idle) + step > self.budget:
                return None
            for block in idle:
                self._blocks.remove(block)
                held -= block.size
            size = min(size, self.budget - held)
        block = _Block(self._place.pinned(size))
        self._blocks.append(block)
        self._current = block
        return block
