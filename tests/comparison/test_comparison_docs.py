"""The documents say what the program does: fields of a row, metrics, default limits."""

import re
from pathlib import Path

from driftline.comparison.metrics.catalogue import KNOWN
from driftline.comparison.table.row import ROW_FIELDS
from driftline.comparison.table.table import SCHEMA, Table
from driftline.comparison.tolerance.defaults import LIMITS
from driftline.numerics.dtypes import DTYPES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_format_names_every_field_and_no_other():
    text = (DOCS / "table-format.md").read_text(encoding="utf-8")
    assert SCHEMA in text
    fields = text[text.index("## A row") : text.index("Positions (")]
    named = set()
    for line in fields.splitlines():
        if line.startswith("| `"):
            named.update(re.findall(r"`(\w+)`", line.split("|")[1]))
    assert named == set(ROW_FIELDS)
    for key in Table(()).as_json():
        assert f"`{key}`" in text or f'"{key}"' in text


def test_the_metrics_page_names_every_metric_with_its_direction():
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    better = {"lower": "lower", "higher": "higher", "nearest 0": "zero", "–": "none"}
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `") and cells[2] in better:
            found |= dict.fromkeys(re.findall(r"`(\w+)`", cells[1]), better[cells[2]])
    for name, metric in KNOWN.items():
        if not name.startswith(("reference_", "candidate_")):
            assert found[name] == metric.column.direction
        else:
            assert f"`{name.partition('_')[2]}`" in text


def test_the_metrics_page_shows_the_default_limits():
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    table = text[text.index("| dtype | limit |") :]
    found = {}
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        names, limit = (cell.strip() for cell in line.split("|")[1:3])
        if limit != "equal":
            found |= dict.fromkeys(names.split(", "), float(limit))
    assert found == LIMITS
    assert set(found) == {dtype.name for dtype in DTYPES.values() if dtype.is_floating}
