"""Rotary position embedding and its gradient."""

from __future__ import annotations

import numpy as np

from driftline.operators.families.calling import (
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    fits,
    real,
)


def rope(call: Call) -> list[Result]:
    """x · cos + turned(x) · sin for queries and keys, head by head.

    `rotaryCoeff` 2 turns the two halves of a head, 4 the two halves of each half, anything else
    neighbouring elements.
    """
    coefficient = call.whole("rotaryCoeff", 4)
    cos, sin = call.at(2, "cos"), call.at(3, "sin")
    return [
        _rotated(call, call.at(number, name), real(cos), real(sin), coefficient, number)
        for number, name in ((0, "query"), (1, "key"))
    ]


def _rotated(
    call: Call, x: Tensor, cos: AnyArray, sin: AnyArray, coefficient: int, number: int
) -> Result:
    width = cos.shape[-1] if cos.ndim else 0
    fits(cos.shape == sin.shape, f"cos {list(cos.shape)} and sin {list(sin.shape)} differ")
    fits(
        width > 0 and x.values.size % cos.size == 0 and width % 2 == 0,
        f"{list(x.values.shape)} cannot be split into heads of {width}",
    )
    tokens = cos.size // width
    heads = real(x).reshape(tokens, -1, width)
    cos, sin = cos.reshape(tokens, 1, width), sin.reshape(tokens, 1, width)
    chunk = {2: width, 4: width // 2}.get(coefficient, 2)
    fits(width % chunk == 0 and chunk % 2 == 0, f"heads of {width} cannot be turned in halves")
    turned = turned_by_halves(heads, chunk)
    values = heads * cos + turned * sin
    scale = np.hypot(heads * cos, turned * sin).reshape(x.values.shape)
    dtype = call.out_dtype(x.dtype, number)
    return Result(values.reshape(x.values.shape), dtype, 2, scale)


def turned_by_halves(heads: AnyArray, chunk: int) -> AnyArray:
    """(-second half, first half) of every chunk."""
    parts = heads.reshape(*heads.shape[:-1], -1, 2, chunk // 2)
    return np.stack([-parts[..., 1, :], parts[..., 0, :]], -2).reshape(heads.shape)


def rope_grad(call: Call) -> list[Result]:
    """g · (cos + (second half of sin, - first half of sin)), element by element.

    That is what the operator's maker tests it against; it is not the derivative of `rope`, in which
    the elements of the gradient themselves would be turned.
    """
    cos, sin = real(call.at(2, "cos")), real(call.at(3, "sin"))
    fits(cos.ndim == 2 and cos.shape == sin.shape, "cos and sin must be two equal matrices")
    lengths = call.wholes("qSeqLen", [cos.shape[0]])
    fits(
        all(0 <= length <= cos.shape[0] for length in lengths) and cos.shape[1] % 2 == 0,
        f"qSeqLen {lengths} is longer than cos and sin ({cos.shape[0]})",
    )
    cos = np.concatenate([cos[:length] for length in lengths])
    sin = np.concatenate([sin[:length] for length in lengths])
    tokens, width = cos.shape
    turned = -turned_by_halves(sin, width)
    factor, spread = (cos + turned)[:, None], np.hypot(cos, turned)[:, None]
    found: list[Result] = []
    for number, name in ((0, "query gradient"), (1, "key gradient")):
        x = call.at(number, name)
        fits(
            x.values.shape[0] == tokens and x.values.shape[-1] % width == 0,
            f"{list(x.values.shape)} cannot be split into {tokens} tokens and heads of {width}",
        )
        heads = real(x).reshape(tokens, -1, width)
        scale = (np.abs(heads) * spread).reshape(x.values.shape)
        dtype = call.out_dtype(x.dtype, number)
        found.append(Result((heads * factor).reshape(x.values.shape), dtype, 2, scale))
    return found


DEFINITIONS: dict[str, Definition] = {"Rope": rope, "RopeGrad": rope_grad}
