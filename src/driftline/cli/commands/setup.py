"""Setting up: the tour, `compat install`, and `doctor`, which describes this installation.

`compat install` writes the scripts and test modules that IBM's and Paddle's documents name, so that
the command lines of those documents run unchanged. The hardware checks test a machine step by step,
stop at the first failure, and write a report that users can send.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from driftline import settings
from driftline.cli import python_script as script
from driftline.cli.options import OUTPUT, place
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE, AlreadyThere, BadInput, DriftlineError
from driftline.settings import cores

# --- scripts and test modules with the names that other tools' documents use

COMMAND_OF = {
    "generate_metrics": "metrics",
    "generate_layers_metrics": "layer-metrics",
    "get_thresholds": "thresholds",
    "hook_result_checker": "check-hooks",
}
"""Scripts of other tools, and the command that replaces each."""
_SCRIPT = '''"""{name}.py, by Driftline; written by `driftline compat install`."""

import sys

from driftline.cli.commands.setup import run_script

if __name__ == "__main__":
    sys.exit(run_script("{name}", sys.argv[1:]))
'''
_SUITE = '''"""{name}.py, by Driftline; written by `driftline compat install`."""

from driftline.suites.{name} import *{more}
'''
_MODELS = """

# Models to test, by id or folder; options of the command line override them.
decoder_models = []
tuple_output_models = []
"""
SCRIPTS = {
    "generate_metrics": ("", "scripts"),
    "generate_layers_metrics": ("", "scripts"),
    "get_thresholds": ("", "tests/resources"),
    "hook_result_checker": ("",),
}
"""Folders in which the documents expect each script."""
SUITES = {"test_decoders": "", "test_model_expectations": _MODELS}


def compat(
    what: Annotated[Literal["install"], place("install")],
    folder: Annotated[Path, place("DIR")],
    /,
    *,
    force: bool = False,
) -> int:
    """Write the scripts and test modules that other tools' documents name into a folder.

        driftline compat install aiu-fms-testing-utils
        cd aiu-fms-testing-utils
        python generate_metrics.py --architecture=hf_pretrained --model_path=$MODEL_PATH …
        pytest tests/models/test_decoders.py -vv

    Each file has a few lines and calls Driftline. Modules that programs import (`ait_llm`,
    `msquickcmp`, `saving_hook`) are in the package driftline-compat instead.

    Args:
        what: install.
        folder: The folder to write to; it is created.
        force: Replace existing files.
    """
    del what
    paths = script.step("paths", install_scripts, folder, force=force)
    script.end(paths)
    for path in paths:
        print(path)
    return EXIT_FINE


def install_scripts(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the files of `compat install` to a folder; returns their paths.

    Raises:
        AlreadyThere: A file with other contents exists.
        BadInput: The folder cannot be written.
    """
    files = {
        folder / place / f"{name}.py": _SCRIPT.format(name=name)
        for name, places in SCRIPTS.items()
        for place in places
    }
    for name, more in SUITES.items():
        files[folder / "tests" / "models" / f"{name}.py"] = _SUITE.format(name=name, more=more)
    # All are checked before the first is written, so that a refusal leaves no half of them.
    for path, text in files.items():
        if path.exists() and not force and path.read_text(errors="replace") != text:
            raise AlreadyThere(f"{path} is there", hint="give another folder, or --force")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as trouble:
        raise BadInput(
            f"{folder} cannot be written: {trouble.strerror or trouble}", hint="give another folder"
        ) from None
    return list(files)


def run_script(name: str, words: Sequence[str]) -> int:
    """Run the command that replaces a script of another tool; returns its exit code."""
    from driftline.cli.main import main

    arguments = list(words)
    # The document's script loads models through ibm-fms, whose layers have the documented names.
    named = any(word == "--library" or word.startswith("--library=") for word in arguments)
    if name == "generate_layers_metrics" and not named and not {"-h", "--help"} & set(arguments):
        arguments += ["--library", "fms"]
    return main([COMMAND_OF[name], *arguments])


# --- what is installed, and the hardware, step by step

_SHOWN = ("numpy", "ml_dtypes", "pyarrow", "msgspec")
# What can be captured, by the name of its extra, and the packages it may come in.
_ENGINES = {
    "torch": ("torch",),
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}


def doctor(
    *,
    format: Literal["table", "json"] = "table",
    ascend: bool = False,
    aiu: bool = False,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE")] = None,
) -> int:
    """Print versions, the kernel path and the devices of this machine.

        driftline doctor --ascend
        driftline doctor --aiu

    Devices are listed if torch is installed. With --ascend or --aiu, the hardware is checked step
    by step, up to the first failure, and a small report is written. Please send it to us: our own
    tests use simulated devices. Exit code 2 if a check fails.

    Args:
        format: How to print the result.
        ascend: Check the toolkit, the ATB library, its probe, torch on the NPU and torchair.
        aiu: Check the AIU's package and backend, a first graph and ibm-fms.
        output: File of the report. Default: driftline_ascend_report.json or
            driftline_aiu_report.json.
    """
    if ascend or aiu:
        fine = script.step("fine", check_hardware, ascend=ascend, aiu=aiu, output=output)
        script.end(fine)
        return EXIT_FINE if fine else EXIT_COULD_NOT
    facts = script.step("facts", environment_facts)
    script.end(facts)
    if format == "json":
        print(json.dumps(facts, indent=2))
        return EXIT_FINE
    for name, value in facts.items():
        print(f"{name:<14}{value}")
    return EXIT_FINE


def environment_facts() -> dict[str, str]:
    """Name and value of everything that can change a result, each as one short text."""
    from driftline import __version__

    facts = {
        "driftline": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": f"{cores()} usable of {os.cpu_count()}",
    }
    facts |= {package: _version(package) or "not installed" for package in _SHOWN}
    for engine, packages in _ENGINES.items():
        versions = [version for package in packages if (version := _version(package))]
        facts[engine] = versions[0] if versions else f"not installed: pip install {packages[0]}"
    facts |= _kernel_facts()
    # Importing torch takes seconds: look first whether it is installed.
    if find_spec("torch") is not None:
        facts |= _torch_facts()
    return facts


def _kernel_facts() -> dict[str, str]:
    from driftline.numerics import kernel

    return {"kernel": f"{kernel.active()} (available: {', '.join(kernel.available())})"}


def _torch_facts() -> dict[str, str]:
    import torch

    from driftline.captures.torch.device.accelerator import device_names

    if torch.accelerator.is_available():
        # An accelerator that was not used yet reports no name.
        torch.zeros(1, device=torch.accelerator.current_accelerator())
    return {
        "torch threads": str(torch.get_num_threads()),
        "devices": ", ".join(["cpu", *device_names()]),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }


class Step(NamedTuple):
    """The result of one check.

    Attributes:
        name: Name of the check.
        fine: Whether it passed; None if it was not run.
        text: What was observed.
        hint: What to do next; may be empty.
    """

    name: str
    fine: bool | None
    text: str
    hint: str = ""


Check = Callable[[], str]
"""Returns a description of what it found, or raises DriftlineError with a hint."""


def walk_steps(checks: Mapping[str, Check]) -> Iterator[Step]:
    """Run checks in order; those after the first failure are not run."""
    failed = False
    for name, check in checks.items():
        if failed:
            yield Step(name, None, "not looked at")
            continue
        try:
            yield Step(name, True, check())
        except DriftlineError as trouble:
            failed = True
            yield Step(name, False, str(trouble), trouble.hint)
        # A vendor's package may raise anything while it is imported.
        except Exception as trouble:
            failed = True
            lines = str(trouble).strip().splitlines() or [""]
            yield Step(name, False, f"{type(trouble).__name__}: {lines[0][:200]}")


def report_hardware(kind: str, checks: Mapping[str, Check], output: Path) -> list[Step]:
    """Run the checks of one kind of hardware and write the report.

    Raises:
        BadInput: The report cannot be written.
    """
    steps = list(walk_steps(checks))
    report = {
        "format": "driftline-hardware-report",
        "kind": kind,
        # Only names of files without their folders, and versions: nothing private of the machine.
        "steps": [
            step._replace(
                text=_without_folders(step.text), hint=_without_folders(step.hint)
            )._asdict()
            for step in steps
        ],
        "versions": {name: _version(name) for name in _REPORTED if _version(name)},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    try:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as trouble:
        raise BadInput(
            f"{output} cannot be written: {trouble.strerror or trouble}", hint="give another -o"
        ) from None
    return steps


def _without_folders(text: str) -> str:
    """The text without folder names: the report is sent, and folders may name people and projects.

    >>> _without_folders("there is no /home/ada/secret/lib/libatb.so")
    'there is no …/libatb.so'
    """
    return re.sub(r"/(?:[^/\n]+/)+", "…/", text)


def print_steps(steps: Sequence[Step], output: Path) -> bool:
    """Print the steps; returns whether all of them passed."""
    marks = {True: "ok", False: "FAILED", None: "-"}
    for step in steps:
        print(f"{marks[step.fine]:<8}{step.name}: {step.text}")
        if step.hint:
            print(f"{'':<8}  next: {step.hint}")
    print(f"report in {output}; please attach it when you write to us")
    return all(step.fine for step in steps)


_REPORTED = (
    *("driftline", "torch", "torch_npu", "torchair", "torch_sendnn", "ibm-fms", "transformers"),
    *("numpy", "onnxruntime"),
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def ascend_checks() -> dict[str, Check]:
    """Checks of what `dump`, `errcheck` and `opcheck -rerun` need on an Ascend machine."""
    from driftline.captures.launch.atb import find_probe

    environment = settings.environment()

    def toolkit() -> str:
        folder = environment.get(settings.ASCEND_TOOLKIT) or settings.ASCEND_TOOLKIT_DEFAULT
        if not Path(folder).is_dir():
            raise BadInput(
                f"there is no folder {folder}", hint="source the toolkit's set_env.sh first"
            )
        return folder

    def library() -> str:
        home = environment.get(settings.ATB_HOME, "")
        path = Path(home) / "lib" / "libatb.so"
        if not home or not path.is_file():
            raise BadInput(
                f"{settings.ATB_HOME} is not set" if not home else f"there is no {path}",
                hint="source the ATB library's set_env.sh; without it only saved dumps can be read",
            )
        return str(path)

    def adapter() -> str:
        from driftline.decoding.models.targets import Target, ready

        return f"torch computes on {ready(Target('npu')).device}"

    def graphs() -> str:
        if find_spec("torchair") is None:
            raise BadInput(
                "torchair cannot be imported: graphs of GE cannot be dumped here",
                hint="install torchair as its maker describes; FX graphs need no torchair",
            )
        return "torchair can be imported"

    return {
        "toolkit": toolkit,
        "ATB library": library,
        "probe": lambda: str(find_probe(environment)),
        "torch on the NPU": adapter,
        "torchair": graphs,
    }


def aiu_checks() -> dict[str, Check]:
    """Checks of what `validate` and `layer-metrics --candidate device=aiu` need, in order."""
    from driftline.decoding.models.targets import AIU_BACKEND, Target, ready

    target = Target("aiu", "fp16", AIU_BACKEND)

    def compiled() -> str:
        import torch

        from driftline.decoding.models.backend_graphs import compile_unit

        layer = torch.nn.Linear(64, 64).half().eval()
        values = torch.ones(2, 64, dtype=torch.float16)
        with torch.inference_mode():
            wanted = layer(values).float()
            unit = compile_unit(layer, "", AIU_BACKEND, dynamic=False)
            made = layer(values).float()
        if not unit.graphs:
            raise BadInput(
                f"torch.compile gave {AIU_BACKEND} no graph of a linear layer",
                hint="TORCH_LOGS=+dynamo says why",
            )
        error = float((made - wanted).norm() / wanted.norm())
        if not error < 0.02:
            raise BadInput(
                f"a linear layer on the AIU is off by {error:.3g} (relative l2)",
                hint="send the report to us",
            )
        return f"a linear layer was compiled and agrees (relative l2 {error:.3g})"

    def models() -> str:
        if find_spec("fms") is None:
            raise BadInput("ibm-fms cannot be imported", hint="pip install ibm-fms transformers")
        return "ibm-fms can be imported"

    def package() -> str:
        ready(target)
        return f"torch.compile knows the backend {AIU_BACKEND}"

    return {"package and backend": package, "a first graph": compiled, "models": models}


def check_hardware(*, ascend: bool, aiu: bool, output: Path | None) -> bool:
    """Check the named hardware and print the results; returns whether everything passed."""
    fine = True
    wanted: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    wanted += [("ascend", ascend_checks)] if ascend else []
    wanted += [("aiu", aiu_checks)] if aiu else []
    if output is not None and len(wanted) > 1:
        raise BadInput("--output names one report", hint="give --ascend or --aiu")
    for kind, checks in wanted:
        path = output or Path(f"driftline_{kind}_report.json")
        fine = print_steps(report_hardware(kind, checks(), path), path) and fine
    sys.stdout.flush()
    return fine


# --- the tour


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

    The tour takes less than a minute. If torch is installed, a small Llama runs in float32 and in
    bfloat16 with a wrong activation in one layer; otherwise a numpy network does the same. Exit
    code 0 if Driftline names the fault.

    Args:
        output: Folder for the program, the runs and the report.
        force: Replace an earlier tour.
        copy: Only copy the program of the tour, infer.py, to this folder and run nothing.
    """
    from driftline.testing import demo as tours

    if copy is not None:
        program = script.step("program", tours.copy_program, copy, force=force)
        script.end(program)
        print(f"driftline: the program is in {program}", file=sys.stderr)
        return EXIT_FINE
    begun = time.monotonic()
    tour = script.step("tour", tours.tour, output, force=force)
    script.end(tour)
    print(f"\nThe planted fault was named: {tour.culprit} ({time.monotonic() - begun:.0f} s).")
    print(f"\nWhat to try next, in the folder {output}:")
    width = max(len(command) for command, _ in tour.next_steps)
    for command, meaning in tour.next_steps:
        print(f"  {command:<{width}}  {meaning}")
    return EXIT_FINE
