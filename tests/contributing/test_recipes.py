"""Every recipe of docs/contributing.md does what it says, in as many files as it says.

The patches stand on the page itself. Each is applied to a copy of the source, and what it adds is
used in a process of its own, by the command line or the Python API.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from contributing_page import PAGE, ROOT, Tree, edits_of, recipes

Use = Callable[[Tree, Path], None]
USES: dict[str, Use] = {}


def recipe(name: str) -> Callable[[Use], Use]:
    """Says which recipe a function below uses."""

    def register(use: Use) -> Use:
        USES[name] = use
        return use

    return register


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "driftline", folder / "src" / "driftline", ignore=ignored)
    return Tree(folder)


@pytest.fixture
def clean(tree: Tree) -> Iterator[Tree]:
    yield tree
    tree.restore()


def save(folder: Path, reference: np.ndarray, candidate: np.ndarray) -> None:
    np.savez(folder / "reference.npz", a=reference, b=reference)
    np.savez(folder / "candidate.npz", a=candidate, b=reference)


def test_every_recipe_of_the_page_is_used_here() -> None:
    assert list(recipes()) == list(USES), "one function here for each heading, in the same order"


@pytest.mark.parametrize("name", list(recipes()))
def test_a_recipe(name: str, clean: Tree, tmp_path: Path) -> None:
    written = recipes()[name]
    touched = clean.apply(written.patch)
    if written.files == 7:
        assert len(touched) <= 7
    else:
        assert len(touched) == written.files
    USES[name](clean, tmp_path)


def test_a_patch_that_does_not_fit_is_not_applied(clean: Tree) -> None:
    patch = "--- a/src/driftline/units.py\n+++ b/src/driftline/units.py\n@@\n-nothing such\n+new\n"
    with pytest.raises(AssertionError, match="is not there once"):
        clean.apply(patch)


def test_without_its_patch_nothing_of_a_recipe_is_there(clean: Tree, tmp_path: Path) -> None:
    """What makes the tests above fail if the copy is not the package that runs."""
    run = clean.python("-c", "import driftline; print(driftline.__file__)", cwd=tmp_path)
    assert run.stdout.startswith(str(clean.folder))
    refused = clean.driftline("sites", "x", cwd=tmp_path)
    assert refused.returncode == 2
    assert "sites" in refused.stderr


def test_the_page_names_the_files_that_its_recipes_touch() -> None:
    text = PAGE.read_text("utf-8")
    for name in ("captures/launch/bootstrap.py", "captures/framework.py", "from_moments.py"):
        assert name in text
        assert list((ROOT / "src" / "driftline").rglob(Path(name).name)), name


def test_the_tables_that_the_map_of_the_source_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    paragraph = next(p for p in text.split("\n\n") if p.startswith("Each kind of part is listed"))
    tables = re.findall(r"`([\w/]+\.py)`", paragraph)
    assert len(tables) == 11
    touched = {name for written in recipes().values() for name in edits_of(written.patch)}
    assert {f"src/driftline/{name}" for name in tables} <= touched, "each is in a recipe"


@recipe("A metric")
def use_metric(tree: Tree, place: Path) -> None:
    save(place, np.zeros(5), np.array([0.0, 1.0, 2.0, 3.0, 100.0]))
    words = ("compare", "reference.npz", "candidate.npz", "--format", "json")
    limited = tree.driftline(*words, "--max", "median_abs_error=1.5", cwd=place)
    rows = {row["site"]: row for row in json.loads(limited.stdout)["rows"]}
    assert rows["a"]["median_abs_error"] == 2.0
    assert rows["a"]["status"] == "fail"
    assert limited.returncode == 1
    assert tree.driftline(*words, "--max", "median_abs_error=2", cwd=place).returncode == 0


def save_e3m4(path: Path, codes: bytes) -> None:
    """A safetensors file with one tensor of the new type: 3 bits of exponent, 4 of mantissa."""
    entry = {"dtype": "F8_E3M4", "shape": [len(codes)], "data_offsets": [0, len(codes)]}
    header = json.dumps({"x": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + codes)


@recipe("An element type")
def use_dtype(tree: Tree, place: Path) -> None:
    save_e3m4(place / "reference.safetensors", bytes([0x30, 0x40, 0xB0, 0x01]))  # 1, 2, -1, 2^-6
    save_e3m4(place / "candidate.safetensors", bytes([0x31, 0x40, 0xB0, 0x01]))  # 1.0625, ...
    save_e3m4(place / "wrong.safetensors", bytes([0x38, 0x40, 0xB0, 0x70]))  # 1.5, 2, -1, inf
    words = ("compare", "reference.safetensors", "candidate.safetensors", "--format", "json")
    compared = tree.driftline(*words, cwd=place)
    (row,) = json.loads(compared.stdout)["rows"]
    assert row["reference_dtype"] == "float8_e3m4"
    assert row["max_abs_error"] == 0.0625
    assert row["max_ulp"] == 1
    assert row["status"] == "pass"
    words = ("compare", "reference.safetensors", "wrong.safetensors", "--format", "json")
    assert json.loads(tree.driftline(*words, cwd=place).stdout)["rows"][0]["status"] == "fail"


@recipe("A file format")
def use_format(tree: Tree, place: Path) -> None:
    for name, last in (("reference.mtx", 6.0), ("candidate.mtx", 7.0)):
        header = "%%MatrixMarket matrix array real general\n% a remark\n2 3\n"
        (place / name).write_text(header + "1\n2\n3\n4\n5\n" + f"{last}\n")
    compared = tree.driftline(
        "compare", "reference.mtx", "candidate.mtx", "--format", "json", cwd=place
    )
    (row,) = json.loads(compared.stdout)["rows"]
    assert row["max_abs_error"] == 1.0
    assert row["reference_shape"] == [2, 3]
    # Also in a folder without a layout, by its suffix; and damaged, with the reader's reason.
    shown = tree.driftline("show", ".", "--format", "csv", cwd=place)
    assert "reference" in shown.stdout
    (place / "damaged.mtx").write_text("2 3\n1\n")
    refused = tree.driftline("show", "damaged.mtx", cwd=place)
    assert "is no Matrix Market array" in refused.stderr


@recipe("An alignment rule")
def use_rule(tree: Tree, place: Path) -> None:
    weight = np.arange(6.0)
    np.savez(place / "reference.npz", **{"Encoder.W": weight, "b": weight})
    np.savez(place / "candidate.npz", **{"encoder.w": weight, "b": weight})
    compared = tree.driftline(
        "compare", "reference.npz", "candidate.npz", "--format", "json", cwd=place
    )
    rows = {row["site"]: row for row in json.loads(compared.stdout)["rows"]}
    assert rows.keys() == {"Encoder.W", "b"}
    assert rows["Encoder.W"]["candidate_site"] == "encoder.w"
    assert rows["Encoder.W"]["by"] == "normalised"


@recipe("A recipe step")
def use_step(tree: Tree, place: Path) -> None:
    save(place, np.arange(6.0), np.arange(6.0)[::-1])
    key = "rank0/step0/a/output/0"
    (place / "plan.toml").write_text(
        f'plan = 1\n[[pair]]\nreference = "{key}"\ncandidate = "{key}"\n'
        f'candidate_recipe = {{ sources = ["{key}"], steps = ["flip(axis 0)"], shape = [6] }}\n'
    )
    words = ("compare", "reference.npz", "candidate.npz", "--plan", "plan.toml")
    compared = tree.driftline(*words, "--format", "json", cwd=place)
    row = next(row for row in json.loads(compared.stdout)["rows"] if row["site"] == "a")
    assert row["status"] == "pass"
    assert "flip(axis 0)" in compared.stdout
    plan = (place / "plan.toml").read_text()
    (place / "plan.toml").write_text(plan.replace("axis 0", "axis 1"))
    refused = tree.driftline(*words, cwd=place)
    assert "flip(axis 1) does not fit 6: it has no axis 1" in refused.stderr


@recipe("An evidence rule")
def use_evidence(tree: Tree, place: Path) -> None:
    wrong = np.ones(8)
    wrong[3] = 2.0
    np.savez(place / "reference.npz", **{"m/add": np.ones(8), "m": wrong})
    np.savez(place / "candidate.npz", **{"m/add": wrong, "m": wrong})
    compared = tree.driftline(
        "compare", "reference.npz", "candidate.npz", "--format", "json", cwd=place
    )
    table = json.loads(compared.stdout)
    rows = {row["site"]: row for row in table["rows"]}
    assert rows["m/add"]["worst_share"] == 1.0
    assert "worst_share" in table["metrics"]


DIAGNOSE = """
import driftline, numpy
from driftline.testing.runs import run_of

rng = numpy.random.default_rng(0)
x = rng.standard_normal((4, 8, 16)).astype(numpy.float32)
y = rng.standard_normal((4, 8, 16)).astype(numpy.float32)
runs = [run_of({"a": x, "b": sign * y}) for sign in (1, -1)]
diagnosis = driftline.diagnose(*runs)
print(diagnosis.cause, diagnosis.first_site)
print(*diagnosis.sentences)
"""


@recipe("A cause")
def use_cause(tree: Tree, place: Path) -> None:
    named = tree.python("-c", DIAGNOSE, cwd=place)
    assert named.stdout.startswith("sign b\n"), named.stdout + named.stderr
    assert "opposite sign" in named.stdout


@recipe("A command")
def use_command(tree: Tree, place: Path) -> None:
    save(place, np.zeros(1), np.zeros(1))
    assert tree.driftline("sites", "reference.npz", cwd=place).stdout == "a\nb\n"
    assert tree.driftline("sites", "reference.npz", "--count", cwd=place).stdout == "2\n"
    page = tree.driftline("sites", "--help", cwd=place).stdout
    assert "List the sites of a run" in page
    assert "sites" in tree.driftline("--help", cwd=place).stdout


@recipe("An output format")
def use_writer(tree: Tree, place: Path) -> None:
    save(place, np.ones(4), np.full(4, 2.0))
    words = ("reference.npz", "candidate.npz", "--format", "tap")
    compared = tree.driftline("compare", *words, cwd=place)
    assert compared.stdout == "TAP version 14\nnot ok 1 - a\nok 2 - b\n1..2\n"
    assert compared.returncode == 1
    diagnosed = tree.driftline("diagnose", *words, cwd=place)
    assert diagnosed.stdout.startswith("TAP version 14\n"), diagnosed.stderr
    refused = tree.driftline("show", "reference.npz", "--format", "tap", cwd=place)
    assert "takes table, json, csv or markdown, not 'tap'" in refused.stderr


@recipe("An executor")
def use_executor(tree: Tree, place: Path) -> None:
    save(place, np.ones(4), np.full(4, 2.0))
    words = ("compare", "reference.npz", "candidate.npz", "--format", "csv")
    plain = tree.driftline(*words, cwd=place)
    serial = tree.driftline(*words, "--executor", "serial", cwd=place)
    assert serial.stdout == plain.stdout
    assert serial.returncode == plain.returncode == 1, serial.stderr
    assert "known: local, ray" in tree.driftline(*words, "--executor", "x", cwd=place).stderr


CAPTURE_TINYNET = """
import driftline, numpy, sys
import tinynet

weights = [numpy.eye(3, dtype=numpy.float32) * (i + 1) for i in range(2)]
weights[1][0, 0] += float(sys.argv[2])
model = tinynet.Module(first=tinynet.Dense(weights[0]), second=tinynet.Dense(weights[1]))
plain = model(numpy.ones((1, 3), numpy.float32))
with driftline.capture(model, sys.argv[1]):
    for step in range(2):
        assert (model(numpy.ones((1, 3), numpy.float32)) == plain).all()
assert tinynet.Module.__call__.__module__ == "tinynet"
"""


def capture_tinynet(tree: Tree, place: Path, run: str, fault: str) -> None:
    shutil.copy(Path(__file__).parent / "tinynet.py", place)
    captured = tree.python("-c", CAPTURE_TINYNET, run, fault, cwd=place)
    assert captured.returncode == 0, captured.stderr


@recipe("An event")
def use_event(tree: Tree, place: Path) -> None:
    tree.apply(recipes()["A framework"].patch)  # a framework that is imported in no time
    capture_tinynet(tree, place, "run", "0")
    events = [json.loads(line) for path in place.rglob("events.jsonl") for line in path.open()]
    assert "3 sites ran" in [event["message"] for event in events if event["kind"] == "sites"]


@recipe("A framework")
def use_framework(tree: Tree, place: Path) -> None:
    capture_tinynet(tree, place, "reference", "0")
    capture_tinynet(tree, place, "candidate", "0.5")
    compared = tree.driftline("compare", "reference", "candidate", "--format", "json", cwd=place)
    table = json.loads(compared.stdout)
    assert table["first_site"] == "second", compared.stderr
    statuses = {(row["site"], row["port"], row["step"]): row["status"] for row in table["rows"]}
    assert statuses["first", "output", 1] == "pass"
    assert statuses["second", "output", 0] == "fail"
    shown = tree.driftline("show", "reference", cwd=place)
    assert "tinynet" in shown.stdout
    assert "Dense" in shown.stdout
