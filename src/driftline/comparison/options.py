"""All options of a comparison, as one immutable value.

The keywords of `driftline.compare` become a `CompareOptions` (`CompareOptions.of`), and every entry
point passes such a value to `pipeline.run_comparison`. No run is opened and no tensor is read here;
metrics and thresholds are looked up, so that a wrong name is refused before anything is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack, cast

from driftline.alignment.align import UNMASKED, AlignOptions
from driftline.comparison.metrics.catalogue import STANDARD, Metric, limited, requested
from driftline.comparison.table.row import JSON, number_from_json, number_to_json
from driftline.comparison.tolerance.defaults import elementwise as default_elementwise
from driftline.comparison.tolerance.tolerance import Limit, Tolerance, limits_from
from driftline.errors import BadFile, did_you_mean
from driftline.execution.jobs import chosen

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.measure.scheduler import Elementwise
    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.execution.jobs import Executor

Limits: TypeAlias = Mapping[str, float] | Sequence[Limit] | None
"""Metric → worst value that passes; or a sequence of limits."""


class JudgeKeywords(TypedDict, total=False):
    """Options for metrics, limits and tensors that a comparison of two live models accepts.

    The docstring of `driftline.compare` explains each of them.
    """

    metrics: Sequence[str]
    limits: Limits
    rtol: float | None
    atol: float | None
    min_coverage: float | None
    thresholds: Thresholds | StrPath | None
    sites: Sequence[str]
    ports: Sequence[str]


class CompareKeywords(JudgeKeywords, total=False):
    """The keywords of `driftline.compare` that are options, except the plan.

    A plan object belongs to two open runs, so it is an argument of `pipeline.prepare`.
    """

    maps: Sequence[str]
    mapping: StrPath | None
    placements: Sequence[str]
    masks: Sequence[StrPath]
    step_map: Mapping[int, int] | None
    structural: bool
    threads: int | None
    jobs: int | None
    executor: str | Executor | None


def refuse_unknown(function: str, keywords: Mapping[str, Any], allowed: type) -> None:
    """Refuse keywords that a `TypedDict` does not name; Python itself accepts them.

    Raises:
        TypeError: There is such a keyword.
    """
    names = allowed.__annotations__.keys()
    for name in sorted(keywords.keys() - names):
        hint = did_you_mean(name, names)
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}'; {hint}")


@dataclass(frozen=True, slots=True)
class Execution:
    """Where the measuring is done.

    Attributes:
        threads: Number of worker threads of a process; one per usable core if None.
        jobs: Number of worker processes; only this process if None.
        executor: `local`, `ray`, `ray://HOST:PORT`, or an executor.
    """

    threads: int | None = None
    jobs: int | None = None
    executor: str | Executor | None = None

    def workers(self) -> Executor | None:
        """Return the executor of other processes; None for this process.

        Raises:
            BadInput: There is no such executor.
        """
        return chosen(self.jobs, self.executor)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Which tensors are compared, by which metrics and limits, and where.

    Attributes:
        align: How the runs are paired. Its masks may include `none`.
        metrics: Metrics to measure for each pair, including those that only a limit names.
        tolerance: The limits.
        execution: Where the measuring is done.
    """

    align: AlignOptions = field(default_factory=AlignOptions)
    metrics: tuple[Metric, ...] = STANDARD
    tolerance: Tolerance = field(default_factory=Tolerance)
    execution: Execution = Execution()

    @classmethod
    def of(cls, plan: StrPath | None = None, **keywords: Unpack[CompareKeywords]) -> CompareOptions:
        """Return the options for the keywords of `driftline.compare`.

        Args:
            plan: The path of a saved plan.
            keywords: See `driftline.compare`.

        Raises:
            DriftlineError: A metric, a limit or a thresholds file does not exist.
            TypeError: There is no such keyword.
        """
        refuse_unknown("compare", keywords, CompareKeywords)
        limits = keywords.get("limits")
        named = limits if isinstance(limits, Mapping) else [limit.metric for limit in limits or ()]
        # A limit on an optional metric implies that the metric is measured.
        metrics = requested([*_words(keywords.get("metrics", ())), *limited(named)])
        if limits is None or isinstance(limits, Mapping):
            limits = limits_from(limits, [metric.column for metric in metrics])
        tolerance = Tolerance(
            tuple(limits),
            keywords.get("rtol"),
            keywords.get("atol"),
            keywords.get("min_coverage"),
            _loaded(keywords.get("thresholds")),
        )
        execution = Execution(
            keywords.get("threads"), keywords.get("jobs"), keywords.get("executor")
        )
        return cls(_align_options(keywords, plan), metrics, tolerance, execution)

    @property
    def paired_by(self) -> AlignOptions:
        """The options for alignment, which does not accept the mask `none`."""
        masks = tuple(mask for mask in self.align.masks if mask != UNMASKED)
        return self.align._replace(masks=masks)

    @property
    def may_leave_out_pads(self) -> bool:
        """Whether failing rows are measured again without the pads of a captured mask.

        A user who names a mask, or says `none`, has already decided which positions count.
        """
        return not self.align.masks

    @property
    def elementwise(self) -> Elementwise:
        """The rtol and atol of `outside_share`, as a function of two dtypes."""
        # The same defaults everywhere, so that all entry points give the same outside_share.
        if not self.tolerance.elementwise:
            return default_elementwise
        rtol, atol = self.tolerance.rtol or 0.0, self.tolerance.atol or 0.0
        return lambda reference, candidate: (rtol, atol)

    def to_json(self) -> dict[str, JSON]:
        """Return the options as JSON values, without an executor that is an object."""
        align = self.align._asdict()
        for name in ("mapping_file", "plan_file"):
            align[name] = None if align[name] is None else str(align[name])
        # A connection to a cluster cannot be stored in a file.
        executor = self.execution.executor
        return {
            "align": {
                name: list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
                for name, value in align.items()
            },
            "metrics": [metric.address for metric in self.metrics if metric.address],
            "tolerance": tolerance_to_json(self.tolerance),
            "execution": {
                "threads": self.execution.threads,
                "jobs": self.execution.jobs,
                "executor": executor if isinstance(executor, str) else None,
            },
        }

    @classmethod
    def from_json(cls, document: Mapping[str, JSON], source: str = "options") -> CompareOptions:
        """The inverse of `to_json`.

        Raises:
            BadFile: These are not options.
        """
        try:
            align: dict[str, Any] = {
                name: tuple(cast("list[str]", value)) if isinstance(value, list) else value
                for name, value in document["align"].items()
            }
            for name in ("mapping_file", "plan_file"):
                align[name] = None if align[name] is None else Path(align[name])
            return cls(
                AlignOptions(**align),
                requested([str(name) for name in document["metrics"]]),
                tolerance_from_json(document["tolerance"], source),
                Execution(**document["execution"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFile(f"{source} holds no options of a comparison: {error}") from None


def tolerance_to_json(tolerance: Tolerance) -> dict[str, JSON]:
    """Return a tolerance and its thresholds as JSON, for the parts of a comparison."""
    thresholds = tolerance.thresholds
    return {
        "limits": [[limit.metric, number_to_json(limit.value)] for limit in tolerance.limits],
        "rtol": None if tolerance.rtol is None else number_to_json(tolerance.rtol),
        "atol": None if tolerance.atol is None else number_to_json(tolerance.atol),
        "min_coverage": tolerance.min_coverage,
        "thresholds": None
        if thresholds is None
        else {
            "path": thresholds.path,
            "notes": list(thresholds.notes),
            "shown": thresholds.as_json(),
        },
    }


def tolerance_from_json(document: Mapping[str, JSON], source: str) -> Tolerance:
    """The inverse of `tolerance_to_json`.

    Raises:
        BadFile: This is not a tolerance.
    """
    from driftline.comparison.tolerance.thresholds import thresholds_from_json

    try:
        stored = document["thresholds"]
        thresholds = None
        if stored is not None:
            # Messages need the path and the notes, which are not part of a thresholds file.
            thresholds = replace(
                thresholds_from_json(stored["shown"], source=source),
                path=str(stored["path"]),
                notes=tuple(map(str, stored["notes"])),
            )
        rtol, atol = (
            None if document[name] is None else float(number_from_json(document[name]))
            for name in ("rtol", "atol")
        )
        limits = tuple(
            Limit(str(name), float(number_from_json(value))) for name, value in document["limits"]
        )
        share = document["min_coverage"]
        share = None if share is None else float(share)
        return Tolerance(limits, rtol, atol, share, thresholds)
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(f"{source} says its limits in a way that means nothing: {error}") from None


def _align_options(keywords: CompareKeywords, plan: StrPath | None) -> AlignOptions:
    masks = keywords.get("masks", ())
    mapping = keywords.get("mapping")
    steps = keywords.get("step_map") or {}
    return AlignOptions(
        sites=_words(keywords.get("sites", ())),
        ports=_words(keywords.get("ports", ())),
        maps=_words(keywords.get("maps", ())),
        mapping_file=None if mapping is None else Path(mapping),
        placements=_words(keywords.get("placements", ())),
        # The mask `none` is kept, because it says that pads count.
        masks=tuple(map(str, [masks] if isinstance(masks, str | Path) else masks)),
        step_map=tuple(f"{reference}={candidate}" for reference, candidate in steps.items()),
        plan_file=None if plan is None else Path(plan),
        structural=keywords.get("structural", True),
    )


def _words(words: Sequence[str]) -> tuple[str, ...]:
    """Return words as a tuple; a single string is one word, not a sequence of letters."""
    return (words,) if isinstance(words, str) else tuple(words)


def _loaded(thresholds: Thresholds | StrPath | None) -> Thresholds | None:
    if thresholds is None:
        return None
    # Imported on use, because most comparisons use the default limits of dtypes.
    from driftline.comparison.tolerance.thresholds import Thresholds, load_thresholds

    return thresholds if isinstance(thresholds, Thresholds) else load_thresholds(thresholds)
