"""Regions that are wrong: zeroed, stale or copied values, lost experts, dropout, wrong masks."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue, Flags, by_chance, other_mask
from driftline.diagnosis.causes.families.recurrences import carried


def zeroed(case: Case) -> Clue | None:
    """All error lies where the candidate is exactly zero and the reference is not."""
    empty = (case.c == 0.0) & (case.r != 0.0) & case.finite
    count = int(np.count_nonzero(empty))
    if count == 0 or case.r.size < 4 or carried(case) is not None:
        return None  # what a call should go on from is a state that was lost
    share = case.explained(np.where(empty, 0.0, case.r))
    if share < 0.5:
        return None
    where = _structure(empty)
    if not where:
        # Scattered zeros are another family's (dropout), unless nearly nothing is left.
        if count < 0.95 * case.r.size:
            return None
        where = "everything"
    return Clue("zeroed", share, f"{where} {_is(where)} zero and should not be", where)


def stale(case: Case) -> Clue | None:
    """A region holds values that belong elsewhere: to an earlier call, or to other tokens."""
    if case.ratio < 2.0:
        return None
    # Eight times noise: single elements of pure noise reach four or five times its size.
    off = np.abs(case.e) > 8.0 * max(case.noise, case.unit) * np.sqrt(
        case.size / max(case.r.size, 1)
    )
    if not off.any():
        return None
    for number, earlier in enumerate(case.before):
        # What stood there must be something else than what is right now, and wrong nowhere else.
        if earlier.shape == case.c.shape and case.port != "param":
            predicted = np.where(off, earlier, case.r)
            share = case.explained(predicted)
            if share > 0.9:
                when = "the call before" if number == 0 else f"{number + 1} calls before"
                part = "all of it" if off.mean() > 0.9 else "part of it"
                return Clue("stale", share, f"{part} is still what stood there at {when}", "call")
    return _copied_rows(case)


def _copied_rows(case: Case) -> Clue | None:
    """Tokens, or some of their channels, that are copies of other tokens of the same tensor."""
    if case.r.ndim < 2 or case.r.shape[-1] < 8:
        return None
    r = case.rows(np.where(case.finite, case.r, 0.0))
    c, e = case.rows(case.r + case.e), case.rows(case.e)
    level = 16.0 * max(case.noise, case.unit) ** 2
    size = np.einsum("ij,ij->i", r, r)
    wrong = np.flatnonzero(np.einsum("ij,ij->i", e, e) > level * size)
    # If most tokens are wrong it is no stale region; the search compares all pairs, hence the
    # bounds.
    if not 1 <= len(wrong) <= min(1024, 0.6 * len(r)) or len(r) > 16384:
        return None
    off = np.einsum("ij,ij->j", e, e)
    wide = np.flatnonzero(off > level * np.maximum(np.einsum("ij,ij->j", r, r), 1e-300))
    if len(wide) < 4:
        return None
    part, wanted = r[:, wide], c[np.ix_(wrong, wide)]
    sources = _nearest(part, wanted)
    # Copies come from few distances (one block moved); many distances are chance matches.
    if np.any(sources == wrong) or len(np.unique(wrong - sources)) > max(4, len(wrong) // 4):
        return None
    # If every row is still there, only elsewhere, rows have changed places: nothing is stale.
    if np.array_equal(np.sort(sources), wrong):
        return None
    predicted = r.copy()
    predicted[np.ix_(wrong, wide)] = part[sources]
    share = case.explained(predicted.reshape(case.r.shape))
    what = f"{len(wrong)} of {len(r)} tokens hold what belongs to other tokens"
    if len(wide) < r.shape[1]:
        what = f"{len(wide)} channels of " + what
    return Clue("stale", share, what, "rows")


def _nearest(r: F64, wanted: F64) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    size = np.einsum("ij,ij->i", r, r)
    distance = size[None, :] - 2.0 * (wanted @ r.T)
    return np.argmin(distance, axis=1)


def _structure(empty: Flags) -> str:
    """The shape of a region in words; empty if it has none."""
    flat = empty.reshape(-1, empty.shape[-1]) if empty.ndim > 1 else empty.reshape(1, -1)
    columns = flat.mean(axis=0)
    full_columns = columns > 0.98
    if full_columns.any() and float(flat[:, full_columns].sum()) > 0.95 * float(flat.sum()):
        count = int(full_columns.sum())
        if count == flat.shape[1]:
            return "everything"
        first = int(np.argmax(full_columns))
        run = bool(full_columns[first : first + count].all())
        return f"channels {first} to {first + count - 1}" if run else f"{count} channels"
    rows = flat.mean(axis=1)
    full_rows = rows > 0.98
    if full_rows.any() and float(flat[full_rows].sum()) > 0.95 * float(flat.sum()):
        count = int(full_rows.sum())
        return f"{count} tokens" if count > 1 else "one token"
    high, wide = np.flatnonzero(rows > 0.0), np.flatnonzero(columns > 0.0)
    if len(high) > 1 or len(wide) > 1:
        box = flat[np.ix_(high, wide)]
        if float(np.count_nonzero(box)) > 0.95 * box.size:
            return f"a tile of {len(high)} tokens x {len(wide)} channels"
    return ""


def _is(where: str) -> str:
    return "is" if where.startswith(("a ", "one ", "every")) else "are"


def lost_expert(case: Case) -> Clue | None:
    """Only tokens sent to one expert are off, and what they lack is a summand."""
    rows = case.rows(case.e)
    error = np.einsum("ij,ij->i", rows, rows)
    r, c = case.rows(np.where(case.finite, case.r, 0.0)), case.rows(case.r + case.e)
    level = 9.0 * max(case.noise, case.unit) ** 2
    off = error > level * np.maximum(np.einsum("ij,ij->i", r, r), 1e-300)
    if not off.any() or off.all() or case.ratio < 2.0:
        return None
    for codes in case.codes.values():
        routes = codes.reshape(-1, codes.shape[-1]) if codes.ndim > 1 else codes.reshape(-1, 1)
        if len(routes) != len(rows):
            continue
        for expert in np.unique(routes):
            sent: Flags = (routes == expert).any(axis=1)
            if float(np.count_nonzero(sent == off)) < 0.98 * len(off):
                continue
            # What is left and what is gone are parts of one sum: neither holds any of the other.
            left, gone = c[off], -rows[off]
            lengths = float(np.linalg.norm(left)) * float(np.linalg.norm(gone))
            overlap = float(np.sum(left * gone))
            if lengths > 0.0 and abs(overlap) > 0.25 * lengths:
                return None
            what = f"only tokens sent to expert {int(expert)} are off, by what it should add"
            return Clue("zeroed", 0.85, what, "expert", measured=False)
    return None


# Dropout left on: random elements are zero, all others larger by the same factor.


def dropout(case: Case) -> Clue | None:
    """`c = 0` at a share p of scattered places, `c = r / (1 - p)` elsewhere."""
    live = (case.r != 0.0) & case.finite
    empty = (case.c == 0.0) & live
    count = int(np.count_nonzero(live))
    p = float(np.count_nonzero(empty)) / max(count, 1)
    if count < 64 or not 0.005 <= p <= 0.95:
        return None
    kept = live & ~empty
    r, c = case.r[kept], case.c[kept]
    factor = float(np.sum(c * r) / max(float(np.sum(r * r)), 1e-300))
    # The factor must fit the share of zeros; the allowance is the scatter of a random share.
    if abs(factor * (1.0 - p) - 1.0) > 0.25 * p + 3.0 * np.sqrt(p / count):
        return None
    if factor <= 1.0:
        return None
    if not by_chance(case.r[live], empty[live]):
        return None
    share = case.explained(np.where(empty, 0.0, case.r * factor))
    rows = case.rows(empty.astype(np.float64))
    spread = float(rows.mean(axis=0).max()) if len(rows) > 8 else 0.0
    if spread > 0.98 and p < 0.9:
        return None  # whole channels: that is a tile, not chance
    return Clue(
        "dropout",
        share,
        f"{p:.1%} of the elements are zero, the others {factor:.4g} times as large: "
        f"dropout of {1.0 - 1.0 / factor:.2g}",
        f"p={1.0 - 1.0 / factor:.2g}",
    )


# Masks: only some tokens are off, and their positions say why.


# Share of tokens that must agree with a mask; a few may differ by chance.
_AGREE = 0.97


def mask(case: Case) -> Clue | None:
    """The tensor is a mask itself, or those tokens are off that a mask tells apart."""
    if words := other_mask(case.r, case.c):
        return Clue("mask", 1.0, words, "flags")
    off = affected(case)
    if off is None:
        return None
    share = _share_inside(case, off)
    if share < 0.95:
        return None
    # Other families explain single tokens that are zero or copied; this one needs an attention, or
    # pads that fit.
    if case.pads is not None and case.pads.shape == off.shape and case.pads.any():
        agreement = _alike(off, case.pads)
        if agreement >= _AGREE:
            return Clue(
                *("mask", 0.95 * agreement, "the error sits on padding and nowhere else", "pads"),
                measured=False,
            )
        if not np.any(off & case.pads) and np.any(off):
            pads_before = np.cumsum(case.pads, axis=1) > 0
            if _alike(off, pads_before & ~case.pads) >= _AGREE:
                return Clue(
                    *("mask", 0.9, "the error sits on the tokens that can see padding", "pads"),
                    measured=False,
                )
    if not case.is_attention:
        return None
    return _by_position(off)


def affected(case: Case) -> Flags | None:
    """Tokens that are off beyond noise, [sequences, tokens]; None if all are, or none is."""
    if case.tokens is None or case.tokens == 0:
        return None
    axis = case.tokens
    others = tuple(dimension for dimension in range(case.r.ndim) if dimension not in (0, axis))
    size = np.sum(np.where(case.finite, case.r, 0.0) ** 2, axis=others)
    error = np.sum(case.e**2, axis=others)
    level = max(case.noise, case.unit / 4.0) ** 2
    # Tokens of nearly zero size would be off by any rounding: a hundredth of the mean size is their
    # floor.
    off: Flags = error > 9.0 * level * np.maximum(size, 0.01 * float(size.sum()) / size.size)
    if off.all() or not off.any():
        return None
    return off


def _share_inside(case: Case, off: Flags) -> float:
    """Share of the error's energy that lies on these tokens."""
    assert case.tokens is not None
    shape = [
        case.r.shape[dimension] if dimension in (0, case.tokens) else 1
        for dimension in range(case.r.ndim)
    ]
    inside = np.broadcast_to(off.reshape(shape), case.r.shape)
    return float(np.sum(np.where(inside, case.e, 0.0) ** 2)) / max(case.energy, 1e-300)


def _alike(a: Flags, b: Flags) -> float:
    return float(np.count_nonzero(a == b)) / a.size


def _by_position(off: Flags) -> Clue | None:
    length = off.shape[1]
    if length < 4:
        return None
    positions = np.arange(length, dtype=np.intp)
    starts = [(_alike(off, positions >= start), start) for start in range(1, length)]
    ends = [(_alike(off, positions < end), end) for end in range(1, length)]
    # From the second token on is no mask: the first sees itself alone, whatever is wrong.
    late, early = max(starts), max(ends)
    if late[0] >= _AGREE and late[0] >= early[0] and late[1] > 1:
        return Clue(
            "mask",
            0.9 * late[0],
            f"tokens from position {late[1]} on are off and none before: what they may attend to "
            "is wrong",
            "late",
            measured=False,
        )
    if early[0] >= _AGREE and early[0] > late[0]:
        last = length - early[1]
        which = "the last token" if last == 1 else f"the last {last} tokens"
        return Clue(
            "mask",
            0.9 * early[0],
            f"every token but {which} is off: earlier tokens see what comes after them",
            "causal",
            measured=False,
        )
    return None
