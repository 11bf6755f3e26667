"""An accelerator that torch knows as PrivateUse1: dumped, compared, watched, replayed like any.

Its backend is compiled here (`tests/support/accelerator`). Its memory is host memory; copies to the
host arrive late, and who reads them too early reads 0xCC. No CUDA function may be called.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from driftline.cli.main import main
from driftline.runs.reader import open_run

BACKEND = Path(__file__).parents[1] / "support" / "accelerator"
MODEL = """
import sys
import torch

device = sys.argv[1]
if device == "hostnpu":
    import hostnpu
torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = torch.nn.LayerNorm(16), torch.nn.GELU()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.share = torch.nn.Softmax(-1)

    def forward(self, x):
        return x + self.share(self.down(self.act(self.up(self.norm(x)))))

net = torch.nn.Sequential(*[Block() for _ in range(3)], torch.nn.Linear(16, 4)).to(device)
x = torch.randn(6, 16).to(device)
if "train" in sys.argv:
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
else:
    with torch.no_grad():
        net(x)
if device == "hostnpu":
    print("late", torch.ops.host_npu.late_copies())
"""


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled backend; five seconds of a compiler, once for a source and a torch."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    source = BACKEND / "host_npu.cpp"
    mark = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    # Kept for the next run where pytest keeps anything: `-p no:cacheprovider` takes its cache away.
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("accelerator") if cache else tmp_path_factory.mktemp("accelerator")
    made = Path(folder) / f"host_npu_{mark}.so"
    if not made.exists():
        home = Path(torch.__file__).parent
        headers = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
        part = made.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *(compiler, "-O0", "-std=c++20", "-fPIC", "-shared", "-w", *headers, str(source)),
                *("-o", str(part), f"-L{home}/lib", "-lc10", "-ltorch_cpu"),
            ],
            check=True,
            timeout=280,
        )
        part.replace(made)
    return made


@pytest.fixture
def on_accelerator(workshop: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workshop, whose programs can import `hostnpu`."""
    (workshop / "net.py").write_text(MODEL)
    monkeypatch.setenv("HOSTNPU_LIBRARY", str(library))
    monkeypatch.setenv("PYTHONPATH", str(BACKEND))
    return workshop


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and words of a command of ours."""

    def said(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(list(words))
        return code, "".join(capfd.readouterr())

    return said


@pytest.mark.parametrize("keep", ["full", "summary"])
def test_a_clean_device_passes_and_a_wrong_kernel_is_named_at_its_module(
    quick, said, on_accelerator: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    runs = {}
    for name, device, fault in (
        ("cpu", "cpu", ""),
        ("clean", "hostnpu", ""),
        ("wrong", "hostnpu", "gelu"),
    ):
        monkeypatch.setenv("HOSTNPU_FAULT", fault)
        dumped = quick("-o", name, "--keep", keep, run=["net.py", device])
        assert dumped.code == 0 and "failed" not in dumped.err, dumped.err
        # Two batches at most: the weights of the model facts are sampled apart.
        assert device == "cpu" or 0 < int(dumped.out.split("late")[1]) < 10
        runs[name] = open_run(on_accelerator / name)
    clean = runs["clean"]
    facts = json.loads((on_accelerator / "clean" / "rank0" / "process.json").read_text())
    assert facts["devices"] == ["cpu", "hostnpu:0 Host NPU 1"]
    assert {record.device for record in clean.records} == {"hostnpu:0"}
    if keep == "summary":
        for ours, theirs in zip(runs["cpu"].records, clean.records, strict=True):
            assert ours.summary is not None and theirs.summary is not None
            assert ours.summary.l2 == pytest.approx(theirs.summary.l2, rel=1e-5)
    code, text = said("compare", "cpu", "clean")
    assert code == 0 and text.startswith("PASS"), text
    code, text = said("compare", "cpu", "wrong")
    assert code == 1 and "the drift starts at '0.act' (GELU), in its output" in text, text


def test_replay_names_every_wrong_product_and_clears_a_sound_device(
    quick, said, on_accelerator: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick("-o", "cpu", run=["net.py", "cpu"])
    for name, fault in (("clean", ""), ("wrong", "addmm")):
        monkeypatch.setenv("HOSTNPU_FAULT", fault)
        quick("-o", name, run=["net.py", "hostnpu"])
        monkeypatch.setenv("HOSTNPU_FAULT", "")
        code, text = said(
            "replay", name, "-o", f"{name}_again", "--", warm_python, "net.py", "hostnpu"
        )
        assert code == 0 and "20 of 20 modules replayed" in text, text
    code, text = said("diagnose", "cpu", "clean", "--replay", "clean_again")
    assert code == 0 and text.startswith("pass"), text
    code, text = said("diagnose", "cpu", "wrong", "--replay", "wrong_again")
    assert code == 1 and "all 7 `Linear`" in text and "cause: zeroed" in text, text


def test_a_training_step_with_gradients_weights_and_facts_passes(
    quick, said, on_accelerator: Path
) -> None:
    levels = ["--level", "modules", "--level", "gradients", "--level", "params"]
    for device in ("cpu", "hostnpu"):
        dumped = quick("-o", device, *levels, run=["net.py", device, "train"])
        assert dumped.code == 0 and "failed" not in dumped.err, dumped.err
    assert (on_accelerator / "hostnpu" / "rank0" / "weights.jsonl").stat().st_size > 1000
    facts = (on_accelerator / "hostnpu" / "rank0" / "model.jsonl").read_text()
    assert "autocast_hostnpu" in facts
    code, text = said("compare", "cpu", "hostnpu")
    # Two steps, and the weights after either update.
    assert code == 0 and "294 tensors compared" in text, text
    assert "weights, loss and gradients agree in step 1" in text, text


WEIGHTS = """
import sys
import hostnpu
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(80, 90), torch.nn.Linear(90, 70))
with torch.no_grad():
    if "rows" in sys.argv:
        net[0].weight.copy_(net[0].weight[torch.randperm(90)])
    if "one" in sys.argv:  # between the 64 x 64 samples
        net[1].weight[69, 89] += 1.0
    net.to("hostnpu")(torch.ones(2, 80).to("hostnpu"))
"""


def test_weights_on_a_device_are_told_apart_by_all_of_their_elements(
    quick, said, on_accelerator: Path
) -> None:
    (on_accelerator / "weights.py").write_text(WEIGHTS)
    for name in ("clean", "again", "rows", "one"):
        dumped = quick("-o", name, run=["weights.py", name])
        assert dumped.code == 0 and "failed" not in dumped.err, dumped.err
    assert "No difference" in said("show", "clean", "again", "--differences")[1]
    text = said("show", "clean", "rows", "--differences")[1]
    assert "0.weight" in text and "have changed places" in text, text
    text = said("show", "clean", "one", "--differences")[1]
    assert "1.weight" in text and "different" in text and "0.weight" not in text, text


def test_operators_of_a_device_pair_where_its_optimizer_is_told_what_to_call(
    quick, said, on_accelerator: Path
) -> None:
    for device in ("cpu", "hostnpu"):
        assert quick("-o", device, "--level", "ops", run=["net.py", device, "train"]).code == 0
    code, text = said("compare", "cpu", "hostnpu")
    assert code != 0 and "INCOMPLETE" in text, text
    # Printed in lines of a terminal's width.
    assert "foreach=False, fused=False in both programs" in " ".join(text.split()), text
    program = on_accelerator / "net.py"
    program.write_text(
        program.read_text().replace("net.parameters())", "net.parameters(), foreach=False)")
    )
    for device in ("cpu", "hostnpu"):
        dumped = quick("-o", device, "--force", "--level", "ops", run=["net.py", device, "train"])
        assert dumped.code == 0, dumped.err
    code, text = said("compare", "cpu", "hostnpu")
    assert code == 0 and text.startswith("PASS"), text
    assert "foreach=False" not in text


@pytest.mark.parametrize("level", ["operator", "module"])
def test_the_error_check_names_the_wrong_kernel_once(
    said, on_accelerator: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("HOSTNPU_FAULT", "_softmax")
    program = ["--level", level, "--", warm_python, "net.py", "hostnpu", "train"]
    code, text = said("errcheck", "-o", "found", *program)
    assert code == 1 and "1 finding;" in text and "Inf made by 0.share" in text, text
    monkeypatch.setenv("HOSTNPU_FAULT", "")
    code, text = said("errcheck", "-o", "none", *program)
    assert code == 0 and "nothing found" in text, text


RULES = """
import json, shutil, sys, tempfile
import torch
from torch import nn
import hostnpu
from driftline.captures.torch.errcheck.api import watch_errors

INF = float("inf")

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x) * 2

def nested(d):
    nn.Sequential(Around(Around(Log())), nn.Identity())(-torch.ones(3, device=d))

def same_output(d):
    nn.Sequential(nn.Sequential(nn.Sequential(Log())))(-torch.ones(3, device=d))

def functions_between(d):
    bad = Log()(-torch.ones(4, device=d))
    nn.Linear(4, 4).to(d)(bad + 1)

def changed_between(d):
    y = nn.Linear(4, 4).to(d)(torch.ones(1, 4, device=d))
    y[0, 0] = INF
    nn.Linear(4, 2).to(d)(y)

def bad_bias(d):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(d)
    net[0].bias.data[0] = float("nan")
    net(torch.ones(1, 2, device=d))

def mask(d):
    Log()(torch.ones(4, 4, device=d).tril())
    Log()(torch.arange(32.0, device=d))

def near_mask(d):
    Log()(torch.tensor([1.0, 0.5, 0.0, 0.3], device=d))

def gradients(d):
    with torch.enable_grad():
        net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(d)
        (net(torch.ones(1, 2, device=d)).sum() * 1e38 * 1e38).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()

def gradients_after_a_finding(d):
    with torch.enable_grad():
        net = nn.Sequential(nn.Linear(2, 2), Log()).to(d)
        net[0].bias.data.fill_(-9.0)
        net(torch.ones(1, 2, device=d)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()

def twice(d):
    net = nn.Sequential(Log(), nn.Identity())
    for sign in (-1, 1, -1):
        net(sign * torch.ones(2, device=d))

answers = {}
for case in (nested, same_output, functions_between, changed_between, bad_bias, mask, near_mask,
             gradients, gradients_after_a_finding, twice):
    for level in ("module", "operator"):
        for device in ("cpu", "hostnpu"):
            torch.manual_seed(0)
            folder = tempfile.mkdtemp()
            with torch.no_grad(), watch_errors(folder, level=level) as watch:
                case(device)
            answers[f"{case.__name__} {level} {device}"] = [
                [f.site, f.types, f.cause, f.phase, f.entered, f.step] for f in watch.findings
            ]
            shutil.rmtree(folder)
print(json.dumps(answers))
"""


def test_the_error_check_has_the_same_rules_on_every_device(
    on_accelerator: Path, warm_python: str
) -> None:
    (on_accelerator / "rules.py").write_text(RULES)
    done = subprocess.run(
        [warm_python, "rules.py"], capture_output=True, text=True, timeout=120, check=True
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    for case in {name.rpartition(" ")[0] for name in answers}:
        assert answers[f"{case} cpu"] == answers[f"{case} hostnpu"], case
    findings = {case: len(answers[f"{case} module hostnpu"]) for case in map(_first, answers)}
    assert findings == {
        **dict.fromkeys(("nested", "same_output", "functions_between", "changed_between"), 1),
        "bad_bias": 1,
        "mask": 0,
        "near_mask": 0,  # minus infinities alone are a mask for a module
        "gradients": 1,
        "gradients_after_a_finding": 1,
        "twice": 2,
    }
    # What the old device rule took for a mask because its largest value is 1.
    assert len(answers["near_mask operator hostnpu"]) == 1


def _first(name: str) -> str:
    return name.split()[0]
