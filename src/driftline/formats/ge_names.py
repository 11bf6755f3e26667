"""What the names in a GE dump say: of an operator's file, and of the folders it lies in.

    [worldsize{W}_global_rank{R}/]{YYYYmmddHHMMSS}/{device}/{graph}/{graph id}/{step}/
        {type}.{name}.{task}[.{stream}].{stamp}[.{task type}.{context}.{thread}.{device}]

Text in, values out: nothing is opened here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LEFT_ALONE = (".txt", ".npy", ".bin", ".csv", ".json", ".log", ".onnx", ".pbtxt", ".pb", ".md")

WORLD = re.compile(r"worldsize(\d+)_global_rank(\d+)", re.ASCII)
_SESSION = re.compile(r"\d{14}", re.ASCII)
_STAMP = re.compile(r"\d{13,20}", re.ASCII)
_FLAT = re.compile(r"[./\\\s]")


class OpFile(NamedTuple):
    """What a file's name says.

    Attributes:
        class_name: Type of the operator.
        op_name: Its name, flattened as file names need it.
        task: Number of the task.
        stamp: When it was dumped, in microseconds.
    """

    class_name: str
    op_name: str
    task: int
    stamp: int


class Place(NamedTuple):
    """What a file's folders say: the graph and its number are empty where they say nothing."""

    rank: int = 0
    session: str = ""
    graph: str = ""
    graph_id: str = ""
    step: int = 0


def parse_name(name: str) -> OpFile | None:
    """`{type}.{name}.{task}[.{stream}].{stamp}[.{task type}.{context}.{thread}.{device}]`.

    >>> parse_name("Add.Add_2.44.6.1706596912161941")
    OpFile(class_name='Add', op_name='Add_2', task=44, stamp=1706596912161941)
    """
    parts = name.split(".")
    for at in range(len(parts) - 1, 2, -1):
        if _STAMP.fullmatch(parts[at]):
            break
    else:
        return None
    if len(parts) - 1 - at > 4 or not all(is_number(part) for part in parts[at + 1 :]):
        return None
    if not is_number(parts[at - 1]):
        return None
    with_stream = at >= 4 and is_number(parts[at - 2])
    task = at - 2 if with_stream else at - 1
    op_name = ".".join(parts[1:task])
    return OpFile(parts[0], op_name, int(parts[task]), int(parts[at])) if parts[0] else None


def is_operator(name: str) -> bool:
    return not name.lower().endswith(LEFT_ALONE) and parse_name(name) is not None


def is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 19


def flat(op_name: str) -> str:
    """A name as file names have it: dots, slashes and blanks are underscores."""
    return _FLAT.sub("_", op_name)


def top_of(folders: list[str]) -> tuple[str, ...] | None:
    """The folders above those of a dump's own layout; None where no session says where it begins.

    >>> top_of(["a", "worldsize2_global_rank0", "20240130064151", "0", "graph_1", "1", "0"])
    ('a',)
    """
    for at in range(len(folders) - 1, -1, -1):
        if _SESSION.fullmatch(folders[at]):
            ranked = at > 0 and WORLD.fullmatch(folders[at - 1])
            return tuple(folders[: at - 1 if ranked else at])
    return None


def parse_place(folders: list[str]) -> Place:
    """What folders say, outermost first; folders above the dump do no harm."""
    session = next(
        (at for at in range(len(folders) - 1, -1, -1) if _SESSION.fullmatch(folders[at])), None
    )
    if session is None:
        # Entered below the session, and moved away from it: read what is there from the end.
        step = int(folders[-1]) if folders and is_number(folders[-1]) else 0
        named = len(folders) > 2 and is_number(folders[-2]) and is_number(folders[-1])
        return Place(0, "", folders[-3], folders[-2], step) if named else Place(step=step)
    above = WORLD.fullmatch(folders[session - 1]) if session else None
    below = folders[session + 1 :]
    device = int(below[0]) if below and is_number(below[0]) else 0
    rank = int(above[2][:9]) if above else device
    inner = below[1:]
    step = int(inner[-1]) if inner and is_number(inner[-1]) and len(inner) != 1 else 0
    graph = inner[0] if inner else ""
    graph_id = inner[1] if len(inner) > 2 else ""
    return Place(rank, folders[session], graph, graph_id, step)
