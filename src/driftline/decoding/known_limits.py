"""Limits of `ce` and mean difference by model: the documented ones, and a table owned by the user.

The table is a JSON list of `{"model_id", "micro", "ce", "mean_diff"}`; it is created with the
documented values and is then the user's to edit. The documented list of models to test, one JSON
object per line, is read here as well.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.errors import BadFile, BadInput

DEFAULT_LIMITS = (3.0, 0.001)
"""Default limits of `ce` and mean difference."""
MOST_BYTES = 16 << 20

_LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
_LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
_GRANITE_32 = "ibm-granite/granite-3.2-8b-instruct"
_GRANITE_33 = "ibm-granite/granite-3.3-8b-instruct"
_GRANITE_20B = "ibm-granite/granite-20b-code-instruct-8k"


class ModelLimits(NamedTuple):
    """Limits of one model.

    Attributes:
        model_id: Its id, as it is named in tests.
        micro: Whether they are for its micro version.
        ce: A token fails at this cross entropy, or above.
        mean_diff: A token fails at this mean difference of probabilities, or above.
    """

    model_id: str
    micro: bool
    ce: float
    mean_diff: float


DOCUMENTED = (
    ModelLimits(_LLAMA_8B, True, 3.7392955756187423, 0.001),
    ModelLimits(_GRANITE_32, True, 2.996668996810913, 0.001),
    ModelLimits(_GRANITE_20B, True, 3.7392955756187423, 0.001),
    ModelLimits(_LLAMA_70B, True, 3.8235735702514626, 0.001),
    ModelLimits(_LLAMA_8B, False, 2.6994638133048965, 0.00047589250549208347),
    ModelLimits(_GRANITE_32, False, 2.3919514417648315, 0.0005767398688476533),
    ModelLimits(_GRANITE_33, False, 2.4444521379470827, 0.0004970188625156878),
    ModelLimits(_GRANITE_20B, False, 2.640706129074097, 0.00034344267623964697),
    ModelLimits(_LLAMA_70B, False, 2.841279556751251, 0.0044301633024588115),
)
"""As the documents list them; 1024 tokens per sequence, CPU fp32 against CUDA fp16."""


def look_up(table: tuple[ModelLimits, ...], model: str, *, micro: bool) -> ModelLimits | None:
    """The limits of a model; a micro model without its own has those of the full model."""
    name = model.rstrip("/")
    for wanted in (True, False) if micro else (False,):
        for entry in table:
            if entry.model_id.rstrip("/") == name and entry.micro is wanted:
                return entry
    return None


def read_table(path: Path) -> tuple[ModelLimits, ...]:
    """Read a table that a user owns.

    Raises:
        BadFile: It is no such table.
    """
    listed = _json(_text(path), path)
    if not isinstance(listed, list):
        raise BadFile(f"{path} is no table of limits: a list of models is expected")
    entries = enumerate(cast("list[Any]", listed))
    return tuple(_limits_of(entry, f"{path}, entry {index}") for index, entry in entries)


def seed_table(path: Path) -> bool:
    """Create the table with the documented values if it does not exist; returns whether it did so.

    Raises:
        BadInput: It cannot be written.
    """
    if path.exists():
        return False
    lines = [json.dumps(entry._asdict()) for entry in DOCUMENTED]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[\n " + ",\n ".join(lines) + "\n]\n", encoding="utf-8")
    except OSError as trouble:
        raise BadInput(
            f"{path} cannot be written: {trouble.strerror}", hint="give another --threshold_table"
        ) from None
    return True


class ModelList(NamedTuple):
    """Models of such a list, and a complaint about every line that could not be read."""

    models: tuple[ModelLimits, ...]
    complaints: tuple[str, ...]


def read_list(path: Path, frequency: int) -> ModelList:
    """Models to test from a file with a JSON object per line, with their limits.

    Args:
        path: The file: `{"model_id", "ce", "mean_diff", "frequency"}` per line.
        frequency: Keep lines of at most this frequency.

    Raises:
        BadFile: It cannot be read, or holds no model.
    """
    models: list[ModelLimits] = []
    complaints: list[str] = []
    for line in filter(str.strip, _text(path).splitlines()):
        try:
            entry = json.loads(line)
            model = _limits_of(entry, str(path))
            rarity = int(cast("dict[str, Any]", entry).get("frequency", 0))
        except (ValueError, TypeError, BadFile, RecursionError):
            # One bad line does not stop the others: the documented tool goes on as well.
            complaints.append(f"config contained an improper json line: {line.strip()}")
            continue
        if rarity <= frequency:
            models.append(model)
    if not models:
        raise BadFile(
            f"{path} names no model of frequency {frequency} or less",
            hint='a line is {"model_id": …, "ce": …, "mean_diff": …, "frequency": 0}',
        )
    return ModelList(tuple(models), tuple(complaints))


def _text(path: Path) -> str:
    try:
        # A wrong path may name a file of weights; it is not read into memory.
        if path.stat().st_size > MOST_BYTES:
            raise BadFile(f"{path} is too large for a list of models")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as trouble:
        reason = trouble.strerror if isinstance(trouble, OSError) else "it is not UTF-8 text"
        raise BadFile(f"{path} cannot be read: {reason}") from None


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} cannot be read as JSON: {trouble}") from None


def _limits_of(entry: Any, where: str) -> ModelLimits:
    if not isinstance(entry, dict):
        raise BadFile(f"{where}: an object with model_id, ce and mean_diff is expected")
    fields = cast("dict[str, Any]", entry)
    name, micro = fields.get("model_id"), fields.get("micro", False)
    numbers = [fields.get(key) for key in ("ce", "mean_diff")]
    if not isinstance(name, str) or not name or not isinstance(micro, bool):
        raise BadFile(f"{where}: it names no model_id")
    # NaN as a limit would let no token fail, or every one.
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        raise BadFile(f"{where}: ce and mean_diff of '{name}' must be numbers")
    return ModelLimits(name, micro, float(cast(Any, numbers[0])), float(cast(Any, numbers[1])))
