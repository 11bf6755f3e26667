"""Writes the golden dumps of `tests/data/seeds`: one archive per format, made by our own writers.

    python -c "from support.golden_dumps import write_all; write_all(Path('tests/data/seeds'))"

Each archive holds what the formats of the seeds' tools look like on disk where it matters: a module
tree in the order of registration, device folders, a hook's tree of a recurrent layer, operators of
one time stamp, descriptions without values. Numbers are drawn from fixed seeds.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from driftline.formats.ascend.ge.graph_text import GraphNode
from support.atb import AtbDump, Generation
from support.atb_files import Operation, Value
from support.atb_twins import Error, atb_twin, torch_twin
from support.ge import GeDump, write_fx
from support.toy_decoder import in_library_order, toy_decoder

PROMPT = np.array([[3, 1, 4]])


def ait_and_atb(folder: Path) -> None:
    """A torch tree as transformers registers its modules, its ATB twin, one with a fault, a map."""
    model = in_library_order(toy_decoder(layers=2, hidden=8, vocabulary=16))
    torch_twin(folder / "torch", model, PROMPT)
    atb_twin(folder / "atb", model, PROMPT)
    atb_twin(folder / "faulty", model, PROMPT, error=Error(1, "ActivationOperation"))
    (folder / "op_mapping_file.json").write_text(json.dumps({"RmsNormOperation": ["RMSNorm"]}))


def ait_statistics(folder: Path) -> None:
    """A torch tree of descriptions: types and shapes, no figures."""
    base = folder / "ait_dump" / "torch_tensors" / "cpu_7"
    place = base / "0" / "root.linear"
    place.mkdir(parents=True)
    heading = "NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm"
    lines = [
        'root.linear,Linear,Input,0,torch.float16,"[2, 3]",N/A,N/A,N/A,N/A',
        'root.linear,Linear,Output,0,torch.float16,"[2, 4]",1.5,-2.0,0.25,3.0',
    ]
    (place / "statistics.csv").write_text("\n".join([heading, *lines]) + "\n")
    tree = {"name": "root", "type": "Net", "children": []}
    tree["children"] = [{"name": "root.linear", "type": "Linear", "children": []}]
    (base / "model_tree.json").write_text(json.dumps(tree))


def atb_devices(folder: Path) -> None:
    """Two devices, the second with a fault on one side."""
    model = toy_decoder(layers=1, hidden=8, vocabulary=16)
    for name, error in (("clean", None), ("faulty", Error(0))):
        atb_twin(folder / name, model, PROMPT, device=0, pid=1)
        atb_twin(folder / name, model, PROMPT, device=1, pid=2, error=error)


GENERATIONS: tuple[Generation, ...] = ("G0", "G1", "G2", "G2t", "G3", "G4")


def atb_generations(folder: Path) -> None:
    """One addition, as the probe of each generation lays it down, and its line of the csv."""
    a, b = np.arange(6, dtype=np.float16).reshape(2, 3), np.ones((2, 3), np.float16)
    add = Operation("AddOperation", [Value("a", a), Value("b", b)], [Value("y", a + b)], param={})
    for generation in GENERATIONS:
        dump = AtbDump(folder / generation, generation)
        dump.execute([add])
        dump.operation_csv([add])


def ge_and_fx(folder: Path) -> None:
    """Two nodes as GE and as FX record them; the second sum of the faulty GE dump is wrong."""
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    doubled, sums = a * 2, a * 2 + a
    for name, wrong in (("ge", 0.0), ("faulty", 1.0)):
        dump = GeDump(folder / name)
        dump.operator("Mul", "Mul_1", [a, np.float32(2)], [doubled])
        dump.operator("Add", "Add_2", [doubled, a], [sums + np.float32(wrong)])
        dump.graph_text(
            [
                GraphNode("Mul_1", "Mul", (("Data", 0),), ("mul_1-aten.mul.Tensor.OUTPUT.0",)),
                GraphNode(
                    *("Add_2", "Add", (("Mul_1", 0), ("Data", 0))),
                    ("add_2-aten.add.Tensor.OUTPUT.0",),
                ),
                GraphNode("Data", "Data"),
            ]
        )
    place = folder / "fx" / "data_dump" / "1" / "gm_20240130064200000001_dump"
    write_fx(place, "mul_1", "aten.mul.Tensor", [a, 2], [doubled])
    write_fx(place, "add_2", "aten.add.Tensor", [doubled, a], [sums], stamp=20240130064201000002)


def ge_one_stamp(folder: Path) -> None:
    """Operators of one time stamp whose task numbers are the other way round."""
    dump = GeDump(folder)
    value = np.arange(4, dtype=np.float32).reshape(2, 2)
    for task, name in enumerate(("Last", "Middle", "First")):
        path = dump.operator("Relu", name, [value], [value])
        path.rename(path.with_name(f"Relu.{name}.{task}.6.1706596912161941"))
    dump.graph_text(
        [
            GraphNode("Last", "Relu", (("Middle", 0),)),
            GraphNode("Middle", "Relu", (("First", 0),)),
            GraphNode("First", "Relu", (("Data", 0),)),
            GraphNode("Data", "Data"),
        ]
    )


def paddle_hook(folder: Path) -> None:
    """Gradients of a recurrent layer over two micro steps, and a layer's activations."""
    rng = np.random.default_rng(0)
    for kind in ("tensors", "grads"):
        (folder / kind / "rank_0").mkdir(parents=True)
    for step in range(2):
        name = f"tensor_idx_{step}_layer_class_Linear_layer_name_linear_0_micro_step_{step}.npy"
        np.save(folder / "tensors" / "rank_0" / name, rng.standard_normal((2, 3)))
        for index, parameter in enumerate(("w_0", "w_1", "b_0", "b_1")):
            number = 4 * step + index
            name = f"grad_idx_{number}_of_param_name_lstm_cell_0.{parameter}_micro_step_{step}.npy"
            np.save(folder / "grads" / "rank_0" / name, rng.standard_normal(4))


FORMATS: dict[str, Callable[[Path], None]] = {
    "ait_and_atb": ait_and_atb,
    "ait_statistics": ait_statistics,
    "atb_devices": atb_devices,
    "atb_generations": atb_generations,
    "ge_and_fx": ge_and_fx,
    "ge_one_stamp": ge_one_stamp,
    "paddle_hook": paddle_hook,
}


def archive(write: Callable[[Path], None]) -> dict[str, bytes]:
    """What a writer writes, by the name of the file."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        return {
            # A csv of the newest probe names its files by their full paths.
            str(path.relative_to(folder)): path.read_bytes().replace(name.encode(), b"/elsewhere")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def write_all(target: Path) -> None:
    """Make every archive anew."""
    for name, write in FORMATS.items():
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            for path, data in archive(write).items():
                # A fixed date: the same content gives the same archive.
                entry = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
                file.writestr(entry, data, zipfile.ZIP_DEFLATED)
        (target / f"{name}.zip").write_bytes(content.getvalue())
