"""`driftline dump --graph`: an unchanged program that compiles, seen node by node or by kernels."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

import driftline
from driftline.cli.main import main
from driftline.graphs.sources.graph_files import read_graphs
from driftline.runs.sidecars.calls import GRAPHS

PROGRAM = """
import sys
import torch
from torch import nn

class Gate(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Gate(), nn.Linear(16, 8)).eval()

def broken(graph, inputs):
    raise ValueError("no such tile")

backend = broken if "broken" in sys.argv else (*sys.argv[1:], "inductor")[0]
with torch.no_grad():
    print("sum", torch.compile(model, backend=backend)(torch.ones(2, 8)).sum().item())
"""


@pytest.fixture
def program(workshop, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    (workshop / "compiles.py").write_text(PROGRAM)
    return "compiles.py"


def test_nodes_of_an_unchanged_program_are_recorded_and_what_ran_is_said(compiling, program):
    dumped = compiling("--graph", "fx", run=[program, "aot_eager"])
    assert dumped.code == 0, dumped.err
    assert dumped.out.startswith("sum ")
    assert "executed node by node by torch's own operators" in dumped.err
    assert "(aot_eager) compiled none of them" in dumped.err
    sites = {r.key.site: r.class_name for r in dumped.run.records}
    assert sites["1/sigmoid"] == "aten.sigmoid.default" and sites["0/addmm"] == "aten.addmm.default"
    (graph,) = read_graphs(dumped.run.sheet(GRAPHS))
    (line,) = [node.line for node in graph.nodes if node.name == "sigmoid"]
    assert line.endswith("compiles.py:8 in forward")


def test_without_a_graph_one_line_says_what_was_seen_and_the_verdict_is_incomplete(
    compiling, program, capfd
):
    eager = compiling("-o", "eager", run=[program, "eager"])
    assert eager.err.count("note:") == 1
    assert "only inputs and outputs of compiled modules were seen" in eager.err
    (Path("plain.py")).write_text(PROGRAM.replace("torch.compile(model, backend=backend)", "model"))
    compiling("-o", "modules", run=["plain.py"])
    capfd.readouterr()
    assert main(["compare", "modules", "eager"]) == 2
    assert capfd.readouterr().out.startswith("INCOMPLETE")


def test_auto_reads_the_nodes_of_other_backends_than_inductor(compiling, program):
    nodes = compiling("--graph", "auto", run=[program, "aot_eager"])
    assert "(aot_eager) compiled none of them" in nodes.err
    assert "1/sigmoid" in {record.key.site for record in nodes.run.records}
    Path("plain.py").write_text(PROGRAM.replace("torch.compile(model, backend=backend)", "model"))
    plain = compiling("--graph", "auto", "--force", run=["plain.py"])
    assert plain.code == 0 and "note:" not in plain.err, plain.err
    assert "1" in {record.key.site for record in plain.run.records}


ACTIVATION = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

class Mlp(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = act

    def forward(self, x):
        return x + self.down(self.act(self.gate(x)) * self.up(x))

class Act(nn.Module):
    def forward(self, x):
        return F.gelu(x) if WRONG and self.last else F.silu(x)

WRONG = "wrong" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(Mlp(Act()), Mlp(Act())).eval()
model[0].act.last, model[1].act.last = False, True
x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))
with torch.no_grad():
    (torch.compile(model) if "compiled" in sys.argv else model)(x)
"""


def test_a_wrong_activation_inside_a_fused_kernel_is_named_with_its_cause(
    compiling, program, capfd
):
    Path("activation.py").write_text(ACTIVATION)
    # Without them: that the code differs would be cause enough.
    alone = "--no-model-facts"
    compiling("-o", "modules", alone, run=["activation.py"])
    run = ["activation.py", "compiled", "wrong"]
    made = compiling("-o", "kernels", "--graph", "auto", alone, run=run)
    assert "values inside of fusions were computed separately" in made.err
    # What runs inductor's kernels is recorded by these, without being told so.
    assert "kernels ran as inductor made them" in made.err
    kernels = {record.class_name for record in driftline.open_run("kernels").records}
    assert any("cpp_fused" in name for name in kernels)
    capfd.readouterr()
    assert main(["diagnose", "modules", "kernels"]) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "the drift starts at 1.act, cause: activation" in said
    assert "inside the fusion of" in said
    assert "it computes gelu where the reference computes silu" in said


AROUND = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.SiLU())

@torch.compile(backend="eager")
def scored(one, x):
    return torch.relu(one(x)) * 2

with torch.no_grad():
    scored(model, torch.ones(2, 8))
"""


def test_a_function_around_a_model_has_the_names_of_the_model(compiling, workshop):
    (workshop / "around.py").write_text(AROUND)
    dumped = compiling("--graph", "fx", run=["around.py"])
    assert dumped.code == 0, dumped.err
    sites = {r.key.site: r.class_name for r in dumped.run.records}
    assert sites["1/silu"] == "aten.silu.default"
    assert sites["(program)/relu"] == "aten.relu.default"
    parameters = {site for site, name in sites.items() if name.startswith("parameter ")}
    assert {site.partition("/")[0] for site in parameters} == {"0"}


def test_kernels_of_an_unchanged_program_are_recorded(compiling, program, workshop, capfd):
    dumped = compiling("--graph", "inductor", run=[program, "inductor"])
    assert dumped.code == 0, dumped.err
    assert "kernels ran as inductor made them" in dumped.err
    kernels = {r.class_name for r in dumped.run.records if "/" in r.key.site}
    assert "cpp_fused_mul_sigmoid_0" in kernels
    assert main(["show", "out"]) == 0
    shown = capfd.readouterr().out
    assert "Kernels of graph 0" in shown and "cpp_fused_mul_sigmoid_0" in shown


def test_a_program_that_fails_to_compile_shows_its_own_error_and_nothing_of_ours(
    compiling, program
):
    dumped = compiling("--graph", "inductor", run=[program, "broken"])
    assert dumped.code == 1
    assert "backend='broken' raised:\nValueError: no such tile" in dumped.err
    assert "broken could not compile a graph, which is not recorded" in dumped.err
    assert "capture failed" not in dumped.err and "During handling" not in dumped.err
    assert GRAPHS not in driftline.open_run(dumped.path).sheets()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-fusion"], "--no-fusion is for the kernels of inductor"),
        (["--graph", "fx", "--no-fusion"], "--no-fusion is for the kernels of inductor"),
        (["--graph", "fx", "--level", "ops"], "TORCHDYNAMO_DISABLE=1 and --level ops"),
        (["--graph", "fx", "--layout", "ait"], "records tensors into a run"),
        (["--graph", "fx", "--type", "model"], "records tensors into a run"),
        (["--graph", "fxx"], "fx"),
    ],
)
def test_what_does_not_go_with_graphs_is_refused(dump, options, message):
    dumped = dump(*options, argv=["true"])
    assert dumped.code == 2 and message in dumped.err, dumped.err


@pytest.mark.slow
def test_the_commands_of_the_page_about_engines_work(workshop, program, monkeypatch, warm_python):
    monkeypatch.setenv("PATH", f"{Path(warm_python).parent}{os.pathsep}{os.environ['PATH']}")
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    part = (
        page.read_text("utf-8").partition("## Compiled graphs")[2].partition("The program stays")[0]
    )
    commands = [
        shlex.split(line, comments=True)
        for line in part.splitlines()
        if line.startswith("    driftline ")
    ]
    assert len(commands) == 6
    for words in commands:
        assert main(words[1:]) == 0, words
