"""`driftline errcheck` on real programs: what is found, said and left, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from driftline import open_run
from driftline.captures.errcheck.findings import Finding, read_findings
from driftline.cli.main import main

LLAMA = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=5, vocab_size=50,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(config).eval().half()
if "plant" in sys.argv:
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(20000)
        model.model.layers[3].mlp.down_proj.weight.fill_(60000)
with torch.no_grad():
    out = model(torch.arange(12).view(1, 12), use_cache=False)
print("finite", bool(out.logits.isfinite().all()))
"""
BAD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
    def forward(self, x):
        h = self.first(x) - 100
        h = torch.log(h)
        return self.last(h)
torch.manual_seed(0)
net = Net()
"""


@dataclass(frozen=True)
class Checked:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def found(self) -> list[Finding]:
        return [f for one in sorted(self.folder.glob("errcheck_*")) for f in read_findings(one)]

    @property
    def left(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def errcheck(workshop: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest):
    """Check a program text: `errcheck("--exit", text=..., words=[...])`, or any `argv`."""

    def errcheck(*options: str, text: str = "", words=(), argv=()) -> Checked:
        if text:
            (workshop / "prog.py").write_text(text)
        python = sys.executable
        if "import torch" in text or "import sys, torch" in text:
            kind = "warm_llama" if "transformers" in text else "warm_python"
            python = request.getfixturevalue(kind)
        command = list(argv) or [python, "prog.py", *words]
        capfd.readouterr()
        code = main(["errcheck", *options, "-o", "found", "--", *command])
        out, err = capfd.readouterr()
        return Checked(code, out, err, workshop / "found")

    return errcheck


def test_an_overflow_planted_in_a_layer_of_a_llama_is_named_with_module_and_line(errcheck) -> None:
    done = errcheck(text=LLAMA, words=["plant"])
    assert done.code == 1
    (found,) = done.found
    assert found.module == "model.layers.3.mlp.down_proj" and "inf" in found.types
    assert (found.step, found.rank, found.phase) == (0, 0, "forward")
    assert "modeling_llama.py" in found.line and "down_proj" in found.code
    assert any("prog.py" in line for line in found.stack)
    assert found.sentence() in done.out
    assert "only passed on" in done.err and "finite False" in done.out
    (text,) = done.folder.glob("ait_overflow_res_*.txt")
    assert text.read_text() == f"Overflow detected! Operator name: {found.site}\n"


def test_a_clean_llama_is_exit_0_computes_the_same_bits_and_leaves_only_what_was_asked_for(
    errcheck, workshop: Path, warm_llama: str
) -> None:
    text = LLAMA + "import hashlib\nprint(hashlib.md5(out.logits.numpy().tobytes()).hexdigest())\n"
    (workshop / "prog.py").write_text(text)
    plain = subprocess.run(
        [warm_llama, "prog.py"], capture_output=True, text=True, check=True, timeout=110
    ).stdout
    done = errcheck("--type", "all", "--headroom", "room.csv", text=text)
    assert done.code == 0, done.out + done.err
    assert done.out == plain and "finite True" in plain
    assert done.left == [] and "nothing found" in done.err and "headroom" in done.err
    rows = (workshop / "room.csv").read_text().splitlines()
    assert rows[0] == "site,dtype,largest_magnitude,headroom_bits" and len(rows) > 30
    bits = [float(row.split(",")[-1]) for row in rows[1:] if row.split(",")[-1]]
    assert bits == sorted(bits) and 0 < bits[0] < 16


def test_a_finding_is_a_line_of_plain_json_and_its_inputs_open_as_a_run(errcheck) -> None:
    done = errcheck(text=BAD + "net(torch.ones(2, 4))\n")
    (run,) = done.folder.glob("errcheck_*")
    opened = open_run(run)
    assert opened.get("(root)/aten.log", "input").numpy().shape == (2, 4)
    assert opened.get("(root)/aten.log", "output").record.class_name == "aten.log.default"
    assert f"driftline opcheck -i {Path('found') / run.name}" in done.err
    (path,) = run.glob("findings-*.jsonl")
    line = json.loads(path.read_text())
    assert line["operator"] == "aten.log.default" and line["outputs"][0]["nan"] == 8
    assert line["inputs"][0]["dtype"] == "float32" and line["pid"] != os.getpid()


def test_a_found_call_is_replayed_by_opcheck(errcheck, capfd) -> None:
    text = "import torch\ntorch.full((2, 3), -float('inf')).softmax(1)\ntorch.zeros(3) / 0\n"
    done = errcheck(text=text)
    assert len(done.found) == 2
    (run,) = done.folder.glob("errcheck_*")
    assert main(["opcheck", "-i", str(run)]) == 0
    assert "2 operators checked" in capfd.readouterr().out


def test_a_program_that_is_killed_right_after_has_lost_nothing(errcheck) -> None:
    done = errcheck(
        text=BAD + "import os, signal\nnet(torch.ones(2, 4))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert done.code == 1 and "the program ended with status 137" in done.err
    (found,) = done.found
    assert found.operator == "aten.log.default"
    (run,) = done.folder.glob("errcheck_*")
    assert open_run(run).get("(root)/aten.log", "input").numpy().shape == (2, 4)
    assert found.sentence() in done.out
    assert "until the program was killed: 1 finding" in done.err and "0 processes" not in done.err


def test_of_a_killed_program_nothing_is_said_that_is_not_known(errcheck) -> None:
    done = errcheck(text="import torch, os\ntorch.ones(2) + 1\nos.kill(os.getpid(), 9)")
    assert done.code == 128 + signal.SIGKILL and done.left == []
    assert "nothing was found up to the end" in done.err and "computed anything" not in done.err


def test_exit_stops_the_program_and_prints_the_finding_last(errcheck, workshop: Path) -> None:
    (workshop / "prog.py").write_text(
        BAD + "print('before')\nnet(torch.ones(2, 4))\nprint('went on')\n"
    )
    (workshop / "run.sh").write_text(f"{sys.executable} prog.py\necho next program\n")
    done = errcheck("--exit", argv=["bash", "run.sh"])
    assert done.code == 1
    assert done.out.startswith("before\n")
    assert "went on" not in done.out and "next program" not in done.out
    assert done.out.strip().endswith("\n".join(done.found[0].lines()))
    assert "the program was stopped" in done.err


def test_two_ranks_are_told_apart(errcheck, warm_python: str) -> None:
    text = BAD + (
        "import os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(2, 4)\nif dist.get_rank() == 1: net(x)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    torchrun = [warm_python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program = ["--standalone", "--no-python", warm_python, "prog.py"]
    done = errcheck(text=text, argv=[*torchrun, *program])
    assert done.code == 1, done.err
    (found,) = done.found
    assert found.rank == 1


@pytest.mark.slow
def test_what_a_collective_brought_from_another_rank_is_said_so(errcheck) -> None:
    text = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = net(torch.ones(2, 4)).sum()
    if step == 1 and dist.get_rank() == 0:
        loss = loss + (loss - loss).sqrt() * 0
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = errcheck(text=text, argv=[*torchrun, "--master-port", "29765", "prog.py"])
    made, received = sorted(done.found, key=lambda f: f.rank)
    assert (made.rank, made.cause, made.step, made.phase) == (0, "made", 1, "backward")
    assert (received.rank, received.cause) == (1, "entered") and "collective" in received.reason
    assert "never written" not in done.err


@pytest.mark.slow
def test_exit_stops_the_other_rank_too(errcheck) -> None:
    text = BAD + (
        "import time, os\nif os.environ['RANK'] == '1': net(torch.ones(2, 4))\n"
        "torch.ones(1) + 1\ntime.sleep(60)\nprint('slept')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = errcheck("--exit", text=text, argv=[*torchrun, "--master-port", "29764", "prog.py"])
    assert done.code == 1 and "slept" not in done.out
    assert done.found[0].rank == 1


def test_a_subprocess_is_watched_too(errcheck, workshop: Path, warm_python: str) -> None:
    (workshop / "child.py").write_text(BAD + "net(torch.ones(2, 4))\n")
    done = errcheck(text=f"import subprocess, sys\nsubprocess.run([{warm_python!r}, 'child.py'])")
    assert done.code == 1 and len(done.found) == 1


def test_forked_children_write_files_of_their_own(errcheck) -> None:
    text = BAD + (
        "import os\nx = torch.ones(2, 4)\nnet(x)\nfor _ in range(2):\n"
        "    if os.fork() == 0:\n        net(x); os._exit(0)\n"
        "for _ in range(2): os.wait()\n"
    )
    done = errcheck(text=text)
    assert len(done.found) == 3 and len({f.pid for f in done.found}) == 3
    assert {f.number for f in done.found} == {1}


def test_a_finding_is_1_however_a_program_ends_and_again_is_one_paragraph(errcheck) -> None:
    text = BAD + "for _ in range(30): net(torch.ones(2, 4))\nraise SystemExit(7)\n"
    done = errcheck(text=text)
    assert done.code == 1 and len(done.found) == 30
    assert "ended with status 7" in done.err and done.found[0].sentence() in done.out
    assert done.out.count("NaN made by") == 1
    assert "and 29 more there, the last in step 29" in done.out


def test_a_program_that_never_calls_torch_is_exit_2_with_the_reason(errcheck) -> None:
    done = errcheck(text="print('hello')\n")
    assert done.code == 2 and "nothing was watched" in done.err and "captured" not in done.err
    assert done.left == []
    done = errcheck(text="import torch\n")
    assert done.code == 2 and "no operator ran" in done.err
    done = errcheck("--level", "module", text="import torch\ntorch.ones(2) + 1\n")
    assert done.code == 2 and "no module was called" in done.err
    done = errcheck(argv=["true"])
    assert done.code == 2 and "no Python process" in done.err


def test_a_training_loop_names_step_and_phase(errcheck) -> None:
    text = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = net(torch.ones(2, 4)).sum()
    if step == 2:
        loss = loss * 0 + (loss - loss).sqrt() * 0
    loss.backward()
    optimizer.step()
"""
    done = errcheck(text=text)
    (found,) = done.found
    assert (found.step, found.phase, found.types) == (2, "backward", ("nan",))
    assert "(loss - loss).sqrt()" in found.forward_line and "loss.backward()" in found.code


def test_module_level_is_as_exact_as_a_module(errcheck) -> None:
    done = errcheck("--level", "module", text=LLAMA, words=["plant"])
    (found,) = done.found
    assert done.code == 1 and found.site == "model.layers.3.mlp.down_proj"
    assert "modules in 1 process" in done.err


def test_allow_silences_a_site(errcheck) -> None:
    text = BAD + "net(torch.ones(2, 4))\ntorch.zeros(2) / 0\n"
    done = errcheck("--allow", "aten.log", text=text)
    assert [found.operator for found in done.found] == ["aten.div.Tensor"]
    assert errcheck("--allow", "(root)/aten.l*", "*aten.div*", text=text).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--type", "overflw"], "overflw"),
        (["--level", "kernel"], "kernel"),
        (["--max-bytes", "many"], "many"),
        (["--headroom", "nowhere/x.csv"], "nowhere"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_a_sentence(
    errcheck, options: list[str], said: str
) -> None:
    done = errcheck(*options, text="print('ran')\n")
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
    assert "ran" not in done.out


def test_an_output_that_cannot_be_a_folder_is_refused(workshop: Path, capfd) -> None:
    (workshop / "file").write_text("")
    code = main(["errcheck", "-o", "file", "--", sys.executable, "-c", "print('ran')"])
    out, err = capfd.readouterr()
    assert code == 2 and "no folder" in err and "ran" not in out


def test_no_program_and_an_unknown_one_are_refused(workshop: Path, capfd) -> None:
    assert main(["errcheck"]) == 2
    assert "driftline errcheck --exec" in capfd.readouterr().err
    assert main(["errcheck", "--", "no-such-program-here"]) == 2
    assert "command not found" in capfd.readouterr().err


def test_a_finding_that_cannot_be_written_is_said_all_the_same(errcheck) -> None:
    text = BAD + (
        "import shutil, pathlib\npathlib.Path('found').write_text('in the way')\n"
        "net(torch.ones(2, 4))\n"
    )
    done = errcheck(text=text)
    assert done.code == 1 and "aten.log" in done.out
    assert "cannot be written" in done.err and "Traceback" not in done.err
