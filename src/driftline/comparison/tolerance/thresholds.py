"""Thresholds of a model: how much each metric of each layer may differ, and what that rests on.

One JSON file, whose plain part (`{metric: {layer: value}}`) people may edit; files of other tools
are read, too. Layers go by many spellings, which `LayerNames` brings together. Which row keeps its
threshold, `verdict.judge` decides; how thresholds are made of clean runs, `calibration` knows.
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
"""What layer files call the model itself, and put before the path of every module."""


class LayerNames:
    """Layers to be found by any of their spellings; an exact one is preferred.

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
        """The known spelling of a layer; None when there is none, or more than one could be."""
        if name in self._exact:
            return name
        for spelling in _spellings(name):
            matches = self._plain.get(spelling, ())
            # Two layers of one spelling: guessing would judge one by the other's limit.
            if len(matches) == 1:
                return next(iter(matches))
        return None


def _spellings(name: str) -> tuple[str, ...]:
    """From the most telling to the least: as it is, then without the root in front of it."""
    spelling = plain(name)
    if not spelling or spelling == ROOT:
        return ("",)
    bare = spelling.removeprefix(f"{ROOT}.")
    return (spelling, bare) if bare != spelling else (spelling,)


# One threshold: a value, where it holds, and what it rests on. With its JSON form.


class PerShape(NamedTuple):
    """The value that one shape alone gives.

    Attributes:
        about: What the shape is: batch_size, seq_length, max_new_tokens, dtype, or a tensor's
            shape.
        value: The threshold of this shape.
        samples: How many values it rests on.
    """

    about: Mapping[str, Any]
    value: float
    samples: int


class Threshold(NamedTuple):
    """The worst value of a metric that is still allowed, somewhere.

    Attributes:
        metric: Its name.
        value: The threshold; NaN when it could not be had, which allows nothing.
        site: The layer; empty for the model as a whole.
        port: Which side of the layer; empty for the model as a whole.
        statistic: What it is of the clean values: p99, average, l2, …; empty if nobody said.
        direction: On which side of the value passing is.
        samples: How many clean values it rests on; 0 if nobody said.
        interval: Bootstrap interval (95 %) of the statistic; None where there is none.
        observed: The statistic before the margin; None if nobody said.
        nan: How many of the clean values were NaN.
        inf: How many were infinite.
        dtypes: The number formats that were pooled.
        shapes: What each shape gives by itself.
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
        """The value of the shapes that agree in everything asked for (the most lenient of them),
        or the pooled one when none does."""
        own = [
            entry.value
            for entry in self.shapes
            if shape and all(entry.about.get(name) == value for name, value in shape.items())
        ]
        own = [value for value in own if math.isfinite(value)]
        if not own:
            return self.value
        # The most lenient: clean runs of that shape reached it.
        return min(own) if self.direction == "higher" else max(own)


def number(value: JSON) -> float:
    """A number of the file; what is null there is no number."""
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


# The thresholds artefact: how much each metric of a model may differ, and what that rests on.


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
        model_id: The model, `/` written as `--`; empty if it is not said.
        entries: Every threshold, in the order of the file.
        settings: How they were made: statistic, margin, seed, …
        sources: Files or tables that were pooled.
        provenance: When, with which versions and command; empty for other tools' files.
        path: Where it was read from; empty if it was not.
        notes: What reading it found odd, one sentence each.
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
        """The threshold of a metric, of the whole model or of one layer, however that is spelt."""
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
            metric: `ce`, `diff_mean`, `abs_diff`, `relative_l2`, …
            site: A layer, in any spelling; None for the model as a whole.
            shape: What is known of the shape, such as `{"batch_size": 8, "seq_length": 64}`; its
                own value is taken where the file has one, the pooled one otherwise.
            port: Which side of the layer.

        Returns:
            None for a layer that has no threshold.

        Raises:
            BadInput: There are no thresholds of this metric, or the one there is is NaN.
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

    def kept_beside(self, older: Thresholds) -> Thresholds:
        """These, and the thresholds of an older file for metrics that these do not speak of."""
        kept = [entry for entry in older.entries if entry.metric not in self.metrics]
        if not kept:
            return self
        sources = dict.fromkeys((*self.sources, *older.sources))
        return replace(self, entries=(*self.entries, *kept), sources=tuple(sources))

    def belongs_to(self, model: str) -> bool:
        """Whether these may be the thresholds of a model, given by its id or path.

        Equal names, or one the tail of the other, are one model, and so are a path and an id with
        the same last part: baselines are often made from a local copy.

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
        # Two ids of a hub must agree in both parts; a path has others in front.
        paths = "" in (own[0], other[0]) or max(len(own), len(other)) > 2
        return paths and own[-1] == other[-1]

    def require_model(self, model: str) -> None:
        """Refuse thresholds of another model.

        Raises:
            BadInput: They are.
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
        """The file's content: the plain form first, what it rests on under `driftline`."""
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
        """Write the file; it is there whole, or not at all.

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
    """Thresholds from the content of a file; `source` is what messages call it.

    Raises:
        BadFile: It holds something else.
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
    # The plain part is what people edit: it wins, and may say more than what was measured.
    edited_entries = {(entry.metric, entry.site): entry for entry in _plain(top)}
    entries: list[Threshold] = []
    for measured in map(threshold_from_json, own["thresholds"]):
        plain = None
        if not measured.site or measured.port == OUTPUT:
            plain = edited_entries.pop((measured.metric, measured.site), None)
        # A number that a person changed in the plain part wins over what was measured.
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
            # Other tools print an L2 norm under the word average.
            # Ours says in its own part which statistic it is.
            statistic = "" if is_own else "l2" if metric == "abs_diff" else "average"
            for layer, value in _layers(cast("JSON", content)):
                if not is_own and isinstance(content, list) and value == 0.0:
                    continue  # see _odd_zeros
                yield Threshold(metric, number(value), layer, OUTPUT, statistic, direction)
        else:
            yield Threshold(metric, number(content), direction=direction)


def _layers(content: JSON) -> Iterator[tuple[str, JSON]]:
    mappings = cast("list[dict[str, JSON]]", [content] if isinstance(content, dict) else content)
    for layers in mappings:
        yield from layers.items()


def _odd_zeros(top: Mapping[str, JSON]) -> tuple[str, ...]:
    """The older form writes 0 for NaN and for layers whose output is a tuple: no threshold."""
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
