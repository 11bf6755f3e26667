"""The first hour of a new user, from the built wheel: empty HOME, empty environment, no compiler.

    make dist && python tools/first_hour.py dist/*.whl -o docs/first-hour.md

Each command is run as shown, and its output goes into the page. `--without-torch` and `--python`
are for the tests of the wheel; with `--without-torch` only the tour is run.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Time limit of one command.
SECONDS = 900
# Lines that are shown of a long output: its beginning and its end.
HEAD, TAIL = 28, 10
TEST = """import torch
import driftline


def build(activation):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), activation, torch.nn.Linear(8, 2)).eval()


def test_the_port_agrees():
    driftline.assert_no_drift(build(torch.nn.SiLU()), build(torch.nn.GELU()), torch.ones(1, 8))
"""
# The command, its expected exit code, and the text before it.
Step = tuple[str, int, str]
TOUR: list[Step] = [
    ("driftline --help", 0, "What is there?"),
    ("driftline doctor", 0, "Is it installed well?"),
    ("driftline demo", 0, "A tour of one minute: two programs, a planted fault, a report."),
]
HOUR: list[Step] = [
    *TOUR,
    ("driftline demo --copy .", 0, "Now by hand, with the program of the tour."),
    (
        'driftline diff "python infer.py --dtype float32" "python infer.py --dtype bfloat16"',
        0,
        "A sound port: the numbers differ, and not by more than bfloat16 explains.",
    ),
    ("driftline show driftline-diff/ref --site 'layers.5.mlp*' --port output", 0, "In a run."),
    (
        'driftline dump -o broken --exec "python infer.py --dtype bfloat16 --fault scale"',
        0,
        "A fault of another kind, step by step.",
    ),
    ("driftline compare driftline-diff/ref broken -o table", 1, ""),
    ("driftline diagnose driftline-diff/ref broken", 1, "What kind of bug is it?"),
    ("driftline report table -o report.html", 0, "Something to attach to a bug."),
    (
        "python -c \"import driftline; print(repr(driftline.open_table('table')))\"",
        0,
        "The same in Python.",
    ),
    ("pip install --quiet pytest", 0, "And in tests."),
    ("pytest -q test_port.py", 1, ""),
]


class Environment:
    """An empty HOME and an empty virtual environment in one folder."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True, timeout=SECONDS)
        bin_folder = folder / "venv" / "bin"
        # The path has only the tools that the commands need, and no compiler.
        tools = folder / "tools"
        tools.mkdir()
        for name in ("sh", "env", "git", "cat"):
            if path := shutil.which(name):
                (tools / name).symlink_to(path)
        self.variables = {
            "HOME": str(self.home),
            "PATH": f"{bin_folder}{os.pathsep}{tools}",
            "LANG": "C.UTF-8",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_QUIET": "2",  # pip's warnings name the package sources of this machine
            # The sources of packages are settings of the machine.
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        }
        # pip would not find the user's own settings, because HOME is another folder here.
        for config in (Path.home() / ".pip" / "pip.conf", Path.home() / ".config/pip/pip.conf"):
            if config.is_file():
                self.variables["PIP_CONFIG_FILE"] = str(config)

    def run(self, command: str) -> tuple[int, str, float]:
        """Run a command; returns its exit code, its output and its time in seconds."""
        begun = time.monotonic()
        done = subprocess.run(
            shlex.split(command),
            cwd=self.home,
            env=self.variables,
            executable=shutil.which(shlex.split(command)[0], path=self.variables["PATH"]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout, time.monotonic() - begun


def play(
    environment: Environment, wheel: Path, steps: Sequence[Step], torch: bool
) -> Iterator[str]:
    """Run the steps and yield the page, block by block.

    Raises:
        SystemExit: A command ended with an unexpected exit code.
    """
    packages = [str(wheel), "torch"] if torch else [str(wheel)]
    # The constraints select the same version of torch as in the tests.
    pin = f"-c {ROOT / 'constraints.txt'} " if torch else ""
    code, text, seconds = environment.run(f"pip install --quiet {pin}{shlex.join(packages)}")
    if code:
        raise SystemExit(f"the wheel cannot be installed:\n{text}")
    shown = f"pip install {wheel.name}{' torch' if torch else ''}"
    yield block(shown, "", seconds, "Into an empty environment, without a compiler.")
    (environment.home / "test_port.py").write_text(TEST, encoding="utf-8")
    for command, expected, remark in steps:
        code, text, seconds = environment.run(command)
        if code != expected:
            raise SystemExit(f"`{command}` ended with {code}, not {expected}:\n{text}")
        yield block(command, cleaned(text, environment), seconds, remark)


def block(command: str, text: str, seconds: float, remark: str) -> str:
    lines = text.splitlines()
    if len(lines) > HEAD + TAIL + 1:
        left_out = len(lines) - HEAD - TAIL
        lines = [*lines[:HEAD], f"[... {left_out} lines ...]", *lines[-TAIL:]]
    inside = "\n".join(line.rstrip() for line in [f"$ {command}", *lines])
    said = f"{remark}\n\n" if remark else ""
    return f"{said}```text\n{inside}\n```\n\n{seconds:.0f} s.\n"


def cleaned(text: str, environment: Environment) -> str:
    """The text without the folders of this machine and without colour codes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return text.replace(str(environment.home), "~").replace(str(environment.folder), "…")


def main() -> None:
    options = argparse.ArgumentParser(description="Play the first hour of a new user.")
    options.add_argument("wheel", type=Path)
    options.add_argument("-o", "--output", type=Path, help="the page to write")
    options.add_argument("--python", default=sys.executable)
    options.add_argument("--without-torch", action="store_true", help="only the tour, in numpy")
    asked = options.parse_args()
    steps = TOUR if asked.without_torch else HOUR
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        environment = Environment(Path(folder), asked.python)
        blocks = []
        for part in play(environment, asked.wheel.resolve(), steps, not asked.without_torch):
            print(part, flush=True)
            blocks.append(part)
    seconds = time.monotonic() - begun
    if asked.output:
        head = f"""# The first hour

What a new user sees: an empty HOME, an empty environment, the built wheel, no compiler.
`make first-hour` plays it and writes this page; times are those of a machine with two cores,
{seconds:.0f} seconds in all.
"""
        asked.output.write_text("\n".join([head, *blocks]), encoding="utf-8")


if __name__ == "__main__":
    main()
