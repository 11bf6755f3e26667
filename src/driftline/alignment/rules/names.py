"""Pairs by name: first equal keys, then names without the parts that wrappers and conventions add.

Equal: site, port, slot (or its alias), step, visit, rank, process, phase and moment all agree.
Normalised: `module.`, `_orig_mod.` and similar parts are removed anywhere; `layers[3]`, `layers3`,
`h.3` and `blocks.3` are treated as the same name. Two sites are a pair only if the plain name is
unique on both sides. This file also contains the selection by site and port, and the error for runs
without a common tensor.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from driftline.alignment.plan import Pair, Plan, Rule, execution
from driftline.errors import BadInput, did_you_mean
from driftline.runs.records import Record, TensorKey

if TYPE_CHECKING:
    from driftline.alignment.align import Context

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
# Names that model libraries use for the list of layers.
_STACKS = frozenset({"layers", "layer", "h", "blocks", "block", "decoder_layers", "encoder_layers"})
# Longest first, because `base_model.` is a prefix of `base_model.model.`.
_HEADS = ("base_model.model.", "base_model.", "model.", "transformer.")
_INDEX = re.compile(r"\[(\d+)\]")
_GLUED = re.compile(r"([A-Za-z_]*[A-Za-z])_?(\d+)")


@lru_cache(maxsize=1 << 17)
def plain(site: str) -> str:
    """A site without the parts that wrappers and conventions add.

    >>> plain("module._orig_mod.h[3].ln"), plain("base_model.layers7.ln"), plain("(root)")
    ('layers.3.ln', 'base_model.layers.7.ln', '')
    """
    if site == "(root)":
        return ""
    parts = [part for part in _INDEX.sub(r".\1", site).split(".") if part not in _WRAPPERS]
    spelt: list[str] = []
    for part in parts:
        glued = _GLUED.fullmatch(part)
        # In `layers3` and `h_3`, the number is attached to the list's name.
        if glued is not None and glued.group(1) in _STACKS:
            spelt += ["layers", glued.group(2)]
        elif part.isdigit() and spelt and spelt[-1] in _STACKS:
            spelt[-1:] = ["layers", part]
        else:
            spelt.append(part)
    return ".".join(spelt)


def headless(site: str) -> str:
    """A plain name without the prefix of the model: `model.`, `transformer.` or an adapter's."""
    name = plain(site)
    # Only one prefix is removed, because later ones are parts of the model.
    for head in _HEADS:
        if name.startswith(head) and len(name) > len(head):
            return name.removeprefix(head)
    return name


def link_names(reference: Iterable[str], candidate: Iterable[str]) -> dict[str, str]:
    """Sites of the reference → sites of the candidate whose plain names agree."""
    reference_sites, candidate_sites = list(reference), list(candidate)
    links: dict[str, str] = {}
    # Wrappers first, prefixes second, because a name that agrees with its prefix is stronger
    # evidence.
    for simplify in (plain, headless):
        free_sites = _unique(simplify, (site for site in reference_sites if site not in links))
        used = set(links.values())
        free_partners = _unique(simplify, (site for site in candidate_sites if site not in used))
        for name, site in free_sites.items():
            if site is not None and (partner := free_partners.get(name)) is not None:
                links[site] = partner
    return links


def _unique(simplify: object, sites: Iterable[str]) -> dict[str, str | None]:
    """Plain name → its only site; None if several sites have it."""
    # A plain name that two sites share identifies neither of them.
    names: dict[str, str | None] = {}
    for site in sites:
        name = headless(site) if simplify is headless else plain(site)
        names[name] = None if name in names else site
    return names


# --- equal names


WRAPPERS = ("module.", "_orig_mod.", "model.", "base_model.model.", "transformer.")
"""Prefixes that wrappers (data parallel, compile, heads, adapters) add to every name."""


def pair_by_name(reference: Iterable[Record], candidate: Iterable[Record]) -> Plan:
    """Pair all tensors of two runs that have equal keys or aliases; there may be none."""
    reference_records = sorted(reference, key=execution)
    candidate_records = sorted(candidate, key=execution)
    by_key: dict[TensorKey, Record] = {}
    repeated: list[Record] = []  # our own runs have unique keys; dumps of other tools may not
    for record in candidate_records:
        if by_key.setdefault(record.key, record) is not record:
            repeated.append(record)
    pairs: list[Pair] = []
    alone: list[Record] = []
    for record in reference_records:
        partner = by_key.pop(record.key, None)
        if partner is None:
            alone.append(record)
        else:
            pairs.append(Pair(record, partner))
    if alone and by_key:
        by_alias, alone = _by_alias(alone, by_key)
        if by_alias:
            pairs = sorted([*pairs, *by_alias], key=lambda pair: execution(pair.reference))
    # Execution order everywhere, because plans are printed and compared in it.
    extra = tuple(sorted([*by_key.values(), *repeated], key=execution))
    return Plan(tuple(pairs), tuple(alone), extra)


def select(
    records: Sequence[Record], sites: Sequence[str], ports: Sequence[str], *, strict: bool = True
) -> list[Record]:
    """The records whose site matches a glob and whose port is listed; an empty list selects all.

    Raises:
        BadInput: A glob or a port matches nothing, unless `strict` is false.
    """
    known_sites = {record.key.site for record in records}
    wanted_sites = set(known_sites)
    if sites:
        wanted_sites.clear()
        for glob in sites:
            hits = fnmatch.filter(known_sites, glob)
            if strict and not hits:
                raise BadInput(f"no site matches '{glob}'", hint=did_you_mean(glob, known_sites))
            # Globs are matched against the existing names, so that a typing error is refused, not
            # ignored.
            wanted_sites.update(hits)
    known_ports = {record.key.port for record in records}
    for port in ports:
        if strict and port not in known_ports:
            raise BadInput(f"no tensor of port '{port}'", hint=did_you_mean(port, known_ports))
    return [
        record
        for record in records
        if record.key.site in wanted_sites and (not ports or record.key.port in ports)
    ]


def _by_alias(
    alone: list[Record], leftover: dict[TensorKey, Record]
) -> tuple[list[Pair], list[Record]]:
    """Pair by the alias of a slot; partners are removed from `leftover`."""
    known_as: dict[TensorKey, Record] = {}
    for record in leftover.values():
        if record.alias:
            known_as.setdefault(record.key.with_slot(record.alias), record)
    pairs: list[Pair] = []
    still_alone: list[Record] = []
    for record in alone:
        partner = known_as.get(record.key)  # a position here, a name there
        if record.alias and (partner is None or partner.key not in leftover):
            other = record.key.with_slot(record.alias)
            # A name here: a position there, or another name for the same position.
            partner = leftover.get(other) or known_as.get(other)
        if partner is not None and leftover.pop(partner.key, None) is not None:
            pairs.append(Pair(record, partner, by="alias"))
        else:
            still_alone.append(record)
    return pairs, still_alone


def nothing_in_common(reference: Sequence[Record], candidate: Sequence[Record]) -> BadInput:
    """The error for two runs without a common tensor, with the likely reason as a hint."""
    reference_sites = {record.key.site for record in reference}
    candidate_sites = {record.key.site for record in candidate}
    return BadInput(
        f"the two runs share no tensor: {len(reference)} names against {len(candidate)}, "
        "0 in common",
        hint=_hint_of_keys(reference, candidate)
        if reference_sites & candidate_sites
        else _prefix_hint(reference_sites, candidate_sites),
    )


def _hint_of_keys(reference: Sequence[Record], candidate: Sequence[Record]) -> str:
    """The hint if the sites agree: the part of the key that always differs."""
    # Steps and ranks come first: the first part of the key without a common value is the reason.
    for part in ("step", "rank", "process", "port", "phase", "moment", "visit"):
        reference_values = {getattr(record.key, part) for record in reference}
        candidate_values = {getattr(record.key, part) for record in candidate}
        if not reference_values & candidate_values:
            return (
                f"the sites agree, but the reference has {part} {_first_values(reference_values)} "
                f"and the candidate {part} {_first_values(candidate_values)}"
            )
    return "the sites agree, but no port, slot, step and visit together do"


def _prefix_hint(reference: set[str], candidate: set[str]) -> str:
    """A hint if the names of one side are those of the other with a prefix."""
    prefixes: Counter[tuple[str, str]] = Counter()
    for side, longer, shorter in (
        ("candidate", candidate, reference),
        ("reference", reference, candidate),
    ):
        firsts = {site.partition(".")[0] + "." for site in longer if "." in site}
        # Every first part of a name may be a prefix, even if it is in no list.
        for prefix in firsts.union(WRAPPERS):
            cut = {site[len(prefix) :] for site in longer if site.startswith(prefix)} - {""}
            if hits := len(cut & shorter):
                prefixes[side, prefix] = hits
    if prefixes:
        (side, prefix), hits = prefixes.most_common(1)[0]
        return (
            f"{hits} names differ by the prefix '{prefix}' in the {side}; "
            f"try --map '{_map_for(side, prefix)}'"
        )
    first_reference, first_candidate = next(iter(sorted(reference))), next(iter(sorted(candidate)))
    return (
        f"the reference has names like '{first_reference}', the candidate like '{first_candidate}'"
    )


def _map_for(side: str, prefix: str) -> str:
    return f"*={prefix}*" if side == "candidate" else f"{prefix}*=*"


def _first_values(values: set[object]) -> str:
    shown = sorted(str(value) for value in values)
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")


def refuse_unrelated(plan: Plan) -> NoReturn:
    """Raise an error that the two runs have nothing in common, and what was tried."""
    trouble = nothing_in_common(plan.missing, plan.extra)
    if tried := next(iter((*plan.notes, *plan.reasons.values())), ""):
        message = f"{trouble}; structure cannot tell them apart either: {tried}"
        raise BadInput(message, hint=f"{trouble.hint}; --map says which site is which")
    raise trouble


def by_name(plan: Plan, context: Context) -> Plan:
    """Pairs by equal names."""
    del context
    named = pair_by_name(plan.missing, plan.extra)
    if not plan.pairs:
        return named
    return plan.with_pairs(named.pairs)._replace(missing=named.missing, extra=named.extra)


def by_plain_name(plan: Plan, context: Context) -> Plan:
    """Pairs by names without the parts that exporters and wrappers add."""
    del context
    # A site that has a pair by its full name keeps it; only complete sites are renamed.
    paired_reference = {pair.reference.key.site for pair in plan.pairs}
    paired_candidate = {pair.candidate.key.site for pair in plan.pairs}
    links = link_names(
        dict.fromkeys(r.key.site for r in plan.missing if r.key.site not in paired_reference),
        dict.fromkeys(r.key.site for r in plan.extra if r.key.site not in paired_candidate),
    )
    return plan.with_pairs(pairs_of_sites(plan, links, "normalised", 0.95)) if links else plan


def pairs_of_sites(plan: Plan, links: dict[str, str], by: Rule, confidence: float) -> list[Pair]:
    """Pairs of the tensors of corresponding sites, call by call."""
    from driftline.alignment.sites.tensors import pair_tensors

    reference_calls: dict[tuple[object, ...], list[Record]] = {}
    candidate_calls: dict[tuple[object, ...], list[Record]] = {}
    for side, records, name in (
        (reference_calls, plan.missing, links.get),
        (candidate_calls, plan.extra, {site: site for site in links.values()}.get),
    ):
        for record in records:
            key = record.key
            if (site := name(key.site)) is not None:
                call = (key.rank, key.process, key.step, site, key.visit)
                side.setdefault(call, []).append(record)
    return [
        Pair(reference, candidate, by, confidence)
        for call, records in reference_calls.items()
        for reference, candidate in pair_tensors(records, candidate_calls.get(call, []))
    ]
