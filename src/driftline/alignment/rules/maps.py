"""Name maps of the user: `--map`, a mapping file, and ait's `op_mapping_file.json`.

A map pairs site with site (globs in which a star stands for the same text on both sides) or class
with class (ait's file). Parsing is strict: a meaningless entry is refused with its file and entry.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.rules.names import pairs_of_sites
from driftline.errors import BadFile, BadInput, did_you_mean
from driftline.runs.records import Record

if TYPE_CHECKING:
    from driftline.alignment.align import AlignOptions, Context

AIT_FILE_NAME = "op_mapping_file.json"
# Room for about a million pairs of names; a larger file is a mistake.
_LARGEST = 64 << 20
_PORTS = {"intensor": "input", "outtensor": "output", "input": "input", "output": "output"}
_FILE = re.compile(r"_(intensor|outtensor|input|output)_?(\d+)?$")
_WORD = re.compile(r"[A-Za-z0-9_.]+")


class ClassMap(NamedTuple):
    """Classes whose names contain `left` do the work of classes whose names contain `right`.

    Attributes:
        left: Part of the class name on one side.
        right: Part of the class name on the other side.
        left_slot: Only this port and slot of the class, such as ("output", "0"); None for all.
        right_slot: The same for the other side.
    """

    left: str
    right: str
    left_slot: tuple[str, str] | None = None
    right_slot: tuple[str, str] | None = None


class MappingFile(NamedTuple):
    """The content of a mapping file."""

    sites: tuple[tuple[str, str], ...] = ()
    classes: tuple[ClassMap, ...] = ()


def parse_map(text: str) -> tuple[str, str]:
    """Parse `REFERENCE=CANDIDATE`.

    Raises:
        BadInput: The text does not have that form, or has stars on one side only.
    """
    left, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not left or not right:
        raise BadInput(
            f"--map '{text}' does not name two sites",
            hint="write REFERENCE=CANDIDATE, such as --map 'model.*=*'",
        )
    if right.count("*") not in (0, left.count("*")) or ("*" in left and "*" not in right):
        raise BadInput(
            f"--map '{text}' has {left.count('*')} stars on the left and {right.count('*')} on "
            "the right",
            hint="each star stands for the same text on both sides",
        )
    return left, right


def link_sites(
    maps: Sequence[tuple[str, str]], reference: Iterable[str], candidate: Iterable[str]
) -> dict[str, str]:
    """Sites of the reference → sites of the candidate; the first map that fits is used.

    Raises:
        BadInput: A map fits no site, or gives two sites the same partner.
    """
    # A dict keeps the execution order and drops repeats.
    reference_sites, candidate_sites = list(dict.fromkeys(reference)), set(candidate)
    links: dict[str, str] = {}
    owner_of: dict[str, str] = {}
    # Stars become groups, and their text is inserted into the right side.
    for left, right in maps:
        pattern = re.compile("(.*)".join(re.escape(piece) for piece in left.split("*")))
        hits = [
            (site, hit) for site in reference_sites if (hit := pattern.fullmatch(site)) is not None
        ]
        if not hits:
            raise BadInput(
                f"--map '{left}={right}': no site of the reference matches '{left}'",
                hint=did_you_mean(left, reference_sites),
            )
        named = 0
        for site, hit in hits:
            partner = _filled(right, hit.groups())
            # A site that an earlier map has taken still counts as named, because overlapping maps
            # are not an error.
            if partner not in candidate_sites or site in links:
                named += site in links
                continue
            named += 1
            if (other := owner_of.get(partner)) is not None:
                raise BadInput(
                    f"--map gives '{partner}' to '{other}' and to '{site}'",
                    hint="each site of the candidate can be paired with one of the reference",
                )
            links[site] = partner
            owner_of[partner] = site
        if not named:
            wanted = _filled(right, hits[0][1].groups())
            raise BadInput(
                f"--map '{left}={right}': the candidate has no site '{wanted}'",
                hint=did_you_mean(wanted, candidate_sites),
            )
    return links


def _filled(right: str, groups: Sequence[str]) -> str:
    pieces = right.split("*")
    stars = (*groups, *[""] * len(pieces))
    return (
        "".join(piece + star for piece, star in zip(pieces, stars, strict=False))
        if (len(pieces) > 1)
        else right
    )


def read_mapping(path: Path) -> MappingFile:
    """Read a file of site pairs (TOML or JSON), ait's file, or the folder that contains it.

    Raises:
        BadFile: The file is missing, too large, or not a mapping.
    """
    file = path / AIT_FILE_NAME if path.is_dir() else path
    try:
        if file.stat().st_size > _LARGEST:
            raise BadFile(f"{file} is too large for a mapping")
        text = file.read_text(encoding="utf-8")
    except OSError as trouble:
        inside = f"; the folder {path} has none" if path.is_dir() else ""
        raise BadFile(f"cannot read the mapping {file}: {trouble.strerror}{inside}") from trouble
    except UnicodeDecodeError:
        raise BadFile(f"{file} is no text") from None
    try:
        data: Any = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as trouble:
        raise BadFile(f"{file} cannot be read: {trouble}") from trouble
    if not isinstance(data, Mapping):
        raise BadFile(
            f"{file} is no mapping", hint='it holds one table: {"reference site": "candidate site"}'
        )
    table = cast("Mapping[str, Any]", data)
    # ait's own file holds only classes. Ours may hold both tables; plain site pairs need neither.
    if file.name == AIT_FILE_NAME or (set(table) <= {"classes", "sites"} and "classes" in table):
        classes = table if file.name == AIT_FILE_NAME else table["classes"]
        sites = () if file.name == AIT_FILE_NAME else _pairs(file, table.get("sites", {}))
        return MappingFile(sites, _classes(file, classes))
    return MappingFile(_pairs(file, table.get("sites", table)))


def _pairs(file: Path, table: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(table, Mapping):
        raise BadFile(
            f"{file}: 'sites' is no table", hint='[sites] holds lines such as "model.*" = "*"'
        )
    pairs: list[tuple[str, str]] = []
    for name, value in cast("Mapping[str, Any]", table).items():
        if not isinstance(value, str) or not value:
            raise BadFile(
                f"{file}: '{name}' is mapped to {str(value)[:60]!r}, not to a site",
                hint='write "reference site" = "candidate site"; quote names that have dots',
            )
        pairs.append(parse_map(f"{name}={value}"))
    return tuple(pairs)


def _classes(file: Path, table: object) -> tuple[ClassMap, ...]:
    if not isinstance(table, Mapping):
        raise BadFile(
            f"{file}: classes are a table of class names",
            hint='[classes] holds lines such as "Linear" = "LinearOperation"',
        )
    class_maps: list[ClassMap] = []
    for name, value in cast("Mapping[str, Any]", table).items():
        if not isinstance(value, (str, list)) or not value:
            raise BadFile(
                f"{file}: '{name}' needs a class name, or a list of them",
                hint='such as "Linear" = "LinearOperation"',
            )
        for partner in cast("list[Any]", [value] if isinstance(value, str) else value):
            for word in (name, partner):
                if not isinstance(word, str) or not _WORD.fullmatch(word):
                    raise BadFile(
                        f"{file}: {str(word)[:60]!r} is no class name",
                        hint="letters, digits and _, such as RmsNormOperation or GLMBlock_output_0",
                    )
            left, left_slot = _with_slot(name)
            right, right_slot = _with_slot(cast(str, partner))
            class_maps.append(ClassMap(left, right, left_slot, right_slot))
    return tuple(class_maps)


def _with_slot(word: str) -> tuple[str, tuple[str, str] | None]:
    """Split `GLMBlock_output_0` into the class, and port and slot of the tensor."""
    file = _FILE.search(word)
    if file is None or not file.start():
        return word, None
    return word[: file.start()], (_PORTS[file.group(1)], file.group(2) or "0")


def unmatched(
    maps: Sequence[ClassMap], reference: Iterable[Record], candidate: Iterable[Record]
) -> list[str]:
    """A sentence for every entry that does not apply to these two runs."""
    sides = [{record.class_name for record in side} for side in (reference, candidate)]
    every = sides[0] | sides[1]
    notes: list[str] = []
    entries: dict[str, list[str]] = {}
    for entry in maps:
        # The classes of one list are alternatives: a single existing class is enough.
        entries.setdefault(entry.left, []).append(entry.right)
    for name, partners in entries.items():
        if any(
            _fits(name, own) and any(_fits(partner, other) for partner in partners)
            for own, other in (sides, sides[::-1])
        ):
            continue
        unknown = [word for word in (name, *partners) if not _fits(word, every)]
        listed = " or ".join(f"'{partner}'" for partner in partners)
        if unknown:
            why = f"no class of either side is called '{unknown[0]}'; "
            why += did_you_mean(unknown[0], every)
        else:
            why = "both are on the same side"
        notes.append(f"the entry '{name}' for {listed} changes nothing: {why}")
    return notes


def _fits(word: str, classes: Iterable[str]) -> bool:
    return any(word in name for name in classes)


def link_classes(
    maps: Sequence[ClassMap], reference: Sequence[Record], candidate: Sequence[Record]
) -> list[tuple[Record, Record]]:
    """Tensors of mapped classes, paired in order if both sides have equally many.

    In ait's file the keys are the candidate's classes (ATB) and the values the reference's (torch).
    If it fits only in the other direction, it is used in that direction.
    """
    pairs: list[tuple[Record, Record]] = []
    used: set[int] = set()
    for class_map in maps:
        flipped = ClassMap(
            class_map.right, class_map.left, class_map.right_slot, class_map.left_slot
        )
        # Users write both directions, so the documented direction is tried first, then the reverse.
        for choice in (flipped, class_map):
            records = _calls(reference, choice.left, choice.left_slot)
            partners = _calls(candidate, choice.right, choice.right_slot)
            if records and len(records) == len(partners):
                new = [
                    (a, b)
                    for a, b in zip(records, partners, strict=True)
                    if id(a) not in used and id(b) not in used
                ]
                used.update(id(record) for pair in new for record in pair)
                pairs += new
                break
    return pairs


def _calls(records: Sequence[Record], word: str, slot: tuple[str, str] | None) -> list[Record]:
    port, which = slot or ("output", "0")
    first: dict[tuple[object, ...], Record] = {}
    # Class maps pair by position, which is only meaningful in execution order.
    for record in sorted(records, key=lambda r: (r.key.rank, r.key.process, r.key.step, r.order)):
        key = record.key
        if (
            word in record.class_name
            and key.port == port
            and key.moment == ("before" if port == "input" else "after")
        ):
            place = (key.rank, key.process, key.step, key.site, key.visit)
            # ait counts outputs from 0; if a dump has named slots, the first slot counts as 0.
            if which in (key.slot, record.alias) or (which == "0" and place not in first):
                first[place] = record
    return list(first.values())


def by_map(plan: Plan, context: Context) -> Plan:
    """Pairs by the maps of the command line and of a file."""
    return pair_by_map(plan, context.options)


def pair_by_map(plan: Plan, options: AlignOptions) -> Plan:
    """The plan with pairs of the sites that the user's maps name."""
    maps = [parse_map(text) for text in options.maps]
    mapping = None if options.mapping_file is None else read_mapping(options.mapping_file)
    if mapping is not None:
        # Maps of the command line come first, so that they override those of the file.
        maps += mapping.sites
    sites = [{record.key.site for record in side} for side in (plan.missing, plan.extra)]
    links = link_sites(maps, (record.key.site for record in plan.missing), sites[1])
    return plan.with_pairs(pairs_of_sites(plan, links, "map", 1.0))


def by_class_map(plan: Plan, context: Context) -> Plan | None:
    """Pairs of mapped classes, for tensors that structure left unpaired.

    A map of classes says which classes do the same work. Which sites correspond is a question of
    structure, which was tried before. Order alone decides only if nothing better is known.
    """
    path = context.options.mapping_file
    classes = () if path is None else read_mapping(path).classes
    if not classes:
        return None
    notes = unmatched(classes, context.reference.records, context.candidate.records)
    context.notes.extend(f"{path}: {note}" for note in notes)
    # Without an execution order on both sides, the nth of one need not be the nth of the other.
    runs = (context.reference, context.candidate)
    if context.structural and any(run.facts.order != "execution" for run in runs):
        return None
    linked = link_classes(classes, plan.missing, plan.extra)
    pairs = [Pair(reference, candidate, "map") for reference, candidate in linked]
    return plan.with_pairs(pairs).with_reasons_of_unpaired() if pairs else None


def mapped_classes(mapping: Path | None) -> list[tuple[str, str]]:
    """Pairs of classes that a file maps to each other; empty without a file."""
    if mapping is None:
        return []
    return [(link.left, link.right) for link in read_mapping(mapping).classes]
