"""Evidence that experiments stored on disk: replay folders, noise runs, results of a bisection.

This file reads and checks them, since they may come from anywhere. It does not interpret them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from driftline.alignment.plan import Plan
from driftline.comparison.evidence.error_stats import NOTHING, Effect
from driftline.comparison.verdict.sites import contains
from driftline.errors import BadFile, BadInput, BadRun
from driftline.formats.registry import open_run
from driftline.runs.files.local_files import is_inside, read_object, reason_of
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath


REPLAY_FILE = "replay.json"
NOISE_FILE = "noise.json"
_LARGEST_RESULTS = 256 << 20
"""Largest size in bytes of a replay's or noise file; a site takes about a hundred bytes."""


class ReplayedSite(NamedTuple):
    """The outcome of replaying one site.

    Attributes:
        status: replayed, unknown or skipped.
        reason: Why the site was not replayed, in words.
        reproduced: Whether its replay on the reference's own inputs gave the reference's output;
            None if that was not tried (it is compiled, it was not called).
        applied: leaf, whole, or `own code` for a container whose parts were not run but answered
            with the outputs of the candidate's parts.
        noise: Error of the candidate's format against the exact result, measured on calls that gave
            the candidate's results in that format, bit for bit or nearly; None if no call did.
        near: Digests of the candidate's results that are as good as those of the replay.
        masks: Slots of masks of another kind than the reference's that hide the same; the replay
            used the reference's masks.
        differs: The tensor at a module's border that has another shape or other integers, in words.
        updated: Whether calls were left out because an optimizer had changed the weights.
        format_cost: Relative error caused by the candidate's format of the buffers, if that is more
            than a few roundings.
        end: For a model that was applied as a whole: the error of the candidate's output, the error
            of a trusted output in the candidate's format, and the number of elements.
    """

    status: str = "replayed"
    reason: str = ""
    reproduced: bool | None = True
    applied: str = ""
    noise: Effect | None = None
    near: frozenset[str] = frozenset()
    masks: frozenset[str] = frozenset()
    differs: str = ""
    updated: bool = False
    format_cost: float = 0.0
    end: tuple[float, float, int] | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ReplayedSite:
        """Build the outcome from an entry of `replay.json`.

        Raises:
            ValueError: A field that should be a number is none.
        """
        # Noise is meaningful only for calls that gave the candidate's results in its format.
        near = _near(fields.get("near"))
        return cls(
            str(fields.get("status", "replayed")),
            str(fields.get("reason") or ""),
            _reproduced_flag(fields.get("reproduced", True)),
            str(fields.get("applied") or ""),
            _noise(fields.get("noise")) if fields.get("same_bits") or near else None,
            near,
            _names(fields.get("masks")),
            str(fields.get("differs") or ""),
            bool(fields.get("updated_calls")),
            float(fields.get("format_cost") or 0.0),
            _end(fields.get("end")),
        )

    @property
    def trouble(self) -> str:
        """Why nothing can be concluded from the replay; empty if something can."""
        # The order matters: a status other than `replayed` explains the other fields.
        if self.status != "replayed":
            return self.reason or f"the replay says '{self.status}'"
        if self.reproduced is False:
            why = f": {self.reason}" if self.reason else ""
            return f"its replay on its own inputs does not give its own output{why}"
        if self.reproduced is None:
            return self.reason or "some of its calls could not be replayed"
        return ""


def _end(shown: Any) -> tuple[float, float, int] | None:
    if not isinstance(shown, dict):
        return None
    fields = cast("dict[str, Any]", shown)
    # A missing field raises a ValueError, which the caller reports.
    return (
        float(fields.get("error", "?")),
        float(fields.get("noise", "?")),
        int(fields.get("elements", "?")),
    )


_NO_SITES: Mapping[str, ReplayedSite] = {}


class Replay(NamedTuple):
    """Results of the reference's modules applied to the candidate's inputs.

    Attributes:
        exact: Outputs of the modules in float32, under the candidate's keys.
        native: Outputs in the candidate's number format; None if that was not done.
        sites: The outcome of each site; a site that is missing counts as replayed.
        of: Id of the candidate for which the replay was made; empty if not known.
    """

    exact: Run
    native: Run | None = None
    sites: Mapping[str, ReplayedSite] = _NO_SITES
    of: str = ""


class NoiseRun(NamedTuple):
    """One trusted execution in the candidate's number format."""

    name: str
    run: Run


Evidence: TypeAlias = "Run | StrPath"


def open_replay(source: Replay | StrPath) -> Replay:
    """Open a replay's folder; a `Replay` is returned unchanged.

    Raises:
        DriftlineError: The folder holds no replay, or one that cannot be read.
    """
    if isinstance(source, Replay):
        return source
    folder = Path(source)
    if not (folder / REPLAY_FILE).is_file():
        raise BadRun(
            f"{folder} is no replay: it has no {REPLAY_FILE}",
            hint='make one: driftline replay CAND --exec "python reference.py" -o REPLAY',
        )
    document = _read_results(folder / REPLAY_FILE)
    sites: dict[str, ReplayedSite] = {}
    # Each part of the document is checked before use: it may have been edited or truncated.
    entries = document.get("sites", {})
    if not isinstance(entries, dict):
        raise BadFile(f"{folder / REPLAY_FILE}: 'sites' is no object")
    for site, about in cast("dict[str, Any]", entries).items():
        if not isinstance(about, dict):
            raise BadFile(f"{folder / REPLAY_FILE}: nothing can be read of site '{site}'")
        try:
            sites[site] = ReplayedSite.from_json(cast("dict[str, Any]", about))
        except (TypeError, ValueError):
            raise BadFile(
                f"{folder / REPLAY_FILE}: the noise of site '{site}' is no number"
            ) from None
    exact = _inner(folder, "exact")
    if exact is None:
        raise BadRun(f"{folder} holds no run 'exact': nothing was replayed", hint="make it again")
    return Replay(exact, _inner(folder, "native"), sites, _identity(document.get("candidate")))


def open_noise(sources: Sequence[Evidence]) -> list[NoiseRun]:
    """Open noise runs, which are folders that `driftline noise` made, or plain runs.

    Raises:
        DriftlineError: A source is neither.
    """
    runs: list[NoiseRun] = []
    for source in sources:
        if isinstance(source, Run):
            runs.append(NoiseRun(source.name, source))
            continue
        folder = Path(source)
        if not (folder / NOISE_FILE).is_file():
            runs.append(NoiseRun(str(source), open_run(source)))
            continue
        variants = _read_results(folder / NOISE_FILE).get("variants", [])
        if not isinstance(variants, list):
            raise BadFile(f"{folder / NOISE_FILE}: 'variants' is no list")
        for variant in cast("list[Any]", variants):
            if not isinstance(variant, dict):
                raise BadFile(f"{folder / NOISE_FILE}: a variant is no object")
            fields = cast("dict[str, Any]", variant)
            name = str(fields.get("name") or fields.get("folder") or "?")
            if fields.get("status") == "same":
                continue  # bit for bit equal to another variant, so no further evidence
            run = _inner(folder, str(fields.get("folder") or name))
            if run is not None:
                runs.append(NoiseRun(name, run))
    if sources and not runs:
        raise BadInput("the noise folders hold no run", hint="make them again: driftline noise")
    return runs


def _inner(folder: Path, name: str) -> Run | None:
    # A name in the file must not lead out of the folder, because the file may be untrusted.
    path = folder / name
    return open_run(path) if is_inside(folder.resolve(), path) else None


def _reproduced_flag(reproduced: Any) -> bool | None:
    return reproduced if reproduced in (True, None) else False


def _noise(value: Any) -> Effect:
    """The stored effect; a replay stores only size and bias if its result is nearly equal."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    nan = math.nan
    return NOTHING._replace(
        rows=int(fields.get("rows", 0)),
        elements=int(fields.get("elements", 0)),
        error=float(fields.get("error", nan)),
        projection=float(fields.get("projection", nan)),
        projection_se=float(fields.get("projection_se", nan)),
    )


def _near(value: Any) -> frozenset[str]:
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return _names(fields.get("digests"))


def _names(value: Any) -> frozenset[str]:
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return frozenset(name for name in listed if isinstance(name, str) and name)


def _identity(candidate: Any) -> str:
    if isinstance(candidate, dict):
        fields = cast("dict[str, Any]", candidate)
        return str(fields.get("id") or "")
    return ""


def _read_results(path: Path) -> Mapping[str, Any]:
    try:
        document = read_object(path.parent.resolve(), path, _LARGEST_RESULTS)
    except (OSError, ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from None
    if document.get("schema") not in (1, None):
        raise BadFile(
            f"{path} is of schema {document['schema']!r}, this program reads 1",
            hint="update driftline",
        )
    return document


# Results of `driftline bisect`: the share of the final error that a block causes.


_LARGEST_BISECTION = 64 << 20
_VERDICTS = ("found", "spread", "same")


class Substitution(NamedTuple):
    """The result of a bisection.

    Attributes:
        verdict: found, spread or same.
        site: The block; empty without one.
        metric: Name of the error of the final output.
        baseline: The error without any replacement.
        before: The error with everything before the block replaced by the reference's outputs.
        after: The error with the block replaced as well.
        explains: The share of the error that the block causes.
        executions: Number of executions of the program.
    """

    verdict: str
    site: str
    metric: str
    baseline: float
    before: float
    after: float
    explains: float
    executions: int

    def is_about(self, site: str) -> bool:
        """Whether the block is the site, contains it, or is inside it."""
        has_block = self.verdict == "found"
        return has_block and (
            self.site == site or contains(self.site, site) or contains(site, self.site)
        )

    def as_evidence(self) -> dict[str, Any]:
        return self._asdict()


def renamed(proof: Substitution, plan: Plan) -> Substitution:
    """The bisection with its site renamed to the reference's name, which findings use."""
    for pair in plan.pairs:
        if pair.candidate.key.port == "output" and pair.candidate.key.site == proof.site:
            return proof._replace(site=pair.reference.key.site)
    return proof


def open_bisection(source: Mapping[str, Any] | StrPath) -> Substitution:
    """Read the output of `driftline bisect --format json`, given as a file or as the object.

    Raises:
        BadFile: It is not the result of a bisection.
    """
    if isinstance(source, Mapping):
        return _substitution_of(source, "the bisection")
    path = Path(source)
    try:
        document = read_object(path.parent.resolve(), path, _LARGEST_BISECTION)
    except (OSError, ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}", hint=_HOW) from None
    return _substitution_of(document, str(path))


_HOW = "driftline bisect --exec CANDIDATE --reference-run REF --format json > FILE makes one"


def _substitution_of(document: Mapping[str, Any], name: str) -> Substitution:
    if document.get("verdict") not in _VERDICTS or not isinstance(document.get("site"), str):
        raise BadFile(f"{name} is no result of a bisection", hint=_HOW)
    # A missing schema counts as schema 1.
    if document.get("schema") not in (1, None):
        raise BadFile(f"{name} is of schema {document['schema']!r}, this program reads 1")
    share = _number(document.get("explains"))
    executions = document.get("executions")
    return Substitution(
        str(document["verdict"]),
        str(document["site"]),
        str(document.get("metric") or "the error"),
        _number(document.get("baseline")),
        _number(document.get("before")),
        _number(document.get("after")),
        # A share outside of 0 to 1 cannot come from a bisection and is ignored.
        share if 0.0 <= share <= 1.0 else math.nan,
        executions if isinstance(executions, int) else 0,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
