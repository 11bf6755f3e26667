"""The benchmarks still run after what they call was renamed; figures on tiny data mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.numerics import kernel

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))


def run_in_root(program: str, python: str = sys.executable) -> str:
    done = subprocess.run(
        [python, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_can_be_imported() -> None:
    assert len(MODULES) > 8
    run_in_root(
        "import importlib\n"
        + f"for name in {MODULES}: importlib.import_module('benchmarks.' + name)"
    )


@pytest.mark.skipif(not kernel.takes_addresses(), reason="the C kernel was not built here")
def test_the_benchmark_of_the_kernel_has_every_figure_with_a_goal() -> None:
    figures = json.loads(
        run_in_root("import json, benchmarks.kernel as k; print(json.dumps(k.run(1 << 14)))")
    )
    named = {figure["what"] for figure in figures}
    for path in {"avx512", "avx2"}.intersection(kernel.available()):
        for dtype in ("float32", "bfloat16", "float16"):
            assert f"pair {dtype}/{dtype} {path}, masked / normal" in named
    assert all(figure["value"] > 0 for figure in figures)


def test_the_clean_pairs_are_enough_and_one_of_them_is_judged(warm_llama: str) -> None:
    said = json.loads(
        run_in_root(
            "import json\n"
            "from benchmarks.clean_pairs.pairs import Pair, clean_pairs\n"
            "from benchmarks.clean_pairs.trial import clean_trial\n"
            "pairs = clean_pairs()\n"
            "names = {pair.name for pair in pairs}\n"
            "result = clean_trial(Pair('perceptron', 'bf16', steps=2, optimizer='SGD'))\n"
            "print(json.dumps([len(names), len({p.architecture for p in pairs}), result]))",
            warm_llama,
        )
    )
    pairs, architectures, result = said
    # Without the packages of `--install`, too.
    assert pairs >= 400
    assert architectures >= 15
    assert result["compare"]["verdict"] == result["diagnose"]["verdict"] == "pass", result


def test_a_fault_in_a_model_of_the_clean_pairs_is_judged_by_every_method(warm_llama: str) -> None:
    result = json.loads(
        run_in_root(
            "import json\n"
            "from benchmarks.clean_pairs.faults import Planted, fault_trial\n"
            "from benchmarks.clean_pairs.pairs import Pair\n"
            "planted = Planted(Pair('llama', 'bf16', 2), 'scaled weight', 'middle')\n"
            "print(json.dumps(fault_trial(planted)))",
            warm_llama,
        )
    )
    assert "broken" not in result, result
    for method in ("compare", "diagnose", "replay"):
        assert result[method]["verdict"] == "fail", method
        assert result[method]["exact"], method
