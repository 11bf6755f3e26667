"""Every command that docs/command-line.md shows is run, in the order of the page."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch

from driftline.testing.atb import AtbDump, Operation, Value

DOCS = Path(__file__).parents[2] / "docs" / "command-line.md"
DECODERS = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
PROGRAM = """
import argparse, torch
options = argparse.ArgumentParser()
options.add_argument("--dtype", default="float32")
dtype = getattr(torch, options.parse_args().dtype)
torch.manual_seed(0)
torch.set_num_threads(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, x):
        return self.model(x)


net = Wrapped().to(dtype).eval()
with torch.no_grad():
    net(torch.randn(4, 16).to(dtype))
"""


LABELS = """
import numpy
from driftline import gen_id, set_label, set_task_id

set_task_id()
data_id = gen_id()
set_label("pta", data_id, data_val=numpy.ones(4))
set_label("acl", data_id, data_val=numpy.ones(4))
"""


AXES = {"axes": [-1]}
NO = {"hasBias": False}


def look_and_stop(words: list[str], place: Path) -> None:
    """A command that ends when its reader is done: the page is read, then Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-m", "driftline", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        with urlopen(process.stdout.readline().strip(), timeout=60) as page:
            assert b"</html>" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def test_every_shown_command_works(tmp_path: Path) -> None:
    (tmp_path / "infer.py").write_text(PROGRAM)
    (tmp_path / "label.py").write_text(LABELS)
    for tree in ("tmp_tensors", "tmp_tensors_0"):
        (tmp_path / tree / "tensors" / "rank_0").mkdir(parents=True)
        np.save(tmp_path / tree / "tensors" / "rank_0" / "a.npy", np.ones(4))
    np.save(tmp_path / "a.npy", np.ones(4, np.float32))
    torch.save(torch.ones(4), tmp_path / "b.pt")
    shutil.copytree(DECODERS / "tiny-llama", tmp_path / "tiny-llama")
    shutil.copy(DECODERS / "share_gpt_tiny.json", tmp_path / "share_gpt.json")
    zeros = Value("x", np.zeros(4, np.float32))
    operators = [
        Operation("SoftmaxOperation", [zeros], [Value("p", np.full(4, 0.25, np.float32))], AXES),
        Operation("LinearOperation", [zeros, Value("w", np.ones((4, 4), np.float32))], [zeros], NO),
    ]
    dump = AtbDump(tmp_path, "G2")
    dump.execute(operators)
    shutil.copy(dump.operation_csv(operators), tmp_path)
    shown = re.findall(r"^    driftline (.+)$", DOCS.read_text("utf-8"), re.MULTILINE)
    assert len(shown) >= 8
    for text in shown:
        words = shlex.split(re.sub(r"python (infer|label)\.py", rf"{sys.executable} \1.py", text))
        if words[0] == "view":
            look_and_stop(words, tmp_path)
            continue
        done = subprocess.run(
            [sys.executable, "-m", "driftline", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"driftline {text}\n{done.stdout}{done.stderr}"
