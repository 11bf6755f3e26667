"""Names that steer terminals and spreadsheets: nothing that is printed or written obeys them."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from driftline.operators.result import OperatorCall, coverage, unchecked
from driftline.reporting.views.operators import Report, print_csv
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter
from driftline.units import csv_cell

ESC = "\x1b]0;owned\x07\x1b[2J"
MARKED = tuple("=+-@'＝＋－＠\n")
SITES = [
    f"evil{ESC}site",
    "c1\x9b2J\x7f\x85end",
    '=HYPERLINK("http://x","y")',
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "line\nend",
    "half\ud800pair",  # as names of files that are no UTF-8 become
]


def write_run(path: Path, shift: float) -> Path:
    writer = RunWriter(path, command=["python", f"x{ESC}.py"])
    writer.topology({"roots": [{"site": f"evil{ESC}site", "class": f"Class{ESC}", "children": []}]})
    for number, site in enumerate(SITES):
        values = (np.arange(12, dtype=np.float32) + 1) * (1 + shift * number)
        record = Record(TensorKey.of(site, "output"), 0, "float32", (3, 4), class_name=f"C{ESC}")
        writer.put(record, values.view(np.uint8))
    writer.event("warning", f"a sentence{ESC}")
    writer.describe(device=f"gpu{ESC}")
    writer.close()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp(f"runs{ESC[:6]}")
    return str(write_run(place / "a", 0.0)), str(write_run(place / "b", 0.1))


@pytest.fixture
def run(warm_python: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """A command in the test's own folder; its bytes are those of a terminal or a file."""

    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [warm_python, "-m", "driftline", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)

    return run


COMMANDS = [
    *(("compare", "A", "B", "--format", name) for name in ("table", "json", "csv", "markdown")),
    *(("compare", "A", "B", "--format", name) for name in ("github", "junit")),
    ("compare", "A", "B", "--all", "-o", "out", "--csv", "rows.csv", "--save-plan", "plan.toml"),
    ("compare", "-gp", "A", "-mp", "B"),
    ("compare", "A", "B", "--shard", "0/2", "-o", "part.json"),
    ("compare", "A", "B", "--dry-run"),
    ("show", "A"),
    ("show", "A", "--format", "json"),
    ("show", "A", "--format", "csv"),
    ("diagnose", "A", "B"),
    ("trend", "A", "B"),
    ("trend", "A", "B", "--format", "csv"),
    ("report", "A", "B", "-o", "page.html"),
    ("show", f"no{ESC}run"),
    ("compare", "A", f"no{ESC}run"),
    (f"no{ESC}command",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:40])
def test_no_escape_reaches_a_terminal_or_a_file(
    words: tuple[str, ...], runs: tuple[str, str], tmp_path: Path, run: Callable[..., Any]
) -> None:
    places = {"A": runs[0], "B": runs[1]}
    done = run(*(places.get(word, word) for word in words))
    assert b"Traceback" not in done.stderr and b"a bug in driftline" not in done.stderr
    for text in (done.stdout, done.stderr):
        assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", text), text[:2000]
    for path in tmp_path.rglob("*"):
        if path.suffix == ".parquet":
            columns = parquet.read_table(path).to_pydict()
            texts = [text for column in columns.values() for text in column if type(text) is str]
            assert {plain(site) for site in columns["site"]} == set(SITES)
            assert not [text for text in texts if re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)]
        elif path.is_file():
            assert not re.search(rb"\x1b|\xc2[\x80-\x9f]", path.read_bytes()), path.name
        if path.suffix == ".csv":
            assert_no_formula(path.read_text())


def assert_no_formula(text: str) -> None:
    lines = list(csv.reader(io.StringIO(text)))
    assert len(lines) > 1
    for cell in (cell for line in lines for cell in line if cell):
        risky = cell[0] in "=+-@" and len(cell) > 1
        assert not risky or re.fullmatch(r"[-+]?(\d[\d.]*(e[-+]?\d+)?|inf|nan)", cell), cell


def test_a_spreadsheet_finds_no_formula_and_loses_no_name(
    runs: tuple[str, str], run: Callable[..., Any]
) -> None:
    done = run("compare", *runs, "--format", "csv", "--all")
    rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
    assert_no_formula(done.stdout.decode())
    assert {plain(row["site"]) for row in rows} == set(SITES)


def plain(cell: str) -> str:
    """What a cell stands for, as docs/table-format.md says."""
    if not cell.startswith("'") or not (cell[1:].startswith(MARKED) or "\\" in cell):
        return cell
    escape = re.compile(r"\\\\|\\x([0-9a-f]{2})|\\u([0-9a-f]{4})")
    return escape.sub(
        lambda match: chr(int(match[1] or match[2], 16)) if match[1] or match[2] else "\\", cell[1:]
    )


def test_the_table_of_checked_operators_holds_no_formula() -> None:
    rows = [
        unchecked(OperatorCall(site, site, ids=site, param={site: site}), site) for site in SITES
    ]
    stream = io.StringIO()
    print_csv(Report("name", "kind", rows, coverage([[row] for row in rows])), stream)
    assert_no_formula(stream.getvalue())
    assert not re.search(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f]", stream.getvalue())


@pytest.mark.parametrize(
    "text",
    [
        *SITES,
        "'",
        "''",
        "'=",
        "'a\\b",
        "'\\",
        "'a'",
        "a\\b",
        "=a\\x1b",
        "\\\x1b\\",
        "\t",
        "\r",
        "-",
        "-1.5",
        "1e-3",
        "",
        "é",
        "＝1",
    ],
)
def test_every_cell_can_be_read_back(text: str) -> None:
    cell = csv_cell(text)
    assert plain(cell) == text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", cell)
