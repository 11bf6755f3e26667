"""`opcheck -rerun` of an ATB dump: the library's own class executes each operator again.

The library needs Ascend hardware; a small one with the same torch class stands in for it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_opcheck_atb import dump_of, operation, spoilt

from driftline.errors import BadInput
from driftline.operators.api import check

SOURCE = Path(__file__).parent / "opchecker" / "opchecker.cpp"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no compiler here")
    root = Path(torch.__file__).parent
    made = tmp_path_factory.mktemp("opchecker") / "libopchecker.so"
    words = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
    words += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    words += [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    words.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return made


def draw(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.slow
def test_the_library_s_results_are_held_to_the_golden_ones(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = {"headNum": 1, "calcType": 3, "qkScale": 1.0, "maskType": 0}
    norm = {"layerType": 1, "normParam": {"epsilon": 1e-5}}
    right = operation("LinearOperation", {"hasBias": False}, [draw(6, 16), draw(8, 16)])
    other = operation("LinearOperation", {"hasBias": False}, [draw(3, 16), draw(8, 16)])
    operations = [
        right,
        spoilt(other, lambda y: y * 1.1),
        operation("SoftmaxOperation", {"axes": [-1]}, [draw(4, 8)]),
        operation("RmsNormOperation", norm, [draw(6, 16), draw(16)]),
        operation("ElewiseOperation", {"elewiseType": 8}, [draw(6), draw(6)]),
        operation("ReduceOperation", {"reduceType": 3, "axis": [1]}, [draw(3, 4)]),
        operation(
            "SelfAttentionOperation",
            attention,
            [draw(4, 1, 8), draw(4, 1, 8), draw(4, 1, 8), np.array([4], np.int32)],
        ),
    ]
    dump = dump_of(tmp_path / "dump", operations)
    monkeypatch.setenv("AIT_OPCHECK_LIB_PATH", str(library.parent))
    found = check(dump.root, rerun=True, device="cpu")
    assert any("by the ATB library on cpu" in text for text in found.remarks)
    rows = {(r.call.op_type.removesuffix("Operation"), r.call.ids): r for r in found.rows}
    said = {
        f"{kind}{ids[-1]}": (row.status, row.figures.reason) for (kind, ids), row in rows.items()
    }
    assert said["Linear0"][0] == "pass" and "both are right" in said["Linear0"][1]
    assert said["Elewise4"][0] == "pass"
    assert (
        said["Linear1"][0] == "fail"
        and "and right: the operator does not give" in said["Linear1"][1]
    )
    assert said["Softmax2"][0] == "fail" and "not deterministic" in said["Softmax2"][1]
    assert said["RmsNorm3"][0] == "fail" and "right in the run, here" in said["RmsNorm3"][1]
    assert said["Reduce5"][0] == "not checked" and "is not in this library" in said["Reduce5"][1]
    assert said["SelfAttention6"][0] == "pass" and "not executed again" in said["SelfAttention6"][1]


def test_a_library_that_is_not_there_or_is_none_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = operation("LinearOperation", {"hasBias": False}, [draw(6, 16), draw(8, 16)])
    root = dump_of(tmp_path / "dump", [linear]).root
    monkeypatch.delenv("AIT_OPCHECK_LIB_PATH", raising=False)
    with pytest.raises(BadInput, match="AIT_OPCHECK_LIB_PATH does not say"):
        check(root, rerun=True)
    monkeypatch.setenv("AIT_OPCHECK_LIB_PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"there is no .*libopchecker\.so"):
        check(root, rerun=True)
    (tmp_path / "libopchecker.so").write_bytes(b"nothing")
    with pytest.raises(BadInput, match="cannot be used"):
        check(root, rerun=True, device="cpu")
    with pytest.raises(BadInput, match="there is no device npu:3 here"):
        check(root, rerun=True, device="3")
