"""Ids of models: is there such a one, here or on the hub, and which commit of it?

Libraries try the hub again and again before they say that it cannot be reached. One short question
comes first: what nobody has is refused at once, and what lies here is loaded without asking again.
"""

# huggingface_hub comes with transformers and is only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
import re
from typing import Any, Literal, NamedTuple

from driftline.errors import BadInput, NotInstalled
from driftline.registry import require

TIMEOUT = 3.0
"""Seconds for the one question."""
_PACKAGE = "huggingface_hub"
_INSTALL = "driftline[transformers]"
_KEPT = re.compile(r"[/\\]snapshots[/\\]([0-9a-f]{7,64})[/\\]")


class _Known(NamedTuple):
    """What is known of an id: whether the hub has it, the commit, and whether it lies here."""

    state: Literal["there", "absent", "off", "unreachable"]
    commit: str = ""
    here: bool = False


def find_id(source: str, what: str = "model") -> None:
    """Refuse an id that can be had neither here nor from the hub.

    If it lies here and the hub cannot be reached, the hub is not asked again by this process.

    Args:
        source: The id.
        what: `model` or `tokenizer`, for the sentence.

    Raises:
        BadInput: Nobody has it.
    """
    known = _ask(source)
    if known.state == "there":
        return
    if known.here:
        if known.state == "unreachable":
            require(f"{_PACKAGE}.constants", install=_INSTALL).HF_HUB_OFFLINE = True
        return
    why = {
        "absent": "the hub has none of that name, or does not show it to you",
        "off": "this machine keeps none of that name, and the hub is switched off (HF_HUB_OFFLINE)",
        "unreachable": "this machine keeps none of that name, and the hub cannot be reached",
    }[known.state]
    raise BadInput(
        f"there is no {what} '{source}': it is no folder here, {why}",
        hint=f"give the {what}'s folder, or download it first",
    )


def commit_of(source: str) -> str:
    """The commit that an id stands for now; empty if nobody says."""
    try:
        return _ask(source).commit if source else ""
    except NotInstalled:  # saved logits can be scored without any library of models
        return ""


@functools.lru_cache(maxsize=64)
def _ask(source: str) -> _Known:
    hub = require(_PACKAGE, install=_INSTALL)
    errors = require(f"{_PACKAGE}.errors", install=_INSTALL)
    constants = require(f"{_PACKAGE}.constants", install=_INSTALL)
    try:
        place: Any = hub.try_to_load_from_cache(source, "config.json")
    except ValueError:  # nothing that could be an id
        return _Known("absent")
    kept = _KEPT.search(place) if isinstance(place, str) else None
    commit = kept[1] if kept else ""
    if constants.HF_HUB_OFFLINE:
        return _Known("off", commit, isinstance(place, str))
    try:
        found = hub.HfApi().model_info(source, timeout=TIMEOUT)
    except errors.GatedRepoError:  # who may have it is seen when it is loaded
        return _Known("there", commit, isinstance(place, str))
    except errors.RepositoryNotFoundError:
        return _Known("absent", commit, isinstance(place, str))
    except errors.HfHubHTTPError:  # the hub is there, and in trouble
        return _Known("there", commit, isinstance(place, str))
    except Exception:  # whatever a network and its libraries can raise
        return _Known("unreachable", commit, isinstance(place, str))
    return _Known("there", str(found.sha or commit), isinstance(place, str))
