"""Names that differ only by what wrappers and conventions put into them.

`module.`, `_orig_mod.` and the like vanish wherever they stand; `layers[3]`, `layers3`, `h.3` and
`blocks.3` are one spelling. Two sites are a pair only where the plain name is unique on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_STACKS = frozenset({"layers", "layer", "h", "blocks", "block", "decoder_layers", "encoder_layers"})
_HEADS = ("base_model.model.", "base_model.", "model.", "transformer.")
_INDEX = re.compile(r"\[(\d+)\]")
_GLUED = re.compile(r"([A-Za-z_]*[A-Za-z])_?(\d+)")


@lru_cache(maxsize=1 << 17)
def plain(site: str) -> str:
    """A site without what wrappers and conventions add.

    >>> plain("module._orig_mod.h[3].ln"), plain("base_model.layers7.ln"), plain("(root)")
    ('layers.3.ln', 'base_model.layers.7.ln', '')
    """
    if site == "(root)":
        return ""
    parts = [part for part in _INDEX.sub(r".\1", site).split(".") if part not in _WRAPPERS]
    spelt: list[str] = []
    for part in parts:
        glued = _GLUED.fullmatch(part)
        if glued is not None and glued.group(1) in _STACKS:
            spelt += ["layers", glued.group(2)]
        elif part.isdigit() and spelt and spelt[-1] in _STACKS:
            spelt[-1:] = ["layers", part]
        else:
            spelt.append(part)
    return ".".join(spelt)


def headless(site: str) -> str:
    """A plain name without what holds the whole model: `model.`, `transformer.`, an adapter's."""
    name = plain(site)
    for head in _HEADS:
        if name.startswith(head) and len(name) > len(head):
            return name.removeprefix(head)
    return name


def link_names(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """Sites of the reference → sites of the candidate whose plain names agree."""
    here, there = list(ours), list(theirs)
    links: dict[str, str] = {}
    for simplify in (plain, headless):
        rest_here = _unique(simplify, (site for site in here if site not in links))
        used = set(links.values())
        rest_there = _unique(simplify, (site for site in there if site not in used))
        for name, site in rest_here.items():
            if site is not None and (partner := rest_there.get(name)) is not None:
                links[site] = partner
    return links


def _unique(simplify: object, sites: Iterable[str]) -> dict[str, str | None]:
    """Plain name → its only site; None where several have it."""
    names: dict[str, str | None] = {}
    for site in sites:
        name = headless(site) if simplify is headless else plain(site)
        names[name] = None if name in names else site
    return names
