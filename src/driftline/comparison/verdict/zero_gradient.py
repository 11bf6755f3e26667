"""Excuse rows that fail only because a bias has no gradient.

A gradient that is zero by construction (of an attention key's bias, or of a bias before a batch
norm) is only rounding in every program, and two rounding errors have nothing in common. Such a
gradient is recognised because it is small compared with the gradient of the same layer's weight, on
*both* sides; a wrong gradient is small on one side at most. An optimizer turns it into a number per
channel on the layer's output (`loose_bias.py` measures the error without it), and every tensor
computed from that output has the difference, too.

This file reads judged rows only. A row that fails for another reason keeps its status.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from driftline.comparison.evidence.loose_bias import NO_MORE, earlier, is_bias_gradient, module_of
from driftline.comparison.evidence.rules import GRADIENTS
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import is_spooled
from driftline.comparison.tolerance.defaults import METRIC, coarsest
from driftline.comparison.tolerance.tolerance import AS_GIVEN, BESIDE_WEIGHT, BEYOND

_UNLIKE = 0.1
"""Two gradients with at least this relative error may be only rounding."""
_SAME = 1e-3
"""Two differences whose norms agree to this fraction are the same difference."""

_ATTENTION = "aten._scaled_dot_product_"

_Layer = tuple[int, int, str]


def excuse_zero_gradients(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the judged rows of a table, in which such failures are excused."""
    if is_spooled(rows):
        # Rows of one process suffice at a time.
        asked = rows.ports & {*GRADIENTS} or rows.has_operators
        return rows.changed_by_process(_without) if asked else rows
    return tuple(_without(rows))


def _without(rows: Sequence[Row]) -> list[Row]:
    updated = list(rows)
    # Most processes of a long run have nothing to excuse.
    if not any(row.status == "fail" or BEYOND in row.metrics for row in rows):
        return updated
    _gradients(updated)
    moved = _outputs(updated)
    passing = [(index, row) for index, row in moved if row.status == "pass"]
    _carriers(updated, [*moved, *_shifted(updated, passing)])
    return updated


def _gradients(rows: list[Row]) -> None:
    """Pass gradients of biases that are only rounding on both sides."""
    failing = [
        index for index, row in enumerate(rows) if row.status == "fail" and _is_gradient(row)
    ]
    if not failing:
        return
    layers = {_layer(rows[index]) for index in failing}
    # Only the layers of failing rows, because a long process has very many weights.
    weights = {
        (_layer(row), row.key.step, row.key.visit, row.key.port): row
        for row in rows
        if row.key.port in GRADIENTS
        and row.key.slot in ("weight", "w_0")
        and _layer(row) in layers
        and row.compared
    }
    for index in failing:
        row = rows[index]
        weight = weights.get((_layer(row), row.key.step, row.key.visit, row.key.port))
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        if weight is None or dtype is None or row.decided_by != METRIC:
            continue
        share = NO_MORE * dtype.unit_roundoff
        sides = ("reference_l2", "candidate_l2")
        # Both sides must be small: a gradient that one program lost is small on one side only.
        if all(_number(row, side) <= share * _number(weight, side) for side in sides):
            size = _number(row, "reference_l2")
            limit = 2 * share * _number(weight, "reference_l2") / size if size else math.inf
            rows[index] = row.judged(
                "pass",
                f"nothing but rounding: on both sides below {share:.2g} of its weight's gradient",
                decided_by=METRIC,
                limit=limit,
                limit_from=f"{row.limit_from}, {BESIDE_WEIGHT}",
                severity=_number(row, METRIC) / limit if size else 0.0,
            )


def _may_be_excused(row: Row) -> bool:
    """Whether a row is an output after an update that fails, or passes because of its bias."""
    is_off = row.status == "fail" or (row.status == "pass" and BEYOND in row.metrics)
    return is_off and row.key.port == "output" and row.key.step > 0 and row.decided_by == METRIC


def _outputs(rows: list[Row]) -> list[tuple[int, Row]]:
    """Judge outputs of layers with such a bias again; return the excused ones with their index."""
    far = [index for index, row in enumerate(rows) if _may_be_excused(row)]
    if not far:
        return []
    layers = {_layer(rows[index]) for index in far}
    gradients: dict[_Layer, list[Row]] = {layer: [] for layer in layers}
    for row in rows:
        if _is_gradient(row) and _layer(row) in layers:
            gradients[_layer(row)].append(row)
    excused: list[tuple[int, Row]] = []
    for index in far:
        own_gradients = gradients[_layer(rows[index])]
        tells = earlier([gradient.key.step for gradient in own_gradients], rows[index].key.step)
        before = [gradient for gradient in own_gradients if tells(gradient.key.step)]
        # Only rounding may be excused, never the consequence of a wrong gradient.
        if any(gradient.status == "fail" for gradient in before):
            continue
        if BEYOND in rows[index].metrics:
            rows[index] = _beyond(rows[index])
        elif rows[index].basis != "values" and any(map(_is_loose, before)):
            rows[index] = rows[index].judged(
                "incomparable",
                f"{rows[index].reason}; its bias has no gradient but rounding, by which an "
                "optimizer moves it, and what else differs only the values can say",
            )
        if rows[index].decided_by == BEYOND or rows[index].status == "incomparable":
            excused.append((index, rows[index]))
    return excused


def _beyond(row: Row) -> Row:
    left, limit = _number(row, BEYOND), row.limit
    # The bias must explain at least half of the error.
    if limit is None or not left <= min(limit, 0.5 * _number(row, METRIC)):
        return row
    return row.judged(
        "pass",
        f"{METRIC} {_number(row, METRIC):.3g} is one number per channel: its bias has no gradient "
        "but rounding, and an optimizer moves it by that",
        decided_by=BEYOND,
        limit=limit,
        limit_from=row.limit_from,
        severity=left / limit,
    )


def _shifted(rows: list[Row], excused: Sequence[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """Pass logarithms of attention's sums that a changed key shifts.

    Such a shift does not change the attention's weights, and only its own backward pass reads the
    logarithms. The output of the call must agree, and a key of its module must be excused.
    """
    passing: list[tuple[int, Row]] = []
    for index, row in enumerate(rows) if excused else ():
        if row.status != "fail" or row.decided_by != METRIC or _ATTENTION not in row.class_name:
            continue
        module = f"{module_of(row.key.site)}."
        keys = [other for _, other in excused if _moment(other) == _moment(row)]
        results = [
            other
            for other in rows
            if other.key == row.key._replace(slot="0") and other.key.slot != row.key.slot
        ]
        # The key must be of this attention's own module.
        lies_within = any(other.key.site.startswith(module) for other in keys)
        if not lies_within or not results or results[0].status != "pass":
            continue
        shape = results[0].reference_shape
        # A logarithm for each row of scores: the output's shape without its last axis.
        if shape is None or row.reference_shape != shape[:-1]:
            continue
        rows[index] = row.judged(
            "pass",
            "a key whose bias has no gradient shifts it; what the attention gives agrees",
            limit_from=f"{row.limit_from}, {AS_GIVEN}",
            severity=results[0].severity,
        )
        passing.append((index, row))
    return passing


def _is_loose(gradient: Row) -> bool:
    """Whether the gradients of a bias have nothing in common on both sides, but pass."""
    return gradient.status == "pass" and _number(gradient, METRIC) >= _UNLIKE


def _carriers(rows: list[Row], excused: Sequence[tuple[int, Row]]) -> None:
    """Pass later tensors that have the same difference as an excused output."""
    if not excused:
        return
    moved: dict[tuple[int, int, int], list[tuple[int, Row]]] = {}
    for index, row in excused:
        moved.setdefault(_moment(row), []).append((index, row))
    for index, row in enumerate(rows):
        # Passing rows are included, or else their sites would be judged by that difference.
        if row.status not in ("fail", "pass") or row.decided_by != METRIC:
            continue
        if _moment(row) not in moved or row.key.port not in ("input", "output"):
            continue
        for before, source in moved[_moment(row)]:
            size = _difference(source)
            # Only later tensors can have received the difference.
            if before < index and abs(_difference(row) - size) <= _SAME * size:
                words = f"differs as '{source.key.site}' does, whose bias has no gradient"
                if source.status == "incomparable":
                    rows[index] = row.judged("incomparable", words)
                    break
                rows[index] = row.judged(
                    "pass",
                    words,
                    limit_from=f"{source.limit_from}, {AS_GIVEN}",
                    severity=source.severity,
                )
                break


def _is_gradient(row: Row) -> bool:
    return is_bias_gradient(row.key, row.class_name, row.reference_shape)


def _layer(row: Row) -> _Layer:
    return row.key.rank, row.key.process, module_of(row.key.site)


def _moment(row: Row) -> tuple[int, int, int]:
    return row.key.rank, row.key.process, row.key.step


def _difference(row: Row) -> float:
    """Norm of the difference; NaN if it is unknown."""
    return _number(row, "rmse") * math.sqrt(math.prod(row.reference_shape or ()))


def _number(row: Row, name: str) -> float:
    return float(row.metrics.get(name, math.nan))
