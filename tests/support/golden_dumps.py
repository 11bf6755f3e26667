"""Write the golden dumps of `tests/data/seeds`: one archive per format.

    cd tests && python -c "from support.golden_dumps import *; write_all(Path('data/seeds'))"

Each archive has the essential features of a format of the seeds' tools: a module tree in the order
of registration, device folders, a hook's tree of a recurrent layer, operators of one time stamp,
descriptions without values. Numbers are drawn from fixed seeds. No writer of driftline is called:
the documented formats are written by code of the tests.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from driftline.formats.ascend.ge.graph_text import GraphNode
from support.atb import AtbDump, Generation
from support.atb_files import Operation, Value, write_bin
from support.atb_twins import Error, atb_twin, torch_twin
from support.ge import GeDump, write_fx
from support.toy_decoder import in_library_order, toy_decoder

PROMPT = np.array([[3, 1, 4]])
FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"


def ait_and_atb(folder: Path) -> None:
    """A torch tree in transformers' registration order, two ATB twins (one faulty), and a map."""
    model = in_library_order(toy_decoder(layers=2, hidden=8, vocabulary=16))
    torch_twin(folder / "torch", model, PROMPT)
    atb_twin(folder / "atb", model, PROMPT)
    atb_twin(folder / "faulty", model, PROMPT, error=Error(1, "ActivationOperation"))
    (folder / "op_mapping_file.json").write_text(json.dumps({"RmsNormOperation": ["RMSNorm"]}))


def ait_statistics(folder: Path) -> None:
    """A torch tree of descriptions and statistics instead of values."""
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
    """Dumps of two devices, without a fault and with a fault on the second device."""
    model = toy_decoder(layers=1, hidden=8, vocabulary=16)
    for name, error in (("clean", None), ("faulty", Error(0))):
        atb_twin(folder / name, model, PROMPT, device=0, pid=1)
        atb_twin(folder / name, model, PROMPT, device=1, pid=2, error=error)


GENERATIONS: tuple[Generation, ...] = ("G0", "G1", "G2", "G2t", "G3", "G4")


def atb_generations(folder: Path) -> None:
    """One addition in the layout of each generation of the probe, and its line of the csv."""
    a, b = np.arange(6, dtype=np.float16).reshape(2, 3), np.ones((2, 3), np.float16)
    add = Operation("AddOperation", [Value("a", a), Value("b", b)], [Value("y", a + b)], param={})
    for generation in GENERATIONS:
        dump = AtbDump(folder / generation, generation)
        dump.execute([add])
        dump.operation_csv([add])


def atb_lists(folder: Path) -> None:
    """Tensors with their topologies, lists of operations and kernels, and times in two forms."""
    x, w = np.arange(6, dtype=np.float16).reshape(2, 3), np.eye(3, dtype=np.float16)
    linear = Operation(
        "LinearOperation",
        [Value("x", x), Value("w", w)],
        [Value("y", x)],
        param={"transposeB": True, "hasBias": False},
    )
    wrong = Value("p", np.full((2, 3), 0.25, np.float16))
    softmax = Operation("SoftmaxOperation", [Value("y", x)], [wrong], param={"axes": [-1]})
    dump = AtbDump(folder, "G2")
    dump.execute([linear, softmax])
    dump.topology("ToyModel", [linear, softmax])
    heading, *operations = dump.operation_csv([linear, softmax]).read_text().splitlines()
    kernels = folder / "ait_dump" / "kernel_io_tensors" / str(dump.pid) / "kernel_tensors_0.csv"
    kernels.parent.mkdir(parents=True)
    lines = [heading]
    for number, operation in enumerate(operations, 1):
        # A kernel's name has no ids, and its parameters are a printed struct.
        cells = [str(number), f"MatMulF16Kernel{number}", "MatMulF16Kernel", "transposeB: 1"]
        lines.append("|".join([*cells, *operation.split("|")[4:]]))
    kernels.write_text("\n".join(lines) + "\n")
    dump.profile(
        "[LinearOperation]:totalTime:30, runnerSetupTime:4\n"
        "[LinearOperation]:totalTime:12, kernelExecuteTime:7, launchTime:2\n"
    )
    dump.profile("LinearOperation:\n[execute] totalTime:11, kernelExecuteTime:6\n\n", execution=1)


def ait_by_hand(folder: Path) -> None:
    """The dump of `dump_data` for two tokens, and the list of their partners in a comparison."""
    import torch

    place = folder / "ait_dump" / "4242_1" / "golden_tensor"
    for token in ("0", "3"):
        (place / token).mkdir(parents=True)
        torch.save(torch.arange(6.0).reshape(2, 3) + int(token), place / token / "out_tensor.pth")
    pairs = {"out": {"3": ["golden_tensor/3/out_tensor.pth", "tensors/x.bin"]}}
    (place / "metadata.json").write_text(json.dumps(pairs))


def ge_and_fx(folder: Path) -> None:
    """Two nodes as GE dumps and as FX dump; the sum in the faulty GE dump is wrong."""
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
    """Operators with equal time stamps, whose task numbers are in reverse order."""
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
    """Gradients of a recurrent layer in two micro steps, and a layer's activations."""
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


LAYERS = ("embedding", "layers0.ln", "layers0.attn.dense", "layers10.ln", "layers2.ln", "dec_norm")
SHAPE = "max-new-tokens-4_batch-size-1"


def layer_metrics(folder: Path) -> None:
    """Two csv files per layer and their thresholds, as documented and as in newer versions."""
    rng = np.random.default_rng(1)
    documented, newer = folder / "documented", folder / "newer"
    documented.mkdir()
    newer.mkdir()
    norms: dict[str, float] = {}
    averages: dict[str, float] = {}
    for layer in (f"model.base_model.{name}" for name in LAYERS):
        differences = rng.uniform(0.0, 0.01, 5)
        for metric, values in (("abs_diff", differences), ("cos_sim", 1.0 - differences**2)):
            lines = [repr(float(value)) for value in values]
            # The documented version does not know the length and writes 0.
            stem = f"acme--toy_{SHAPE}_seq-length-0_dtype-float16--{layer}"
            text = "\n".join([metric, *lines]) + "\n"
            (documented / f"{stem}.{metric}.csv").write_text(text)
            # Newer versions have two more heading lines, and an extra file for each later call.
            shape = "torch.Size([1, 4, 8])"
            heading = [
                metric,
                f"GPU shape {shape} CPU shape {shape}",
                "Metric shape torch.Size([4])",
            ]
            stem = stem.replace("seq-length-0", "seq-length-4")
            for suffix, part in (("", lines[:4]), (".iter-57", lines[4:])):
                text = "\n".join([*heading, *part]) + "\n"
                (newer / f"{stem}{suffix}.{metric}.csv").write_text(text)
        # The original's "average difference" is the norm of all values.
        norms[layer] = float(np.linalg.norm(differences))
        averages[layer] = float(np.mean(1.0 - differences**2))
    # The documented file has lists of single entries; later files have mappings and other names.
    contents = {
        documented: {"abs_diff": entries(norms), "cos_sim": entries(averages)},
        newer: {"abs_diff": norms, "cos_sim_avg": averages, "cos_sim_mean": averages},
    }
    for place, content in contents.items():
        text = json.dumps({"model_id": "acme--toy", **content})
        (place / "acme--toy-thresholds.json").write_text(text)


def entries(layers: dict[str, float]) -> list[dict[str, float]]:
    return [{layer: value} for layer, value in layers.items()]


def decoder_metrics(folder: Path) -> None:
    """Saved logits of two devices, the four metrics of each token, and thresholds of a model.

    The three spellings of the file names hold the same three tokens of two prompts.
    """
    rng = np.random.default_rng(2)
    reference = rng.standard_normal((2, 3, 40)).astype(np.float32)
    device = (reference + rng.normal(0, 0.01, reference.shape)).astype(np.float16)
    settings = "attn-type-sdpa_batch-size-2_dtype-fp16_max-new-tokens-3_model-id-acme--toy"
    hashed = hashlib.sha256(f"{settings}_seq-length-8".encode()).hexdigest()
    stems = {
        "oldest": "acme--toy_max-new-tokens-3_batch-size-2_seq-length8_dtype-fp16",
        "documented": "acme--toy_max-new-tokens-3_batch-size-2_seq-length-8_dtype-fp16",
        "newest": f"{hashed}_0.4.2",
    }
    figures = token_figures(reference, device)
    for version, stem in stems.items():
        place = folder / version
        for side, logits in (("cpu", reference), ("cuda", device)):
            saved = place / f"{stem}.{side}_validation_info.0.out"
            saved.mkdir(parents=True)
            for prompt in range(2):
                content = {"tokens": saved_tokens(reference, prompt), "logits": logits[prompt]}
                save_tensors(saved / f"{prompt}.pt", content)
        if version != "newest":  # the model of a csv file cannot be told from a hash
            for metric, values in figures.items():
                text = "\n".join([metric, *(repr(float(value)) for value in values)]) + "\n"
                (place / f"{stem}.{metric}.csv").write_text(text)
    limits = {name: float(np.percentile(figures[name], 99)) for name in ("ce", "diff_mean")}
    text = json.dumps({"model_id": "acme--toy", **limits})
    (folder / "documented" / "acme--toy-thresholds.json").write_text(text)


def saved_tokens(logits: Any, prompt: int) -> Any:
    """Two pads, a prompt of six tokens, and the reference's next tokens."""
    said = logits[prompt].argmax(axis=1)
    return np.array([0, 0, *range(5 + prompt, 11 + prompt), *said], dtype=np.int64)


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    import torch

    torch.save({name: torch.from_numpy(value.copy()) for name, value in content.items()}, path)


def token_figures(reference: Any, device: Any, top: int = 20) -> dict[str, Any]:
    """The four documented metrics, in float64, over the reference's largest logits."""
    order = np.argsort(-reference.astype(np.float64), axis=-1, kind="stable")[..., :top]
    p, q = (
        softmax(np.take_along_axis(logits.astype(np.float64), order, axis=-1))
        for logits in (reference, device)
    )
    figures = {
        "ce": -(q * np.log(p)).sum(axis=-1),
        "diff_mean": np.abs(p - q).mean(axis=-1),
        "prob_mean": (p / q - 1.0).mean(axis=-1),
        "prob_std": (p / q).std(axis=-1, ddof=1),
    }
    return {name: values.ravel() for name, values in figures.items()}


def softmax(values: Any) -> Any:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def expectations(folder: Path) -> None:
    """Signature and weight keys of a decoder for 60 tokens after four pads, in float16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "tiny-llama", dtype=torch.float16)
    real = torch.arange(64) >= 4
    allowed = (real[:, None] == real[None, :]).tril()
    mask = torch.zeros(64, 64, dtype=torch.float16).masked_fill(~allowed, -torch.inf)
    with torch.no_grad():
        logits = model.eval()(
            input_ids=torch.arange(1, 65).where(real, 0)[None],
            attention_mask=mask[None, None],
            position_ids=torch.arange(-4, 60).clamp(min=0)[None],
            use_cache=False,
        ).logits
    spread = logits.amax(dim=-1) - logits.amin(dim=-1)
    signature = (spread - spread.min()).squeeze().tolist()
    stem = "models.test_model_expectations.TestAIUDecoderModels.tiny-llama.test_model"
    (folder / f"{stem}_output").write_text(",".join(map(str, signature)))
    (folder / f"{stem}_weight_keys").write_text(",".join(sorted(model.state_dict())))


def labels(folder: Path) -> None:
    """A round of labels of two processes: values of both, a library's file, and an unpaired one.

    The library's file is where the library's first generation dumped it, `tensors/{pid}/{task}`.
    """
    store = folder / "cmp_dump_data"
    golden = np.arange(6, dtype=np.float32).reshape(2, 3)
    values = {"high": golden, "low": golden + 1, "wrong": golden, "alone": golden}
    others = {"high": golden.astype(np.float16), "wrong": golden * 2}
    inner = "0_Encoder/3_SelfAttentionRunner/after/outTensor0.bin"
    library = folder / "library" / "tensors" / "72" / "72_1" / inner
    library.parent.mkdir(parents=True)
    write_bin(library, values["low"])
    for source, pid, content in (("pta", 71, values), ("acl", 72, others)):
        process = f"{pid}-0000000{pid % 10}"
        lines: list[dict[str, Any]] = []
        for name, value in content.items():
            file = f"{source}_tensor/{name}_{process}_{len(lines)}.safetensors"
            (store / file).parent.mkdir(parents=True, exist_ok=True)
            (store / file).write_bytes(safetensors_file(value))
            facts = {"dtype": value.dtype.name, "shape": list(value.shape), "file": file}
            lines.append(label_line(source, name, pid, process, len(lines)) | facts)
        if source == "acl":
            facts = {"tensor_path": inner, "folder": "."}
            facts["roots"] = {"ACLTRANSFORMER_HOME_PATH": "library"}
            lines.append(label_line(source, "low", pid, process, len(lines)) | facts)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (store / f"labels-{process}.jsonl").write_text(text)


def label_line(source: str, name: str, pid: int, process: str, number: int) -> dict[str, Any]:
    # Each process has begun its own first round.
    return {
        "task": f"{pid}_1",
        "source": source,
        "id": name,
        "time": 1000 * pid + number,
        "process": process,
        "number": number,
        "pid": pid,
    }


def safetensors_file(value: Any) -> bytes:
    """A safetensors file with one tensor: length of the heading, heading, bytes."""
    kind = {"float32": "F32", "float16": "F16"}[value.dtype.name]
    entry = {"dtype": kind, "shape": list(value.shape), "data_offsets": [0, value.nbytes]}
    heading = json.dumps({"value": entry}).encode()
    heading += b" " * (-len(heading) % 8)
    return len(heading).to_bytes(8, "little") + heading + value.tobytes()


FORMATS: dict[str, Callable[[Path], None]] = {
    "decoder_metrics": decoder_metrics,
    "expectations": expectations,
    "labels": labels,
    "layer_metrics": layer_metrics,
    "ait_and_atb": ait_and_atb,
    "ait_statistics": ait_statistics,
    "atb_devices": atb_devices,
    "ait_by_hand": ait_by_hand,
    "atb_generations": atb_generations,
    "atb_lists": atb_lists,
    "ge_and_fx": ge_and_fx,
    "ge_one_stamp": ge_one_stamp,
    "paddle_hook": paddle_hook,
}


def archive(write: Callable[[Path], None]) -> dict[str, bytes]:
    """The files that a writer writes, by name."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        return {
            # A csv of the newest probe has full paths of files.
            str(path.relative_to(folder)): path.read_bytes().replace(name.encode(), b"/elsewhere")
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def write_all(target: Path) -> None:
    """Write all archives again."""
    for name, write in FORMATS.items():
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            for path, data in archive(write).items():
                # With a fixed date, equal content gives equal archives.
                entry = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
                file.writestr(entry, data, zipfile.ZIP_DEFLATED)
        (target / f"{name}.zip").write_bytes(content.getvalue())
