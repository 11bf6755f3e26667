"""Collective operators: their inputs are those of rank 0, then of rank 1, and so on."""

from __future__ import annotations

import numpy as np

from driftline.operators.definitions.call import (
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    Unfit,
    fits,
    is_float,
    real,
)
from driftline.operators.definitions.matmul import Sized, product

_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _ALONE = range(4)


def _by_rank(call: Call) -> list[list[Tensor]]:
    # A dump without `rankSize` lists one input per rank.
    ranks = call.whole("rankSize", 0) or len(call.inputs)
    fits(
        ranks > 0 and len(call.inputs) % ranks == 0 and len(call.inputs) > 0,
        f"{len(call.inputs)} inputs are not those of {ranks} ranks",
    )
    per_rank = len(call.inputs) // ranks
    return [list(call.inputs[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]


def _own(call: Call, ranks: int) -> int:
    rank = call.whole("rank", 0)
    fits(0 <= rank < ranks, f"rank {rank} of {ranks} does not exist")
    return rank


def all_gather(call: Call) -> list[Result]:
    """The inputs of all ranks, stacked along a new first axis."""
    first = [inputs[0] for inputs in _by_rank(call)]
    values = np.stack([tensor.values for tensor in first])
    return [Result(values, call.out_dtype(first[0].dtype), exact=True)]


def all_reduce(call: Call) -> list[Result]:
    """Sum, product, maximum or minimum over the ranks."""
    fits(call.whole("quantType", 0) == 0, "a quantised reduction is not defined here")
    first = [inputs[0] for inputs in _by_rank(call)]
    kind = call.param.get("allReduceType", "sum")
    dtype = call.out_dtype(first[0].dtype)
    stacked = np.stack([tensor.values for tensor in first])
    if kind == "max":
        return [Result(stacked.max(0), dtype, exact=True)]
    if kind == "min":
        return [Result(stacked.min(0), dtype, exact=True)]
    # Sums of integers are exact in int64, whatever their own width.
    exact = not is_float(first[0].dtype)
    wide = stacked.astype(np.int64) if exact else stacked
    if kind == "prod":
        return [Result(wide.prod(0), dtype, exact=exact)]
    if kind != "sum":
        raise Unfit(f"allReduceType {kind!r} is not known")
    if exact:
        return [Result(wide.sum(0), dtype, exact=True)]
    return [Result(wide.sum(0), dtype, len(first), np.sqrt((wide**2).sum(0)))]


def broadcast(call: Call) -> list[Result]:
    """The root's input."""
    ranks = _by_rank(call)
    root = call.whole("rankRoot", 0)
    fits(0 <= root < len(ranks), f"rankRoot {root} of {len(ranks)} does not exist")
    return [Result(ranks[root][0].values, call.out_dtype(ranks[root][0].dtype), exact=True)]


def linear_parallel(call: Call) -> list[Result]:
    """A linear layer whose parts are spread over the ranks."""
    fits(call.whole("quantType", -1) == -1, "a quantised parallel layer is not defined here")
    ranks = _by_rank(call)
    rank = _own(call, len(ranks))
    kind = call.whole("type", _ALL_REDUCE)
    dtype = call.out_dtype(ranks[rank][0].dtype)
    if kind in (_ALL_REDUCE, _REDUCE_SCATTER):
        # Every rank holds a part of the inner dimension: the parts are added before a residual.
        parts = [_product(call, inputs[0], inputs) for inputs in ranks]
        values = np.sum([part[0] for part in parts], 0)
        scale = np.sqrt(np.sum([part[1]() ** 2 for part in parts], 0))
        terms = sum(part[2] for part in parts)
        if call.flag("hasResidual", False):
            added = real(ranks[rank][-1])
            values, scale = values + added, np.hypot(scale, added)
        if kind == _REDUCE_SCATTER:
            # Each rank keeps its own share of the rows.
            fits(values.shape[0] % len(ranks) == 0, "the rows cannot be spread over the ranks")
            values = np.split(values, len(ranks))[rank]
            scale = np.split(scale, len(ranks))[rank]
        return [Result(values, dtype, terms, scale)]
    if kind == _ALL_GATHER:
        gathered = np.concatenate([inputs[0].values for inputs in ranks])
        gathered_input = Tensor(gathered, ranks[rank][0].dtype)
        values, scale, terms = _product(call, gathered_input, ranks[rank])
        outputs = [Result(values, dtype, terms, scale)]
        if call.flag("keepIntermediate", False):
            outputs.append(Result(gathered, call.out_dtype(gathered_input.dtype, 1), exact=True))
        return outputs
    if kind == _ALONE:
        values, scale, terms = _product(call, ranks[rank][0], ranks[rank])
        return [Result(values, dtype, terms, scale)]
    raise Unfit(f"type {kind} of a parallel layer is not defined here")


def _product(call: Call, x: Tensor, inputs: list[Tensor]) -> tuple[AnyArray, Sized, int]:
    fits(len(inputs) > 1, "needs a weight")
    weight = real(inputs[1])
    if call.flag("transWeight", True):
        weight = np.swapaxes(weight, -1, -2)
    return product(real(x), weight)


DEFINITIONS: dict[str, Definition] = {
    "AllGather": all_gather,
    "AllReduce": all_reduce,
    "Broadcast": broadcast,
    "LinearParallel": linear_parallel,
}
