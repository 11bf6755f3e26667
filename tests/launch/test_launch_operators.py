"""`dump --level ops`: every operator of an unchanged program, in modules and outside of them."""

from __future__ import annotations

import subprocess

import driftline

BARE = """
import sys, torch
torch.manual_seed(0)
a = torch.randn(8, 8).to(getattr(torch, sys.argv[1]))
b = (a @ a).softmax(-1)
if "fault" in sys.argv:
    b = b * 2
print(float(b.cumsum(0).sum()))
"""

TRAIN = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from model import Net
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
data = TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,)))
for x, y in DataLoader(data, batch_size=4, num_workers=1):
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
torch.save(net.state_dict(), "net.pt")
"""


def sites(run, port="output"):
    return [t.key.site for t in run.tensors() if t.key.port == port]


def test_a_program_without_modules_is_captured_compared_and_its_fault_named(quick, workshop):
    (workshop / "bare.py").write_text(BARE)
    for name, words in (
        ("ref", ["float32"]),
        ("same", ["bfloat16"]),
        ("cand", ["bfloat16", "fault"]),
    ):
        dumped = quick("--level", "ops", "-o", name, run=["bare.py", *words])
        assert dumped.code == 0, dumped.err
    run = driftline.open_run(workshop / "ref")
    assert sites(run)[:2] == ["(program)/aten.randn", "(program)/aten.mm"]
    # `to` is an operator in one of them only.
    assert driftline.compare(workshop / "ref", workshop / "same", sites=["*[!y]"]).verdict == "pass"
    table = driftline.compare(workshop / "ref", workshop / "cand", sites=["*cumsum"])
    assert table.first_site == "(program)/aten.cumsum"


def test_a_training_program_prints_and_saves_the_same_and_shows_loss_and_optimizer(
    quick, workshop, warm_python
):
    (workshop / "train.py").write_text(TRAIN)
    plain = subprocess.run(
        [warm_python, "train.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=workshop,
        timeout=110,
    )
    weights = (workshop / "net.pt").read_bytes()
    dumped = quick("--level", "ops", "--level", "modules", "--step", "*", run=["train.py"])
    assert dumped.code == 0, dumped.err
    assert dumped.out == plain.stdout
    assert (workshop / "net.pt").read_bytes() == weights
    assert dumped.folders == ["rank0"]
    found = set(sites(dumped.run))
    assert {"first/aten.addmm", "(program)/aten.nll_loss_forward", "first"} <= found
    assert any(site.startswith("AdamW/") for site in found)
    assert not [site for site in found if "uniform" in site or "randn" in site]
    losses = [t for t in dumped.run.tensors() if t.key.site == "(program)/aten.nll_loss_forward"]
    outputs = [t for t in losses if t.key.port == "output" and t.key.slot == "0"]
    assert [float(t.numpy()) for t in outputs] == [float(line) for line in plain.stdout.split()]
    assert [t.key.step for t in outputs] == [0, 1, 2]


def test_importing_torch_and_running_nothing_is_still_an_empty_dump(quick, workshop):
    (workshop / "idle.py").write_text("import torch\nprint(torch.__version__)\n")
    dumped = quick("--level", "ops", run=["idle.py"])
    assert dumped.code == 2
    assert "no module was called and no operator ran" in dumped.err
    (workshop / "bare.py").write_text(BARE)
    dumped = quick(run=["bare.py", "float32"])
    assert dumped.code == 2
    assert "--level ops also sees operators" in dumped.err


def test_children_that_only_compute_are_processes_of_their_own(quick, workshop):
    (workshop / "pool.py").write_text(
        "import multiprocessing, torch\n"
        "def work(n):\n    return float(torch.full((4,), float(n)).exp().sum())\n"
        "if __name__ == '__main__':\n"
        "    torch.ones(3).neg()\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        print(pool.map(work, range(4)))\n"
        "        pool.close(); pool.join()\n"
    )
    dumped = quick("--level", "ops", run=["pool.py"])
    assert dumped.code == 0, dumped.err
    by_process = {}
    for tensor in dumped.run.tensors():
        by_process.setdefault(tensor.key.process, set()).add(tensor.key.site.split("/")[1])
    assert sum("aten.neg" in ops for ops in by_process.values()) == 1
    assert sum("aten.exp" in ops for ops in by_process.values()) in (1, 2)
    assert not any({"aten.neg", "aten.exp"} <= ops for ops in by_process.values())


def test_of_a_collective_only_what_it_sends_is_read(quick, workshop):
    (workshop / "ranks.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='file://' + os.path.abspath('meet'),\n"
        "                        rank=0, world_size=1)\n"
        "t = torch.ones(3)\n"
        "dist.all_reduce(t)\n"
        "out = [torch.empty(3)]\n"
        "dist.all_gather(out, t)\n"
        "print((t + out[0]).sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    dumped = quick("--level", "ops", run=["ranks.py"])
    assert dumped.code == 0, dumped.err
    collective = [t.key for t in dumped.run.tensors() if "c10d" in t.key.site]
    assert {(key.site, key.port) for key in collective} == {("(program)/c10d.allreduce_", "input")}
