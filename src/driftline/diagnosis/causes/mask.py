"""Only some tokens are off, and their positions say why: pads, late tokens, all but the last."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue, Flags

_AGREE = 0.97


def mask(case: Case) -> Clue | None:
    """Tokens whose error is beyond noise are those that a mask tells apart."""
    off = affected(case)
    if off is None:
        return None
    share = _share_inside(case, off)
    if share < 0.95:
        return None
    # Other families explain single tokens that are zero or copied; this one needs an attention, or
    # pads that fit.
    if case.pads is not None and case.pads.shape == off.shape and case.pads.any():
        both = _alike(off, case.pads)
        if both >= _AGREE:
            return Clue("mask", 0.95 * both, "the error sits on padding and nowhere else", "pads")
        if not np.any(off & case.pads) and np.any(off):
            pads_before = np.cumsum(case.pads, axis=1) > 0
            if _alike(off, pads_before & ~case.pads) >= _AGREE:
                return Clue(
                    "mask", 0.9, "the error sits on the tokens that can see padding", "pads"
                )
    if not case.is_attention:
        return None
    return _by_position(off)


def affected(case: Case) -> Flags | None:
    """Which tokens are off beyond noise, [sequences, tokens]; None if all are, or none is."""
    if case.tokens is None or case.tokens == 0:
        return None
    axis = case.tokens
    others = tuple(at for at in range(case.r.ndim) if at not in (0, axis))
    size = np.sum(np.where(case.finite, case.r, 0.0) ** 2, axis=others)
    error = np.sum(case.e**2, axis=others)
    level = max(case.noise, case.unit / 4.0) ** 2
    off: Flags = error > 9.0 * level * np.maximum(size, 0.01 * float(size.sum()) / size.size)
    if off.all() or not off.any():
        return None
    return off


def _share_inside(case: Case, off: Flags) -> float:
    """Share of the error's energy on those tokens."""
    assert case.tokens is not None
    shape = [case.r.shape[at] if at in (0, case.tokens) else 1 for at in range(case.r.ndim)]
    inside = np.broadcast_to(off.reshape(shape), case.r.shape)
    return float(np.sum(np.where(inside, case.e, 0.0) ** 2)) / max(case.energy, 1e-300)


def _alike(a: Flags, b: Flags) -> float:
    return float(np.count_nonzero(a == b)) / a.size


def _by_position(off: Flags) -> Clue | None:
    length = off.shape[1]
    if length < 4:
        return None
    at = np.arange(length, dtype=np.intp)
    starts = [(_alike(off, at >= start), start) for start in range(1, length)]
    ends = [(_alike(off, at < end), end) for end in range(1, length)]
    # From the second token on is no mask: the first sees itself alone, whatever is wrong.
    late, early = max(starts), max(ends)
    if late[0] >= _AGREE and late[0] >= early[0] and late[1] > 1:
        return Clue(
            "mask",
            0.9 * late[0],
            f"tokens from position {late[1]} on are off and none before: what they may attend to "
            "is wrong",
            "late",
        )
    if early[0] >= _AGREE and early[0] > late[0]:
        last = length - early[1]
        which = "the last token" if last == 1 else f"the last {last} tokens"
        return Clue(
            "mask",
            0.9 * early[0],
            f"every token but {which} is off: earlier tokens see what comes after them",
            "causal",
        )
    return None
