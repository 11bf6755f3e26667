"""Small runs in memory, made from arrays, for tests of comparisons.

    run_of({"embed": array, "layers.0.mlp/input/x": array})

A tensor is named `site`, `site/port` or `site/port/slot`; order of the mapping is execution order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.runs.memory import MemorySink
from driftline.runs.records import Kept, Port, Record, TensorKey
from driftline.runs.run import Run


def key_of(name: str | TensorKey) -> TensorKey:
    """The key a short name stands for.

    >>> str(key_of("mlp/input/x"))
    'rank0/step0/mlp/input/x'
    """
    if isinstance(name, TensorKey):
        return name
    # Short names cannot hold a site with a slash; such tests pass a TensorKey.
    site, _, rest = name.partition("/")
    port, _, slot = rest.partition("/")
    return TensorKey.of(site, cast("Port", port or "output"), slot or "0")


def record_into(
    sink: Any,
    name: str | TensorKey,
    values: npt.NDArray[Any],
    *,
    keep: Kept = "full",
    stride: int = 1,
    alias: str = "",
    class_name: str = "",
) -> None:
    """Put one array into a sink as a capture would. ml_dtypes arrays keep their type."""
    array = np.ascontiguousarray(values)
    flat = array.reshape(-1)
    dtype = DTYPES[array.dtype.name]
    if keep == "sample":
        # As a capture samples: every nth element of the flat tensor.
        flat = np.ascontiguousarray(flat[::stride])
    raw = flat.view(np.uint8)
    summary = None
    if keep == "summary":
        storage = flat.view(dtype.storage)
        summary = kernel.summarize(storage, dtype, count=math.prod(array.shape))
    record = Record(
        key_of(name),
        0,
        array.dtype.name,
        tuple(values.shape),
        alias=alias,
        class_name=class_name,
        kept=keep,
        sample_stride=stride if keep == "sample" else 1,
        summary=summary,
    )
    # A description has no values at all.
    sink.put(record, None if keep == "describe" else raw)


def run_of(
    tensors: Mapping[Any, npt.NDArray[Any]],
    *,
    keep: Kept = "full",
    stride: int = 1,
    aliases: Mapping[Any, str] | None = None,
    classes: Mapping[str, str] | None = None,
    name: str = "memory",
) -> Run:
    """A run of these tensors, in this order.

    Args:
        tensors: Arrays by short name or `TensorKey`.
        keep: How much of each is kept.
        stride: For `sample`.
        aliases: Other names of slots, by the tensor's name.
        classes: Class names, by site.
        name: Name of the run in messages.
    """
    sink = MemorySink(name=name)
    for key, values in tensors.items():
        site = key_of(key).site
        record_into(
            sink,
            key,
            values,
            keep=keep,
            stride=stride,
            alias=(aliases or {}).get(key, ""),
            class_name=(classes or {}).get(site, ""),
        )
    return sink.run()
