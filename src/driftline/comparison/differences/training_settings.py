"""Differences outside the modules: configuration, state of the process, optimizer, loss, order.

Values of an optimizer's groups are compared for each parameter, because two programs may arrange
the same settings in different groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from driftline.comparison.differences.difference import ABSENT, Difference, Kind
from driftline.comparison.differences.models import ModelPair, is_same_value, shown
from driftline.runs.sidecars.model_facts import ModelFacts

_CONTEXT = frozenset(
    {
        "seed",
        "threads",
        "interop_threads",
        "grad_enabled",
        "inference_mode",
        "deterministic_algorithms",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "recomputes_forward",
        "sdpa_used",
        "device",
    }
)
"""State of a process that may differ between correct runs. It is shown, but not counted."""
_DEFAULTS: Mapping[str, Any] = {"recomputes_forward": False}
"""Values of switches that are written only if they are set."""
_SILENT = frozenset({"seed", "device"})
"""State that is not even shown: models with other seeds or devices are not different models."""
_MOST_NAMES = 6
_RATE = 0.1
"""Relative difference of two measured rates that the rounding of small changes may cause."""
_NEVER = 1 << 62
"""The step of a parameter that never joins an optimizer."""
_CONVERSION = "ToCopyBackward0"
"""The function with which a model's output is converted to float32 for the loss."""
# Counters and results of a schedule. Its learning rates are compared as values of the optimizer.
_PROGRESS = frozenset(
    {
        "last_epoch",
        "_step_count",
        "_last_lr",
        "base_lrs",
        "_growth_tracker",
        "best",
        "num_bad_epochs",
        "cooldown_counter",
        "T_cur",
    }
)


def of_config(pair: ModelPair) -> Iterator[Difference]:
    """Differences of the models' configurations, entry by entry."""
    first, second = pair.reference.config, pair.candidate.config
    if not first or not second:
        return
    for name in (*first, *(name for name in second if name not in first)):
        a, b = first.get(name, ABSENT), second.get(name, ABSENT)
        words = tuple(str(value).removeprefix("torch.") for value in (a, b))
        converted = pair.dtypes is not None and words == pair.dtypes
        if not is_same_value(name, a, b) and not converted:
            yield Difference("config", "", name, shown(a), shown(b))


def of_process(reference: ModelFacts, candidate: ModelFacts) -> Iterator[Difference]:
    """Differences of switches of the process that can change a number."""
    if not reference.process or not candidate.process:
        return
    first, second = ({**_DEFAULTS, **facts.process} for facts in (reference, candidate))
    for name in first:
        if name not in second or name in _SILENT:
            continue
        if not is_same_value(name, first[name], second[name]):
            values = shown(first[name]), shown(second[name])
            yield Difference("process", "", name, *values, counts=name not in _CONTEXT)


def of_training(pair: ModelPair) -> Iterator[Difference]:
    """Differences of optimizers, schedulers, scalers, clipping, losses and the order of calls."""
    first, second = _by_kind(pair.reference), _by_kind(pair.candidate)
    if not (first and second):
        return
    yield from _optimizers(pair, first.get("optimizer", []), second.get("optimizer", []))
    for kind in ("scheduler", "scaler", "clipping") if pair.same_framework else ():
        yield from _settings(cast("Kind", kind), first.get(kind, []), second.get(kind, []))
    yield from _clipped_parameters(pair, first.get("clipping", []), second.get("clipping", []))
    yield from _averages(first.get("average", []), second.get("average", []))
    yield from _orders(first.get("order", []), second.get("order", []))
    losses = first.get("loss", []), second.get("loss", [])
    # Functions have other names in another framework.
    if pair.same_framework:
        yield from _loss_functions(*losses, without=_CONVERSION if _is_converted(pair) else "")
    yield from _loss_values(*losses)


def _by_kind(facts: ModelFacts) -> dict[str, list[dict[str, Any]]]:
    records: dict[str, list[dict[str, Any]]] = {}
    for record in facts.training:
        records.setdefault(str(record.get("kind")), []).append(record)
    return records


def _table(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


# Optimizers.

OPTIMIZER = "optimizer"
"""Kind of a record about an optimizer."""


def _optimizers(
    pair: ModelPair, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> Iterator[Difference]:
    everywhere = [
        {path for record in side for path in _values_by_parameter(record)}
        for side in (first, second)
    ]
    wrappers = _wrappers(first) | _wrappers(second)
    numbers = {record.get("number") for record in (*first, *second)}
    changed: dict[tuple[str, str, str], list[str]] = {}
    for number in sorted(number for number in numbers if type(number) is int):
        records = [[r for r in side if r.get("number") == number] for side in (first, second)]
        classes = [_class_name(pair, side[0]) if side else ABSENT for side in records]
        if classes[0] != classes[1] and not (ABSENT in classes and number in wrappers):
            yield Difference("optimizer", "", "class of the optimizer", classes[0], classes[1])
        if ABSENT not in classes:
            changes = _group_values(pair, records[0][0], records[1][0], everywhere)
            for (name, a, b), paths in changes.items():
                changed.setdefault((f"{classes[0]} {name}", a, b), []).extend(paths)
            yield from _later_values(records[0], records[1], classes[0])
            yield from _later_parameters(pair, records[0], records[1], classes[0])
            yield from _first_states(records[0][0], records[1][0], classes[0])
    # A program may have an optimizer for each parameter, so equal changes are merged.
    for (name, a, b), paths in changed.items():
        is_everywhere = bool(everywhere[0]) and everywhere[0].issubset(paths)
        where = "for all parameters" if is_everywhere else _for_parameters(paths)
        yield Difference("optimizer", "", name, a, b, where)
    yield from _other_optimizers(pair, first, second, wrappers)


def _other_optimizers(
    pair: ModelPair, first: list[dict[str, Any]], second: list[dict[str, Any]], wrappers: set[Any]
) -> Iterator[Difference]:
    """Parameters that another optimizer of the program updates in another way."""
    owners, others = (
        {
            path: (record.get("number"), _class_name(pair, record), values)
            for record in side
            if record.get("number") not in wrappers
            for path, values in _values_by_parameter(record).items()
        }
        for side in (first, second)
    )
    others = {pair.renamed_path(path): owner for path, owner in others.items()}
    moved: dict[tuple[str, str], list[str]] = {}
    for path in owners.keys() & others.keys():
        (number, kind, values), (other, other_kind, other_values) = owners[path], others[path]
        shared = values.keys() & other_values.keys()
        same = all(is_same_value(name, values[name], other_values[name]) for name in shared)
        if number != other and not (kind == other_kind and same):
            texts = [
                f"{which} {shown(about.get('lr', ''))}".strip()
                for which, about in ((kind, values), (other_kind, other_values))
            ]
            moved.setdefault((texts[0], texts[1]), []).append(path)
    for texts, paths in moved.items():
        where = _for_parameters(sorted(paths))
        yield Difference("optimizer", "", "optimizer and its lr", *texts, where)


def _for_parameters(paths: Sequence[str]) -> str:
    named = list(dict.fromkeys(paths))
    listed = ", ".join(named[:_MOST_NAMES]) + (", ..." if len(named) > _MOST_NAMES else "")
    if named[0].startswith("group "):
        return f"for {listed}"
    return f"for {len(named)} parameter{'' if len(named) == 1 else 's'}: {listed}"


def _class_name(pair: ModelPair, record: dict[str, Any]) -> str:
    """The class of an optimizer; between frameworks, the name of torch's equivalent."""
    name = str(record.get("class", "")).rpartition(".")[2]
    return name if pair.same_framework else str(record.get("like") or name)


def add_parameters(record: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the parameters that an optimizer updates on another rank to its groups, in order."""
    groups = zip(_list(record.get("groups")), _list(other.get("groups")), strict=False)
    for group, more in groups:
        names = _table(group).get("names")
        if isinstance(names, list):
            listed = cast("list[Any]", names)
            held = set(map(str, listed))
            listed += [name for name in _list(_table(more).get("names")) if str(name) not in held]


def _wrappers(records: list[dict[str, Any]]) -> set[Any]:
    """Numbers of optimizers that hold all parameters of another optimizer.

    An optimizer that distributes parameters over ranks contains one for the parameters of its own
    rank.
    """
    held = {record.get("number"): set(_values_by_parameter(record)) for record in records}
    return {
        number
        for number, own in held.items()
        if any(other != number and paths and paths <= own for other, paths in held.items())
    }


def _group_values(
    pair: ModelPair,
    first: dict[str, Any],
    second: dict[str, Any],
    everywhere: Sequence[set[str]],
) -> dict[tuple[str, str, str], list[str]]:
    """The parameters for each setting with two different values."""
    first_values, second_values = _values_by_parameter(first), _values_by_parameter(second)
    second_values = {pair.renamed_path(path): values for path, values in second_values.items()}
    # A parameter that another optimizer of the program updates is not missing.
    elsewhere = everywhere[0], {pair.renamed_path(path) for path in everywhere[1]}
    changed: dict[tuple[str, str, str], list[str]] = {}

    def is_shared(path: str) -> bool:
        return pair.same_framework or pair.has_both(path)

    for path, values in first_values.items():
        others = second_values.get(path)
        if others is None and path not in elsewhere[1] and is_shared(path):
            changed.setdefault(("parameters", "updated", "not in the optimizer"), []).append(path)
        for name in values:
            if (
                others is not None
                and name in others
                and not is_same_value(name, values[name], others[name])
            ):
                key = name, shown(values[name]), shown(others[name])
                changed.setdefault(key, []).append(path)
    if lone := [path for path in second_values if path not in elsewhere[0] and is_shared(path)]:
        changed["parameters", "not in the optimizer", "updated"] = lone
    # If parameters have no names, the groups are compared in order.
    if not first_values or not second_values:
        groups = zip(_list(first.get("groups")), _list(second.get("groups")), strict=False)
        for number, (group, other) in enumerate(groups):
            a, b = _table(_table(group).get("values")), _table(_table(other).get("values"))
            for name in a:
                if name in b and not is_same_value(name, a[name], b[name]):
                    key = name, shown(a[name]), shown(b[name])
                    changed.setdefault(key, []).append(f"group {number}")
    return changed


def _values_by_parameter(record: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        str(path): _table(_table(group).get("values"))
        for group in _list(record.get("groups"))
        for path in _list(_table(group).get("names"))
    }


def _later_values(
    first: list[dict[str, Any]], second: list[dict[str, Any]], optimizer: str
) -> Iterator[Difference]:
    """Settings that become different in a later step, with the first such step."""
    schedule, other_schedule = _schedule(first), _schedule(second)
    start = {key: (schedule[key], other_schedule[key]) for key in schedule if key in other_schedule}
    for (group, name), (values, others) in start.items():
        # A difference from the first step on is reported by `_group_values`.
        if not is_same_value(name, values[min(values)], others[min(others)]):
            continue
        a, b = values[min(values)], others[min(others)]
        for step in sorted({*values, *others}):
            a, b = values.get(step, a), others.get(step, b)
            if not _near(a, b):
                label = f"{optimizer} {name} in group {group} from step {step}"
                yield Difference("optimizer", "", label, shown(a), shown(b), step=step)
                break


def _later_parameters(
    pair: ModelPair, first: list[dict[str, Any]], second: list[dict[str, Any]], optimizer: str
) -> Iterator[Difference]:
    """Parameters that join an optimizer in different steps, such as those that are unfrozen."""
    joined = _joining_steps(first)
    others = {pair.renamed_path(path): step for path, step in _joining_steps(second).items()}
    moved: dict[tuple[int, int], list[str]] = {}
    for path in (*joined, *(path for path in others if path not in joined)):
        steps = joined.get(path, _NEVER), others.get(path, _NEVER)
        # A difference from the first step on is reported by `_group_values`.
        if steps[0] != steps[1] and min(steps) > 0:
            moved.setdefault(steps, []).append(path)
    for steps, paths in moved.items():
        texts = [
            "not in the optimizer"
            if step == _NEVER
            else "updated"
            if step == min(steps)
            else f"updated from step {step}"
            for step in steps
        ]
        where = _for_parameters(paths)
        label = f"{optimizer} parameters from step {min(steps)}"
        yield Difference("optimizer", "", label, texts[0], texts[1], where, step=min(steps))


def _joining_steps(records: list[dict[str, Any]]) -> dict[str, int]:
    """The step in which each parameter joined its optimizer; 0 if it was there from the start."""
    steps: dict[str, int] = {}
    for position, record in enumerate(records):
        step = record.get("step") if position else 0
        for path in _values_by_parameter(record):
            steps.setdefault(path, step if type(step) is int else 0)
    return steps


def _first_states(
    first: dict[str, Any], second: dict[str, Any], optimizer: str
) -> Iterator[Difference]:
    """States, such as momenta, that only one side has loaded before its first update."""
    states = first.get("state"), second.get("state")
    if isinstance(states[0], str) and isinstance(states[1], str) and states[0] != states[1]:
        step = first.get("step")
        step = step if type(step) is int else 0
        label = f"{optimizer} state before its first update, in step {step}"
        yield Difference("optimizer", "", label, states[0], states[1], step=step)


def _near(first: Any, second: Any) -> bool:
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    # Schedules compute in float64, and the last digits depend on the order of operations.
    return math.isclose(first, second, rel_tol=1e-9) if numbers else first == second


def _schedule(records: list[dict[str, Any]]) -> dict[tuple[int, str], dict[int, Any]]:
    """For each group and setting, its value in each step in which it was written."""
    schedule: dict[tuple[int, str], dict[int, Any]] = {}
    for record in records:
        step = record.get("step")
        for number, group in enumerate(_list(record.get("groups"))):
            for name, value in _table(_table(group).get("values")).items():
                schedule.setdefault((number, name), {})[step if type(step) is int else 0] = value
    return schedule


# Settings, order and loss.


def _settings(
    kind: Kind, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> Iterator[Difference]:
    if not first and not second:
        return
    if not first or not second:
        present = (first or second)[0]
        name = str(present.get("class", "")).rpartition(".")[2] or _settings_text(present)
        values = (name, ABSENT) if first else (ABSENT, name)
        yield Difference(kind, "", kind, *values)
        return
    # Schedulers and scalers have no names, so they are compared in the order they were found in.
    for record, other in zip(first, second, strict=False):
        classes = [str(side.get("class", "")).rpartition(".")[2] for side in (record, other)]
        if classes[0] != classes[1]:
            yield Difference(kind, "", "class", classes[0], classes[1])
            continue
        a, b = _table(record.get("values")), _table(other.get("values"))
        for name in (*a, *(name for name in b if name not in a)):
            values = a.get(name, ABSENT), b.get(name, ABSENT)
            if name not in _PROGRESS and not is_same_value(name, *values):
                label = f"{classes[0]} {name}".strip()
                yield Difference(kind, "", label, shown(values[0]), shown(values[1]))


def _clipped_parameters(
    pair: ModelPair, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> Iterator[Difference]:
    """Parameters whose gradients only one side clips, if both sides clip some."""
    clipped = [
        {str(name) for record in side for name in _list(record.get("names"))}
        for side in (first, second)
    ]
    clipped[1] = {pair.renamed_path(path) for path in clipped[1]}
    for own, others, values in (
        (clipped[0], clipped[1], ("clipped", "not clipped")),
        (clipped[1], clipped[0], ("not clipped", "clipped")),
    ):
        if others and (lone := sorted(own - others)):
            listed = ", ".join(lone[:_MOST_NAMES]) + (", ..." if len(lone) > _MOST_NAMES else "")
            yield Difference("clipping", "", f"gradients of {listed}", *values)


def _averages(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Iterator[Difference]:
    """Differences of averages of weights: which exist, and at which rate they follow."""
    sides = [_rates(side) for side in (first, second)]
    for number in sorted({*sides[0], *sides[1]}):
        rates = [side.get(number, {}) for side in sides]
        name = "average of weights" + (f" {number}" if number else "")
        if not all(rates):
            texts = ["kept, and moves" if own else ABSENT for own in rates]
            yield Difference("average", "", name, texts[0], texts[1])
            continue
        for step in sorted({*rates[0], *rates[1]}):
            a, b = (_in_force(own, step) for own in rates)
            # Rates are measured from the weights, and their last digits are rounding errors.
            if a is not None and b is not None and not math.isclose(a, b, rel_tol=_RATE):
                label = f"decay of the {name}, measured before step {step}"
                yield Difference("average", "", label, _decay(a), _decay(b), step=step)
                break


def _rates(records: list[dict[str, Any]]) -> dict[int, dict[int, float]]:
    """For each average and step, the fraction of the distance to the weights that it moves."""
    rates: dict[int, dict[int, float]] = {}
    for record in records:
        number, step, rate = (record.get(name) for name in ("number", "step", "rate"))
        if type(number) is int and type(step) is int and isinstance(rate, float):
            rates.setdefault(number, {})[step] = rate
    return rates


def _in_force(rates: Mapping[int, float], step: int) -> float | None:
    earlier = [written for written in rates if written <= step]
    return rates[max(earlier)] if earlier else None


def _decay(rate: float) -> str:
    return f"{1.0 - float(f'{rate:.2g}'):.6g}"


def _settings_text(record: dict[str, Any]) -> str:
    values = _table(record.get("values"))
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


def _orders(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Iterator[Difference]:
    orders, other_orders = _order_by_step(first), _order_by_step(second)
    for step in sorted({*orders, *other_orders}):
        # An order holds until another one is written.
        a = orders[max(s for s in orders if s <= step)] if any(s <= step for s in orders) else []
        b = (
            other_orders[max(s for s in other_orders if s <= step)]
            if any(s <= step for s in other_orders)
            else []
        )
        if a and b and a != b:
            values = " ".join(a), " ".join(b)
            # Two long lists are hard to read, so the calls that one side lacks are added.
            lacks = [
                f"{_surplus(calls, others)} in the {side} only"
                for calls, others, side in ((a, b, "reference"), (b, a, "candidate"))
                if _surplus(calls, others) != ABSENT
            ]
            label = f"calls of step {step}" + (f" ({'; '.join(lacks)})" if lacks else "")
            yield Difference("order", "", label, *values, step=step)
            return


def _order_by_step(records: list[dict[str, Any]]) -> dict[int, list[str]]:
    orders: dict[int, list[str]] = {}
    for record in records:
        if type(step := record.get("step", 0)) is not int:
            continue
        order = orders.setdefault(step, [])
        for word in map(str, _list(record.get("calls"))):
            # An optimizer that wraps another one steps it within its own step.
            if not (word == "step" and order[-1:] == ["step"]):
                order.append(word)
    return orders


def _is_converted(pair: ModelPair) -> bool:
    """Whether one side computes in another number format."""
    processes = pair.reference.process, pair.candidate.process
    autocasts = [
        {name: value for name, value in process.items() if name.startswith("autocast_")}
        for process in processes
    ]
    return pair.dtypes is not None or autocasts[0] != autocasts[1]


def _loss_functions(
    first: list[dict[str, Any]], second: list[dict[str, Any]], without: str
) -> Iterator[Difference]:
    for record, other in zip(first, second, strict=False):
        functions = [
            [name for name in map(str, _list(side.get("functions"))) if name != without]
            for side in (record, other)
        ]
        step = record.get("step", 0)
        # Not every step has functions: some keep only the value of the loss.
        if all(functions) and functions[0] != functions[1]:
            a = _surplus(functions[0], functions[1])
            b = _surplus(functions[1], functions[0])
            # The same functions in another order, such as terms of a sum, are no difference.
            if a != b:
                yield Difference("loss", "", f"functions of the loss in step {step}", a, b)
                break


def _loss_values(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Iterator[Difference]:
    for record, other in zip(first, second, strict=False):
        a, b = _number(record.get("value")), _number(other.get("value"))
        if a is not None and b is not None and a != b:
            size = abs(a) or 1.0
            yield Difference(
                "loss",
                "",
                f"loss in step {record.get('step', 0)}",
                f"{a:.8g}",
                f"{b:.8g}",
                distance=abs(a - b) / size,
                # Every change of arithmetic changes the loss; the verdict judges the size.
                counts=False,
            )
            break


def _surplus(functions: list[str], others: list[str]) -> str:
    """The functions that the other side lacks, or calls less often."""
    own = Counter(functions)
    own.subtract(others)
    texts = [f"{count} {name}" if count > 1 else name for name, count in own.items() if count > 0]
    return ", ".join(texts) or ABSENT


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
