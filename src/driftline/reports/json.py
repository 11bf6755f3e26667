"""Documents as JSON; non-finite numbers are the words "nan", "inf" and "-inf"."""

from __future__ import annotations

import json
from typing import Any, TextIO, cast

from driftline.comparison.row import number_to_json


def write(document: Any, stream: TextIO, *, indent: int | None = 2) -> None:
    """The document, ended by a newline."""
    stream.write(json.dumps(safe(document), indent=indent, ensure_ascii=False, allow_nan=False))
    stream.write("\n")


def safe(value: Any) -> Any:
    """The same values with non-finite numbers in words and tuples as lists.

    >>> safe({"a": (1, float("nan"))})
    {'a': [1, 'nan']}
    """
    if isinstance(value, dict):
        return {str(k): safe(v) for k, v in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [safe(v) for v in cast(list[Any], value)]
    if isinstance(value, float):
        return number_to_json(value)
    return value
