"""A failing call of a torch operator as a stand-alone script: torch, numpy, its tensors.

The script contains `calls.py`, which builds and executes the call, and `formulas.py` if a CPU has
no kernel. It compares what the program gave with what float64 gives on the CPU.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from driftline.comparison.tolerance.defaults import allowed
from driftline.operators.aten import calls, formulas, kinds
from driftline.operators.aten.calls import Unfit, raw_of
from driftline.operators.aten.check import load
from driftline.operators.aten.golden import golden_of
from driftline.operators.aten.scaling import scale_of
from driftline.operators.aten.source import ListedCall
from driftline.operators.source import Reproduction
from driftline.runs.run import Run

_UNSAFE = re.compile(r"[^\w.()-]+", re.ASCII)

_HEAD = '''"""{title}

Written by `driftline opcheck --repro`. Needs torch, numpy and tensors.npz from the same folder:

    python repro.py [DEVICE]

Executes the operator on the CPU in float64, and again in its own types on DEVICE (cpu unless
given), and compares both with what the program gave. Exit code 1: the program's output is wrong.
0: it is not.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

'''

_TAIL = """

# ---- The call, and the comparison ----------------------------------------------------------------

OPERATOR = {operator!r}
PARAM = json.loads({param!r})
# Name in tensors.npz, slot, element type, shape.
INPUTS = json.loads({inputs!r})
OUTPUTS = json.loads({outputs!r})
WRITTEN = {written!r}
# For each output: bound of an element, is it relative, its floor, percent that must be within, and
# what rounding in a sum may add, in units of `scale_SLOT`.
BOUNDS = json.loads({bounds!r})


def numbers(tensor, dtype):
    tensor = tensor.detach().cpu().to(dtype)
    if dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    return (tensor.double() if dtype.is_floating_point else tensor).numpy()


def errors(right, given):
    with np.errstate(all="ignore"):
        kind = complex if np.iscomplexobj(right) else float
        alike = (right == given) | ((right != right) & (given != given))
        off = np.where(alike, 0.0, np.abs(given.astype(kind) - right.astype(kind)))
    return np.where(np.isnan(off), np.inf, off)


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    with np.load(Path(__file__).with_name("tensors.npz")) as held:
        read = {{slot: tensor_of(held[n], dtype, shape) for n, slot, dtype, shape in INPUTS}}
        gave = {{slot: tensor_of(held[n], dtype, shape) for n, slot, dtype, shape in OUTPUTS}}
        scales = {{slot: held["scale_" + slot] for slot in BOUNDS if "scale_" + slot in held}}
    func = operator_of(OPERATOR)
    precision = {precision!r}
    {golden}
    try:
        again = executed(func, arguments_of(func, PARAM, read, "own", device), "own", WRITTEN)
    except Exception as trouble:
        print(f"it cannot be executed on {{device}}: {{trouble}}")
        again = {{}}
    fine = True
    for slot, (error, relative, floor, required, growth) in BOUNDS.items():
        dtype = gave[slot].dtype
        golden, given = numbers(right[slot], dtype), numbers(gave[slot], dtype)
        if golden.shape != given.shape:
            print(f"{{OPERATOR}} output {{slot}}: shape {{given.shape}}, expected {{golden.shape}}")
            fine = False
            continue
        size = np.where(np.isfinite(golden), np.abs(golden), 0.0).astype(float)
        limit = error * np.maximum(size, floor) if relative else np.full(size.shape, error)
        if growth and slot in scales:
            limit = limit + growth * scales[slot].reshape(size.shape)
        off = errors(golden, given)
        inside = 100.0 * np.count_nonzero(off <= limit) / max(1, off.size)
        good = inside >= required and not np.isinf(off).any()
        fine = fine and good
        verdict = "right" if good else "WRONG"
        print(f"{{OPERATOR}} output {{slot}} ({{dtype}} {{list(given.shape)}}): {{verdict}}")
        print(f"  {{inside:.4g}} % of the elements are within the bound, {{required:g}} % must be")
        print(f"  largest error {{off.max(initial=0.0):g}} against {{precision}}")
        if slot in again:
            other = numbers(again[slot], dtype)
            worst = errors(golden, other).max(initial=0.0)
            print(f"  executed again on {{device}}: largest error {{worst:g}}")
        for place in np.argsort(-off, axis=None, kind="stable")[:5]:
            at = tuple(int(n) for n in np.unravel_index(place, off.shape))
            print(f"  at {{at}}: gave {{given[at].item()}}, should be {{golden[at].item()}}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
"""


_KERNEL = (
    'right = executed(func, arguments_of(func, PARAM, read, precision, "cpu"), precision, WRITTEN)'
)
_FORMULA = 'right = computed(func, arguments_of(func, PARAM, read, precision, "cpu", lenient=True))'


def reproduction_of(run: Run, listed: ListedCall, failing: Sequence[str]) -> Reproduction | None:
    """The script and its tensors; None if the call can no longer be built."""
    try:
        loaded = load(run, listed)
        golden = golden_of(loaded.prepared)
    except Unfit:
        return None
    call = listed.call
    if call.op_type.partition(".")[0] != "aten":
        return None  # a custom operator is not there without what defines it
    bounds: dict[str, tuple[float, bool, float, float, float]] = {}
    arrays: dict[str, Any] = {}
    # Bounds and scales of the failing outputs are computed here, because the script has no
    # tolerance table.
    for slot in failing:
        actual, right = loaded.actual[slot], golden.outputs[slot]
        exact = kinds.is_exact(loaded.prepared.func, call.param, actual.dtype)
        name = str(actual.dtype).removeprefix("torch.")
        bound = allowed(name, exact=exact)
        terms = (
            1 if exact else kinds.terms_of(loaded.prepared.func, loaded.prepared.arguments(), right)
        )
        growth = bound.growth(terms)
        # The scale is stored with the tensors: the script has no code to compute it.
        if growth and right.shape == actual.shape:
            try:
                arrays[f"scale_{slot}"] = scale_of(loaded.prepared, slot, right, actual.dtype)
            except Exception:
                growth = 0.0
        bounds[slot] = (bound.error, bound.relative, bound.floor, bound.share, growth)
    inputs = _named("input", loaded.prepared.tensors)
    outputs = _named("output", loaded.actual)
    # A formula replaces the kernel only if float64 was possible; otherwise the script runs the
    # kernel.
    formula = golden.precision == "float64" and formulas.has_formula(loaded.prepared.func)
    parts = (calls, formulas) if formula else (calls,)
    # A site's name is untrusted and goes into a program text.
    place = _UNSAFE.sub("_", call.site)[:200]
    title = f"{call.op_type} at {place}, step {call.step}: its output is not right."
    tail = _TAIL.format(
        operator=call.op_type,
        param=json.dumps(dict(call.param)),
        inputs=json.dumps(_described(inputs)),
        outputs=json.dumps(_described(outputs)),
        written=list(loaded.prepared.operator.written),
        bounds=json.dumps(bounds),
        precision=golden.precision,
        golden=_FORMULA if formula else _KERNEL,
    )
    held = {name: raw_of(tensor) for name, (_, tensor) in {**inputs, **outputs}.items()}
    return Reproduction(
        call,
        {name: held[name] for name in inputs} | arrays,
        {name: held[name] for name in outputs},
        {
            name: str(t.dtype).removeprefix("torch.")
            for name, (_, t) in {**inputs, **outputs}.items()
        },
        _HEAD.format(title=title) + "\n\n".join(map(_body, parts)) + tail,
    )


def _named(port: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
    return {f"{port}{n}": (slot, tensor) for n, (slot, tensor) in enumerate(tensors.items())}


def _described(
    named: Mapping[str, tuple[str, torch.Tensor]],
) -> list[tuple[str, str, str, list[int]]]:
    return [
        (name, slot, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, (slot, tensor) in named.items()
    ]


def _body(module: ModuleType) -> str:
    """The text of a file without its head and imports."""
    text = inspect.getsource(module)
    nodes = ast.parse(text).body
    # The first statement that is no import begins the part that a script needs.
    first = next(node for node in nodes[1:] if not isinstance(node, (ast.Import, ast.ImportFrom)))
    return "\n".join(text.split("\n")[first.lineno - 1 :])
