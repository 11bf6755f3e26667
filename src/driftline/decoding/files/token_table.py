"""The scores of every counted token on disk: one part per round during the work, then one table.

A row knows its seed, prompt and position, which the documented CSV files do not. How a score is
computed is not known here.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.decoding.files.outputs import make_readable
from driftline.errors import BadFile
from driftline.registry import require
from driftline.units import csv_cell

Array = np.ndarray[Any, np.dtype[Any]]

PLACES = {
    "seed": "int32",
    "prompt": "int32",
    "prompt_name": "string",
    "position": "int32",
    "token": "int64",
}
"""The address of a row: the round, the prompt's index in the batch and its name, the number of
generated tokens before, and the reference's token."""
SCORES = {
    "ce": "double",
    "prob_mean": "double",
    "prob_std": "double",
    "diff_mean": "double",
    "kl_rc": "double",
    "kl_cr": "double",
    "total_variation": "double",
    "top1_agree": "bool",
    "rank_of_reference": "int64",
    "gap": "double",
}
"""The results of `scoring.score` per token, as typed columns."""
METADATA = b"driftline"
"""Key of the provenance in the table's own metadata."""
GROUP = 1 << 14
"""Rows that are written at once, or a few more."""
FEW = 32
"""Parts that are held one by one."""


class Rows(NamedTuple):
    """Rows by column; a score that was not computed is a column of None."""

    columns: dict[str, Sequence[Any] | Array]

    def __len__(self) -> int:
        return len(self.columns["seed"])


def rows_of(
    seed: int,
    prompt: int,
    prompt_name: str,
    tokens: Array,
    scores: Mapping[str, Array | None],
    kept: int,
) -> Rows:
    """The rows of one prompt: its first `kept` tokens."""
    columns: dict[str, Sequence[Any] | Array] = {
        "seed": [seed] * kept,
        "prompt": [prompt] * kept,
        "prompt_name": [csv_cell(prompt_name)] * kept,  # anybody's text
        "position": np.arange(kept),
        "token": tokens[:kept],
    }
    for name in SCORES:
        values = scores.get(name)
        # Absent, not NaN: a score that was not computed is not a bad score.
        columns[name] = [None] * kept if values is None else values[:kept]
    return Rows(columns)


def write_part(path: Path, parts: Sequence[Rows], provenance: Mapping[str, Any]) -> None:
    """Write the rows of one round, at once."""
    _write(path, (_arrow(rows) for rows in parts), provenance)


def join_parts(path: Path, parts: Sequence[Path], provenance: Mapping[str, Any]) -> None:
    """Write the table of all rounds from their parts, some thousand rows in memory at a time."""
    _write(path, _in_groups(parts), provenance)


def _in_groups(parts: Sequence[Path]) -> Iterator[Any]:
    """The parts' rows in larger tables: each one costs kilobytes, in memory and in the file."""
    pa, pq = require("pyarrow"), require("pyarrow.parquet")
    waiting: list[Any] = []
    for part in parts:
        with pq.ParquetFile(part) as file:
            waiting.append(file.read().replace_schema_metadata(None))
        if len(waiting) >= FEW:
            waiting = [pa.concat_tables(waiting).combine_chunks()]
            if len(waiting[0]) >= GROUP:
                yield waiting.pop()
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def part_settings(path: Path) -> dict[str, Any]:
    """The provenance a part or table was written with; empty if it is not there or not whole."""
    pq = require("pyarrow.parquet")
    try:
        # The schema alone: rows of a part are read when all are joined.
        kept = pq.read_schema(path).metadata or {}
        return cast("dict[str, Any]", json.loads(kept.get(METADATA, b"{}")))
    except (OSError, ValueError):
        return {}


def read_columns(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Columns of a table as float64; what is absent is NaN.

    Raises:
        BadFile: It is no such table.
    """
    pq = require("pyarrow.parquet")
    try:
        table = pq.read_table(path, columns=list(names))
        return {
            # Columns with absent values, or of truth values, cannot be had without a copy.
            name: np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)
            for name in names
        }
    except (OSError, ValueError, KeyError, TypeError) as trouble:
        raise BadFile(f"{path} is no table of token scores: {trouble}") from None


def _schema(provenance: Mapping[str, Any]) -> Any:
    pa = require("pyarrow")
    from driftline.runs.provenance import plain_json

    types = {
        "int32": pa.int32(),
        "int64": pa.int64(),
        "string": pa.string(),
        "double": pa.float64(),
        "bool": pa.bool_(),
    }
    fields = [pa.field(name, types[kind]) for name, kind in {**PLACES, **SCORES}.items()]
    text = json.dumps(plain_json(provenance), allow_nan=False)
    return pa.schema(fields, metadata={METADATA: text.encode("utf-8")})


def _arrow(rows: Rows) -> Any:
    pa = require("pyarrow")
    schema = _schema({})
    arrays = [
        pa.array(rows.columns[field.name], type=field.type, from_pandas=False) for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _write(path: Path, tables: Iterator[Any], provenance: Mapping[str, Any]) -> None:
    """Write a table under another name, then rename it, so that no reader sees half of it."""
    pq = require("pyarrow.parquet")
    schema = _schema(provenance)
    try:
        # A unique name: workers write their tables into one folder at the same time.
        descriptor, draft = tempfile.mkstemp(
            prefix=".driftline-", suffix=path.suffix, dir=path.parent
        )
        os.close(descriptor)
        try:
            with pq.ParquetWriter(draft, schema) as writer:
                for table in tables:
                    writer.write_table(table.replace_schema_metadata(schema.metadata))
            make_readable(Path(draft))
            Path(draft).replace(path)
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError as trouble:  # pyarrow's does not say which file
        if trouble.errno is None:
            raise
        raise OSError(trouble.errno, os.strerror(trouble.errno), str(path)) from None
