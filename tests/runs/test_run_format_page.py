"""docs/run-format.md is true: its reader reads our runs, its sketch and digests are ours."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter

PAGE = (Path(__file__).parents[2] / "docs" / "run-format.md").read_text(encoding="utf-8")


def page_namespace() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, "run-format.md", "exec"), namespace)  # noqa: S102 - our own page
    return namespace


def test_the_reader_on_the_page_reads_every_type(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.first_header = 4096
    rng = np.random.default_rng(3)
    for name, dtype in DTYPES.items():
        data = rng.integers(0, 2, dtype.byte_count(21), np.uint8)
        writer.put(Record(TensorKey.of(name, "input", "é"), 0, name, (3, 7)), data)
    part = rng.integers(0, 9, 12, np.uint8)
    record = Record(
        TensorKey.of("some", "output"), 0, "float32", (7,), kept="sample", sample_stride=3
    )
    writer.put(record, part)
    writer.close()
    read_run = page_namespace()["read_run"]
    theirs = [(r, p, line["site"], bytes(data)) for r, p, line, data in read_run(tmp_path / "run")]
    ours = [
        (t.key.rank, t.key.process, t.key.site, t.raw().tobytes())
        for t in open_run(tmp_path / "run").tensors()
    ]
    assert theirs == ours and len(ours) == len(DTYPES) + 1


def test_every_type_is_on_the_page() -> None:
    table = PAGE.partition("## Types")[2].partition("## Digest")[0]
    table += " `int32` `int16` `uint32` `uint16`"  # behind the dots of the table
    for name in DTYPES:
        assert f"`{name}`" in table, name


def test_the_sketch_is_the_one_on_the_page(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    values[5] = np.nan
    summary = kernel.summarize(values, DTYPES["float32"], count=values.size)
    writer = RunWriter(tmp_path / "run")
    key = TensorKey.of("a", "output")
    writer.put(Record(key, 0, "float32", (1000,), kept="summary", summary=summary), None)
    writer.close()
    line = json.loads((tmp_path / "run" / "rank0" / "index.jsonl").read_text())
    written = np.frombuffer(base64.b64decode(line["summary"]["sketch"]), "<f8")
    expected = np.zeros(64)
    word = 2**64
    for i, value in enumerate(np.where(np.isfinite(values), values, 0.0).astype(np.float64)):
        k, j = divmod(i, 64)
        z = (k + 1) * 0x9E3779B97F4A7C15 % word
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
        h = z ^ (z >> 31)
        f = (h * 0xD6E8FEB86659FD93 % word) >> 58
        expected[j ^ f] += -value if h >> j & 1 else value
    assert np.allclose(written, expected, rtol=1e-12, atol=1e-12)
    assert line["summary"]["nan"] == 1 and line["summary"]["count"] == 1000


def test_a_masked_score_counts_as_minus_infinity_as_the_page_says() -> None:
    values = np.array([-65504.0, 1.0, 2.0], np.float16)
    summary = kernel.summarize(values, DTYPES["float16"], count=3)
    assert (summary.neg_inf, summary.min, summary.max) == (1, 1.0, 2.0)


def test_digests_are_those_of_their_algorithms() -> None:
    for size in (0, 1, 16, 17, 128, 129, 240, 241, 1024, 1025, 100_001):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        algorithm, _, found = kernel.digest(data).partition(":")
        if algorithm == "xxh3-128":
            assert found == xxhash.xxh3_128_hexdigest(data.tobytes())
        else:
            assert found == hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()
