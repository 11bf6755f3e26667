"""The plan file: a plan as TOML that a person can read and edit, one table per pair.

Writing is implemented here, because the standard library can only read TOML. Reading is strict: a
tensor that no run has, or a field that does not exist, is refused with its line. `saved_plan` also
adds what is not saved: program lines and fusions, which are looked up in the runs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from driftline.alignment.plan import NOT_PLANNED, LeftOut, Pair, Plan, Rule, execution
from driftline.alignment.recipe import Recipe, check_recipe, recipe_from_json
from driftline.errors import BadFile, BadInput, DriftlineError, did_you_mean
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

VERSION = 1
# A gibibyte holds some millions of pairs; a larger file is not a plan, and would fill the memory.
_LARGEST = 1 << 30
_HOW = "`driftline compare REF CAND --dry-run --save-plan FILE` writes one"
_TABLES = {
    "pair": (
        *("reference", "candidate", "by", "confidence"),
        *("reference_recipe", "candidate_recipe", "trouble"),
    ),
    "missing": ("reference", "reason"),
    "extra": ("candidate", "reason"),
}
_TOP = ("plan", "reference", "candidate", "notes", "left_out", *_TABLES)


def write_plan(plan: Plan, path: Path, reference: str = "", candidate: str = "") -> None:
    """Write a plan for people to edit.

    Args:
        plan: The plan to write.
        path: Path of the file; an existing file is replaced.
        reference: Name of the reference, for the reader.
        candidate: Name of the candidate.

    Raises:
        BadInput: The file cannot be written.
    """
    try:
        path.write_text("\n".join(_lines(plan, reference, candidate)) + "\n", encoding="utf-8")
    except OSError as trouble:
        raise BadInput(
            f"cannot write the plan {path}: {trouble.strerror}",
            hint="give --save-plan a path that can be written",
        ) from trouble


def _lines(plan: Plan, reference: str, candidate: str) -> Iterator[str]:
    yield "# What `driftline compare` sets against what. Change, add and remove pairs as you like,"
    yield "# then give it back: driftline compare REF CAND --plan THIS_FILE"
    yield "# Only these pairs are compared; [[missing]] and [[extra]] are there to be read."
    yield f"plan = {VERSION}"
    if reference or candidate:
        yield f"reference = {_text(reference)}"
        yield f"candidate = {_text(candidate)}"
    if plan.notes:
        yield "notes = [" + ", ".join(map(_text, plan.notes)) + "]"
    if plan.left_out:
        texts = (f"{part.side}: {part.elements}: {part.words}" for part in plan.left_out)
        yield "left_out = [" + ", ".join(map(_text, texts)) + "]"
    for pair in plan.pairs:
        yield "\n[[pair]]"
        yield f"reference = {_text(str(pair.reference.key))}"
        yield f"candidate = {_text(str(pair.candidate.key))}"
        yield f"by = {_text(pair.by)}"
        yield f"confidence = {float(pair.confidence)!r}"
        for side, recipe in (
            ("reference", pair.reference_recipe),
            ("candidate", pair.candidate_recipe),
        ):
            if recipe is not None:
                yield f"{side}_recipe = {_value(recipe.as_json())}"
        if pair.trouble:
            yield f"trouble = {_text(pair.trouble)}"
    for table, side, records in (
        ("missing", "reference", plan.missing),
        ("extra", "candidate", plan.extra),
    ):
        for record in records:
            yield f"\n[[{table}]]"
            yield f"{side} = {_text(str(record.key))}"
            if reason := plan.reasons.get((side, record.key)):
                yield f"reason = {_text(reason)}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value).items()
        return "{ " + ", ".join(f"{name} = {_value(element)}" for name, element in inner) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(element) for element in cast("list[Any]", value)) + "]"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(text: str) -> str:
    """A TOML basic string; all other than plain characters are escaped.

    >>> _text('a"b')
    '"a\\\\"b"'
    """
    # Quotes and backslashes first, because the later escapes contain backslashes themselves.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", _code, escaped) + '"'


def _code(match: re.Match[str]) -> str:
    code = ord(match.group())
    # TOML cannot hold half of a surrogate pair, which file names may contain; it becomes U+FFFD.
    return "\\ufffd" if code >= 0xD800 else f"\\u{code:04x}"


def read_plan(path: Path, reference: Run, candidate: Run) -> Plan:
    """Read a saved plan for two runs.

    Raises:
        BadFile: The file cannot be read, or something in it is invalid; the message names the line.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise BadFile(
                f"{path} is too large for a plan", hint="is it the file that --save-plan wrote?"
            )
        text = path.read_text(encoding="utf-8")
        document: Mapping[str, Any] = tomllib.loads(text)
    except OSError as trouble:
        raise BadFile(f"cannot read the plan {path}: {trouble.strerror}", hint=_HOW) from trouble
    except (ValueError, RecursionError) as trouble:  # no TOML, no UTF-8, a number of 5000 digits
        raise BadFile(f"{path} is no plan: {trouble}", hint=_HOW) from trouble
    return _Reader(path, text, reference, candidate).plan(document)


class _Reader:
    """Converts the tables of one plan file to a plan; every error names its line."""

    def __init__(self, path: Path, text: str, reference: Run, candidate: Run) -> None:
        self.path = path
        self.text = text
        self.sides = {
            "reference": {str(record.key): record for record in reference.records},
            "candidate": {str(record.key): record for record in candidate.records},
        }

    def plan(self, document: Mapping[str, Any]) -> Plan:
        # A misspelt table would silently drop pairs, so unknown names are refused.
        for name in document:
            if name not in _TOP:
                raise self._bad(f"'{name}' means nothing in a plan", "", 0, name, _TOP)
        if document.get("plan") != VERSION:
            raise BadFile(
                f"{self.path} is no plan: it does not begin with 'plan = {VERSION}'",
                hint="driftline compare REF CAND --save-plan FILE writes one",
            )
        tables = {name: self._tables(document, name) for name in _TABLES}
        pairs = [self._pair(index, fields) for index, fields in enumerate(tables["pair"])]
        if not pairs:
            raise BadFile(f"{self.path} has no [[pair]]", hint="nothing would be compared")
        reasons: dict[tuple[str, TensorKey], str] = {}
        for table, side in (("missing", "reference"), ("extra", "candidate")):
            for index, fields in enumerate(tables[table]):
                record = self._record(table, index, fields, side)
                reasons[side, record.key] = str(fields.get("reason", "")) or NOT_PLANNED
        # Every tensor that no pair uses is listed as unpaired, whatever the file says about it.
        used = {id(record) for pair in pairs for record in pair.records}
        alone = [
            tuple(record for record in side.values() if id(record) not in used)
            for side in self.sides.values()
        ]
        for side, records in zip(self.sides, alone, strict=True):
            for record in records:
                reasons.setdefault((side, record.key), NOT_PLANNED)
        notes = tuple(map(str, cast("Sequence[Any]", document.get("notes", ()))))
        pairs.sort(key=lambda pair: execution(pair.reference))
        left_out = tuple(self._left_out(document.get("left_out", [])))
        selected = (f"the plan {self.path}",)
        return Plan(
            tuple(pairs), alone[0], alone[1], notes, reasons, left_out=left_out, selected=selected
        )

    def _left_out(self, texts: object) -> Iterator[LeftOut]:
        for text in cast("list[Any]", texts) if isinstance(texts, list) else ():
            side, _, rest = str(text).partition(": ")
            elements, _, words = rest.partition(": ")
            if side not in self.sides or not elements.isdecimal():
                raise BadFile(
                    f"{self.path}: '{text}' says in no way what is left out",
                    hint='such as "split(axis 0, 4:8)"; docs/alignment.md lists the steps',
                )
            yield LeftOut(side, words, int(elements))

    def _tables(self, document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        tables = document.get(name, [])
        if not isinstance(tables, list) or not all(
            isinstance(entry, Mapping) for entry in cast("list[Any]", tables)
        ):
            raise self._bad(f"'{name}' is written [[{name}]]", "", 0, name)
        for index, table in enumerate(cast("list[Mapping[str, Any]]", tables)):
            for field in table:
                if field not in _TABLES[name]:
                    sentence = f"[[{name}]] has no field '{field}'"
                    raise self._bad(sentence, name, index, field, _TABLES[name])
        return cast("list[Mapping[str, Any]]", tables)

    def _pair(self, index: int, fields: Mapping[str, Any]) -> Pair:
        reference = self._record("pair", index, fields, "reference")
        candidate = self._record("pair", index, fields, "candidate")
        by, confidence = fields.get("by", "plan"), fields.get("confidence", 1.0)
        if by not in get_args(Rule):
            raise self._bad(f"'{by}' is no rule", "pair", index, "by", get_args(Rule))
        # A bool is an int in Python, but `true` is not a confidence.
        number = isinstance(confidence, (int, float)) and not isinstance(confidence, bool)
        if not number or not 0 <= cast(float, confidence) <= 1:
            sentence = f"confidence is a number from 0 to 1, not {confidence!r}"
            raise self._bad(sentence, "pair", index, "confidence")
        first, second = (self._recipe(index, fields, side) for side in ("reference", "candidate"))
        trouble = str(fields.get("trouble", ""))
        return Pair(reference, candidate, cast(Rule, by), float(confidence), first, second, trouble)

    def _recipe(self, index: int, fields: Mapping[str, Any], side: str) -> Recipe | None:
        field = f"{side}_recipe"
        if field not in fields:
            return None
        try:
            recipe = recipe_from_json(fields[field], self._finder(index, side, field))
            check_recipe(recipe)
            return recipe
        # Errors of this file already name their line; those of recipes get it here.
        except BadFile:
            raise
        except DriftlineError as trouble:
            raise BadFile(
                f"{self.path}, line {self._line('pair', index, field)}: {trouble}",
                hint=trouble.hint,
            ) from trouble

    def _finder(self, index: int, side: str, field: str) -> Callable[[str], Record]:
        def find(key: str) -> Record:
            record = self.sides[side].get(key)
            if record is None:
                raise self._bad(f"the {side} has no {key}", "pair", index, field, self.sides[side])
            return record

        return find

    def _record(self, table: str, index: int, fields: Mapping[str, Any], side: str) -> Record:
        key = fields.get(side)
        if not isinstance(key, str):
            sentence = f"[[{table}]] needs a '{side}', the key of a tensor in quotes"
            raise self._bad(sentence, table, index, side)
        record = self.sides[side].get(key)
        if record is None:
            raise self._bad(f"the {side} has no {key}", table, index, side, self.sides[side])
        return record

    def _bad(
        self,
        sentence: str,
        table: str,
        index: int,
        field: str,
        candidates: Sequence[str] | Any = (),
    ) -> BadFile:
        # For an unknown tensor the hint compares keys, for an unknown field the names of fields.
        words = sentence.rpartition(" ")[2] if isinstance(candidates, Mapping) else field
        hint = did_you_mean(words, cast("Sequence[str]", candidates)) if candidates else ""
        return BadFile(
            f"{self.path}, line {self._line(table, index, field)}: {sentence}", hint=hint
        )

    def _line(self, table: str, index: int, field: str) -> int:
        """Line number of a field of the nth table; the table's own line if the field is missing."""
        head = re.compile(rf"\s*\[\[\s*{re.escape(table)}\s*\]\]")
        line_of = re.compile(rf'\s*"?{re.escape(field)}"?\s*=')
        # tomllib gives no line numbers, so the text is searched for the nth table of this name.
        # Fields outside of tables are searched from the first line.
        start = 0 if table else 1
        for number, line in enumerate(self.text.splitlines(), start=1):
            if not start and head.match(line):
                start, index = (number, index) if index == 0 else (0, index - 1)
            elif start and line_of.match(line):
                return number
            # The next table begins, so the field is missing: return the line of its table.
            elif start and table and line.lstrip().startswith("["):
                break
        return start or 1


def saved_plan(path: Path, reference: Run, candidate: Run, *, compiled: bool) -> Plan:
    """Read a plan and add the program lines and fusions that the runs contain.

    Args:
        path: Path of the file.
        reference: The reference run.
        candidate: The candidate run.
        compiled: Whether one of the runs lists graphs of a compiler.

    Raises:
        BadFile: The file cannot be read, or something in it is invalid.
    """
    # Lines of the program and fusions are not saved; they are looked up in the runs again.
    plan = read_plan(path, reference, candidate)
    if compiled:
        from driftline.alignment.annotate.compiled_graphs import with_lines
        from driftline.alignment.sites.compiled_graphs import graphs_of

        plan = with_lines(plan, graphs_of(reference), graphs_of(candidate))
    from driftline.graphs.sources.exported import exported_graph

    graphs = exported_graph(reference), exported_graph(candidate)
    if graphs != (None, None):
        from driftline.alignment.annotate.fusions import with_fusions

        plan = with_fusions(plan, *graphs)
        # The notes were saved with the plan, and were concluded once more.
        plan = plan._replace(notes=tuple(dict.fromkeys(plan.notes)))
    return plan
