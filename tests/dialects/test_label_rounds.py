"""Rounds of labels that several processes begin, lone labels, and the three granularities.

Every program is started by `driftline labels` and by the seed's own `ait debug compare aclcmp`.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driftline

SOURCE = Path(driftline.__file__).parents[1]
SUPPORT = Path(__file__).parents[1]
HEAD = "import os, numpy as np\nfrom driftline import set_label, gen_id, set_task_id\n"


def variables(**more: str) -> dict[str, str]:
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DRIFTLINE_LABELS", "AIT_CMP", "ACLTRANSFORMER", "ASDOPS"))
    }
    path = os.pathsep.join((str(SOURCE), str(SUPPORT)))
    return {**mine, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def run(folder: Path, body: str) -> str:
    """A program that nobody waits for: it compares its labels as it ends."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


PTA = "set_task_id()\nset_label('pta', 'layer0', np.arange(4.0))\n"
ACL = "set_task_id()\nset_label('acl', 'layer0', np.arange(4.0) + {})\n"


@pytest.mark.parametrize("first", ["pta", "acl"])
def test_rounds_that_two_processes_began_still_pair(tmp_path: Path, first: str) -> None:
    """Each process names its round after itself; whichever ends last, both labels meet."""
    programs = [PTA, ACL.format(0)] if first == "pta" else [ACL.format(0), PTA]
    alone, both = [run(tmp_path, body) for body in programs]
    (path,) = tmp_path.glob("*_cmp_result.csv")
    assert [row["cmp_flag"] for row in table(path)] == ["True"]
    assert "nothing could be compared" in alone and "1 tensor compared" in both


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_two_processes_of_one_command_pair_round_by_round(tmp_path: Path, spelling: str) -> None:
    pta = HEAD + (
        "for turn in range(2):\n    set_task_id()\n"
        "    set_label('pta', 'out', np.arange(3.0) + turn + 1.0)\n"
    )
    acl = pta.replace("'pta'", "'acl'")
    (tmp_path / "pta.py").write_text(pta)
    (tmp_path / "acl.py").write_text(acl)
    (tmp_path / "run.sh").write_text(f"{sys.executable} pta.py & {sys.executable} acl.py; wait\n")
    done = labels_command(tmp_path, spelling, "bash run.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for path in sorted(tmp_path.glob("*_cmp_result.csv")) for row in table(path)]
    assert [row["cmp_flag"] for row in rows] == ["True", "True"]
    assert all(float(row["cosine_similarity"]) == 1.0 for row in rows)
    (tmp_path / "acl.py").write_text(acl.replace("turn + 1.0", "2.0 - turn"))
    assert labels_command(tmp_path, spelling, "bash run.sh").returncode == 1, "rounds are not mixed"


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_a_label_without_a_partner_is_no_pass(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "one.py").write_text(
        HEAD
        + "for side in ('pta', 'acl'):\n    set_label(side, 'both', np.arange(3.0))\n"
        + "set_label('pta', 'alone', np.arange(3.0))\n"
    )
    done = labels_command(tmp_path, spelling, f"{sys.executable} one.py")
    assert done.returncode != 0
    assert "PASS" not in done.stdout and "1 label has no partner, 'alone'" in done.stdout


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_types_are_spelled_as_upstream_and_figures_are_float64(
    tmp_path: Path, spelling: str
) -> None:
    values = np.random.default_rng(0).standard_normal((2, 64, 3)).astype(np.float16)
    values[1] = values[0] * np.float16(1.01)
    np.save(tmp_path / "values.npy", values)
    (tmp_path / "one.py").write_text(
        HEAD + "for side, value in zip(('pta', 'acl'), np.load('values.npy')):\n"
        "    set_label(side, 'out', value)\n"
    )
    labels_command(tmp_path, spelling, f"{sys.executable} one.py")
    (path,) = tmp_path.glob("*_cmp_result.csv")
    (row,) = table(path)
    for side in ("pta", "acl"):
        assert (row[f"{side}_dtype"], row[f"{side}_shape"]) == ("float16", "(64, 3)")
    golden, mine = values.astype(np.float64).reshape(2, -1)
    relative = np.abs(mine - golden) / np.abs(golden)
    figures = {
        "cosine_similarity": golden @ mine / np.sqrt((golden @ golden) * (mine @ mine)),
        "max_relative_error": relative.max(),
        "mean_relative_error": relative.mean(),
        "relative_euclidean_distance": np.linalg.norm(mine - golden) / np.linalg.norm(golden),
    }
    assert {name: float(row[name]) for name in figures} == pytest.approx(figures, rel=1e-12)


GRANULARITY = {
    # A kernel inside an operator, an operation inside a layer, a layer inside the model.
    "op": "3_SelfAttentionOperation/0_FlashAttentionKernel",
    "layer": "0_DecoderLayer/3_SelfAttentionOpsRunner",
    "model": "0_ModelEncoderTorch/0_LayerEncoderOperationGraphRunner",
}


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
@pytest.mark.parametrize("replaced", sorted(GRANULARITY))
def test_each_granularity_has_a_high_and_a_low_level(
    tmp_path: Path, spelling: str, replaced: str
) -> None:
    """High: what goes into and comes out of what was replaced. Low: what is inside it."""
    inside = GRANULARITY[replaced]
    program = f"""
from pathlib import Path
from support.atb_files import write_bin
set_task_id()
given, made, inner = (np.arange(6, dtype='float32') + n for n in range(3))
for name, value in (('in', given), ('out', made)):
    data_id = gen_id()
    set_label('pta', data_id, data_val=value)
    set_label('acl', data_id, data_val=value)
data_id = gen_id()
set_label('pta', data_id, data_val=inner)
set_label('acl', data_id, tensor_path='{inside}/after/outTensor0.bin')
root = Path(os.environ['ACLTRANSFORMER_HOME_PATH'], 'tensors', str(os.getpid()))
place = root / os.environ['AIT_CMP_TASK_ID'] / '{inside}' / 'after'
place.mkdir(parents=True)
write_bin(place / 'outTensor0.bin', inner * WRONG)
"""
    for factor, code in ((1, 0), (3, 1)):
        (tmp_path / "model.py").write_text(HEAD + program.replace("WRONG", str(factor)))
        for old in tmp_path.glob("*_cmp_result.csv"):
            old.unlink()
        done = labels_command(
            tmp_path,
            spelling,
            f"{sys.executable} model.py",
            ACLTRANSFORMER_HOME_PATH=str(tmp_path / "acl"),
            ACLTRANSFORMER_SAVE_TENSOR="1",
        )
        assert done.returncode == code, done.stdout + done.stderr
        (path,) = tmp_path.glob("*_cmp_result.csv")
        rows = table(path)
        assert len(rows) == 3 and all(row["cmp_flag"] == "True" for row in rows)
        assert rows[2]["acl_data_path"].endswith(f"{inside}/after/outTensor0.bin")


def labels_command(
    folder: Path, spelling: str, program: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """`driftline labels`, or the seed's own command."""
    place = Path(sys.executable).parent
    words = [str(place / "driftline"), "labels"]
    if spelling == "theirs":
        words = [str(place / "ait"), "debug", "compare", "aclcmp"]
    return subprocess.run(
        [*words, "--exec", program],
        cwd=folder,
        env=variables(**more),
        capture_output=True,
        text=True,
    )
