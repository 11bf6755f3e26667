"""The registry of definitions: which file defines which operator, and computing golden values.

The definition files import numpy and each other only, by `from driftline.operators.definitions.X
import ...`, because `driftline opcheck --repro` copies them into its stand-alone scripts. A new
operator is one function in such a file, one line in its `DEFINITIONS` and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from driftline.errors import BadInput, did_you_mean
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.operators.definitions.call import Call, Definition, Result, Tensor, Unfit, rounded

FAMILIES: dict[str, tuple[str, ...]] = {
    "elementwise": (
        "Activation",
        "Elewise",
    ),
    "norms": (
        "FastSoftMax",
        "FastSoftMaxGrad",
        "GenAttentionMask",
        "LayerNorm",
        "RmsNorm",
        "Softmax",
    ),
    "matmul": (
        "Linear",
        "LinearSparse",
        "Matmul",
        "StridedBatchMatmul",
    ),
    "indexing": (
        "AsStrided",
        "Concat",
        "Fill",
        "Gather",
        "Pad",
        "Repeat",
        "SetValue",
        "Slice",
        "Split",
        "Transdata",
        "Transpose",
        "Unpad",
        "Where",
    ),
    "reductions": (
        "Cumsum",
        "Gating",
        "IndexAdd",
        "Nonzero",
        "Onehot",
        "Reduce",
        "Sort",
    ),
    "attention": (
        "KvCache",
        "PagedAttention",
        "ReshapeAndCache",
        "Rope",
        "RopeGrad",
        "SelfAttention",
    ),
    "sampling": (
        "Multinomial",
        "TopkToppSampling",
    ),
    "collectives": (
        "AllGather",
        "AllReduce",
        "Broadcast",
        "LinearParallel",
    ),
}
"""Which file defines which operators (names without `Operation`)."""


# Golden values: what an operator should have computed.


AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def known_operators() -> list[str]:
    """Names of the operators that have a definition, without `Operation` at the end."""
    return sorted(name for family in FAMILIES.values() for name in family)


def plain_name(op_type: str) -> str:
    """`Linear` of `LinearOperation`, as the table of operators has it."""
    return op_type.removesuffix("Operation")


def definition_of(op_type: str) -> Definition | None:
    """The definition of an operator; None when there is none."""
    import importlib

    name = plain_name(op_type)
    for module, names in FAMILIES.items():
        # Families are imported when one of their operators is needed; most dumps use few of them.
        if name in names:
            family = importlib.import_module(f"driftline.operators.definitions.{module}")
            return cast("Definition", family.DEFINITIONS[name])
    return None


def tensor_of(raw: AnyArray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Stored values in the form for a definition: floats in float64, integers unchanged."""
    kind = DTYPES[dtype]
    # Four-bit numbers are packed in pairs and have to be decoded like floats.
    if kind.is_floating or kind.bits == 4:
        elements = int(np.prod(shape, dtype=np.int64))
        return Tensor(np.asarray(to_float64(raw, kind, elements)).reshape(shape), dtype)
    return Tensor(raw.view(kind.storage).reshape(shape), dtype)


def results(
    op_type: str, param: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[str] = ()
) -> list[Result]:
    """The outputs of a call, rounded to their formats.

    Args:
        op_type: `LinearOperation` or `Linear`.
        param: Its parameters.
        inputs: Its inputs.
        outputs: Formats of the outputs where they are known.

    Raises:
        Unfit: The inputs or parameters do not fit the operator, or it has no definition.
    """
    definition = definition_of(op_type)
    if definition is None:
        raise Unfit(f"there is no golden implementation of {op_type}")
    try:
        with np.errstate(all="ignore"):
            computed = definition(Call(param, inputs, outputs))
            return [_rounded(result) for result in computed]
    # A definition's own refusal is clearer than any error of numpy.
    except Unfit:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as trouble:
        # numpy's own words for shapes that cannot be multiplied, added or sliced.
        raise Unfit(f"the inputs do not fit {op_type}: {trouble}") from None


def _rounded(result: Result) -> Result:
    return result._replace(values=rounded(np.asarray(result.values), result.dtype))


def golden(op_type: str, param: Mapping[str, Any], inputs: Sequence[Any]) -> list[AnyArray]:
    """The expected result of an operator: its definition in float64, rounded once.

        driftline.operators.golden("SoftmaxOperation", {"axes": [-1]}, [x])

    Args:
        op_type: `LinearOperation`, or `Linear`; see `known_operators()`.
        param: Parameters by name, as op_param.json has them.
        inputs: numpy arrays or torch tensors; bfloat16 and float8 as `ml_dtypes` types or torch's.

    Returns:
        One array per output, in the type of the output.

    Raises:
        BadInput: There is no such operator, or the inputs or parameters do not fit it.
    """
    if definition_of(op_type) is None:
        raise BadInput(
            f"there is no golden implementation of {op_type!r}",
            hint=did_you_mean(plain_name(op_type), known_operators()),
        )
    try:
        outputs = results(op_type, param, [_taken(value) for value in inputs])
    except Unfit as why:
        raise BadInput(f"{op_type}: {why}") from None
    return [_given(value) for value in outputs]


def _taken(value: Any) -> Tensor:
    if hasattr(value, "detach"):  # a torch tensor; torch itself is not needed to know it
        name = str(value.dtype).removeprefix("torch.")
        held = value.detach().cpu().contiguous()
        if name not in DTYPES:
            raise BadInput(f"tensors of {name} cannot be computed with")
        if DTYPES[name].is_floating:
            held = held.to_dense() if held.is_sparse else held
            return Tensor(held.double().numpy() if "complex" not in name else held.numpy(), name)
        return Tensor(held.numpy(), name)
    array = np.asarray(value)
    name = array.dtype.name
    if name not in DTYPES:
        raise BadInput(f"arrays of {name} cannot be computed with")
    if DTYPES[name].is_floating:
        kind = np.complex128 if DTYPES[name].kind == "complex" else np.float64
        return Tensor(array.astype(kind), name)
    return Tensor(array, name)


def _given(result: Result) -> AnyArray:
    if result.dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return result.values.astype(getattr(ml_dtypes, result.dtype))
    return result.values.astype(result.dtype)
