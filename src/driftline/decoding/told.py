"""What lies beside metric files: on which targets they were made, and in which order layers ran.

`driftline metrics` leaves `….provenance.json`, `driftline layer-metrics` `….layers.json`. Files of
other tools have neither, and a damaged one is as good as none: nothing hangs on it but an order and
a remark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.decoding.metric_files import MetricFile

MOST_BYTES = 64 << 20
_DTYPE = re.compile(r"dtype=\w+,?|,dtype=\w+")
_BESIDE = (".provenance.json", ".layers.json")
_KEPT = ("library", "weights", "reference", "candidate", "mode")


class Told(NamedTuple):
    """What was found.

    Attributes:
        targets: Each kind of run that was pooled: reference, candidate, weights, ….
        layers: Layers in the order they ran; empty if nothing says it.
    """

    targets: list[dict[str, str]]
    layers: list[str]


def told_beside(files: Iterable[MetricFile]) -> Told:
    """What the files beside these say."""
    told = Told([], [])
    for path in dict.fromkeys(path for file in files for path in _places(file)):
        content = _read(path)
        settings = content.get("settings")
        if isinstance(settings, dict):
            said = cast("dict[str, Any]", settings)
            target = {name: str(said[name]) for name in _KEPT if name in said}
            if target and target not in told.targets:
                told.targets.append(target)
        layers = content.get("layers")
        if isinstance(layers, dict):
            known = set(told.layers)
            names = map(str, cast("dict[str, Any]", layers))
            told.layers.extend(name for name in names if name not in known)
    return told


def differing(targets: Sequence[Mapping[str, str]]) -> list[str]:
    """In what several kinds of runs differ, a number format alone being none of it.

    >>> differing([{"weights": "a", "reference": "cpu"}, {"weights": "b", "reference": "cpu"}])
    ['weights']
    """
    names = sorted({name for target in targets for name in target})
    return [name for name in names if len({_plain(target.get(name)) for target in targets}) > 1]


def _plain(value: str | None) -> str | None:
    """Formats are pooled on purpose, and written down with each threshold."""
    return None if value is None else _DTYPE.sub("", value)


def _places(file: MetricFile) -> list[Path]:
    start = file.path.name.removesuffix(file.named.rest)
    return [file.path.with_name(start + suffix) for suffix in _BESIDE]


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
