"""Configurations that make torchair write dumps: GE operators with their graph, or FX nodes.

    config = get_ge_dump_config(dump_path="dump")
    torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))

The dumps open as runs: `driftline show dump`, `driftline compare FX GE`. This file knows only the
names of settings; torchair makes the configuration object. FX nodes can be recorded without it.
"""

from __future__ import annotations

import importlib
import importlib.util
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.errors import BadConfig, BadInput

if TYPE_CHECKING:
    from _typeshed import StrPath

MODES = ("input", "output", "all")


def get_ge_dump_config(
    dump_path: StrPath = "ait_ge_dump",
    dump_mode: str = "all",
    fusion_switch_file: StrPath | None = None,
) -> Any:
    """A CompilerConfig that dumps every operator that the graph engine runs.

    Args:
        dump_path: Folder; each call makes a new one in it, `dump_{YYYYmmdd_HHMMSS}`, which holds
            the operators and the graph's text.
        dump_mode: `input`, `output` or `all`.
        fusion_switch_file: A JSON file that turns fusions off. Default: fusions stay on.

    Raises:
        ValueError: The mode does not exist.
        DriftlineError: torchair, the file or the folder is missing.
    """
    # Checked before torchair is loaded.
    if dump_mode not in MODES:
        raise BadConfig(f"dump_mode is one of {', '.join(MODES)}, not {dump_mode!r}")
    switch = None if fusion_switch_file is None else Path(fusion_switch_file)
    if switch is not None and not switch.is_file():
        raise BadInput(
            f"there is no fusion switch file '{switch}'",
            hint="give the path of that JSON file, or leave it out",
        )
    config = _compiler_config()
    folder = _new_folder(Path(dump_path))
    config.debug.graph_dump.type = "txt"
    config.debug.graph_dump.path = str(folder)
    config.dump_config.enable_dump = True
    config.dump_config.dump_mode = dump_mode
    config.dump_config.dump_path = str(folder)
    if switch is not None:
        config.fusion_config.fusion_switch_file = str(switch)
    return config


def get_fx_dump_config() -> Any:
    """A configuration that records every FX node of a compiled model.

    With torchair, it is a CompilerConfig: torchair's backend then runs the FX graph and saves
    tensors below the current folder. Without torchair, it is a `RecordedGraphs`, whose `backend`
    works on any machine and writes the run `driftline_fx_{YYYYmmdd_HHMMSS}` (its `path`).

        config = get_fx_dump_config()
        model = torch.compile(model, backend=config.backend)

    Raises:
        DriftlineError: Neither torchair nor torch is installed.
    """
    # Searched without importing it: only its presence matters here.
    if importlib.util.find_spec("torchair") is not None:
        config = _compiler_config()
        config.debug.data_dump.type = "npy"
        return config
    if importlib.util.find_spec("torch") is None:
        raise BadInput("torch cannot be imported", hint="pip install torch")
    from driftline.captures.torch.compile.tap import RecordedGraphs

    path = Path(f"driftline_fx_{datetime.now():%Y%m%d_%H%M%S}").absolute()
    return RecordedGraphs(_unused(path))


def _unused(path: Path) -> Path:
    """The path, with a number if the path exists already."""
    count, free_path = 0, path
    while free_path.exists():
        count += 1
        free_path = path.with_name(f"{path.name}_{count}")
    return free_path


def _compiler_config() -> Any:
    try:
        torchair: Any = importlib.import_module("torchair")
    except ImportError as trouble:
        raise BadInput(
            f"torchair cannot be imported: {trouble}",
            hint="pip install torch_npu brings it; without an NPU, "
            "`driftline dump` captures the model",
        ) from trouble
    return torchair.CompilerConfig()


def _new_folder(above: Path) -> Path:
    """A new folder named by the current time; torchair needs an existing folder."""
    moment = f"dump_{datetime.now():%Y%m%d_%H%M%S}"
    name, count = moment, 0
    try:
        above.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                (above / name).mkdir()
            except FileExistsError:
                count += 1
                name = f"{moment}_{count}"
            else:
                return above / name
    except OSError as trouble:
        raise BadInput(
            f"cannot make a folder in {above}: {trouble.strerror}",
            hint="give a dump_path that can be written",
        ) from trouble
