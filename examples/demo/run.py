"""The tour behind `make demo`: a fault is planted in one layer, and Driftline must name it.

Runs the commands of the README as a user would, and fails loudly if the fault is not named.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = Path("demo-output")
FAULTY_LAYER = 5
CULPRIT = f"layers.{FAULTY_LAYER}.mlp.act_fn"


def driftline(*arguments: str, expect: int) -> None:
    command = [sys.executable, "-m", "driftline", *arguments]
    print("\n$ driftline " + " ".join(f'"{a}"' if " " in a else a for a in arguments), flush=True)
    status = subprocess.run(command, check=False).returncode
    if status != expect:
        sys.exit(f"demo: expected exit status {expect}, got {status}")


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    infer = HERE / "infer.py"
    ref, cand, table = (str(OUTPUT / name) for name in ("ref", "cand", "table"))
    print("Driftline's tour: a model of 8 layers in float32, and the same in bfloat16 with GELU")
    print(f"instead of SiLU in layer {FAULTY_LAYER}. The script does not know that it is watched.")
    program = f"{sys.executable} {infer}"
    driftline("dump", "-o", ref, "--exec", f"{program} --dtype float32", expect=0)
    driftline(
        "dump",
        "-o",
        cand,
        "--exec",
        f"{program} --dtype bfloat16 --fault gelu --fault-layer {FAULTY_LAYER}",
        expect=0,
    )
    driftline("compare", ref, cand, "-o", table, expect=1)
    found = json.loads((OUTPUT / "table" / "table.json").read_text())
    if found["first_site"] != CULPRIT:
        sys.exit(f"demo: the fault was planted in {CULPRIT}, but {found['first_site']} was named")
    print(f"\nThe planted fault was named: {CULPRIT}.")
    page = OUTPUT / "report.html"
    driftline("report", table, "-o", str(page), expect=0)
    print(f"The two runs are in {ref} and {cand}, the comparison in {table}")
    print(f"  look inside:  driftline show {ref}")
    print(f"  all rows:     driftline show {table} --format csv")
    print(f"  the report:   {page.resolve()}  (one file; open it in a browser)")


if __name__ == "__main__":
    main()
