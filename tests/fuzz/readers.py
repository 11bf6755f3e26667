"""The readers that are fuzzed: which file is damaged, what lies around it, who reads it.

The promise is the same for all: any bytes become a run, a table, a plan, ... or a DriftlineError.
Anything else that is raised, a crash, a hang or an allocation beyond the limit is a finding.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from driftline.errors import DriftlineError
from driftline.formats import registry, tensor_files
from driftline.runs.run import Run

DATA = Path(__file__).parents[1] / "data"
CORPUS = Path(__file__).parent / "corpus"
MOST_ELEMENTS = 1 << 20
"""Values of larger tensors are not decoded: views of one element may claim any size."""


class Reader(NamedTuple):
    """One reader.

    Attributes:
        name: Its name; its corpus lies in the folder of that name.
        file: The damaged file, relative to a folder of its own.
        read: Reads that folder; may raise a DriftlineError.
        around: Writes what else the folder needs, once.
        binary: Whether it reads a binary format.
    """

    name: str
    file: str
    read: Callable[[Path], None]
    around: Callable[[Path], None] | None = None
    binary: bool = False

    def prepare(self, folder: Path) -> Path:
        """Makes the folder; returns the path of the file to damage."""
        if self.around is not None:
            self.around(folder)
        path = folder / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def corpus(self) -> list[bytes]:
        """The inputs that are checked in."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]

    def survives(self, folder: Path, path: Path, content: bytes) -> bool:
        """Reads the content; whether it was accepted. Raises what no user should see."""
        # Without a buffer of Python's: half of the time of a short input.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(file, content)
        os.close(file)
        _forget()
        try:
            self.read(folder)
        except DriftlineError as refused:
            text = str(refused)
            assert text, f"{type(refused).__name__} without a word"
            return False
        return True


# Installed packages are looked through for formats of others whenever no format of ours fits; they
# do not change while inputs are read, and looking takes twenty times as long as reading one.
registry.plugins = functools.cache(registry.plugins)


def _forget() -> None:
    """Readers remember files by their time of change, which is coarser than a fuzzer is fast."""
    tensor_files._recently_read.cache_clear()


def look_at(run: Run) -> None:
    """Everything that a command may ask of a run."""
    for handle in run.tensors():
        if handle.has_values and int(np.prod(handle.shape, dtype=object)) <= MOST_ELEMENTS:
            try:
                handle.float64()
                handle.numpy()
            except DriftlineError:
                continue
    list(run.events())
    list(map(str, run.losses))
    run.processes()
    for process in run.processes() or [{}]:
        place = int(process.get("rank", 0)), int(process.get("process", 0))
        run.topology(*place)
        for name in run.sheets(*place):
            run.sheet(name, *place)
    run.facts  # noqa: B018 - reads manifest and processes


def _open_file(name: str, format_name: str) -> Callable[[Path], None]:
    """Reads a file as its format, and every eighth time as a user would, asking all formats."""
    turn = itertools.count()

    def read(folder: Path) -> None:
        path = folder / name
        if next(turn) % 8 == 0:
            look_at(registry.open_run(path))
            return
        run = registry._opened(registry.FILES[format_name].reader.load(), path)
        for handle in run.tensors():
            if handle.has_values and int(np.prod(handle.shape, dtype=object)) <= MOST_ELEMENTS:
                handle.float64()

    return read


def _open_folder(folder: Path) -> None:
    look_at(registry.open_run(folder))


def _shards() -> Callable[[Path], None]:
    """Reads a run's shard, and every eighth time all of the run: the rest of it is not damaged."""
    turn = itertools.count()
    opened: dict[Path, Run] = {}

    def read(folder: Path) -> None:
        from driftline.runs.reader import open_run
        from driftline.runs.verify import verify

        if next(turn) % 8 == 0:
            run = opened[folder] = open_run(folder)
            look_at(run)
        run = opened[folder]
        list(verify(run))
        for handle in run.tensors():
            try:
                handle.float64()
            except DriftlineError:
                continue
        run.release()  # the next one is another file

    return read


def _run_around(folder: Path) -> None:
    shutil.copytree(CORPUS.parent / "skeletons" / "run", folder, dirs_exist_ok=True)


def _two_runs(folder: Path) -> None:
    for side in ("reference", "candidate"):
        _run_around(folder / side)


def _copy_of(*parts: str) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        shutil.copytree(DATA.joinpath(*parts), folder, dirs_exist_ok=True)

    return copy


def _table(folder: Path) -> None:
    from driftline.comparison.table.files import open_table

    for row in open_table(folder).rows:
        str(row)


def _part(folder: Path) -> None:
    from driftline.comparison.table.part import open_parts

    open_parts([folder / "shard-1-of-2.json"])


def _plan(folder: Path) -> None:
    from driftline.alignment.plan_file import read_plan
    from driftline.runs.reader import open_run

    reference, candidate = open_run(folder / "reference"), open_run(folder / "candidate")
    for pair in read_plan(folder / "plan.toml", reference, candidate).pairs:
        str(pair)


def _thresholds(folder: Path) -> None:
    from driftline.comparison.tolerance.thresholds import load_thresholds

    load_thresholds(folder / "thresholds.json")


def _mapping(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from driftline.alignment.rules.maps import read_mapping

        read_mapping(folder / name)

    return read


def _calls(folder: Path) -> None:
    from driftline.runs.sidecars.calls import read_calls

    list(read_calls((folder / "calls.jsonl").read_text("utf-8", "replace")))


def _graphs(folder: Path) -> None:
    from driftline.graphs.sources.graph_files import read_errors, read_graphs

    text = (folder / "graphs.jsonl").read_text("utf-8", "replace")
    list(read_graphs(text))
    list(read_errors(text))


def _graph_text(folder: Path) -> None:
    from driftline.formats.ascend.ge.graph_text import parse_graph
    from driftline.formats.ascend.protobuf import NotText

    try:
        parse_graph((folder / "graph.txt").read_text("utf-8", "replace"))
    except NotText as refused:
        assert str(refused)


def _onnx(folder: Path) -> None:
    from driftline.captures.onnxruntime.model_file import check_external, load_graph

    check_external(folder / "model.onnx", load_graph(folder / "model.onnx"))


def _tokens(folder: Path) -> None:
    from driftline.reporting.html.tokens import read_tokens

    len(read_tokens(folder / "x.tokens.parquet"))


def _note(folder: Path) -> None:
    from driftline.runs.stores.upload import sent_to

    sent_to(folder, "rank0/tensors-00000.safetensors")


_FX = "data_dump/1/gm_20240130064200000001_dump/add_2-aten.add.INPUT.0.20240130064201000001.npy"
_PADDLE = "tensors/rank_0/tensor_idx_0_layer_class_Linear_layer_name_linear_0_micro_step_0.npy"
_GE = "Add.Add_2.19.6.1706596911887829"
_PROBE = "step0/proc0"
_SHARD = "rank0/tensors-00000.safetensors"

READERS = [
    Reader("npy", "x.npy", _open_file("x.npy", "npy"), binary=True),
    Reader("npz", "x.npz", _open_file("x.npz", "npz"), binary=True),
    Reader("torch-zip", "x.pt", _open_file("x.pt", "torch"), binary=True),
    Reader("torch-legacy", "x.pth", _open_file("x.pth", "torch"), binary=True),
    Reader("safetensors", "x.safetensors", _open_file("x.safetensors", "safetensors"), binary=True),
    Reader("atb", "x.bin", _open_file("x.bin", "atb-bin"), binary=True),
    Reader("ge", _GE, _open_file(_GE, "ge"), binary=True),
    Reader("fx", _FX, _open_folder, binary=True),
    Reader("paddle", _PADDLE, _open_folder, binary=True),
    Reader("shard", _SHARD, _shards(), _run_around, binary=True),
    Reader("onnx", "model.onnx", _onnx, binary=True),
    Reader("tokens-parquet", "x.tokens.parquet", _tokens, binary=True),
    Reader("run-index", "rank0/index.jsonl", _open_folder, _run_around),
    Reader("run-manifest", "run.json", _open_folder, _run_around),
    Reader("run-process", "rank0/process.json", _open_folder, _run_around),
    Reader("run-events", "rank0/events.jsonl", _open_folder, _run_around),
    Reader("run-topology", "rank0/topology.json", _open_folder, _run_around),
    Reader("calls", "calls.jsonl", _calls),
    Reader("graphs", "graphs.jsonl", _graphs),
    Reader("sending-note", ".sending.json", _note, _run_around),
    Reader("table", "table.json", _table),
    Reader("part", "shard-1-of-2.json", _part),
    Reader("plan", "plan.toml", _plan, _two_runs),
    Reader("thresholds", "thresholds.json", _thresholds),
    Reader("mapping-json", "map.json", _mapping("map.json")),
    Reader("mapping-toml", "map.toml", _mapping("map.toml")),
    Reader("msprobe", f"{_PROBE}/dump.json", _open_folder, _copy_of("msprobe", "L0_statistics")),
    Reader(
        "msprobe-tree",
        f"{_PROBE}/construct.json",
        _open_folder,
        _copy_of("msprobe", "L0_statistics"),
    ),
    Reader("transformers-debugger", "M_debug_tree_FULL_TENSORS.json", _open_folder),
    Reader("ge-graph-text", "graph.txt", _graph_text),
]


def chosen(names: list[str]) -> Iterator[Reader]:
    """Readers by name, or by kind (`binary`, `text`); all without a name."""
    for reader in READERS:
        kind = "binary" if reader.binary else "text"
        if not names or reader.name in names or kind in names:
            yield reader
