"""Whether a replay was given things of the same kind as the reference: integers or floats."""

from __future__ import annotations

from collections.abc import Mapping

from driftline.alignment.plan import Plan
from driftline.diagnosis.artefacts import ReplayedSite
from driftline.numerics.dtypes import DTYPES


def other_kinds(plan: Plan, sites: Mapping[str, ReplayedSite]) -> dict[str, str]:
    """Sites that were given another kind of thing than in the reference, by the candidate's names.

    A mask of booleans says what may be seen, one of floats what is added: replaying the one with
    the other is another computation. Where the replay saw that both say the same, it is none.
    """
    found: dict[str, str] = {}
    for pair in plan.pairs:
        key = pair.candidate.key
        kinds = [DTYPES.get(record.dtype) for record in (pair.reference, pair.candidate)]
        if key.port != "input" or None in kinds:
            continue
        about = sites.get(key.site)
        if about is not None and key.slot in about.masks:
            continue
        floats = [kind is not None and kind.is_floating for kind in kinds]
        if floats[0] != floats[1]:
            found[key.site] = (
                f"it was given another kind of '{key.slot}' ({pair.candidate.dtype}, in the "
                f"reference {pair.reference.dtype}), so its replay is another computation"
            )
    return found
