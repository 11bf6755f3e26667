"""Driftline and its peers: dump and compare of one 134M Llama in fp32 and bf16, whole commands.

msprobe (`mindstudio-probe`) and polygraphy are installed into `.bench-venv`, a separate
environment. The tools do not compute exactly the same figures (msprobe also writes statistics and
stacks, polygraphy also medians and histograms). The ratio is that of the wall times until a user
has a table of differences. All tools get the same tensors: inputs and outputs of all modules, and
the parameters.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".bench-venv"
OUTPUT = ROOT / "bench-output" / "peers"
PROGRAMS = ROOT / "benchmarks" / "programs"


def install() -> None:
    """Make the peers' environment once; torch first, so that no package installs another build."""
    if (VENV / ".ready").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run(
        [*pip, "mindstudio-probe", "polygraphy", "transformers", "safetensors"], check=True
    )
    (VENV / ".ready").touch()


def timed(command: list[str], *, cwd: Path, accept: tuple[int, ...] = (0,)) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode not in accept:
        raise SystemExit(f"benchmarks: {' '.join(command)} failed\n{done.stderr[-2000:]}")
    return took


def run() -> list[dict[str, object]]:
    install()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    theirs = str(VENV / "bin" / "python")
    ours = [sys.executable, "-m", "driftline"]
    for side, dtype in (("ref", "float32"), ("cand", "bfloat16")):
        script = str(PROGRAMS / "dump_with_msprobe.py")
        timed([theirs, script, "--dtype", dtype, "--output", f"msprobe_{side}"], cwd=OUTPUT)
        program = f"{sys.executable} {PROGRAMS / 'infer_llama.py'} --dtype {dtype}"
        dump = ["dump", "-o", f"ours_{side}", "--level", "modules", "params", "--exec", program]
        timed([*ours, *dump], cwd=OUTPUT)
    msprobe_compare = [
        *(str(VENV / "bin" / "msprobe"), "compare"),
        *("-tp", "msprobe_cand/step0", "-gp", "msprobe_ref/step0", "-o", "msprobe_out"),
    ]
    our_compare = [*ours, "compare", "ours_ref", "ours_cand", "--format", "csv"]
    msprobe_times: list[float] = []
    our_times: list[float] = []
    timed(our_compare, cwd=OUTPUT, accept=(0, 1))  # warms the page cache for our files
    for _ in range(3):
        msprobe_times.append(timed(msprobe_compare, cwd=OUTPUT))
        our_times += [timed(our_compare, cwd=OUTPUT, accept=(0, 1)) for _ in range(3)]
    msprobe, mine = statistics.median(msprobe_times), statistics.median(our_times)
    return [
        {
            "what": "compare, whole command, msprobe / ours",
            "value": msprobe / mine,
            "goal": 60.0,
            "better": "higher",
            "unit": "x",
            "note": f"msprobe {msprobe:.1f} s, ours {mine:.2f} s",
        },
        *polygraphy(mine),
    ]


def polygraphy(mine: float) -> list[dict[str, object]]:
    """Measure Polygraphy's simple comparison of the same dumps, as dictionaries of arrays."""
    script = str(PROGRAMS / "compare_with_polygraphy.py")
    took = timed([str(VENV / "bin" / "python"), script, "ours_ref", "ours_cand"], cwd=OUTPUT)
    return [
        {
            "what": "compare, whole command, polygraphy / ours",
            "value": took / mine,
            "goal": None,
            "better": "higher",
            "unit": "x",
            "note": f"polygraphy {took:.1f} s; it also computes medians, quantiles and histograms",
        }
    ]


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(run())  # type: ignore[arg-type]
