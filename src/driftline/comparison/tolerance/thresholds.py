"""Thresholds of a model: how much each metric of each layer may differ, and how that was measured.

They are stored in one JSON file, whose plain part (`{metric: {layer: value}}`) people may edit.
Files of other tools can be read, too. `LayerNames` finds a layer by any of its spellings.
`verdict.judge` applies thresholds, and `calibration` derives them from clean runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.alignment.rules.names import plain
from driftline.comparison.table.row import JSON, Direction, number_from_json, number_to_json
from driftline.errors import BadFile, BadInput, did_you_mean

if TYPE_CHECKING:
    from _typeshed import StrPath
__all__ = [
    "SCHEMA",
    "PerShape",
    "Threshold",
    "Thresholds",
    "load_thresholds",
    "thresholds_from_json",
]


ROOT = "model"
"""The name of the model itself in layer files, which is also a prefix of every module's path."""


class LayerNames:
    """Finds layers by any of their spellings; an exact match is preferred.

    >>> LayerNames(["model.base_model.layers7.ln"]).find("base_model.layers.7.ln")
    'model.base_model.layers7.ln'
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._exact = frozenset(names)
        self._plain: dict[str, set[str]] = {}
        for name in self._exact:
            for spelling in _spellings(name):
                self._plain.setdefault(spelling, set()).add(name)

    def find(self, name: str) -> str | None:
        """The known spelling of a layer; None if no layer matches, or more than one."""
        if name in self._exact:
            return name
        for spelling in _spellings(name):
            matches = self._plain.get(spelling, ())
            # If two layers have this spelling, a guess might judge one by the other's limit.
            if len(matches) == 1:
                return next(iter(matches))
        return None


def _spellings(name: str) -> tuple[str, ...]:
    """The spellings of a name: as it is, then without the name of the root before it."""
    spelling = plain(name)
    if not spelling or spelling == ROOT:
        return ("",)
    bare = spelling.removeprefix(f"{ROOT}.")
    return (spelling, bare) if bare != spelling else (spelling,)


# One threshold: a value, where it applies, and how it was measured. With its JSON form.


class PerShape(NamedTuple):
    """The threshold for one shape alone.

    Attributes:
        about: The shape: batch_size, seq_length, max_new_tokens, dtype, or a tensor's shape.
        value: The threshold for this shape.
        samples: The number of values from which it was derived.
    """

    about: Mapping[str, Any]
    value: float
    samples: int


class Threshold(NamedTuple):
    """The worst allowed value of a metric, for a layer or for the model as a whole.

    Attributes:
        metric: The name of the metric.
        value: The threshold; NaN if it could not be computed, which allows nothing.
        site: The layer; empty for the model as a whole.
        port: The port of the layer; empty for the model as a whole.
        statistic: The statistic of the clean values, such as p99, average or l2; empty if unknown.
        direction: Which values are better.
        samples: The number of clean values from which it was derived; 0 if unknown.
        interval: Bootstrap interval (95 %) of the statistic; None if there is none.
        observed: The statistic before the margin; None if unknown.
        nan: The number of clean values that were NaN.
        inf: The number of clean values that were infinite.
        dtypes: The number formats of the clean values.
        shapes: The thresholds for single shapes.
    """

    metric: str
    value: float
    site: str = ""
    port: str = ""
    statistic: str = ""
    direction: Direction = "lower"
    samples: int = 0
    interval: tuple[float, float] | None = None
    observed: float | None = None
    nan: int = 0
    inf: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[PerShape, ...] = ()

    @property
    def usable(self) -> bool:
        return math.isfinite(self.value)

    def for_shape(self, shape: Mapping[str, Any] | None) -> float:
        """The most lenient value among matching shapes; the pooled value if no shape matches."""
        own = [
            entry.value
            for entry in self.shapes
            if shape and all(entry.about.get(name) == value for name, value in shape.items())
        ]
        own = [value for value in own if math.isfinite(value)]
        if not own:
            return self.value
        # The most lenient one, because clean runs of a matching shape reached it.
        return min(own) if self.direction == "higher" else max(own)


def number(value: JSON) -> float:
    """A number of the file; NaN for null."""
    return math.nan if value is None else float(number_from_json(value))


def to_json(entry: Threshold) -> dict[str, JSON]:
    shown: dict[str, JSON] = dict(entry._asdict())
    shown["value"] = number_to_json(entry.value)
    shown["observed"] = None if entry.observed is None else number_to_json(entry.observed)
    shown["interval"] = None if entry.interval is None else list(entry.interval)
    shown["dtypes"] = list(entry.dtypes)
    shown["shapes"] = [
        {**per_shape.about, "value": number_to_json(per_shape.value), "samples": per_shape.samples}
        for per_shape in entry.shapes
    ]
    return shown


def threshold_from_json(shown: Mapping[str, JSON]) -> Threshold:
    interval = shown.get("interval")
    observed = shown.get("observed")
    direction = str(shown.get("direction", "lower"))
    if direction not in ("lower", "higher", "zero"):
        raise ValueError(f"{direction!r} is no direction")
    return Threshold(
        metric=str(shown["metric"]),
        value=number(shown["value"]),
        site=str(shown.get("site", "")),
        port=str(shown.get("port", "")),
        statistic=str(shown.get("statistic", "")),
        direction=cast(Direction, direction),
        samples=int(shown.get("samples", 0)),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        observed=None if observed is None else number(observed),
        nan=int(shown.get("nan", 0)),
        inf=int(shown.get("inf", 0)),
        dtypes=tuple(map(str, shown.get("dtypes", ()))),
        shapes=tuple(map(_shape_from_json, shown.get("shapes", ()))),
    )


def _shape_from_json(shown: Mapping[str, JSON]) -> PerShape:
    about = {name: value for name, value in shown.items() if name not in ("value", "samples")}
    return PerShape(about, number(shown["value"]), int(shown.get("samples", 0)))


# All thresholds of a model.


SCHEMA = "driftline.thresholds/1"
_HOW = "`driftline thresholds` and `driftline calibrate` write one"
MOST_BYTES = 256 << 20
OUTPUT = "output"

_ALIASES = {"mean_diff": "diff_mean", "cos_sim_avg": "cos_sim", "cos_sim_mean": "cos_sim"}
_HIGHER = frozenset({"cos_sim", "cosine"})
_NOT_METRICS = frozenset({"model_id", "driftline", "frequency"})


@dataclass(frozen=True)
class Thresholds:
    """All thresholds of one model.

    Attributes:
        model_id: The model, with `--` for `/`; empty if unknown.
        entries: All thresholds, in the order of the file.
        settings: How they were derived: statistic, margin, seed and others.
        sources: The files or tables from which they were derived.
        provenance: When, with which versions and by which command; empty for other tools' files.
        path: The file from which they were read; empty if there is none.
        notes: Remarks about the file, one sentence each.
    """

    model_id: str
    entries: tuple[Threshold, ...]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sources: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: str = ""
    notes: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.metric for entry in self.entries))

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.site for entry in self.entries if entry.site))

    def find(self, metric: str, site: str | None = None, *, port: str = OUTPUT) -> Threshold | None:
        """The threshold of a metric, for the whole model or for a layer in any spelling."""
        name = _ALIASES.get(metric, metric)
        if site is None:
            return self._places.get((name, "", ""))
        return self._places.get((name, self._names.find(site) or site, port))

    @cached_property
    def _places(self) -> dict[tuple[str, str, str], Threshold]:
        return {(entry.metric, entry.site, entry.port): entry for entry in self.entries}

    @cached_property
    def _names(self) -> LayerNames:
        return LayerNames(self.sites)

    def limit(
        self,
        metric: str,
        site: str | None = None,
        shape: Mapping[str, Any] | None = None,
        *,
        port: str = OUTPUT,
    ) -> float | None:
        """The worst value of a metric that passes.

        Args:
            metric: The metric, such as `ce`, `diff_mean`, `abs_diff` or `relative_l2`.
            site: A layer, in any spelling; None for the model as a whole.
            shape: What is known about the shape, such as `{"batch_size": 8, "seq_length": 64}`. If
                the file has a threshold for that shape, it is used instead of the pooled one.
            port: The port of the layer.

        Returns:
            The value; None for a layer without a threshold.

        Raises:
            BadInput: There are no thresholds of this metric, or the threshold is NaN.
        """
        name = _ALIASES.get(metric, metric)
        if name not in self.metrics:
            raise BadInput(
                f"{self._called} has no threshold of {metric}",
                hint=did_you_mean(metric, self.metrics),
            )
        entry = self.find(name, site, port=port)
        if entry is None:
            if site is None:
                raise BadInput(
                    f"{self._called} has thresholds of {metric} for layers, none for the whole "
                    "model",
                    hint="make one without --layer_io",
                )
            return None
        value = entry.for_shape(shape)
        if not math.isfinite(value):
            where = f" of '{entry.site}'" if entry.site else ""
            raise BadInput(
                f"the threshold of {metric}{where} in {self._called} is {value:g}, which allows "
                "nothing",
                hint="its clean values held NaN or Inf; look at those first",
            )
        return value

    def with_older(self, older: Thresholds) -> Thresholds:
        """These thresholds, with those of an older file for metrics that are missing here."""
        kept = [entry for entry in older.entries if entry.metric not in self.metrics]
        if not kept:
            return self
        sources = dict.fromkeys((*self.sources, *older.sources))
        return replace(self, entries=(*self.entries, *kept), sources=tuple(sources))

    def belongs_to(self, model: str) -> bool:
        """Whether these may be the thresholds of a model, given by its id or path.

        Two names mean one model if they are equal, if one is the end of the other, or if a path and
        an id have the same last part, because baselines are often made from a local copy.

        >>> Thresholds("--tmp--models--Tiny-v1", ()).belongs_to("acme/Tiny-v1")
        True
        >>> Thresholds("acme--Tiny-v1", ()).belongs_to("acme/Tiny-v1-instruct")
        False
        """
        if not self.model_id:
            return True
        own, other = _parts(self.model_id), _parts(model)
        shorter = min(len(own), len(other))
        if own[-shorter:] == other[-shorter:]:
            return True
        # Two ids of a hub must agree in both parts; a path has further parts before them.
        paths = "" in (own[0], other[0]) or max(len(own), len(other)) > 2
        return paths and own[-1] == other[-1]

    def require_model(self, model: str) -> None:
        """Refuse thresholds of another model.

        Raises:
            BadInput: These are thresholds of another model.
        """
        if not self.belongs_to(model):
            raise BadInput(
                f"{self._called} is for the model '{self.model_id}', not for '{model}'",
                hint="make thresholds for this model: driftline thresholds --models …",
            )

    def __str__(self) -> str:
        of_model = [f"{e.metric} {e.value:.6g}" for e in self.entries if not e.site]
        layers = dict.fromkeys(entry.metric for entry in self.entries if entry.site)
        parts = [", ".join(of_model)] if of_model else []
        if layers:
            parts.append(f"{', '.join(layers)} of {len(self.sites)} layers")
        return f"thresholds of {self.model_id or 'a model'}: {'; '.join(parts) or 'none'}"

    @property
    def _called(self) -> str:
        return self.path or "the thresholds"

    def as_json(self) -> dict[str, JSON]:
        """The content of the file: the plain form first, and all details under `driftline`."""
        shown: dict[str, JSON] = {"model_id": self.model_id}
        for entry in self.entries:
            value = entry.value if entry.usable else None
            if not entry.site:
                shown[entry.metric] = value
            elif entry.port == OUTPUT and isinstance(shown.setdefault(entry.metric, {}), dict):
                shown[entry.metric][entry.site] = value
        shown["driftline"] = {
            "schema": SCHEMA,
            "settings": dict(self.settings),
            "sources": list(self.sources),
            "provenance": dict(self.provenance),
            "thresholds": [to_json(entry) for entry in self.entries],
        }
        return shown

    def write(self, path: StrPath) -> Path:
        """Write the file as a whole or not at all.

        Raises:
            BadInput: The folder is missing, read-only or full.
        """
        goal = Path(path)
        text = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        draft = goal.with_name(f".driftline-{os.getpid()}-thresholds")
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            draft.replace(goal)
        except OSError as trouble:
            raise BadInput(
                f"{goal} cannot be written: {trouble.strerror or trouble}",
                hint="name another place for it",
            ) from None
        finally:
            _forget(draft)
        return goal


def looks_like_thresholds(path: StrPath) -> bool:
    """Whether a file begins as thresholds files do, without reading all of it."""
    goal = Path(path)
    if goal.suffix != ".json" or not goal.is_file():
        return False
    with goal.open("rb") as file:
        return b'"model_id"' in file.read(4096)


def load_thresholds(path: StrPath, *, model: str | None = None) -> Thresholds:
    """Read a thresholds file of Driftline, or the plain JSON that other tools write.

    Args:
        path: The file.
        model: Refuse it unless it is for this model.

    Raises:
        BadFile: It is missing, not JSON, too large, or not a thresholds file.
        BadInput: It is for another model.
    """
    goal = Path(path)
    try:
        if goal.exists() and not goal.is_file():
            raise BadFile(f"{goal} is no file; thresholds are one")
        if goal.stat().st_size > MOST_BYTES:
            raise BadFile(f"{goal} is too large for a thresholds file")
        shown = json.loads(goal.read_text(encoding="utf-8"))
    except OSError as trouble:
        raise BadFile(
            f"{goal} cannot be read: {trouble.strerror}",
            hint=_HOW,
        ) from None
    except (ValueError, RecursionError) as trouble:
        raise BadFile(f"{goal} cannot be read as JSON: {trouble}", hint=_HOW) from None
    thresholds = thresholds_from_json(shown, source=str(goal))
    if model is not None:
        thresholds.require_model(model)
    return thresholds


def thresholds_from_json(shown: JSON, *, source: str = "") -> Thresholds:
    """Thresholds from the content of a file; `source` is its name in messages.

    Raises:
        BadFile: The content is not thresholds.
    """
    called = source or "this"
    top = cast("dict[str, JSON]", shown if isinstance(shown, dict) else {})
    own = top.get("driftline")
    if not isinstance(top.get("model_id"), str) and not isinstance(own, dict):
        raise BadFile(
            f"{called} is no thresholds file: it names no model_id",
            hint="`driftline thresholds` and `driftline calibrate` write one",
        )
    try:
        if isinstance(own, dict):
            return _from_ours(top, cast("dict[str, JSON]", own), source)
        # Two spellings of one metric (cos_sim_avg, cos_sim_mean) are one threshold.
        plain = {(entry.metric, entry.site): entry for entry in _plain(top)}
        notes = _odd_zeros(top)
        return Thresholds(str(top["model_id"]), tuple(plain.values()), path=source, notes=notes)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as trouble:
        raise BadFile(f"{called} is a damaged thresholds file: {trouble}") from None


def _from_ours(top: Mapping[str, JSON], own: Mapping[str, JSON], source: str) -> Thresholds:
    if own.get("schema") != SCHEMA:
        raise BadFile(
            f"{source or 'this'} has schema {own.get('schema')!r}; this version reads {SCHEMA!r}",
            hint="a newer driftline wrote it; upgrade, or make it again",
        )
    # People edit the plain part, so it takes precedence, and it may have more entries.
    edited_entries = {(entry.metric, entry.site): entry for entry in _plain(top)}
    entries: list[Threshold] = []
    for measured in map(threshold_from_json, own["thresholds"]):
        plain = None
        if not measured.site or measured.port == OUTPUT:
            plain = edited_entries.pop((measured.metric, measured.site), None)
        # A number that was changed in the plain part replaces the measured one.
        edited = plain is not None and plain.usable and plain.value != measured.value
        entries.append(measured._replace(value=plain.value) if plain and edited else measured)
    return Thresholds(
        str(top.get("model_id") or ""),
        (*entries, *edited_entries.values()),
        settings=dict(own.get("settings") or {}),
        sources=tuple(map(str, own.get("sources") or ())),
        provenance=dict(own.get("provenance") or {}),
        path=source,
    )


def _plain(top: Mapping[str, JSON]) -> Iterator[Threshold]:
    """The thresholds of `{metric: value}`, `{metric: {layer: value}}`, `{metric: [{layer: v}]}`."""
    is_own = isinstance(top.get("driftline"), dict)
    for key, content in top.items():
        if key in _NOT_METRICS:
            continue
        metric = key if is_own else _ALIASES.get(key, key)
        direction: Direction = "higher" if metric in _HIGHER else "lower"
        if isinstance(content, dict | list):
            # Other tools print an L2 norm under the word average. Driftline's own part names the
            # statistic.
            statistic = "" if is_own else "l2" if metric == "abs_diff" else "average"
            for layer, value in _layers(cast("JSON", content)):
                if not is_own and isinstance(content, list) and value == 0.0:
                    continue  # a zero means NaN or a tuple; see `_odd_zeros`
                yield Threshold(metric, number(value), layer, OUTPUT, statistic, direction)
        else:
            yield Threshold(metric, number(content), direction=direction)


def _layers(content: JSON) -> Iterator[tuple[str, JSON]]:
    mappings = cast("list[dict[str, JSON]]", [content] if isinstance(content, dict) else content)
    for layers in mappings:
        yield from layers.items()


def _odd_zeros(top: Mapping[str, JSON]) -> tuple[str, ...]:
    """A note about zeros, which the older form has for NaN and for layers that return a tuple."""
    zeros = [
        f"{metric} of '{layer}'"
        for metric, content in top.items()
        if isinstance(content, list)
        for layer, value in _layers(cast("JSON", content))
        if value == 0.0
    ]
    if not zeros:
        return ()
    return (
        f"{len(zeros)} values are 0, {zeros[0]} for one: files of this older form have that where "
        "there was NaN or a tuple, so they are passed over",
    )


def _parts(model: str) -> list[str]:
    return model.rstrip("/").replace("/", "--").removesuffix("--").split("--")


def _forget(draft: Path) -> None:
    try:
        draft.unlink(missing_ok=True)
    except OSError:
        return
