"""`driftline demo`: the tour, from an installed package and nothing else.

A program is copied to a folder of the user's, run rightly and wrongly, and Driftline's own commands
must name the fault that was planted: the tour is also a test of the installation.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from driftline.cli.options import OUTPUT
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, AlreadyThere, DriftlineError

# Ten times what it takes on a slow machine: a tour that hangs ends with a sentence.
_SECONDS = 600


def demo(
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="DIR", group=OUTPUT)] = Path(
        "driftline-demo"
    ),
    force: Annotated[bool, Parameter(group=OUTPUT)] = False,
    copy: Annotated[Path | None, Parameter(metavar="DIR", group=OUTPUT)] = None,
) -> int:
    """Take a tour: two small programs, a planted fault, a report.

        driftline demo

    Takes less than a minute. With torch installed, a small Llama runs in float32 and in bfloat16
    with a wrong activation in one layer; without torch, a network in numpy does the same. Exit code
    0 if the fault was named.

    Args:
        output: Folder for the program, the runs and the report.
        force: Replace an earlier tour.
        copy: Only copy the program of the tour, infer.py, to this folder and run nothing.
    """
    if copy is not None:
        from driftline.testing.demo import TORCH_PROGRAM

        copy.mkdir(parents=True, exist_ok=True)
        program = copy / TORCH_PROGRAM.name
        if program.exists() and not force:
            raise AlreadyThere(f"{program} exists", hint="give another --copy, or --force")
        shutil.copy(TORCH_PROGRAM, program)
        print(f"driftline: the program is in {program}", file=sys.stderr)
        return EXIT_FINE
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        # Only what a tour wrote is ever deleted.
        if not force or not (output / "demo.json").is_file():
            hint = "give another -o" + ("" if force else ", or --force for an earlier tour")
            raise AlreadyThere(f"{output} is not empty", hint=hint)
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "demo.json").write_text(json.dumps({"schema": "driftline.demo/1"}) + "\n")
    begun = time.monotonic()
    tour = _torch_tour if importlib.util.find_spec("torch") is not None else _numpy_tour
    culprit, table, next_steps = tour(output)
    named = json.loads((output / table / "table.json").read_text(encoding="utf-8"))["first_site"]
    if named != culprit:
        raise DriftlineError(
            f"the fault was planted in {culprit}, and {named or 'nothing'} was named",
            hint=f"please report this with the folder {output}",
        )
    print(f"\nThe planted fault was named: {culprit} ({time.monotonic() - begun:.0f} s).")
    print(f"\nWhat to try next, in the folder {output}:")
    width = max(len(command) for command, _ in next_steps)
    for command, meaning in next_steps:
        print(f"  {command:<{width}}  {meaning}")
    return EXIT_FINE


def _torch_tour(folder: Path) -> tuple[str, str, list[tuple[str, str]]]:
    """Two executions of a small Llama, by the one command that does it all."""
    from driftline.testing.demo import CULPRIT, FAULTY_LAYER, TORCH_PROGRAM

    shutil.copy(TORCH_PROGRAM, folder / "infer.py")
    print("A small Llama of 8 layers runs in float32, and in bfloat16 with GELU instead of SiLU in")
    print(f"layer {FAULTY_LAYER}. The program, infer.py, does not know that it is watched.")
    right = f"{_python()} infer.py --dtype float32"
    wrong = f"{_python()} infer.py --dtype bfloat16 --fault gelu --fault-layer {FAULTY_LAYER}"
    _run(folder, "diff", right, wrong, expected=EXIT_DIFFERENT)
    return (
        CULPRIT,
        "driftline-diff/table",
        [
            ("open driftline-diff/report.html", "the report, in a browser"),
            ("driftline view driftline-diff/ref driftline-diff/cand", "and every tensor behind it"),
            ("driftline show driftline-diff/ref", "what is in a run"),
            (f'driftline diff "{right}" "{right.replace("float32", "bfloat16")}" -o clean', "PASS"),
            ('driftline diff "python a.py" "python b.py"', "two programs of yours"),
        ],
    )


def _numpy_tour(folder: Path) -> tuple[str, str, list[tuple[str, str]]]:
    """Two folders of .npy files, as any program may write them."""
    from driftline.testing.demo import FAULTY_LAYER, NUMPY_CULPRIT, NUMPY_PROGRAM

    shutil.copy(NUMPY_PROGRAM, folder / "layers.py")
    print("torch is not installed, so a network in numpy saves its layers as .npy files: once in")
    print(f"float32, once in float16 with ReLU instead of SiLU in layer {FAULTY_LAYER}.")
    for words in (["right"], ["wrong", "--dtype", "float16", "--fault-layer", str(FAULTY_LAYER)]):
        command = ["layers.py", "--output", *words]
        print(f"\n$ {_python()} {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], cwd=folder, check=True, timeout=_SECONDS)
    _run(folder, "compare", "right", "wrong", "-o", "table", expected=EXIT_DIFFERENT)
    _run(folder, "report", "table", "-o", "report.html", expected=EXIT_FINE)
    return (
        NUMPY_CULPRIT,
        "table",
        [
            ("open report.html", "the report, in a browser"),
            ("driftline show right", "what is in a folder of tensors"),
            ("driftline view right wrong", "the report's page, and every tensor behind it"),
            ("pip install torch", "then `driftline demo --force` watches an unchanged program"),
        ],
    )


def _python() -> str:
    """How a user of this shell calls this interpreter."""
    path = shutil.which("python")
    if path is not None and Path(path).absolute() == Path(sys.executable).absolute():
        return "python"
    return shlex.quote(sys.executable)


def _run(folder: Path, *words: str, expected: int) -> None:
    """Run one of our own commands as the user would, and show it."""
    print(f"\n$ driftline {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "driftline", *words]
    try:
        status = subprocess.run(command, cwd=folder, timeout=_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        raise DriftlineError(f"`driftline {words[0]}` took longer than {_SECONDS} s") from None
    if status != expected:
        raise DriftlineError(
            f"`driftline {words[0]}` ended with exit code {status}, expected was {expected}",
            hint="see what it printed above; `driftline doctor` describes this installation",
        )
