"""The document of a page: everything that the front end shows, as JSON values and arrays.

In this order: rows as columns, sites as a tree, differences between the two runs, and `page_data`,
which puts them together with the verdict. The format is described in docs/report-format.md. Nothing
here knows HTML.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from driftline import __version__
from driftline.comparison.table.covered import spans
from driftline.comparison.table.files import metric_names
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Side, Table
from driftline.reporting.html.depth import DRAWN, depth_lines
from driftline.reporting.html.page import Array, singles
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.comparison.differences.difference import Difference
    from driftline.diagnosis.result import Diagnosis


Column = dict[str, Any]

# Fields of a row that are repeated from row to row: stored once as a word list and a code per row.
_TEXT: dict[str, Callable[[Row], str]] = {
    "site": lambda row: row.key.site,
    "port": lambda row: row.key.port,
    "slot": lambda row: row.key.slot,
    "phase": lambda row: row.key.phase,
    "moment": lambda row: row.key.moment,
    "status": lambda row: row.status,
    "reason": lambda row: row.reason,
    "candidate_site": lambda row: row.candidate_site,
    "candidate_port": lambda row: row.candidate_port,
    "candidate_slot": lambda row: row.candidate_slot,
    "by": lambda row: row.by,
    "reference_recipe": lambda row: row.reference_recipe,
    "candidate_recipe": lambda row: row.candidate_recipe,
    "class": lambda row: row.class_name,
    "candidate_class": lambda row: row.candidate_class,
    "reference_dtype": lambda row: row.reference_dtype,
    "candidate_dtype": lambda row: row.candidate_dtype,
    "reference_shape": lambda row: _dims(row.reference_shape),
    "candidate_shape": lambda row: _dims(row.candidate_shape),
    "line": lambda row: row.line,
    "fused": lambda row: row.fused,
    "culprit": lambda row: row.culprit,
    "basis": lambda row: row.basis,
    "estimated": lambda row: " ".join(row.estimated),
    "decided_by": lambda row: row.decided_by,
    "limit_from": lambda row: row.limit_from,
}
# Fields that are numbers in every row; None marks a row without one.
_NUMBERS: dict[str, Callable[[Row], float | int | None]] = {
    "step": lambda row: row.key.step,
    "rank": lambda row: row.key.rank,
    "visit": lambda row: row.key.visit,
    "process": lambda row: row.key.process,
    "order": lambda row: row.order,
    "candidate_step": lambda row: row.candidate_step,
    "candidate_visit": lambda row: row.candidate_visit,
    "candidate_rank": lambda row: row.candidate_rank,
    "confidence": lambda row: row.confidence,
    "limit": lambda row: row.limit,
    "severity": lambda row: row.severity,
}


def row_columns(table: Table) -> dict[str, Any]:
    """All rows of a table: their number, their fields and their metrics, by column."""
    rows = table.rows
    columns = {name: words([get(row) for row in rows]) for name, get in _TEXT.items()}
    columns |= {name: numbers([get(row) for row in rows]) for name, get in _NUMBERS.items()}
    metrics = {
        name: numbers([row.metrics.get(name) for row in rows]) for name in metric_names(table)
    }
    return {"count": len(rows), "columns": columns, "metrics": metrics}


def words(values: Sequence[str]) -> Column:
    """A column of text.

    >>> words(["a", "a"])
    {'same': 'a', 'n': 2}
    """
    codes: dict[str, int] = {}
    places = [codes.setdefault(value, len(codes)) for value in values]
    # Most columns of a comparison hold a single value; one word is then enough.
    if len(codes) <= 1:
        return {"same": next(iter(codes), None), "n": len(values)}
    return {"words": list(codes), "codes": np.asarray(places, np.uint32).astype(_code(len(codes)))}


def numbers(values: Sequence[float | int | None]) -> Column:
    """A column of figures, some of which may be absent; NaN is a figure.

    >>> numbers([None, None])
    {'same': None, 'n': 2}
    """
    first = values[0] if values else None
    # `is`, because NaN is not equal to itself, and 1 is equal to True.
    if all(value is first or value == first for value in values):
        return {"same": first, "n": len(values)}
    # Without absences the page needs no second array.
    if None not in values:
        return {"numbers": _narrow(cast("Sequence[float | int]", values)), "absent": None}
    absent = np.fromiter((value is None for value in values), np.bool_, len(values))
    filled = [0 if value is None else value for value in values]
    return {"numbers": _narrow(filled), "absent": absent.astype(np.uint8)}


def figures(values: Mapping[str, Array]) -> dict[str, Column]:
    """Columns from arrays; NaN means an absent value."""
    shown: dict[str, Column] = {}
    for name, array in values.items():
        has_values = array.dtype.kind != "f" or not bool(np.isnan(array).all())
        if not has_values:
            shown[name] = {"same": None, "n": int(array.size)}
            continue
        # Half the bytes, where float32 loses nothing that a reader sees.
        stored = singles(array) if array.dtype.kind == "f" else array
        shown[name] = {"numbers": stored, "absent": None}
    return shown


def _narrow(values: Sequence[float | int]) -> Array:
    if all(isinstance(value, int) for value in values):
        low, high = min(values), max(values)
        if low >= -(1 << 31) and high < 1 << 31:
            return np.asarray(values, np.int32)
        # JavaScript has no 64-bit integers; its numbers are float64.
        return np.asarray([float(value) for value in values], np.float64)
    return singles(np.asarray(values, np.float64))


def _code(count: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32


def _dims(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return ""
    return "x".join(map(str, shape)) or "scalar"


# Sites as a tree, which the reader unfolds to reach a layer.


ROOT = "(root)"
_DEEPEST = 48
"""Levels of a name that become nodes; the rest of a deeper name stays in one piece."""


def path_of(site: str) -> list[str]:
    """A site's name, level by level.

    >>> path_of("layers.0.mlp/aten.mm"), path_of("bert/layer_0/MatMul"), path_of("(root)")
    (['layers', '0', 'mlp', 'aten.mm'], ['bert', 'layer_0', 'MatMul'], [])
    """
    # The root is the tree itself, so it has no levels below.
    if site == ROOT:
        return []
    head, *operators = site.split("/")
    # A site in brackets, such as `(root)`, is a name, not a path.
    parts = [*(head.split(".") if not head.startswith("(") else [head]), *operators]
    if len(parts) <= _DEEPEST:
        return parts
    return [*parts[: _DEEPEST - 1], ".".join(parts[_DEEPEST - 1 :])]


def outline(
    sites: Iterable[tuple[str, str]], roots: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The tree of these sites, parents first.

    Args:
        sites: Site and class, in order of execution; sites may be repeated.
        roots: The module tree of the run's topology; gives the classes of modules without tensors.
    """
    class_of = dict(_classes(roots))
    names: list[str] = [ROOT]
    owners: list[str | None] = [None]
    parents: list[int] = [-1]
    classes: list[str] = [class_of.get(ROOT, "")]
    places: dict[tuple[int, str], int] = {}
    # Every part of a name becomes a node once, under its own parent: `0.mlp` and `1.mlp`
    # differ.
    for site, class_name in sites:
        node = 0
        so_far = ""
        for part in path_of(site):
            so_far = f"{so_far}.{part}" if so_far else part
            child = places.get((node, part))
            if child is None:
                child = places[node, part] = len(names)
                names.append(part)
                owners.append(None)
                parents.append(node)
                classes.append(class_of.get(so_far, ""))
            node = child
        owners[node] = site
        classes[node] = class_name or classes[node]
    # The page draws in one pass, so a parent must come before its children.
    order = _parents_first(parents)
    place = {old: new for new, old in enumerate(order)}
    return {
        "count": len(names),
        "name": [names[old] for old in order],
        "site": [owners[old] for old in order],
        "parent": np.asarray(
            [place[parents[old]] if parents[old] >= 0 else -1 for old in order], np.int32
        ),
        "class": [classes[old] for old in order],
    }


def _parents_first(parents: list[int]) -> list[int]:
    """Depth first, children in the order in which they ran."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    waiting = [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        # Reversed, because the stack gives the last one first.
        waiting += reversed(children.get(node, []))
    return order


def _classes(roots: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    below: list[Any] = list(roots)
    while below:
        node = below.pop()
        # The topology comes from a file, which may be damaged.
        if not isinstance(node, Mapping):
            continue
        about = cast("Mapping[str, Any]", node)
        yield str(about.get("site", "")), str(about.get("class", ""))
        children = about.get("children")
        below += cast("list[Any]", children) if isinstance(children, list) else []


# Facts about both runs and their differences: versions, number formats, devices.


_FACT_NAMES = {
    "target": "target",
    "dtypes": "number formats",
    "default_dtype": "default number format",
    "devices": "devices",
    "framework": "framework",
    "seed": "seed",
    "deterministic": "deterministic algorithms",
    "threads": "threads",
    "world_size": "processes in the job",
    "machine": "processor",
    "platform": "system",
    "python": "Python",
    "driftline": "captured by driftline",
    "git": "commit",
    "command": "command",
    "argv": "command",
    "created": "made at",
    "format": "kind of dump",
}
"""Facts that are shown, in this order."""
_NUMBER_KEYS = frozenset(
    {
        *("dtypes", "default_dtype", "devices", "framework", "seed", "deterministic", "threads"),
        *("world_size", "machine", "git", "target"),
    }
)
"""Facts that can change numbers; so can versions of libraries and environment variables."""
# Two runs always have different times; that difference explains nothing.
_NEVER_EQUAL = frozenset({"created"})
_MOST_CLASSES = 12
_NAMING_CONVENTION = 3
"""If a class differs at this many sites, the two frameworks name it differently."""


def sides(table: Table, reference: Run | None = None, candidate: Run | None = None) -> Any:
    """Both sides of a table: their facts, the different ones and the equal ones."""
    reference_facts = _facts(table.reference, reference)
    candidate_facts = _facts(table.candidate, candidate)
    differences = _tensors(table)
    same: list[list[str]] = []
    for what in dict.fromkeys((*reference_facts, *candidate_facts)):
        reference_value, candidate_value = reference_facts.get(what), candidate_facts.get(what)
        kind = _kind(what)
        shown = _FACT_NAMES.get(what, what)
        if reference_value == candidate_value:
            same.append([shown, reference_value or ""])
        elif what not in _NEVER_EQUAL:
            differences.append(
                {
                    "what": shown,
                    "reference": reference_value or "not said",
                    "candidate": candidate_value or "not said",
                    # A fact that one side lacks is no difference that a user could act on.
                    "weight": kind if reference_value and candidate_value else "other",
                }
            )
    # Facts that can change numbers come first, and models before machines.
    differences = [*model_differences(table.differences or ()), *differences]
    differences.sort(key=lambda difference: difference["weight"] != "numbers")
    # If two runs have the same folder name, their full paths are shown.
    short = _short(table.reference.path) != _short(table.candidate.path)
    return {
        "reference": _side(table.reference, reference_facts, short=short),
        "candidate": _side(table.candidate, candidate_facts, short=short),
        "differences": differences,
        "same": same,
    }


def model_differences(differences: Sequence[Difference]) -> list[dict[str, str]]:
    """Differences of the models, as the page lists them; unimportant ones are folded."""
    listed: list[dict[str, str]] = []
    for difference in differences:
        more = len(difference.sites) - 1
        what = difference.path or difference.kind
        if difference.kind == "code":
            what = f"code of {difference.class_name}.{difference.name}"
        elif difference.kind == "class":
            what = f"class of {difference.path}"
        near = difference.counts and difference.position != "elsewhere"
        same = difference.reference == difference.candidate
        listed.append(
            {
                "what": f"{what} and {more} more" if more > 0 else what,
                "reference": difference.reference,
                # Two values in the same format: the change of the values says more than the format.
                "candidate": difference.change if same else difference.candidate,
                "weight": "numbers" if near else "other",
                "explains": difference.explains,
                "position": difference.position,
            }
        )
    return listed


def _short(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _side(side: Side, facts: Mapping[str, str], *, short: bool) -> dict[str, Any]:
    return {
        "name": (_short(side.path) if short else side.path) or "in memory",
        "path": side.path,
        "facts": [[_FACT_NAMES.get(what, what), value] for what, value in facts.items()],
        "losses": list(side.losses),
    }


def _kind(what: str) -> str:
    plain = what in _NUMBER_KEYS or what not in _FACT_NAMES
    return "numbers" if plain else "other"


def _tensors(table: Table) -> list[dict[str, str]]:
    """Differences that the tensors show: number formats of pairs, classes of modules."""
    compared = [row for row in table.rows if row.compared]
    formats = Counter(
        (row.reference_dtype, row.candidate_dtype)
        for row in compared
        if row.reference_dtype != row.candidate_dtype
    )
    differences = [
        {
            "what": f"stored tensors ({count} of {len(compared)})",
            "reference": reference_kind,
            "candidate": candidate_kind,
            "weight": "numbers",
        }
        for (reference_kind, candidate_kind), count in formats.most_common(4)
    ]
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    # If the models were described, their classes are among the differences of the models.
    described = {
        site
        for difference in table.differences or ()
        if difference.kind == "class"
        for site in (difference.site, *difference.sites)
    }
    for row in table.rows:
        differs = row.candidate_class and row.candidate_class != row.class_name
        if differs and row.site not in described:
            kinds.setdefault((row.class_name, row.candidate_class), {})[row.site] = None
    # Rare differences first: they are the ones that point at a fault.
    for (reference_kind, candidate_kind), sites in sorted(
        kinds.items(), key=lambda entry: len(entry[1])
    )[:_MOST_CLASSES]:
        first = next(iter(sites))
        few = len(sites) < _NAMING_CONVENTION
        what = f"class of {first}"
        if len(sites) > 1:
            what += f" and {len(sites) - 1} more"
        # At many sites it is a naming of another framework; at a single site it is a clue.
        differences.append(
            {
                "what": what,
                "reference": reference_kind,
                "candidate": candidate_kind,
                "weight": "numbers" if few else "other",
            }
        )
    return differences


def _facts(side: Side, run: Run | None) -> dict[str, str]:
    """Fact → its value in words, in the order of a reader's interest."""
    metadata: dict[str, Any] = dict(side.about)
    if run is not None:
        processes = run.processes()
        # The computing process knows more than its launcher; the first rank is used for all.
        metadata |= {**run.manifest, **(processes[0] if processes else {})}
    facts: dict[str, str] = {}
    for what in _FACT_NAMES:
        if what in metadata and (value := _fact_text(what, metadata[what])):
            facts[what] = value
        # Versions are shown next to the framework, environment variables next to the
        # machine.
        if what == "framework":
            facts |= _text_items(metadata.get("versions"))
        if what == "machine":
            facts |= _text_items(metadata.get("environment"))
    # The launcher's command holds the process's arguments already.
    if "argv" in facts and "command" in facts:
        del facts["argv"]
    return facts


def _text_items(entries: Any) -> dict[str, str]:
    if not isinstance(entries, Mapping):
        return {}
    items = cast("Mapping[object, object]", entries).items()
    return {str(name): str(value) for name, value in items if value not in (None, "")}


def _fact_text(what: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if what == "git" and isinstance(value, Mapping):
        revision = cast("Mapping[str, Any]", value)
        # Enough digits to find the commit, and short enough for a table cell.
        commit = str(revision.get("commit") or "")[:12]
        return f"{commit}{' with changes' if revision.get('dirty') else ''}" if commit else ""
    # Before numbers: a bool is an int in Python.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        joint = " " if what in ("command", "argv") else ", "
        return joint.join(str(word) for word in cast("Iterable[object]", value))
    return str(value)


# The whole document of a page.


SCHEMA = "driftline.page/1"
_METHOD_NAMES = {
    "replay": "a replay of the reference's modules",
    "noise": "trusted runs",
    "growth": "how the error grows in similar layers",
    "weights": "the weights themselves",
}


@dataclass(frozen=True, slots=True)
class PageContents:
    """What a page shows besides its table.

    Attributes:
        reference: The run behind the table, if available: it has more facts than the table.
        candidate: The run of the other side.
        diagnosis: Site and cause of the drift, if they were looked for.
        noise: Comparisons of trusted runs with the same reference: the normal error.
        flow: Edges between sites, as `graphs.sources.run.site_edges` gives them.
        pictures: Row number → pictures of that pair.
        decoder: Parts about a text model.
        notes: Other sentences for the reader.
        title: Title of the page; made from the sides if empty.
    """

    reference: Run | None = None
    candidate: Run | None = None
    diagnosis: Diagnosis | None = None
    noise: Sequence[Table] = ()
    flow: Mapping[str, Any] | None = None
    pictures: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    decoder: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    title: str = ""


def page_data(table: Table, contents: PageContents | None = None) -> dict[str, Any]:
    """The document of a page, from a judged table and further contents."""
    contents = contents or PageContents()
    reference, diagnosis, decoder = contents.reference, contents.diagnosis, contents.decoder
    side_data = sides(table, reference, contents.candidate)
    names = f"{side_data['reference']['name']} against {side_data['candidate']['name']}"
    # For a text model its name says more than the paths of two folders.
    if decoder and decoder[0]["model"]:
        first = decoder[0]
        model = str(first["model"]).rstrip("/").rpartition("/")[2]
        names = f"{model}, {first['reference']} against {first['candidate']}"
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "made": {
            "by": f"driftline {__version__}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "title": contents.title or names,
        "verdict": _verdict(table, diagnosis, contents.notes, decoder),
        "sides": side_data,
        "metrics": [
            {
                "name": column.name,
                "direction": column.direction,
                "meaning": column.meaning,
                "unit": column.unit,
            }
            for column in table.columns
        ],
        "rows": row_columns(table),
        "tree": outline(
            ((row.site, row.class_name) for row in table.rows),
            _roots(reference, table),
        ),
        "depth": depth_lines(table, diagnosis=diagnosis, noise=contents.noise),
        "flow": contents.flow,
        "pictures": {
            str(index): {"row": index, **picture}
            for index, picture in sorted(contents.pictures.items())
        },
        "decoder": [
            {name: value for name, value in part.items() if name != "about"} for part in decoder
        ],
        "diagnosis": None if diagnosis is None else diagnosis.as_json(),
    }
    # Last, so that no text of a run escapes it.
    return _without_reordering(document)


# Unicode's marks for the direction of text; they can make one name look like another.
_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _without_reordering(value: Any) -> Any:
    """The value with marks of text direction escaped: they could disguise a name."""
    if isinstance(value, str):
        if _REORDERING.search(value) is None:
            return value
        return _REORDERING.sub(lambda mark: f"\\u{ord(mark[0]):04x}", value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_without_reordering(key): _without_reordering(item) for key, item in items}
    if isinstance(value, list):
        return [_without_reordering(item) for item in cast("list[Any]", value)]
    return value


def _verdict(
    table: Table,
    diagnosis: Diagnosis | None,
    notes: Sequence[str],
    decoder: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    first = table.position(table.first)
    status, sentence = table.verdict, table.finding
    # The verdict on tokens outranks that on tensors: it is what the user of a model sees.
    judged = [part for part in decoder if part["checks"] or part["verdict"] != "unjudged"]
    if judged or (decoder and not table.rows):
        status, sentence = _of_decoder(judged or decoder)
    site = table.first_site or None
    class_name = ""
    if site is not None:
        named = (row for row in table.rows if row.site == site and row.class_name)
        row = next(named, None)
        if row is not None:
            other = row.candidate_class
            class_name = f"{row.class_name} → {other}" if other else row.class_name
    limits_text = table.limits.get("said")
    losses = [
        f"{name} run: {loss}"
        for name, side in (("reference", table.reference), ("candidate", table.candidate))
        for loss in side.losses
    ]
    return {
        "status": status,
        "sentence": sentence,
        "headline": _headline(judged),
        "site": site,
        "row": first,
        "class": class_name,
        "ordered": table.reference.ordered,
        "kind": str(table.limits.get("kind", "runs")),
        "cause": _cause(diagnosis, site),
        "coverage": table.coverage.as_json(),
        "failing": len(table.failing),
        "limits": limits_text if isinstance(limits_text, str) else "",
        "notes": [*table.notes, *losses, *notes],
        "tiles": [*_step_tiles(table), *_tiles(table)],
    }


def _step_tiles(table: Table) -> list[list[str]]:
    """A tile with the compared steps, if not all steps that ran were compared."""
    covered = table.covered
    if covered is None or not min(covered.ran) > len(covered.steps) > 0:
        return []
    ran = " and ".join(dict.fromkeys(map(str, covered.ran)))
    return [["Steps", f"{spans(covered.steps)} of {ran}", "the others ran and were not captured"]]


def _tiles(table: Table) -> list[list[str]]:
    """A tile with the difference of the final output, if the comparison has it."""
    outputs = [row for row in table.rows if row.port == "output" and row.compared and row.metrics]
    if not outputs or not table.reference.ordered:
        return []
    model_outputs = [row for row in outputs if row.site in ("(root)", "")]
    last = (model_outputs or outputs)[-1]
    metric = last.decided_by or "relative_l2"
    value = last.metrics.get(metric)
    # Other metrics have no scale that a headline could show.
    if value is None or metric not in DRAWN:
        return []
    name = "Output of the model" if model_outputs else f"Last output, {last.site}"
    allowed = "" if last.limit is None else f"{last.limit:g} allowed"
    shown = f"{float(value):.3g}"
    if last.limit is not None and shown == f"{last.limit:.3g}":  # 0.04998 keeps 0.05
        shown = f"{float(value):.5g}"
    return [[name, f"{metric} {shown}", allowed]]


def _headline(judged: Sequence[Mapping[str, Any]]) -> str:
    """The headline of a decoder's validation; empty for another page."""
    if not judged:
        return ""
    # A failing part decides the headline; passing parts only if none fails.
    worst = min(judged, key=lambda part: ("fail", "unjudged", "pass").index(str(part["verdict"])))
    checks = cast("list[dict[str, Any]]", worst["checks"])
    failing = max((int(check["failing"]) for check in checks), default=0)
    if worst["verdict"] == "fail":
        return f"{failing:,} of {int(checks[0]['kept']):,} generated tokens differ too much"
    return "The two say the same" if not checks else "The two say the same, or nearly"


def _cause(diagnosis: Diagnosis | None, site: str | None) -> dict[str, Any] | None:
    """Kind and site of the error; None if the diagnosis names none."""
    if diagnosis is None or not diagnosis.introduced:
        return None
    by = str(diagnosis.evidence.get("by", ""))
    return {
        "kind": diagnosis.cause,
        "sentence": diagnosis.sentences[1] if len(diagnosis.sentences) > 1 else "",
        "where": diagnosis.sentences[0] if diagnosis.sentences else "",
        "share": diagnosis.sentences[2] if len(diagnosis.sentences) > 2 else "",
        "site": diagnosis.first_site,
        "agrees": site is None or diagnosis.first_site == site,
        "confidence": diagnosis.confidence,
        "by": _METHOD_NAMES.get(by, by),
    }


def _of_decoder(parts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The verdict of a page without a table of tensors: that of the first failing part."""
    order = ("fail", "unjudged", "pass")
    worst = min(parts, key=lambda part: order.index(str(part["verdict"])))
    return str(worst["verdict"]), str(worst["sentence"])


def _roots(run: Run | None, table: Table) -> list[Mapping[str, Any]]:
    if run is None or not table.rows:
        return []
    key = table.rows[0].key
    topology = run.topology(key.rank, key.process)
    roots = topology.get("roots") if topology is not None else None
    return cast("list[Mapping[str, Any]]", roots) if isinstance(roots, list) else []
