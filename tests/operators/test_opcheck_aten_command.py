"""`driftline opcheck` on runs of torch programs: the command, -rerun, --repro, and bad input."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_opcheck_aten import Given, captured, spoil
from torch import nn

import driftline
from driftline.cli.main import main
from driftline.operators.api import check

CUSTOM = '''
"""Custom operators for a test: right, wrong by 1 %, and different each time."""
import torch

@torch.library.custom_op("dltest::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@torch.library.custom_op("dltest::rough", mutates_args=())
def rough(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.dtype == torch.float64 else x * 2.02

@torch.library.custom_op("dltest::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.dtype == torch.float64 else x * (2 + torch.rand(()).item() / 10)
'''

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(torch.relu(self.up(x))).softmax(-1)

torch.manual_seed(0)
net = Net()
with torch.no_grad():
    net(torch.randn(5, 6))
"""


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """Without -o the table is written where the command is given."""
    monkeypatch.chdir(tmp_path)


def opcheck(capsys, *words):
    status = main(["opcheck", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    model, x = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU()), torch.randn(5, 6)
    with torch.no_grad():
        return captured(tmp_path_factory.mktemp("made") / "right", model, lambda: model(x))


@pytest.fixture
def right(made, tmp_path):
    """A run of its own, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "right"))


@pytest.fixture
def wrong(right):
    spoil(right, "0/aten.addmm", factor=1.05)
    return right


@pytest.fixture
def custom(tmp_path, monkeypatch):
    (tmp_path / "dltest_operators.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    import dltest_operators  # noqa: F401

    return tmp_path


def test_a_launched_program_is_captured_and_checked(tmp_path, capsys, monkeypatch, warm_python):
    (tmp_path / "net.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    words = ["dump", "--level", "ops", "-o", "run", "--", warm_python, "net.py"]
    assert subprocess.run([sys.executable, "-m", "driftline", *words]).returncode == 0
    status, out, _ = opcheck(capsys, "-i", "run", "-o", "result")
    assert status == 0
    assert "4 operators checked, all right" in out
    with next((tmp_path / "result").glob("opcheck_result_*.csv")).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["op_name"] for row in rows} >= {"aten.addmm.default", "aten._softmax.default"}
    assert {row["status"] for row in rows} == {"pass"}
    assert all(json.loads(row["op_param"]) is not None for row in rows)


def test_filters_metrics_and_json(right, capsys):
    status, out, _ = opcheck(
        capsys, "-i", right, "-opname", "LAYER", "-metric", "cos_sim", "--format", "json"
    )
    found = json.loads(out)
    assert status == 0
    assert {row["op_type"] for row in found["rows"]} == {"aten.native_layer_norm.default"}
    assert found["coverage"]["filtered"] == 2
    assert all(abs(row["cos_sim"] - 1) < 1e-6 for row in found["rows"])
    ids = found["rows"][0]["ids"]
    status, out, _ = opcheck(capsys, "-i", right, "-ids", ids, "--format", "json")
    assert {row["ids"] for row in json.loads(out)["rows"]} == {ids}


def test_a_reproducer_shows_the_error_without_driftline(wrong, tmp_path, capsys):
    status, out, _ = opcheck(capsys, "-i", wrong, "--repro", tmp_path / "repro", "-o", tmp_path)
    assert status == 1
    assert "0/aten.addmm (aten.addmm.default, output 0)" in out.replace("\n", " ")
    script = next((tmp_path / "repro").glob("aten.addmm*/repro.py"))
    clean = [sys.executable, "-I", str(script)]
    done = subprocess.run(clean, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout and "executed again on cpu" in done.stdout
    assert "driftline" not in script.read_text().split('"""')[2]


def test_rerun_tells_a_wrong_operator_from_one_that_changes(custom, capsys):
    ops = torch.ops.dltest
    model, x = Given(lambda x: (ops.double(x), ops.rough(x), ops.moody(x))), torch.randn(64)
    with torch.no_grad():
        captured(custom / "run", model, lambda: model(x))
    found = check(custom / "run", rerun=True, device="cpu")
    reasons = {row.call.op_type.split(".")[1]: row for row in found.rows if row.slot}
    assert reasons["double"].status == "pass"
    assert reasons["rough"].status == "fail"
    assert "deterministic: the same again" in reasons["rough"].figures.reason
    assert "inaccurate" in reasons["rough"].figures.reason
    assert reasons["moody"].status == "fail"
    assert reasons["moody"].figures.reason.startswith("not deterministic")


def test_a_pass_with_a_remark_is_not_said_to_have_elements_outside(tmp_path, capsys):
    x = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    model = Given(lambda x: x > 0.1)
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(x))
    _, out, _ = opcheck(capsys, "-i", tmp_path / "run", "-o", tmp_path / "o")
    assert "1 output passes with a remark" in out and "outside" not in out


def test_rerun_says_that_the_operator_does_not_give_what_the_run_holds(wrong):
    rows = [row for row in check(wrong, rerun=True).rows if row.status == "fail"]
    assert rows[0].call.op_type == "aten.addmm.default"
    assert "the operator does not give what the run holds" in rows[0].figures.reason


def test_a_custom_operator_that_nothing_defines_here_has_a_reason(custom, warm_python):
    model, x = Given(lambda x: torch.ops.dltest.double(x) + 1), torch.randn(4)
    with torch.no_grad():
        captured(custom / "run", model, lambda: model(x))
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    words = [warm_python, "-m", "driftline", "opcheck", "-i", "run", "--format", "json"]
    done = subprocess.run(words, cwd=custom, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reasons = json.loads(done.stdout)["coverage"]["reasons"]
    assert reasons[0]["reason"].startswith("nothing here defines the custom operator dltest.double")
    words += ["--import", "dltest_operators"]
    done = subprocess.run(words, cwd=custom, env=env, capture_output=True, text=True)
    assert json.loads(done.stdout)["coverage"]["passed"] == 2


def as_if_on_a_gpu(run):
    """Say of each operator of a CPU that it was the GPU's, whose kernel is not here."""
    for name in ("calls.jsonl", "index.jsonl"):
        file = run / "rank0" / name
        text = file.read_text()
        for short in ("attention_for_cpu_backward", "attention_for_cpu"):
            text = text.replace(short, short.replace("_for_cpu", ""))
        file.write_text(text)


def test_attention_of_a_gpu_is_held_to_its_formula(tmp_path, warm_python):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 12, 8, requires_grad=True) for _ in range(3))
    attention = nn.functional.scaled_dot_product_attention
    model = Given(lambda q, k, v: attention(q, k, v, is_causal=True))
    captured(tmp_path / "run", model, lambda: model(q, k, v).square().sum().backward())
    as_if_on_a_gpu(tmp_path / "run")
    found = check(tmp_path / "run")
    mine = [row for row in found.rows if "attention" in row.call.op_type]
    assert {row.call.op_type for row in mine} == {
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
    }
    assert {(row.slot, row.status) for row in mine} == {(n, "pass") for n in "012"}
    spoil(tmp_path / "run", "(root)/aten._scaled_dot_product_flash_attention", factor=1.01)
    words = ["opcheck", "-i", str(tmp_path / "run"), "-opname", "attention.default"]
    words += ["--repro", str(tmp_path / "repro"), "-o", str(tmp_path)]
    assert main(words) == 1
    script = next((tmp_path / "repro").glob("*/repro.py"))
    done = subprocess.run([warm_python, str(script)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout


# --- bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"levels": "modules"}, "holds no operators, only modules"),
        ({"keep": "summary"}, "of each tensor only its summary was kept"),
        ({"ports": "output"}, "holds no inputs of operators"),
    ],
    ids=["modules", "summaries", "outputs"],
)
def test_a_run_that_does_not_hold_what_it_takes_says_how_to_get_it(
    tmp_path, capsys, options, sentence
):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    captured(tmp_path / "run", model, lambda: model(x), **({"levels": ("ops",)} | options))
    status, _, err = opcheck(capsys, "-i", tmp_path / "run")
    assert status == 2
    assert sentence in err and "driftline dump --level ops" in err


def test_without_parameters_products_say_what_is_missing(tmp_path):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(x), ports=["input", "output"])
    rows = check(tmp_path / "run").rows
    assert [row.status for row in rows] == ["not checked", "pass"]
    assert "capture without --port" in rows[0].figures.reason


@pytest.mark.parametrize("device", ["7", "cuda:99", "warp", "meta", "cpu:x"])
def test_a_device_that_does_not_exist_is_a_sentence(right, capsys, device):
    status, _, err = opcheck(capsys, "-i", right, "-rerun", "-device", device)
    assert status == 2
    assert "device" in err and "Traceback" not in err


def test_a_module_that_cannot_be_imported_is_a_sentence(right, capsys):
    status, _, err = opcheck(capsys, "-i", right, "--import", "no_such_module_anywhere")
    assert status == 2
    assert "no_such_module_anywhere" in err


def lines_of(run):
    return [json.loads(line) for line in (run / "rank0" / "calls.jsonl").read_text().splitlines()]


def rewrite(run, change):
    lines = lines_of(run)
    for line in lines:
        if line["kind"] == "operator" and "addmm" in line["class"]:
            change(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "rank0" / "calls.jsonl").write_text(text)


HOSTILE = {
    "unknown": lambda line: line.update({"class": "aten.no_such_operator.default"}),
    "no overload": lambda line: line.update({"class": "aten.addmm.__class__"}),
    "escape": lambda line: line.update({"class": "load_library.evil.default"}),
    "dunder": lambda line: line.update({"class": "__class__.__mro__.x"}),
    "file": lambda line: line.update({"class": "aten.from_file.default"}),
    "text": lambda line: line["param"].update({"beta": "__import__('os')"}),
    "object": lambda line: line["param"].update({"beta": {"a": 1}}),
    "shape": lambda line: line["inputs"].pop(),
    "huge order": lambda line: [one.update({"order": [9, 9]}) for one in line["inputs"]],
    "other operator": lambda line: line.update({"class": "aten.convolution.default"}),
    "huge": lambda line: line.update(
        {"class": "aten.full.default", "param": {"size": [1 << 40], "fill_value": 1.0}}
    ),
    "huge repeat": lambda line: line.update(
        {"class": "aten.repeat.default", "param": {"repeats": [1 << 20, 1 << 20]}}
    ),
    "layout": lambda line: line.update(
        {"class": "aten.zeros.default", "param": {"size": [2], "layout": -5, "dtype": 99}}
    ),
    "huge range": lambda line: line.update(
        {"class": "aten.arange.default", "param": {"end": 1e13}}
    ),
    "huge counts": lambda line: line.update(
        {
            "class": "aten.histc.default",
            "param": {"bins": 1 << 40},
            "inputs": [{**line["inputs"][1], "slot": "self"}],
        }
    ),
    "huge out": lambda line: line.update(
        {
            "class": "aten.full.out",
            "param": {"size": [1 << 40], "fill_value": 1.0},
            "outputs": [{**line["outputs"][0], "shape": [1 << 40]}],
        }
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_list_of_calls_that_makes_no_sense_is_a_row_with_a_reason(right, capsys, kind):
    rewrite(right, HOSTILE[kind])
    found = check(right)
    bad = [row for row in found.rows if row.status != "pass"]
    assert len(bad) == 1 and bad[0].figures.reason, found.rows
    assert found.coverage.passed >= 2
    if kind.startswith("huge") and "order" not in kind:
        # By our own rule: what a machine's memory refuses is another thing on each.
        assert "elements, where the run lists" in bad[0].figures.reason, bad[0].figures.reason


def test_tensors_that_are_gone_are_rows_with_reasons(right):
    for shard in (right / "rank0").glob("tensors-*.safetensors"):
        shard.unlink()
    found = check(right)
    assert {row.status for row in found.rows} == {"not checked"}
    ((reason, count),) = found.coverage.reasons  # one for all, not one for each
    assert count == found.coverage.operators and "is missing" in reason


def test_damaged_bytes_are_no_wrong_operator(right, capsys):
    run = driftline.open_run(right)
    record = next(r for r in run.records if r.key.site == "0/aten.addmm" and r.key.slot == "mat1")
    shard = right / "rank0" / record.blob.shard
    held = bytearray(shard.read_bytes())
    held[record.blob.offset + 3] ^= 0x40
    shard.write_bytes(bytes(held))
    status, out, _ = opcheck(capsys, "-i", right)
    assert status == 0 and "damaged" in out and "driftline show --verify" in out
    found = check(right)
    assert [row.status for row in found.rows if "addmm" in row.call.op_type] == ["not checked"]
    assert not found.failing and found.coverage.passed == found.coverage.operators - 1


def test_shapes_that_do_not_fit_are_a_reason(right):
    index = right / "rank0" / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    for line in lines:
        if line["site"] == "0/aten.addmm" and line["slot"] == "mat1":
            line["shape"] = [6, 5]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = next(row for row in check(right).rows if "addmm" in row.call.op_type)
    assert row.status == "not checked"
    assert "cannot be executed" in row.figures.reason


def test_a_run_of_another_kind_is_a_sentence(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros(3))
    status, _, err = opcheck(capsys, "-i", tmp_path / "x.npy")
    assert status == 2 and "Traceback" not in err


# --- on a GPU


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "mixtral", "cnn"])
def test_operators_of_a_gpu_are_right(tmp_path, kind, dtype):
    from aten_programs import program, train

    model, loss = program(kind, dtype, device="cuda")
    captured(tmp_path / "run", model, lambda: train(model, loss))
    found = check(tmp_path / "run")
    assert not found.failing, [(r.call.op_type, r.slot, r.figures) for r in found.failing]
    cover = found.coverage
    marks = dict(cover.reasons).get("it gives no tensor", 0)  # profiler marks, reads of numbers
    assert cover.passed > 0.9 * (cover.operators - marks), cover


@cuda
def test_rerun_on_a_gpu_tells_atomic_sums_from_wrong_ones(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(1 << 20, device="cuda")
    places = torch.randint(0, 8, (1 << 20,), device="cuda")

    def act(x):
        return torch.zeros(8, device="cuda").index_add_(0, places, x)

    model = Given(act).cuda()
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(x))
    found = check(tmp_path / "run", rerun=True, device="0")
    row = next(r for r in found.rows if "index_add" in r.call.op_type)
    assert row.status == "pass" and "not deterministic" in row.figures.reason
    assert driftline.open_run(tmp_path / "run").records


def test_an_operator_whose_line_is_damaged_is_a_row_all_the_same(right):
    before = check(right).coverage.operators
    path = right / "rank0" / "calls.jsonl"
    lines = path.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if "aten.addmm" in line)
    lines[at] = lines[at][:40]
    path.write_text("\n".join(lines) + "\n")
    found = check(right)
    assert found.coverage.operators == before
    (row,) = [row for row in found.rows if "missing or damaged" in row.figures.reason]
    assert row.call.op_type == "aten.addmm.default" and row.status == "not checked"
