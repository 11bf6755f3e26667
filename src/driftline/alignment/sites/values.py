"""Dataflow of a run: the output that each input is, by its topology or by equal bytes.

Only one run is examined, so a fault of one side cannot create a pair. `roles` infers the roles that
follow from the dataflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.alignment.sites.site_graph import Call, Frame
from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.runs.json_values import list_of
from driftline.runs.records import Record
from driftline.runs.run import Run

_SAMPLE = 1 << 16
"""Number of bytes at either end of a tensor that identify it within its run."""
_MOST_READ = 1 << 28
"""Largest number of bytes read per step; edges beyond that stay unknown."""

_CONSTANT = "constant "

Place = tuple[str, str]
"""Site and slot."""


class Dataflow(NamedTuple):
    """The edges of one step of one process.

    Attributes:
        makers: Input → the output that it is.
        names: Input → name of the tensor in the dump (a weight, an input of the model).
        params: Site → the operator's parameters, if the dump has them.
    """

    makers: Mapping[Place, Place]
    names: Mapping[Place, str]
    params: Mapping[str, Mapping[str, Any]]

    def source(self, site: str, slot: str) -> str:
        """An identifier of the tensor behind an input, equal for all readers; empty if unknown."""
        maker = self.makers.get((site, slot))
        return "/".join(maker) if maker is not None else self.names.get((site, slot), "")


_NOTHING = Dataflow({}, {}, {})


class Dataflows:
    """The dataflow of a run, read once per process, or once per kind of step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_process: dict[tuple[int, int], Dataflow] = {}
        self._by_signature: dict[object, Dataflow] = {}

    def of(self, frame: Frame, calls: Sequence[Call], signature: object) -> Dataflow:
        """The edges of one step.

        Args:
            frame: The step and its process.
            calls: The calls of that step.
            signature: Equal for steps with the same calls; only bytes of the first such step are
                read.
        """
        place = (frame.rank, frame.process)
        if place not in self._by_process:
            self._by_process[place] = edges_of(self._run, *place)
        # Edges of the dump are certain; bytes are read only if there are none.
        flow = self._by_process[place]
        if flow.makers:
            return flow
        if signature not in self._by_signature:
            leaves = [call for call in calls if call.leaf and call.called]
            if _has_operators(leaves):
                makers, names = _from_bytes(self._run, [call for call in calls if call.called])
                flow = flow._replace(makers=makers, names=names)
            self._by_signature[signature] = flow
        return self._by_signature[signature]


def edges_of(run: Run, rank: int, process: int) -> Dataflow:
    """The edges in the topology of one process."""
    topology = run.topology(rank, process)
    return _NOTHING if topology is None else _from_topology(topology)


def _has_operators(leaves: Iterable[Call]) -> bool:
    """Whether attention operators are sites: only their inputs have a meaning by position."""
    return any(call.kind == "core attention" for call in leaves)


def _from_topology(topology: Mapping[str, Any]) -> Dataflow:
    makers: dict[Place, Place] = {}
    for maker, taker in _edges(topology):
        # A container's output is the output of a leaf inside it; the leaf is more precise.
        if taker not in makers or maker[0].startswith(f"{makers[taker][0]}."):
            makers[taker] = maker
    names: dict[Place, str] = {}
    params: dict[str, Mapping[str, Any]] = {}
    # An explicit stack instead of recursion, because the nesting comes from a file.
    below = [cast("object", root) for root in list_of(topology.get("roots"))]
    while below:
        node = below.pop()
        if not isinstance(node, Mapping):
            continue
        about = cast("Mapping[str, Any]", node)
        site = about.get("site")
        if isinstance(site, str):
            for slot, name in enumerate(list_of(about.get("inputs"))):
                if isinstance(name, str):
                    names[site, str(slot)] = name
            if isinstance(about.get("param"), Mapping):
                params[site] = cast("Mapping[str, Any]", about["param"])
        below += list_of(about.get("children"))
    return Dataflow(makers, names, params)


def _edges(topology: Mapping[str, Any]) -> Iterable[tuple[Place, Place]]:
    """Edges in either of the two forms; other entries are skipped."""
    for edge in list_of(topology.get("edges")):
        if isinstance(edge, Mapping):
            about = cast("Mapping[str, Any]", edge)
            values = [about.get(name) for name in ("from", "output", "to", "input")]
        else:
            values = list_of(edge)
        if len(values) == 4 and isinstance(values[0], str) and isinstance(values[2], str):
            yield (values[0], str(values[1])), (values[2], str(values[3]))


def _from_bytes(run: Run, calls: Sequence[Call]) -> tuple[dict[Place, Place], dict[Place, str]]:
    """Edges by equal bytes of an input and an earlier output; and digests as names of inputs."""
    made: dict[str, list[Place]] = {}
    makers: dict[Place, Place] = {}
    names: dict[Place, str] = {}
    read = 0
    for call in sorted(calls, key=lambda call: call.order):
        # Containers repeat the tensors of their leaves, so only their inputs are named.
        for port in ("input", "output") if call.leaf else ("input",):
            inputs: dict[str, list[Place]] = {}
            for record in call.records:
                if record.key.port != port or record.key.phase != "forward":
                    continue
                # A record with a digest costs no read, however much was read before.
                readable = bool(record.digest) or (record.kept == "full" and read <= _MOST_READ)
                if not readable or not record.shape:
                    continue
                digest, length = _sampled(run, record)
                read += length
                place = (record.key.site, record.key.slot)
                if digest and port == "input":
                    names[place] = digest
                if digest.startswith(_CONSTANT):
                    continue  # constants are equal everywhere and do not identify their maker
                # Vectors (biases, scales) are equal too often to identify their maker.
                if not digest or len(record.shape) < 2 or not call.leaf:
                    continue
                if port == "output":
                    made.setdefault(digest, []).append(place)
                elif digest in made:
                    inputs.setdefault(digest, []).append(place)
            for digest, places in inputs.items():
                # Several outputs may have the same bytes: distribute them over the readers.
                last = made[digest][-len(places) :]
                for index, place in enumerate(places):
                    makers[place] = last[min(index, len(last) - 1)]
    return makers, names


def bytes_of(run: Run, record: Record) -> str:
    """A digest that is equal for equal tensors of a run; empty if it proves nothing (zeros)."""
    if not record.digest and record.kept != "full":
        return ""
    return _sampled(run, record)[0]


def _sampled(run: Run, record: Record) -> tuple[str, int]:
    """A digest of both ends of a tensor (empty for zeros), and the number of bytes read."""
    if not math.prod(record.shape):
        return "", 0
    if record.digest:
        return f"{record.dtype} {math.prod(record.shape)} {record.digest}", 0
    try:
        values = np.ascontiguousarray(run.raw(record)).reshape(-1).view(np.uint8)
    except (DriftlineError, OSError, ValueError):
        return "", 0  # the comparison itself will report the reason
    # Both ends are enough to distinguish the tensors of one step; the middle is not read.
    ends = values if values.size <= 2 * _SAMPLE else _both_ends(values)
    if not (ends != ends[0]).any():
        return "", ends.size
    # All elements are equal if bytes repeat with the width of an element.
    width = values.size // math.prod(record.shape)
    same = "" if width and (ends[width:] != ends[:-width]).any() else _CONSTANT
    # Only the number of elements counts, because a view with other axes is the same tensor.
    return f"{same}{record.dtype} {math.prod(record.shape)} {kernel.digest(ends)}", ends.size


def _both_ends(values: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.concatenate((values[:_SAMPLE], values[-_SAMPLE:]))
