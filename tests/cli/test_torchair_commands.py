"""The commands that docs/formats.md shows for torchair dumps, and what they say of bad ones."""

from __future__ import annotations

import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from driftline import open_run
from driftline.formats.ascend.ge.graph_text import GraphNode
from support.ge import GeDump, ge_bytes, write_fx

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "ascend"
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
NODES = [
    GraphNode("x", "Data"),
    GraphNode("Add_2", "Add", (("x", 0), ("x", 0)), ("add_2-aten.add.Tensor.OUTPUT.0",)),
    GraphNode("Relu_1", "Relu", (("Add_2", 0),), ("relu_1-aten.relu.default.OUTPUT.0",)),
]


@pytest.fixture
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DATA / "ge_dump", tmp_path / "ge_dump")
    shutil.copytree(DATA / "fx_dump", tmp_path / "fx_dump")
    unfused, fused = GeDump(tmp_path / "unfused_ge"), GeDump(tmp_path / "fused_ge")
    unfused.operator("Add", "Add_2", [X, X], [X + X])
    unfused.operator("Relu", "Relu_1", [X + X], [np.maximum(X + X, 0)])
    fused.operator("AutomaticBufferFusionOp", "Add_2Relu_1", [X], [np.maximum(X + X, 0)])
    for dump in (unfused, fused):
        dump.graph_text(NODES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_documented_commands_pass_on_sound_dumps(dumps, driftline) -> None:
    page = (ROOT / "docs" / "formats.md").read_text("utf-8")
    section = page.partition("## torchair")[2].partition("\n## ")[0]
    shown = re.findall(r"^    driftline (.+?)(?:\s+#.*)?$", section, re.MULTILINE)
    assert len(shown) == 3
    for text in shown:
        said = driftline(*shlex.split(text))
        assert said.code == 0, text + said.out + said.err


def test_a_fault_is_named_and_the_exit_code_says_so(dumps, driftline) -> None:
    path = next((dumps / "ge_dump").rglob("AutomaticBufferFusionOp.*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x0F
    path.write_bytes(bytes(data))
    said = driftline("compare", "fx_dump", "ge_dump")
    assert said.code == 1
    assert "FAIL: the drift starts at 'relu_1'" in said.out
    assert "Add_2Relu_1" in said.out
    said = driftline("compare", "ge_dump", "fx_dump")
    assert said.code == 1
    assert "the drift starts at 'Add_2Relu_1'" in said.out


def test_the_plan_says_what_is_left_over_and_why(dumps, driftline) -> None:
    said = driftline("compare", "unfused_ge", "fused_ge", "--dry-run")
    assert said.code == 0
    assert "inside the fused operator Add_2Relu_1" in said.out


def test_show_lists_operators_losses_and_what_the_dump_says_of_itself(dumps, driftline) -> None:
    said = driftline("show", "ge_dump")
    assert said.code == 0
    assert "Add_2Relu_1" in said.out
    assert "AutomaticBufferFusionOp" in said.out
    hurt = next((dumps / "ge_dump").rglob("Cast.*"))
    hurt.write_bytes(hurt.read_bytes()[:30])
    said = driftline("show", "ge_dump")
    assert "missing: " in said.out
    assert "its header claims 70 bytes and 22 follow" in said.out


def test_two_operator_files_are_compared_as_they_are(dumps, driftline) -> None:
    for name, value in (("a", X), ("b", X * 1.5)):
        Path(name).write_bytes(ge_bytes("Neg_1", [X], [value]))
    said = driftline("compare", "a", "b")
    assert said.code == 1
    assert "the drift starts at 'Neg_1', in its output" in said.out


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda ge: next(ge.glob("*.txt")).unlink(), "no graph text"),
        (lambda ge: next(ge.glob("*.txt")).write_text("op {{"), "no graph text"),
        (lambda ge: shutil.rmtree(ge / "20240130064151"), "holds no tensor"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence_and_exit_code_two(
    spoil, reason, dumps, driftline
) -> None:
    spoil(dumps / "ge_dump")
    said = driftline("compare", "fx_dump", "ge_dump")
    assert said.code == 2
    assert reason in said.err
    assert "Traceback" not in said.err


def test_dumps_of_other_steps_say_so(tmp_path, driftline) -> None:
    dump = GeDump(tmp_path / "ge")
    for step in (0, 1):
        dump.operator("Relu", "Relu_1", [X], [X], step=step)
        place = tmp_path / "fx" / "gm_20240130064200000001_dump" / str(step + 5)
        write_fx(place, "relu_1", "aten.relu.default", [X], [X])
    dump.graph_text(NODES)
    said = driftline("compare", tmp_path / "fx", tmp_path / "ge")
    assert said.code == 2
    assert "are they of one model, step and rank?" in said.err


def test_the_seeds_two_scenarios_write_the_report(tmp_path, monkeypatch, driftline) -> None:
    """`--my-path {dump_path}/dump_{stamp} --golden-path gm_{stamp}_dump`, then GE against GE."""
    monkeypatch.chdir(tmp_path)
    mine, plain = Path("dump/dump_20240130_064151"), Path("dump/dump_20240130_070000")
    golden = Path("gm_20240130064200000001_dump")
    relu = np.maximum(X + X, 0)
    fused, unfused = GeDump(mine), GeDump(plain)
    fused.operator("AutomaticBufferFusionOp", "Add_2Relu_1", [X], [relu * 1.5])
    unfused.operator("Add", "Add_2", [X, X], [X + X])
    unfused.operator("Relu", "Relu_1", [X + X], [relu])
    for dump in (fused, unfused):
        dump.graph_text(NODES)
    write_fx(golden / "1", "add_2", "aten.add.Tensor", [X, X], [X + X])
    write_fx(golden / "1", "relu_1", "aten.relu.default", [X + X], [relu])
    for reference, site in ((golden, "relu_1"), (plain, "Relu_1")):
        said = driftline("compare", "--my-path", mine, "--golden-path", reference)
        assert said.code == 1
        assert f"the drift starts at '{site}'" in said.out
    assert len(list(tmp_path.glob("ait_cmp_report_*.csv"))) == 2


def test_a_dump_that_holds_two_dumps_keeps_them_apart(tmp_path, driftline) -> None:
    for stamp, session in (("a", "20240130064151"), ("b", "20240130070000")):
        dump = GeDump(tmp_path / "dump" / f"dump_{stamp}", session=session, world=(2, 1))
        dump.operator("Relu", "Relu_1", [X], [X])
        dump.graph_text(NODES)
    said = driftline("show", tmp_path / "dump")
    assert said.code == 2
    assert "holds 2 dumps: dump_a, dump_b" in said.err
    said = driftline("show", tmp_path / "dump" / "dump_b")
    assert said.code == 0
    for session in ("20240130064151", "20240130070000"):  # of one dump: processes of a rank
        GeDump(tmp_path / "one", session=session, world=(2, 1)).operator("Op", "a", [X], [X])
    assert "1, 1.p1" in driftline("show", tmp_path / "one").out


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_a_conversion_that_corrupts_is_where_the_drift_starts(
    tmp_path: Path, spelling: str
) -> None:
    """A TransData whose output is not its input: its own fault, not that of the model's inputs."""
    data = Path(__file__).parents[1] / "data" / "ascend"
    shutil.copytree(data / "ge_dump", tmp_path / "ge")
    (file,) = (tmp_path / "ge").rglob("TransData.*")
    content = bytearray(file.read_bytes())
    payload = 8 + struct.unpack("<Q", content[:8])[0]
    # The output lies behind the input: two of its numbers become 8.
    content[payload + 512 : payload + 516] = b"\x00\x48\x00\x48"
    file.write_bytes(content)
    place = Path(sys.executable).parent
    words = [str(place / "driftline"), "compare"]
    if spelling == "theirs":
        words = [str(place / "ait"), "llm", "compare"]
    words += ["--golden-path", str(data / "fx_dump"), "--my-path", str(tmp_path / "ge")]
    done = subprocess.run([*words, "-o", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "the drift starts at 'trans_TransData_1' (TransData), in its output" in text
    assert "inputs differ already" not in text


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_operators_of_one_time_stamp_stand_as_the_graph_has_them(
    tmp_path: Path, spelling: str
) -> None:
    """Task numbers may be the other way round; what feeds what comes first."""
    names = ["Last", "Middle", "First"]
    # From the first operator on the values of the candidate are wrong, so all three differ.
    for folder, factor in (("golden", 1), ("mine", 2)):
        dump = GeDump(tmp_path / folder)
        right = np.ones((2, 2), np.float32)
        for task, name in enumerate(names):
            given = right if name == "First" else right * factor
            path = dump.operator("Relu", name, [given], [right * factor])
            path.rename(path.with_name(f"Relu.{name}.{task}.6.1706596912161941"))
        dump.graph_text(
            [
                GraphNode("Last", "Relu", (("Middle", 0),)),
                GraphNode("Middle", "Relu", (("First", 0),)),
                GraphNode("First", "Relu", (("Data", 0),)),
                GraphNode("Data", "Data"),
            ]
        )
    run = open_run(tmp_path / "golden")
    assert list(dict.fromkeys(record.key.site for record in run.records)) == names[::-1]
    place = Path(sys.executable).parent
    words = [str(place / "driftline"), "compare"]
    if spelling == "theirs":
        words = [str(place / "ait"), "llm", "compare"]
    words += ["--golden-path", "golden", "--my-path", "mine"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the drift starts at 'First' (Relu), in its output" in " ".join(done.stdout.split())
