"""A part of a comparison: the measured rows of one shard, and facts that must agree for merging.

It is one JSON file, written as a whole or not at all; docs/table-format.md specifies it. Rows are
measured but not judged, because a row may inherit its limit from a row of another shard.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from driftline.alignment.plan import Plan
from driftline.comparison.differences.difference import Difference
from driftline.comparison.table.files import ROWS, RowText, write_rows
from driftline.comparison.table.row import (
    JSON,
    Column,
    Row,
    number_from_json,
    number_to_json,
)
from driftline.comparison.table.structure import NO_STRUCTURE, Structure
from driftline.comparison.table.table import Side, Table
from driftline.comparison.training.training_report import TrainingReport
from driftline.errors import AlreadyThere, BadFile, BadInput
from driftline.execution.slicing import Shard
from driftline.runs.records import Record

if TYPE_CHECKING:
    from _typeshed import StrPath

SCHEMA = "driftline.part/1"
_LONG = 16 << 20


@dataclass(frozen=True)
class Part:
    """One shard of a comparison.

    Attributes:
        shard: The number of the shard, and the number of all.
        made: The versions of Driftline and numpy, and the path of the kernel.
        plan: Digest of the whole plan, for all shards.
        pairs: Number of pairs of all shards.
        tolerance: The limits, in the form of a table.
        columns: The meaning of the metrics of the rows.
        reference: Where the reference came from.
        candidate: Where the candidate came from.
        notes: Conclusions of the alignment.
        places: The indices of the pairs of the plan that the rows are about.
        rows: A row for each of these pairs.
        missing: Rows of tensors that only the reference has, in the first shard only.
        extra: Rows of tensors that only the candidate has, in the first shard only.
        masked: Rows of these pairs that may fail, measured again without padding.
        structure: Facts about the structure of the model, in the first shard only.
        looks: Second looks at rows that may make a site suspect: the index of the row, its error on
            the better half of the tokens, and its error on the tokens that count.
        look_notes: Notes from the second looks.
        differences: The differences of the two models, in the first shard only.
        training: The comparison of two trainings, in the first shard only.
        source: The file from which it was read.
    """

    shard: Shard
    made: Mapping[str, str]
    plan: str
    pairs: int
    tolerance: Mapping[str, JSON]
    columns: tuple[Column, ...]
    reference: Side
    candidate: Side
    notes: tuple[str, ...]
    places: Sequence[int]
    rows: Sequence[Row]
    missing: tuple[Row, ...] = ()
    extra: tuple[Row, ...] = ()
    masked: tuple[Row, ...] = ()
    structure: Structure = NO_STRUCTURE
    looks: tuple[tuple[int, float, float], ...] = ()
    look_notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] | None = None
    training: TrainingReport | None = None
    source: str = field(default="", compare=False)

    @property
    def file_name(self) -> str:
        return part_name(self.shard)

    def __str__(self) -> str:
        return f"shard {self.shard}: {len(self.rows)} of {self.pairs} pairs"

    def write(self, folder: StrPath, *, force: bool = False) -> Path:
        """Write the part into a folder, which may have parts of other shards.

        Raises:
            AlreadyThere: The folder already has this shard, and `force` was not given.
            BadInput: The folder is a file, or cannot be written.
        """
        goal = Path(folder) / self.file_name
        refuse_part(goal, force=force)
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            # Renamed when complete, so that an existing part is always whole.
            draft = goal.with_name(f".{goal.name}.{os.getpid()}")
            with draft.open("w", encoding="utf-8", buffering=1 << 20) as stream:
                self._write(stream)
            draft.replace(goal)
        except OSError as trouble:
            raise BadInput(
                f"cannot write {goal}: {trouble.strerror}", hint="give another -o"
            ) from trouble
        return goal

    def _write(self, stream: TextIO) -> None:
        encode = json.JSONEncoder(allow_nan=False).encode
        stream.write(encode(self.head_as_json())[:-1] + ROWS)
        write_rows(self.rows, stream)
        lone = {"missing": self.missing, "extra": self.extra, **self._masked()}
        rest = encode({name: [row.as_json() for row in rows] for name, rows in lone.items()})
        stream.write(f"], {rest[1:]}\n")

    def as_json(self) -> dict[str, JSON]:
        """The content of the file; non-finite numbers are "nan", "inf" and "-inf"."""
        lists = {
            "rows": self.rows,
            "missing": self.missing,
            "extra": self.extra,
            **self._masked(),
        }
        shown = {name: [row.as_json() for row in rows] for name, rows in lists.items()}
        return {**self.head_as_json(), **shown}

    def _masked(self) -> dict[str, Sequence[Row]]:
        """The masked rows by their key, if there are any: files of version 0.1.0 lack the key."""
        return {"masked": self.masked} if self.masked else {}

    def head_as_json(self) -> dict[str, JSON]:
        """The content without the rows, which come last."""
        # Columns and sides are written as in a table, so that one function reads both.
        frame = Table(
            (),
            self.columns,
            reference=self.reference,
            candidate=self.candidate,
            differences=self.differences,
            training=self.training,
        )
        shown = frame.as_json()
        return {
            "schema": SCHEMA,
            "shard": self.shard.number,
            "of": self.shard.of,
            "made": dict(self.made),
            "plan": self.plan,
            "pairs": self.pairs,
            "tolerance": dict(self.tolerance),
            **{name: shown[name] for name in ("metrics", "reference", "candidate")},
            "notes": list(self.notes),
            "places": _ranges(self.places),
            **({"structure": self.structure.as_json()} if self.structure != NO_STRUCTURE else {}),
            **({"looks": self._looks()} if self.looks else {}),
            **({"look_notes": list(self.look_notes)} if self.look_notes else {}),
            **{name: shown[name] for name in ("differences", "training") if name in shown},
        }

    def _looks(self) -> list[list[JSON]]:
        return [[place, *map(number_to_json, figures)] for place, *figures in self.looks]

    @classmethod
    def from_json(cls, shown: JSON, source: str, rows: Sequence[Row] | None = None) -> Part:
        """The inverse of `as_json`.

        Args:
            shown: The JSON values.
            source: Name of the part in messages.
            rows: Its rows, if they were read separately.

        Raises:
            BadFile: It is not a part, or its schema is unknown to this version.
        """
        if not isinstance(shown, dict) or "schema" not in shown:
            raise BadFile(f"{source} is no part of a comparison", hint=_HOW)
        top = cast(dict[str, JSON], shown)
        if top["schema"] != SCHEMA:
            raise BadFile(
                f"{source} has schema {top['schema']!r}; this version merges {SCHEMA!r}", hint=_HOW
            )
        try:
            shard = Shard(int(top["shard"]), int(top["of"]))
            rows = _rows(top["rows"]) if rows is None else rows
            places = _expanded(top["places"], len(rows))
            # The file may come from another machine, so everything in it is checked.
            if not 1 <= shard.number <= shard.of or len(places) != len(rows):
                raise ValueError("its numbers do not fit together")
            frame = Table.from_json(
                {
                    **{name: top[name] for name in ("metrics", "reference", "candidate", "notes")},
                    **{name: top[name] for name in ("differences", "training") if name in top},
                    # The reader of tables needs a schema and a verdict.
                    "schema": "driftline.table/1",
                    "verdict": "unjudged",
                    "rows": [],
                },
                source=source,
            )
            return cls(
                shard,
                {str(name): str(value) for name, value in top["made"].items()},
                str(top["plan"]),
                int(top["pairs"]),
                dict(top["tolerance"]),
                frame.columns,
                frame.reference,
                frame.candidate,
                frame.notes,
                places,
                rows,
                _rows(top["missing"]),
                _rows(top["extra"]),
                _rows(top.get("masked", [])),
                Structure.from_json(top.get("structure", {})),
                _looks_from(top.get("looks", ()), len(rows)),
                tuple(map(str, top.get("look_notes", ()))),
                frame.differences,
                frame.training,
                source,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as trouble:
            raise BadFile(
                f"{source} is a damaged part of a comparison: {type(trouble).__name__}: {trouble}"
            ) from trouble


def _looks_from(shown: JSON, rows: int) -> tuple[tuple[int, float, float], ...]:
    looks = tuple(
        (int(place), float(number_from_json(half)), float(number_from_json(rest)))
        for place, half, rest in shown
    )
    if not all(0 <= place < rows for place, _, _ in looks):
        raise ValueError("second looks at rows that are not there")
    return looks


_HOW = "`driftline compare REF CAND --shard 1/8 -o DIR` writes one"


def part_name(shard: Shard) -> str:
    """The file name of a shard; names of one comparison sort by number."""
    return f"shard-{shard.number:0{len(str(shard.of))}d}-of-{shard.of}.json"


def refuse_part(goal: Path, *, force: bool) -> None:
    """Refuse, before anything is measured, if a part cannot be written.

    Raises:
        AlreadyThere: The part exists, and `force` was not given.
        BadInput: Its folder is a file.
    """
    if goal.parent.exists() and not goal.parent.is_dir():
        raise BadInput(
            f"{goal.parent} is a file; -o takes a folder, for the parts of all shards",
            hint="give another -o",
        )
    if goal.exists() and not force:
        raise AlreadyThere(f"{goal} is there already", hint="give another -o, or --force")


def open_parts(paths: Sequence[StrPath]) -> list[Part]:
    """Open parts by their paths, or all parts in folders; each file only once.

    Raises:
        BadFile: A file is not a part, or a folder has none.
    """
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        inside = [path]
        if path.is_dir():
            inside = sorted(path.glob("shard-*-of-*.json")) or sorted(
                path.glob("*/shard-*-of-*.json")
            )
            if not inside:
                raise BadFile(f"{path} holds no part of a comparison", hint=_HOW)
        # By real path, because a folder and a file in it may both be given.
        files |= {file.resolve(): file for file in inside}
    return [_open(path) for path in files.values()]


def _open(path: Path) -> Part:
    try:
        # Read long files row by row, because all rows as JSON take far more memory than the file.
        if path.stat().st_size > _LONG and (part := _row_by_row(path)) is not None:
            return part
        shown = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadFile(f"there is no '{path}'", hint=_HOW) from None
    except (ValueError, OSError, RecursionError) as trouble:
        raise BadFile(
            f"{path} is no part of a comparison: it cannot be read as JSON ({trouble})", hint=_HOW
        ) from trouble
    return Part.from_json(shown, str(path))


def _row_by_row(path: Path) -> Part | None:
    """Read a long part in the form that Driftline writes; None for any other form."""
    from driftline.comparison.table.row_spool import keep

    try:
        with path.open(encoding="utf-8") as stream:
            text = RowText(stream)
            rows = keep(map(Row.from_json, text.rows()))
            shown = json.loads(text.head + ', "rows": [' + text.tail())
        return Part.from_json(shown, str(path), rows)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadFile):
        return None


def plan_digest(plan: Plan) -> str:
    """A digest of every tensor of a plan, its partner, and their recipes."""
    # Parts may be merged only if all of them pair the same tensors in the same way.
    digest = hashlib.sha256()
    for pair in plan.pairs:
        reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
        how = (
            *(pair.by, pair.confidence, pair.trouble),
            *(
                None if recipe is None else recipe.as_json()
                for recipe in (reference_recipe, candidate_recipe)
            ),
        )
        facts = (_identity(pair.reference), _identity(pair.candidate), how)
        digest.update(repr(facts).encode("utf-8", "surrogatepass"))
    for records in (plan.missing, plan.extra):
        identities = [_identity(record) for record in records]
        digest.update(repr(identities).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _identity(record: Record) -> tuple[Any, ...]:
    return (*record.key, record.order, record.dtype, record.shape, record.kept, record.digest)


def _rows(shown: list[JSON]) -> tuple[Row, ...]:
    return tuple(map(Row.from_json, shown))


def _ranges(places: Sequence[int]) -> list[list[int]]:
    """Places as ranges: the first of each, and one more than its last.

    >>> _ranges([0, 1, 2, 7]), _ranges(range(3))
    ([[0, 3], [7, 8]], [[0, 3]])
    """
    if isinstance(places, range):
        return [[places.start, places.stop]] if len(places) else []
    ranges: list[list[int]] = []
    for place in places:
        if ranges and ranges[-1][1] == place:
            ranges[-1][1] += 1
        else:
            ranges.append([place, place + 1])
    return ranges


def _expanded(ranges: JSON, most: int) -> Sequence[int]:
    places: list[int] = []
    for start, stop in ranges:
        # A few bytes of a damaged file must not cause gigabytes of places.
        if not 0 <= start <= stop <= start + most:
            raise ValueError("places that there are no rows for")
        if len(ranges) == 1:
            return range(start, stop)
        places += range(start, stop)
        if len(places) > most:
            raise ValueError("more places than rows")
    return tuple(places)
