"""Every code block of the documents whose surfaces Driftline takes over, as far as it is built.

Only models, paths and hardware are replaced; the import lines, names, options and their order are
the documents' own. Programs are started as their readers would start them.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from driftline import open_run
from support.atb import AtbDump, Operation, Value, write_bin
from support.ge_twins import Twins, traced, write_twins

BIN = Path(sys.executable).parent

MODEL = """
import torch
from torch import nn

torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.linear(self.norm(x))

class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A folder with `ait`, as a person types it, in the Python that has imported torch already."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "ait").write_text(f'#!/bin/sh\nexec "{warm_python}" "{BIN / "ait"}" "$@"\n')
    (folder / "ait").chmod(0o755)
    return folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, commands: Path) -> Path:
    """The current folder, with the commands on the path; `python` has imported torch already."""
    for name in ("ait", "hook_result_checker.py"):
        assert (BIN / name).exists(), "driftline-compat is not installed: make install"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Programs of these tests write dumps of other tools with `support`.
    own = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, own)))
    places = (str(commands), str(Path(warm_python).parent), str(BIN), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(places))
    (tmp_path / "toy.py").write_text(MODEL)
    return tmp_path


def shell(line: str, *, typed: str = "", code: int = 0) -> str:
    """Run a line as a person at a terminal would."""
    done = subprocess.run(["bash", "-c", line], input=typed, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def opcheck_dump(output: Path) -> AtbDump:
    """A linear layer that is right and a softmax that is not, with their operation csv."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(size).astype(np.float16) for size in ((4, 16), (8, 16)))
    y = (x.astype(float) @ w.astype(float).T).astype(np.float16)
    wrong = np.full((4, 8), 0.125, np.float16)
    operations = [
        Operation(
            "LinearOperation",
            [Value("x", x), Value("w", w)],
            [Value("y", y)],
            param={"transposeB": True, "hasBias": False},
        ),
        Operation("SoftmaxOperation", [Value("y", y)], [Value("p", wrong)], param={"axes": [-1]}),
    ]
    dump = AtbDump(output, "G2")
    dump.execute(operations)
    dump.operation_csv(operations)
    return dump


class TestLabels:
    """Labels in a PyTorch program: `ait debug compare aclcmp`."""

    SCRIPT = """
from msquickcmp.pta_acl_cmp.compare import set_task_id
from patches.models import modeling_toy_model

def chat():
    history = []
    while True:
        set_task_id()
        query = input("\\n用户：")
        if query.strip() == "stop":
            break
        if query.strip() == "clear":
            history = []
        modeling_toy_model.answer(query)

chat()
"""
    HIGH = """
import torch

def answer(query):
    hidden_states = torch.arange(6.0)
    acl_model_out = (hidden_states + 0.5,)
    from msquickcmp.pta_acl_cmp.compare import set_label, gen_id
    data_id = gen_id()
    set_label("pta", data_id, hidden_states)
    set_label("acl", data_id, acl_model_out[0])
"""
    LOW = """
import torch

def answer(query):
    attention_output = torch.arange(6.0)
    from msquickcmp.pta_acl_cmp.compare import set_label, gen_id
    data_id = gen_id()
    set_label("pta", data_id, data_val=attention_output)
    set_label("acl", data_id, tensor_path="0_ChatGlm6BModelEncoderTorch/"
    "0_ChatGlm6BLayerEncoderOperationGraphRunner"
                    "/3_SelfAttentionOpsChatglm6bRunner/after/outTensor0.bin")
    import os
    folder = os.path.join(os.environ["ACLTRANSFORMER_HOME_PATH"], "tensors", str(os.getpid()),
                          os.environ["AIT_CMP_TASK_ID"], "0_ChatGlm6BModelEncoderTorch",
                          "0_ChatGlm6BLayerEncoderOperationGraphRunner",
                          "3_SelfAttentionOpsChatglm6bRunner", "after")
    os.makedirs(folder)
    assert os.environ["ACLTRANSFORMER_SAVE_TENSOR"] == "1"
    assert os.environ["ACLTRANSFORMER_SAVE_TENSOR_RUNNER"] == "SelfAttentionOpsChatglm6bRunner"
    from pathlib import Path
    from support.atb import AtbDump, Operation, Value, write_bin
    write_bin(Path(folder) / "outTensor0.bin", attention_output.numpy())
"""
    COLUMNS = (
        "data_id,pta_data_path,pta_dtype,pta_shape,acl_data_path,acl_dtype,acl_shape,cmp_flag,"
        "cosine_similarity,max_relative_error,mean_relative_error,relative_euclidean_distance,"
        "cmp_fail_reason"
    )

    @pytest.fixture
    def example(self, desk: Path) -> Path:
        (desk / "patches" / "models").mkdir(parents=True)
        (desk / "main_performance.py").write_text(self.SCRIPT)
        (desk / "run_performance.sh").write_text("python main_performance.py\n")
        return desk

    def test_labels_in_the_model_are_compared_round_by_round(self, example: Path) -> None:
        (example / "patches" / "models" / "modeling_toy_model.py").write_text(self.HIGH)
        shell(
            'ait debug compare aclcmp --exec "bash run_performance.sh '
            'patches/models/modeling_toy_model.py"',
            typed="hello\nclear\nstop\n",
            code=1,  # the two sides differ by half a unit, and that is said
        )
        tables = sorted(example.glob("*_cmp_result.csv"))
        assert len(tables) == 2, "two rounds were answered"
        for table in tables:
            assert table.read_text(encoding="utf-8").splitlines()[0] == self.COLUMNS
            (row,) = rows_of(table)
            assert row["cmp_flag"] == "True"
            assert float(row["relative_euclidean_distance"]) == pytest.approx((1.5 / 55) ** 0.5)

    def test_a_tensor_inside_the_library_is_found_by_its_path(self, example: Path) -> None:
        (example / "patches" / "models" / "modeling_toy_model.py").write_text(self.LOW)
        shell(
            f"""
            export ACLTRANSFORMER_HOME_PATH={example / "acl"}
            export ACLTRANSFORMER_SAVE_TENSOR=1
            export ACLTRANSFORMER_SAVE_TENSOR_MAX=2
            export ACLTRANSFORMER_SAVE_TENSOR_RUNNER=SelfAttentionOpsChatglm6bRunner
            ait debug compare aclcmp --exec "bash run_performance.sh patches/models/x.py"
            """,
            typed="hello\nstop\n",
        )
        (table,) = example.glob("*_cmp_result.csv")
        (row,) = rows_of(table)
        assert row["cmp_flag"] == "True" and row["cmp_fail_reason"] == ""
        assert float(row["cosine_similarity"]) == pytest.approx(1.0)


class TestDumpAndCompare:
    """`ait llm dump`, the hooks of `ait_llm`, `ait llm compare`."""

    PROGRAM = "import torch\nfrom toy import Model\nModel().eval()(torch.ones(2, 8))\n"

    def test_a_program_is_dumped_into_the_tree_of_its_document(self, desk: Path) -> None:
        (desk / "patches" / "models").mkdir(parents=True)
        (desk / "patches" / "models" / "modeling_toy.py").write_text(self.PROGRAM)
        (desk / "run.sh").write_text('PYTHONPATH=".:$PYTHONPATH" python "$1"\n')
        shell('ait llm dump --exec "bash run.sh patches/models/modeling_toy.py"')
        (process,) = (desk / "ait_dump" / "torch_tensors").iterdir()
        assert re.fullmatch(r"cpu_\d+", process.name)
        assert (process / "model_tree.json").is_file()
        assert (process / "0" / "root.layers.1.linear" / "output.pth").is_file()

    def test_descriptions_and_a_second_dump_lie_in_one_tree(self, desk: Path) -> None:
        (desk / "infer.py").write_text(self.PROGRAM)
        shell('ait llm dump --exec "python infer.py" -sd')
        tree = desk / "ait_dump" / "torch_tensors"
        (first,) = tree.iterdir()
        assert not list(first.rglob("*.pth"))
        assert {record.kept for record in open_run(first).records} == {"describe"}
        shell('ait llm dump --exec "python infer.py" -time 3')
        (second,) = set(tree.iterdir()) - {first}
        moments = {(r.key.port, r.key.moment) for r in open_run(second).records}
        assert moments == {("input", "before"), ("output", "after")}

    def test_hooks_are_registered_as_the_document_writes(self, desk: Path) -> None:
        (desk / "infer.py").write_text(
            "import torch\n"
            "from toy import Model\n"
            "model = Model().eval()\n"
            "from ait_llm import DumpConfig, register_hook\n"
            'dump_config = DumpConfig(dump_path="./ait_dump")\n'
            "register_hook(model, dump_config)  # model is the instance to be dumped\n"
            "model(torch.ones(2, 8))\n"
        )
        shell("python infer.py")
        (process,) = (desk / "ait_dump" / "ait_dump" / "torch_tensors").iterdir()
        assert (process / "0" / "root" / "output.pth").is_file()
        assert "layers.2.norm" in {r.key.site for r in open_run(process / "0").records}

    def test_advice_and_details_are_in_the_words_of_the_document(self, desk: Path) -> None:
        (desk / "infer.py").write_text(
            "import torch\nfrom toy import Model\nmodel = Model().eval()\n"
            "for _ in range(3):\n    model(torch.ones(2, 8))\n"
        )
        said = shell('ait llm dump --exec "python infer.py"')
        assert "steps 1-2 ran and were not selected (2 in all); select these with -er 1,2" in said
        assert "--step" not in said
        said = shell('ait llm dump --exec "python infer.py" -er 7,7 -o other', code=2)
        assert "select these with -er 0,2" in said
        said = shell('ait llm dump --exec "python infer.py" -opname lin -l debug -o debug')
        assert "debug: selected: names that begin with lin; steps " in said

    def test_operators_kernels_times_and_graphs_are_where_the_document_says(
        self, desk: Path
    ) -> None:
        (desk / "infer.py").write_text(self.PROGRAM)
        shell(
            'ait llm dump --exec "python infer.py" '
            "--type model layer op kernel tensor cpu_profiling onnx"
        )
        root = desk / "ait_dump"
        (tensors,) = (root / "torch_tensors").iterdir()
        pid = tensors.name.removeprefix("cpu_")
        for name in (
            f"operation_io_tensors/{pid}/operation_tensors_0.csv",
            f"kernel_io_tensors/{pid}/kernel_tensors_0.csv",
            f"cpu_profiling/{pid}/operation_statistic_0.txt",
            f"model/{pid}/Model.json",
            f"model/{pid}/Model.onnx",
            f"layer/{pid}/Block_0_1.json",
            f"layer/{pid}/Block_0_1.onnx",
        ):
            assert (root / name).is_file(), name
        assert "neither is given" in shell(
            'ait llm dump --exec "python infer.py" --type onnx -o x', code=2
        )

    def test_a_topology_becomes_onnx_as_the_document_writes(self, desk: Path) -> None:
        layer = {
            "opName": "XXX_layer",
            "opType": "Layer",
            "inTensors": ["a"],
            "outTensors": ["c"],
            "nodes": [
                {"opName": "n_0", "opType": "N", "inTensors": ["a"], "outTensors": ["b"]},
                {"opName": "n_1", "opType": "N", "inTensors": ["b"], "outTensors": ["c"]},
            ],
        }
        (desk / "XXX_layer.json").write_text(json.dumps(layer))
        (desk / "draw.py").write_text(
            "from ait_llm.common.json_fitter import atb_json_to_onnx\n\n"
            "model_level = 1\n"
            'layer_topo_info = "./XXX_layer.json"\n'
            "atb_json_to_onnx(layer_topo_info, model_level)\n"
        )
        shell(f"{sys.executable} draw.py")
        model = onnx.load(desk / "XXX_layer.onnx")
        onnx.checker.check_model(model, full_check=True)
        assert [node.name for node in model.graph.node] == ["n_0", "n_1"]

    def test_two_dumps_are_compared(self, desk: Path) -> None:
        (desk / "infer.py").write_text(self.PROGRAM)
        shell('ait llm dump --exec "python infer.py" -o golden')
        faulty = self.PROGRAM.replace(
            "Model().eval()(",
            "m = Model().eval()\nwith torch.no_grad():"
            "\n    m.layers[1].linear.weight.mul_(1.5)\nm(",
        )
        (desk / "infer.py").write_text(faulty)
        shell('ait llm dump --exec "python infer.py" -o mine')
        said = shell("ait llm compare --golden-path golden --my-path mine", code=1)
        assert "layers.1.linear" in said
        (report,) = desk.glob("ait_cmp_report_*.csv")
        assert len(next(csv.reader(report.open(encoding="utf-8")))) == 22

    def test_single_files_are_compared(self, desk: Path) -> None:
        import torch

        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        torch.save(torch.from_numpy(values), desk / "xx.pth")
        write_bin(desk / "xx.bin", values)
        usual = shell("ait llm compare -gp xx.pth -mp xx.bin")
        (report,) = desk.glob("ait_cmp_report_*.csv")
        (row,) = rows_of(report)
        assert float(row["cosine_similarity"]) == 1.0
        said = shell("ait llm compare -gp xx.pth -mp xx.bin -l debug")
        assert "  pair " in said and "  pair " not in usual

    def test_graph_dumps_are_compared(self, desk: Path) -> None:
        twins = graph_twins(desk)
        shell(f"ait llm compare --my-path {twins.ge} --golden-path {twins.fx}")
        (report,) = desk.glob("ait_cmp_report_*.csv")
        compared = [row for row in rows_of(report) if not row["cmp_fail_reason"]]
        assert compared and all(float(row["cosine_similarity"]) > 0.999999 for row in compared)

    def test_fused_and_unfused_graphs_are_compared(self, desk: Path) -> None:
        fused = graph_twins(desk / "fused", fused=[["add", "relu"]]).ge
        unfused = graph_twins(desk / "unfused").ge
        shell(f"ait llm compare --my-path {fused} --golden-path {unfused}")
        (report,) = desk.glob("ait_cmp_report_*.csv")
        compared = [row for row in rows_of(report) if not row["cmp_fail_reason"]]
        assert compared and all(float(row["cosine_similarity"]) > 0.999999 for row in compared)


def graph_twins(folder: Path, fused: Sequence[Sequence[str]] = ()) -> Twins:
    import torch

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) @ y.T

    inputs = [torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 12).reshape(3, 4)]
    return write_twins(traced(model, *inputs), inputs, folder, fused=fused)


class TestSavingHook:
    """The training hook and its checker."""

    TRAINING = """
import sys
import torch
from saving_hook import register_saving_hook
from toy import Model

class Trainer:
    def __init__(self, model):
        self.model = model
    def train(self):
        for step in range(2):
            self.model(torch.full((2, 8), 1.0 + step)).square().sum().backward()

model = Model()
if "scaled" in sys.argv:
    with torch.no_grad():
        model.layers[1].linear.weight.mul_(1.5)
model = register_saving_hook(
  model,
  path=sys.argv[1],
  target_class_names=['Linear', 'LayerNorm'],
  max_saved_tensors=100,
  max_saved_grads=200
)
trainer = Trainer(model)
trainer.train()
"""

    def test_two_trainings_are_hooked_and_checked(self, desk: Path) -> None:
        (desk / "train.py").write_text(self.TRAINING)
        shell("python train.py ./tmp_tensors")
        shell("python train.py ./tmp_tensors_0 scaled")
        checker = BIN / "hook_result_checker.py"
        shell(f"python {checker} --pathA tmp_tensors --pathB tmp_tensors_0")
        rows = rows_of(desk / "tmp_tensors" / "tensors" / "compare_rst" / "rank_0_rst.csv")
        assert list(rows[0]) == [
            "tensor_name",
            "cosine similarity",
            "meanA",
            "meanB",
            "meanA - meanB",
            "stdA",
            "stdB",
            "stdA - stdB",
            "varA",
            "varB",
            "varA - varB",
        ]
        assert len(rows) == 12, "six layers, two micro steps"
        changed = [row for row in rows if float(row["cosine similarity"]) < 0.9999]
        assert changed and "tensor_idx_3" in changed[0]["tensor_name"]
        assert (desk / "tmp_tensors" / "grads" / "compare_rst" / "rank_0_rst.csv").is_file()

    PADDLE_NLP = """
import sys, warnings
warnings.simplefilter("ignore")
import paddle
from paddle import nn

class ColumnSequenceParallelLinear(nn.Linear):
    pass

class RowSequenceParallelLinear(nn.Linear):
    pass

class LLama13B(nn.Layer):
    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.embed = nn.Embedding(9, 8)
        self.up = ColumnSequenceParallelLinear(8, 16)
        self.down = RowSequenceParallelLinear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        return self.norm(self.down(self.up(self.embed(ids))))

class Trainer:
    def __init__(self, model):
        self.model = model

    def train(self):
        for step in range(3):
            self.model(paddle.to_tensor([[1, 2 + step]])).square().sum().backward()
"""
    PADDLE_TRAINING = """
from saving_hook import register_saving_hook
from paddlenlp import LLama13B, Trainer

model = LLama13B()
model = register_saving_hook(
  model,
  path='./tmp_tensors',
  target_class_names=['ColumnSequenceParallelLinear', 'RowSequenceParallelLinear', 'LayerNorm'],
  max_saved_tensors=100,
  max_saved_grads=200
)
trainer = Trainer(model)
trainer.train()
"""

    def test_the_document_s_own_program_runs_with_paddle(self, desk: Path) -> None:
        (desk / "paddlenlp.py").write_text(self.PADDLE_NLP)
        (desk / "train.py").write_text(self.PADDLE_TRAINING)
        shell("python train.py")
        tensors = {path.name for path in (desk / "tmp_tensors/tensors/rank_0").iterdir()}
        assert len(tensors) == 9, "three layers, three micro steps"
        assert (
            "tensor_idx_3_layer_class_ColumnSequenceParallelLinear"
            "_layer_name_column_sequence_parallel_linear_0_micro_step_1.npy"
        ) in tensors
        grads = sorted(path.name for path in (desk / "tmp_tensors/grads/rank_0").iterdir())
        assert len(grads) == 18 and all(name.startswith("grad_idx_") for name in grads)
        assert "grad_idx_0_of_param_name_layer_norm_0.b_0_micro_step_0.npy" in grads or (
            "grad_idx_0_of_param_name_layer_norm_0.w_0_micro_step_0.npy" in grads
        )


class TestErrorCheck:
    """Watching a program for overflows: `ait llm errcheck`."""

    PROGRAM = """
import sys
import torch
from toy import Model
model = Model().half()
if "overflow" in sys.argv:
    model.layers[1].linear.weight.data[:, :4] = 60000
with torch.no_grad():
    model(torch.arange(8.0).half().view(1, 8))
print("went on")
"""

    @pytest.fixture
    def infer(self, desk: Path) -> Path:
        (desk / "infer.py").write_text(self.PROGRAM)
        return desk

    def test_an_overflow_leaves_the_documents_file_and_the_program_goes_on(
        self, infer: Path
    ) -> None:
        said = shell('ait llm errcheck --exec "python infer.py overflow"', code=1)
        (path,) = infer.glob("ait_overflow_res_*.txt")
        assert path.read_text().startswith(
            "Overflow detected! Operator name: layers.1.linear/aten.addmm"
        )
        assert "went on" in said and "layers.1.linear" in said

    def test_type_exit_and_output_mean_what_the_document_says(self, infer: Path) -> None:
        (infer / "res").mkdir()
        said = shell(
            f'ait llm errcheck --exec "{sys.executable} infer.py overflow" --type overflow --exit '
            "--output res",
            code=1,
        )
        assert "went on" not in said
        assert list((infer / "res").glob("ait_overflow_res_*.txt"))
        assert not list(infer.glob("ait_overflow_res_*"))

    def test_without_an_overflow_there_is_no_file(self, infer: Path) -> None:
        before = sorted(infer.iterdir())
        shell('ait llm errcheck --exec "python infer.py"')
        assert [p for p in sorted(infer.iterdir()) if p.name != "__pycache__"] == before


def test_a_command_that_is_not_built_is_said_in_a_sentence(desk: Path) -> None:
    assert "does not answer" in shell("ait profile x", code=2)
    assert "does not answer" in shell("ait profile", code=2)
    assert "usage" in shell("ait")


def test_help_is_given_and_what_is_not_there_yet_is_not_mistaken_for_something_else(
    desk: Path,
) -> None:
    for words in ("ait", "ait -h", "ait llm", "ait llm --help"):
        assert "usage: ait llm dump|compare" in shell(words)
    said = shell("ait llm transform -i x -c y", code=2)
    assert "does not answer 'ait llm transform" in said
    assert "did you mean" not in said


class TestOpcheck:
    """Single operators of a dump: `ait llm opcheck`."""

    def test_the_documented_line_checks_a_dump(self, desk: Path) -> None:
        dump = opcheck_dump(desk / "OUTPUT_DIR")
        tensors = dump.execution(0)
        table = next(dump.root.rglob("operation_tensors_0.csv"))
        said = shell(f"ait llm opcheck -i {tensors} -c {table} -o result", code=1)
        assert "1 of 2 checked operators is not right; first 1_SoftmaxOperation" in said
        (written,) = (desk / "result").glob("opcheck_result_*.csv")
        rows = rows_of(written)
        assert list(rows[0])[:9] == [
            "op_id",
            "op_name",
            "op_param",
            "tensor_path",
            "out_tensor_id",
            "precision_standard",
            "excuted_information",
            "precision_result(%)",
            "max_rel_error",
        ]
        assert [row["op_id"] for row in rows] == ["0", "1"]
        assert float(rows[0]["precision_result(%)"]) == 100.0
        assert float(rows[1]["precision_result(%)"]) < 99.9

    def test_every_documented_option_is_taken_as_it_is_printed(self, desk: Path) -> None:
        dump = opcheck_dump(desk)
        table = next(dump.root.rglob("operation_tensors_0.csv"))
        start = f"ait llm opcheck -i {dump.execution(0)} -c {table} -o result"
        assert "1 operator checked, all right" in shell(f"{start} -ids 0,2_3_5")
        assert "1 operator checked, all right" in shell(f"{start} -opname lin，self")
        shell(f"{start} --metric kl cos_sim", code=1)
        (written,) = [p for p in (desk / "result").iterdir() if "kl_divergence" in p.read_text()]
        assert {"cosine_similarity", "kl_divergence"} < set(rows_of(written)[0])
        assert "-device has no effect" in shell(f"{start} -device 0", code=1)
        assert "libopchecker.so" in shell(f"{start} -rerun", code=2)
