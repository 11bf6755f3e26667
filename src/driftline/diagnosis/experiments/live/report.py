"""The report of a replay: the outcome of each site, and whether both models are the same."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from driftline.captures.torch.layers import ModuleNames
from driftline.diagnosis.experiments.live.captured_calls import Candidate
from driftline.diagnosis.experiments.live.results import Noise

# An experiment that fails usually fails at each call; a few examples are enough.
_MOST_FAULTS = 8


_UPDATED = (
    "an optimizer has changed its weights, and nothing shows that the candidate's are the same"
)


class _Site:
    __slots__ = (
        *("differs", "end", "formats", "left_out", "masks", "near", "not_reproduced", "own"),
        *("reason", "replayed", "unknown", "updated", "way"),
    )

    def __init__(self) -> None:
        self.replayed = 0
        self.own = 0
        self.near: dict[str, float] = {}
        self.masks: Sequence[str] = ()
        self.unknown = 0
        self.not_reproduced = 0
        self.reason = ""
        self.way = ""
        self.left_out: set[str] = set()
        self.differs = ""
        self.updated = 0
        self.formats = 0.0
        self.end: tuple[float, float, int] | None = None


class Report:
    """Collects the outcome of each site of the captured run.

    Attributes:
        clash: Why the program's model is not the captured run's; the replay is then rejected.
        faults: Errors of the experiment itself.
        noise: Error of the captured run's format against exact results, of calls that are right.
    """

    def __init__(self, candidate: Candidate, *, partial: bool = False) -> None:
        self._candidate = candidate
        self._partial = partial
        self._sites: dict[str, _Site] = {}
        self._not_selected: set[str] = set()
        self.clash = ""
        self.clashes: list[str] = []
        self.faults: list[str] = []
        self.calls = 0
        self.noise = Noise()

    def replayed(
        self,
        site: str,
        way: str,
        *,
        its_own: bool = False,
        near: Mapping[str, float] | None = None,
        masks: Sequence[str] = (),
    ) -> None:
        """Record a call that was applied again.

        Args:
            site: Site of the captured run.
            way: leaf, own code or whole.
            its_own: Whether it gave the captured results bit for bit.
            near: Digests of captured results that are as good as the replayed ones, and their
                distances.
            masks: Slots of masks that are of another kind than the program's, but equivalent.
        """
        entry = self._sites.setdefault(site, _Site())
        entry.replayed += 1
        entry.own += its_own
        # Digests of all calls are collected, because the diagnosis accepts results by digest.
        entry.near.update(near or {})
        entry.masks = masks
        entry.way = way
        self.calls += 1

    def unknown(self, site: str, reason: str, *, not_reproduced: bool = False) -> None:
        """Record a call that could not be replayed.

        Args:
            site: Site of the captured run.
            reason: The reason, in words.
            not_reproduced: Whether it was repeated and did not give its own output.
        """
        entry = self._sites.setdefault(site, _Site())
        entry.unknown += 1
        # The first failed reproduction explains more than any later reason.
        if not_reproduced and not entry.not_reproduced:
            entry.reason = reason
        entry.not_reproduced += not_reproduced
        entry.reason = entry.reason or reason

    def differs(self, site: str, what: str) -> None:
        """Record a module that gave or passed on another shape or other integers."""
        entry = self._sites.setdefault(site, _Site())
        entry.differs = entry.differs or what
        entry.replayed += 1
        self.calls += 1

    def updated(self, site: str) -> None:
        """Record a call after an optimizer's update that may differ from the captured run's."""
        self._sites.setdefault(site, _Site()).updated += 1

    def format_cost(self, site: str, cost: float) -> None:
        """Record the relative error caused by rounding buffers to the captured run's format."""
        entry = self._sites.setdefault(site, _Site())
        entry.formats = max(entry.formats, cost)

    def end(self, site: str, measured: tuple[float, float, int] | None) -> None:
        """Record the errors of a model's output: as captured, and applied in that format."""
        entry = self._sites.setdefault(site, _Site())
        if measured is not None and (entry.end is None or measured[0] > entry.end[0]):
            entry.end = measured

    def not_selected(self, site: str) -> None:
        """Record a call that was not selected."""
        self._not_selected.add(site)

    def left_out(self, site: str, slot: str) -> None:
        """Record a slot that could not be compared, although others of its call could."""
        self._sites.setdefault(site, _Site()).left_out.add(slot)

    def fault(self, site: str, problem: Exception) -> None:
        if len(self.faults) < _MOST_FAULTS:
            trace = traceback.format_exc(limit=-3).strip().splitlines()
            self.faults.append(f"{site}: {type(problem).__name__}: {problem} ({trace[-2:-1]})")

    def look_for_clashes(self, names: ModuleNames, sites: Mapping[str, str]) -> None:
        """Compare the names and shapes of the two module trees as far as both are known.

        Missing modules may be built later, or belong to another root, so the last result counts.
        """
        if not self._candidate.parameters:
            return
        self.clashes = self._clashes(names, sites)
        self.clash = self.clashes[0] if self.clashes and not self._partial else ""

    def _clashes(self, names: ModuleNames, sites: Mapping[str, str]) -> list[str]:
        parameters = self._candidate.parameters
        partners = {site: partner for site, partner in sites.items() if partner in parameters}
        clashes: list[str] = []
        met = set(sites.values())
        for place in names.places():
            module = place.ref()
            if module is None or not any(p is not None for p in module._parameters.values()):
                continue
            partner = partners.get(place.site)
            if partner is None:
                if place.root.helper:
                    continue
                clashes.append(
                    f"the program's model has a module '{place.site}' ({place.class_name}) that "
                    "the candidate run's model has not, or has not called"
                )
                continue
            candidate_parameters = parameters[partner]
            for name, tensor in module._parameters.items():
                if tensor is None or name not in candidate_parameters:
                    continue
                dtype, shape = candidate_parameters[name]
                # Quantised weights are stored in other shapes, so a difference is no clash there.
                if tuple(tensor.shape) != tuple(shape) and "int" not in dtype:
                    clashes.append(
                        f"'{place.site}.{name}' has shape {tuple(tensor.shape)} in the program's "
                        f"model and {tuple(shape)} in the candidate run's"
                    )
        # A module with weights that the candidate called and the program lacks is a clash; one
        # that was not called may be unused.
        called = set(self._candidate.sites)
        for site, held in parameters.items():
            if held and site in called and site not in met and met:
                clashes.append(
                    f"the candidate run has a module '{site}' "
                    f"({self._candidate.classes.get(site, 'of an unknown class')}) that the "
                    "program's model has not"
                )
        return clashes

    def to_json(self) -> dict[str, Any]:
        """The clashes, faults and calls, and the outcome of each site of the captured run."""
        sites: dict[str, Any] = {}
        for site in self._candidate.sites:
            entry = self._sites.get(site)
            if entry is None:
                sites[site] = {
                    "status": "skipped",
                    "reason": "it was not selected"
                    if site in self._not_selected
                    else "the program did not call it in these steps",
                    "reproduced": None,
                }
                continue
            data: dict[str, Any] = {
                "status": "replayed" if entry.replayed else "unknown",
                "reason": entry.reason,
                "reproduced": _reproduced(entry),
                "applied": entry.way,
                "calls": entry.replayed,
            }
            # Optional entries are written only if they have a value, to keep the document small.
            if entry.own:
                data["same_bits"] = entry.own
            if entry.near:
                most = max(entry.near.values())
                data["near"] = {"most": round(most, 4), "digests": [*entry.near]}
            if entry.own or entry.near:
                data["noise"] = self.noise.of(site)
            if entry.replayed and entry.unknown:
                data["unknown_calls"] = entry.unknown
            if entry.differs:
                data["differs"] = entry.differs
            if entry.updated:
                data["updated_calls"] = entry.updated
                data["reason"] = data["reason"] or _UPDATED
            if entry.formats:
                data["format_cost"] = entry.formats
            if entry.end is not None:
                error, noise, elements = entry.end
                data["end"] = {"error": error, "noise": noise, "elements": elements}
            if entry.masks:
                data["masks"] = [*entry.masks]
            if entry.left_out:
                data["left_out"] = sorted(entry.left_out)
            sites[site] = data
        return {
            "clash": self.clash,
            "clashes": self.clashes[:20],
            "clash_count": len(self.clashes),
            "faults": self.faults,
            "calls": self.calls,
            "sites": sites,
        }


def _reproduced(entry: _Site) -> bool | None:
    """Whether the calls gave their own output again; None if that could not be tried."""
    if entry.not_reproduced:
        return False
    return None if entry.unknown else True
