"""Names and sizes of run format 1: which files a run's folder holds.

Shared by the writer and the reader; `docs/run-format.md` describes the format for other programs.
This file opens no file.
"""

from __future__ import annotations

FORMAT = "driftline-run"
SCHEMA = 1

MANIFEST = "run.json"
ORPHAN_EVENTS = "events.jsonl"
"""In the run's own folder: events of processes without tensors, which have no folder."""

INDEX = "index.jsonl"
EVENTS = "events.jsonl"
TOPOLOGY = "topology.json"
PROCESS = "process.json"
CALLS = "calls.jsonl"
"""Operator and module calls; see `runs.sidecars.calls`."""
GRAPHS = "graphs.jsonl"
"""Compiled graphs."""
MODEL = "model.jsonl"
"""Description of a process's models: attributes, code, state, training."""
WEIGHTS = "weights.jsonl"
"""Summaries, digests and samples of parameters and buffers; see `runs.sidecars.model_facts`."""
STEPS = "steps.jsonl"
"""Weights, gradients and digests of each step; see `runs.sidecars.step_facts`."""
RESERVE = ".reserve"
"""A file that only reserves space.

It is deleted on a full disk, so that the index can be completed.
"""
RESERVE_BYTES = 1 << 20

# Tensors begin at multiples of a cache line, so that wide instructions can read mapped values.
ALIGNMENT = 64
SHARD_BYTES = 1 << 30
SENT_SHARD_BYTES = 64 << 20
"""Size of shards in a run that is sent while it is written; a sealed shard is sent at once."""
# The header of a shard is reserved before its tensors are known, and grows with the shard's number.
FIRST_HEADER = 256 * 1024
LARGEST_HEADER = 8 << 20
LONGEST_NAME = 500

# Folder and shard names may come from other machines; longer numbers are refused.
_MOST_DIGITS = 9


def folder_name(rank: int, process: int) -> str:
    """Name of the folder of a process.

    >>> folder_name(0, 0), folder_name(3, 1)
    ('rank0', 'rank3.p1')
    """
    return f"rank{rank}.p{process}" if process else f"rank{rank}"


def parse_folder(name: str) -> tuple[int, int] | None:
    """Rank and process of a folder's name; None if it is not the name of a process's folder."""
    # Without regular expressions: compiling three patterns takes longer than opening a run.
    numbers = name.removeprefix("rank").split(".p")
    if len(numbers) > 2 or not all(map(_is_number, numbers)):
        return None
    rank, process = int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0
    # `rank00` and `rank0.p0` would be second names of one folder; only the canonical name counts.
    return (rank, process) if folder_name(rank, process) == name else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def shard_name(number: int) -> str:
    return f"tensors-{number:05d}.safetensors"


def is_shard_name(name: str) -> bool:
    number = name.removeprefix("tensors-").removesuffix(".safetensors")
    return _is_number(number) and len(number) >= 5 and name == f"tensors-{number}.safetensors"


def align(offset: int) -> int:
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def header_bytes(number: int, first: int = FIRST_HEADER) -> int:
    """Bytes reserved at the start of the nth shard, including the length field; grows fourfold.

    So a small run wastes little, and a run of a hundred thousand tensors needs few shards.
    """
    return align(min(first * 4**number, max(LARGEST_HEADER, first)))
