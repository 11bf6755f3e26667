"""Equal names that are accidental, such as the numbers of `nn.Sequential` in two nestings.

`2` may be the second Linear of one model and the third of the other. This rule runs only if names
left some sites unpaired. It returns the pairs in doubt. Structure may find better partners; a pair
without a better partner is restored. No tensor is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from driftline.alignment.plan import Pair
from driftline.alignment.sites.kinds import is_known, kind_of, same_kind
from driftline.alignment.sites.site_graph import ROOTS, enclosing, main_tensor
from driftline.runs.records import Record

# Only pairs by name can be accidental: the user gives maps, and graphs have edges.
_BY_NAME = ("name", "alias", "normalised")


def in_doubt(
    pairs: Sequence[Pair], missing: Sequence[Record], extra: Sequence[Record]
) -> list[Pair]:
    """Pairs made by name whose two sites do different work.

    A pair with a real name is in doubt if both classes are known and differ in kind. A pair with a
    number is in doubt as soon as one of its siblings is a leaf on one side and a container on the
    other, or does different work, unless both sides have the same sites below the parent.
    """
    named = [pair for pair in pairs if pair.by in _BY_NAME]
    reference_sites = _Side([*(pair.reference for pair in pairs), *missing])
    candidate_sites = _Side([*(pair.candidate for pair in pairs), *extra])
    links = {
        pair.reference.key.site: pair.candidate.key.site
        for pair in named
        if pair.reference.key.site not in ROOTS
    }
    doubted: set[str] = set()
    numbered: set[str] = set()
    for site, partner in links.items():
        # A number alone proves nothing; the other children of the same parent do. If their names
        # differ too, all numbers of that parent are shifted and none can be trusted.
        if _other_work(reference_sites, site, candidate_sites, partner):
            doubted.add(site)
            holder, _, last = site.rpartition(".")
            if last.isdigit() and reference_sites.below(holder) != candidate_sites.below(
                partner.rpartition(".")[0]
            ):
                numbered.add(holder)
    # A shifted number moves every later one, so all sites below such a parent are in doubt.
    if numbered:
        doubted.update(site for site in links if _counted_by(site, numbered))
    return [pair for pair in named if pair.reference.key.site in doubted]


def still_alone(doubted: Sequence[Pair], new_pairs: Sequence[Pair]) -> list[Pair]:
    """Doubted pairs to restore: neither site has found a better partner.

    A container whose leaves found partners elsewhere is not restored either.
    """
    moved: set[tuple[str, str]] = set()
    partner_of = {pair.reference.key.site: pair.candidate.key.site for pair in doubted}
    reference_of = {partner: site for site, partner in partner_of.items()}
    for pair in new_pairs:
        reference, candidate = pair.reference.key.site, pair.candidate.key.site
        moved.update((("reference", reference), ("candidate", candidate)))
        for side, site, partner, by_name in (
            ("reference", reference, candidate, partner_of),
            ("candidate", candidate, reference, reference_of),
        ):
            # If a leaf found its partner elsewhere, the containers around it are affected too: if
            # they do not hold that partner, their equal names were accidental as well.
            for around in enclosing(site):
                if around in by_name and not partner.startswith(by_name[around] + "."):
                    moved.add((side, around))
    return [
        pair
        for pair in doubted
        if ("reference", pair.reference.key.site) not in moved
        and ("candidate", pair.candidate.key.site) not in moved
    ]


class _Site(NamedTuple):
    class_name: str
    records: list[Record]


class _Side:
    """The sites of one run: their classes, and the sites inside each."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.sites: dict[str, _Site] = {}
        for record in records:
            site = self.sites.setdefault(record.key.site, _Site(record.class_name, []))
            site.records.append(record)
        self._inside: dict[str, list[str]] = defaultdict(list)
        for site in self.sites:
            if site not in ROOTS:
                for around in (*enclosing(site), ""):
                    self._inside[around].append(site)

    def below(self, holder: str) -> set[str]:
        """Names of the sites inside a site, relative to it."""
        cut = len(holder) + 1 if holder else 0
        return {site[cut:] for site in self._inside[holder]}

    def count(self, site: str) -> int:
        return len(self._inside.get(site, ()))

    def features(self, site: str) -> int:
        output = main_tensor(self.sites[site].records, "output")
        return output.shape[-1] if output is not None and output.shape else -1


def _other_work(reference_sites: _Side, site: str, candidate_sites: _Side, partner: str) -> bool:
    classes = reference_sites.sites[site].class_name, candidate_sites.sites[partner].class_name
    if not all(classes) or classes[0] == classes[1]:
        same_leaf = not reference_sites.count(site) and not candidate_sites.count(partner)
        sizes = reference_sites.features(site), candidate_sites.features(partner)
        return same_leaf and site.rpartition(".")[2].isdigit() and sizes[0] != sizes[1]
    inside = reference_sites.count(site), candidate_sites.count(partner)
    if not any(inside):
        return same_kind(kind_of(classes[0]), kind_of(classes[1])) == 0
    if all(inside):
        return False
    leaf = classes[0] if not inside[0] else classes[1]
    # A container of one site is a wrapper around it, and its name is not accidental.
    return max(inside) > 1 and is_known(kind_of(leaf)) and site.rpartition(".")[2].isdigit()


def _counted_by(site: str, holders: set[str]) -> bool:
    """Whether the site, or a site around it, is a numbered child of one of these holders."""
    while site:
        holder, _, last = site.rpartition(".")
        if holder in holders and last.isdigit():
            return True
        site = holder
    return False
