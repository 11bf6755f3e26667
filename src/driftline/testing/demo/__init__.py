"""The tour of `driftline demo`, and its programs, which do not use Driftline.

A program is copied to a folder of the user and runs once without and once with a fault. Driftline's
commands must name the planted fault, so the tour is also a test of the installation. Nothing
imports the programs.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, AlreadyThere, DriftlineError

if TYPE_CHECKING:
    from _typeshed import StrPath

TORCH_PROGRAM = Path(__file__).with_name("infer.py")
NUMPY_PROGRAM = Path(__file__).with_name("layers.py")
FAULTY_LAYER = 5
CULPRIT = f"layers.{FAULTY_LAYER}.mlp.act_fn"
"""The site that the torch tour must name."""
NUMPY_CULPRIT = f"{FAULTY_LAYER:02}_activation"
_MARK = "demo.json"
"""A file in every folder of a tour: only such a folder is ever replaced."""
# Ten times the time on a slow machine: a tour that hangs ends with a message.
_SECONDS = 600


class Tour(NamedTuple):
    """The result of a tour.

    Attributes:
        culprit: The site of the planted fault, which was named.
        next_steps: Commands to try in its folder, with what each shows.
    """

    culprit: str
    next_steps: list[tuple[str, str]]


def tour(output: StrPath, *, force: bool = False) -> Tour:
    """Run the tour in a folder, and print what a user would see.

    Args:
        output: The folder; it is made.
        force: Replace an earlier tour.

    Raises:
        AlreadyThere: The folder holds something else.
        DriftlineError: A command failed, or the fault was not named.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not force or not (folder / _MARK).is_file():
            hint = "give another -o" + ("" if force else ", or --force for an earlier tour")
            raise AlreadyThere(f"{folder} is not empty", hint=hint)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(json.dumps({"schema": "driftline.demo/1"}) + "\n")
    has_torch = importlib.util.find_spec("torch") is not None
    culprit, table, next_steps = (_torch_tour if has_torch else _numpy_tour)(folder)
    named = json.loads((folder / table / "table.json").read_text(encoding="utf-8"))["first_site"]
    if named != culprit:
        raise DriftlineError(
            f"the fault was planted in {culprit}, and {named or 'nothing'} was named",
            hint=f"please report this with the folder {folder}",
        )
    return Tour(culprit, next_steps)


def copy_program(folder: StrPath, *, force: bool = False) -> Path:
    """Copy the program of the tour, `infer.py`, to a folder, and run nothing.

    Raises:
        AlreadyThere: It is there, and `force` was not given.
    """
    program = Path(folder) / TORCH_PROGRAM.name
    if program.exists() and not force:
        raise AlreadyThere(f"{program} exists", hint="give another folder, or --force")
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TORCH_PROGRAM, program)
    return program


def _torch_tour(folder: Path) -> tuple[str, str, list[tuple[str, str]]]:
    """Run `driftline diff` on two executions of a small Llama."""
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
    """Compare two folders of .npy files, as any program may write them."""
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
    """The command by which a user of this shell starts this interpreter."""
    path = shutil.which("python")
    # By the folder: an environment has several names for its one interpreter.
    if path is not None and Path(path).absolute().parent == Path(sys.executable).absolute().parent:
        return "python"
    return shlex.quote(sys.executable)


def _run(folder: Path, *words: str, expected: int) -> None:
    """Print and run one of our own commands, as a user would."""
    print(f"\n$ driftline {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", "driftline", *words]
    try:
        status = subprocess.run(command, cwd=folder, timeout=_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        raise DriftlineError(
            f"`driftline {words[0]}` took longer than {_SECONDS} s",
            hint="is the machine busy? The command can be given by hand in that folder",
        ) from None
    if status != expected:
        raise DriftlineError(
            f"`driftline {words[0]}` ended with exit code {status}, expected was {expected}",
            hint="see what it printed above; `driftline doctor` describes this installation",
        )
