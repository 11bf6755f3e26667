"""`driftline trend`: when did a layer start to grow?"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from driftline.cli.main import main
from driftline.diagnosis.trend import trend
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.kernel import summarize
from driftline.reporting.formatting import spark
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter


def written(path: Path, sizes: dict[str, list[float]], *, keep: str = "summary") -> Path:
    """A run in which each site's output has these sizes, step by step."""
    writer = RunWriter(path)
    generator = np.random.default_rng(1)
    for step in range(len(next(iter(sizes.values())))):
        for site, values in sizes.items():
            data = (values[step] * generator.standard_normal(256)).astype(np.float32)
            if values[step] == np.inf:
                data = np.full(256, np.inf, np.float32)
            summary = summarize(data, DTYPES["float32"], count=256) if keep == "summary" else None
            key = TensorKey.of(site, "output", step=step)
            record = Record(key, 0, "float32", (256,), kept=keep, summary=summary)  # type: ignore[arg-type]
            writer.put(record, None if keep == "summary" else data.view(np.uint8))
    writer.close()
    return path


STEADY = [1.0] * 12
GROWS = [1.0] * 7 + [2.5, 4.0, 8.0, 16.0, 40.0]
LATER = [1.0] * 9 + [3.0, 5.0, 9.0]
SPIKE = [1.0] * 5 + [50.0] + [1.0] * 6


@pytest.mark.parametrize("keep", ["summary", "full"])
def test_the_first_layer_that_grows_for_good_is_named_first(tmp_path: Path, keep: str) -> None:
    sizes = {"a": STEADY, "c": LATER, "b": GROWS, "d": SPIKE}
    found = trend([open_run(written(tmp_path / "run", sizes, keep=keep))])
    assert [(one.site, one.since) for one in found.moved()] == [("b", 7), ("c", 9)]
    assert found.moved()[0].ratio == pytest.approx(40, rel=0.3)
    assert found.over == "steps"


def test_releases_are_points_in_the_order_given(tmp_path: Path) -> None:
    runs = [
        open_run(written(tmp_path / f"r{n}", {"a": [1.0], "b": [size]}))
        for n, size in enumerate((1.0, 1.1, 6.0))
    ]
    found = trend(runs)
    assert found.over == "runs"
    assert [(one.site, one.since) for one in found.moved()] == [("b", 2)]


def test_non_finite_values_are_counted_from_nothing(tmp_path: Path) -> None:
    sizes = {"a": STEADY, "b": [1.0] * 10 + [np.inf] * 2}
    run = open_run(written(tmp_path / "run", sizes))
    found = trend([run], figure="nonfinite")
    assert [(one.site, one.since) for one in found.moved()] == [("b", 10)]
    assert trend([run]).moved() == []


def test_a_faulty_run_says_what_is_faulty_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"a": STEADY, "b": [1.0] * 10 + [np.inf] * 2, "c": [1.0] * 11 + [np.inf]}
    path = written(tmp_path / "run", sizes, keep="full")
    assert main(["trend", str(path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("NaN or infinity from step 10 on: first in b output, 256 of 256")
    assert "in 1 more tensor, too" in first and "errcheck" in first
    # What is followed is said as ever: the finite part kept its size.
    assert "tensors kept their usual rms" in second
    (shard,) = path.rglob("*.safetensors")
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size // 2)
    assert main(["trend", str(path)]) == 2
    assert "is damaged: rank0/step0/a/output/0" in capsys.readouterr().err


def test_every_format_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path / "run", {"a": STEADY, "b": GROWS}))
    assert main(["trend", path]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 tensors left their usual rms; the first is b, which grew from step 7" in text
    assert "█" in text
    assert main(["trend", path, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [s["since"] for s in told["series"]] == [None, "7"]
    assert main(["trend", path, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 24
    assert float(rows[-1]["rms"]) == told["series"][1]["values"][-1]


def test_what_cannot_be_followed_is_one_sentence(tmp_path: Path) -> None:
    one = open_run(written(tmp_path / "one", {"a": [1.0]}))
    with pytest.raises(BadInput, match="more than one point"):
        trend([one])
    with pytest.raises(BadInput, match="no figure 'rsm'"):
        trend([one, one], figure="rsm")
    with pytest.raises(BadInput, match="nothing to follow"):
        trend([one, one], ports=("grad_output",))


def test_bars_show_growth_gaps_and_infinities_and_no_false_drama() -> None:
    assert spark([1.0, 2.0, None, 8.0]) == "▁▂ █"
    assert spark([1.0, 1.001, 1.0]) == "▁▁▁"
    assert spark([1.0, float("inf"), 10.0])[1] == "!"
    assert len(spark([float(n) for n in range(1000)])) == 40
    assert spark([None, None]) == ""
