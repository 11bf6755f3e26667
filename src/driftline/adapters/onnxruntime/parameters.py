"""The weights of an optimised model, read from its files one at a time."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from driftline.adapters.onnxruntime import loading
from driftline.adapters.onnxruntime.snapshot import TYPES, AnyArray, HostTensor
from driftline.numerics.dtypes import DTYPES


class Weights:
    """The initializers of a model whose large ones lie beside it."""

    def __init__(self, path: Path) -> None:
        model = loading.protobuf().load(str(path), load_external_data=False)
        self._folder = path.parent
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def read(self, name: str) -> HostTensor | None:
        """One of them; None if it holds no numbers, or there is none."""
        tensor = self._tensors.get(name)
        dtype = TYPES.get(tensor.data_type, "") if tensor is not None else ""
        if tensor is None or not dtype:
            return None
        shape = tuple(tensor.dims)
        size = DTYPES[dtype].byte_count(math.prod(shape))
        data = self._bytes(tensor, size)
        return None if data is None or data.nbytes != size else HostTensor(data, dtype, shape)

    def _bytes(self, tensor: Any, size: int) -> AnyArray | None:
        if tensor.external_data:
            where = {entry.key: entry.value for entry in tensor.external_data}
            if not size:
                return np.empty(0, np.uint8)
            return np.memmap(
                self._folder / where["location"],
                np.uint8,
                "r",
                offset=int(where.get("offset", 0)),
                shape=(size,),
            )
        if tensor.raw_data:
            return np.frombuffer(tensor.raw_data, np.uint8)
        array: AnyArray = np.asarray(loading.protobuf().numpy_helper.to_array(tensor))
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
