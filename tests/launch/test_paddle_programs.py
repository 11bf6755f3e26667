"""Unchanged Paddle programs, launched: alone, beside torch, and as two ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from driftline.formats.registry import open_run
from warm_python import warm

NET = """
import sys, warnings
warnings.simplefilter("ignore")
import paddle
from paddle import nn

def train(steps=3):
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    loss = nn.MSELoss()
    for _ in range(steps):
        value = loss(model(paddle.ones([3, 4])), paddle.zeros([3, 2]))
        value.backward()
        optimizer.step()
        optimizer.clear_grad()
        print(float(value))
"""


@pytest.fixture(scope="module")
def warm_paddle() -> Iterator[str]:
    with warm("paddle") as python:
        yield python


@pytest.fixture(scope="module")
def warm_both() -> Iterator[str]:
    with warm("paddle", "torch") as python:
        yield python


def test_a_program_with_torch_and_paddle_is_captured_in_both(dump, workshop, warm_both):
    text = NET + "import torch\ntrain()\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n"
    (workshop / "both.py").write_text(text)
    plain = subprocess.run(
        [warm_both, "both.py"], capture_output=True, text=True, check=True, timeout=110
    )
    words = ("--level", "modules,gradients,params", "--step", "*")
    dumped = dump(*words, argv=[warm_both, "both.py"])
    assert dumped.code == 0 and dumped.out == plain.stdout
    assert dumped.folders == ["rank0", "rank0.p1"]
    assert {each["framework"] for each in dumped.run.processes()} == {"torch", "paddle"}
    steps = {(r.key.port, r.key.step) for r in dumped.run.records if r.class_name == "LayerNorm"}
    ports = ("input", "output", "grad_input", "grad_output", "param_grad", "optimizer_grad")
    assert steps == {("param", 0), *((port, step) for port in ports for step in range(3))}
    assert any(r.key.site == "MSELoss" for r in dumped.run.records)


def test_filters_reductions_and_trees_are_those_of_torch_programs(dump, workshop, warm_paddle):
    (workshop / "alone.py").write_text(NET + "train()\nassert 'torch' not in sys.modules\n")
    words = ("--class", "Linear", "--keep", "summary", "-er", "1,1")
    dumped = dump(*words, argv=[warm_paddle, "alone.py"])
    assert dumped.code == 0
    assert {(r.class_name, r.kept, r.key.step) for r in dumped.run.records} == {
        ("Linear", "summary", 1)
    }
    listed = dump("--type", "model", "--force", argv=[warm_paddle, "alone.py"])
    assert listed.code == 0
    assert "Sequential" in (listed.path / "rank0" / "topology.json").read_text()


def test_what_is_not_there_for_paddle_is_said(dump, workshop, warm_paddle):
    (workshop / "alone.py").write_text(NET + "train(1)\n")
    dumped = dump("--level", "modules,ops", argv=[warm_paddle, "alone.py"])
    assert dumped.code == 0 and "operators of Paddle programs are not seen" in dumped.err
    dumped = dump("--type", "tensor", "op", "--force", argv=[warm_paddle, "alone.py"])
    assert "of paddle programs there is no such list" in dumped.err
    dumped = dump("--layout", "ait", "-o", "tree", argv=[warm_paddle, "alone.py"])
    assert dumped.code == 2 and "--layout ait holds what torch programs compute" in dumped.err
    assert "could not start" not in dumped.err
    for words, said in (
        (("--level", "ops"), "--level ops sees operators of torch programs"),
        (("--type", "op"), "--type op lists what torch programs do"),
        (("--engine", "torch"), "the program imported paddle, and --engine looks at another one"),
    ):
        dumped = dump(*words, "-o", "none", "--force", argv=[warm_paddle, "alone.py"])
        assert dumped.code == 2 and f"nothing was captured: {said}" in dumped.err
        assert "filters left" not in dumped.err
    (workshop / "static.py").write_text(
        "import paddle\n"
        "paddle.enable_static()\n"
        "x = paddle.static.data('x', [1, 4])\n"
        "y = paddle.nn.Linear(4, 2)(x)\n"
        "exe = paddle.static.Executor()\n"
        "exe.run(paddle.static.default_startup_program())\n"
        "import numpy\n"
        "exe.run(feed={'x': numpy.ones((1, 4), 'float32')}, fetch_list=[y])\n"
    )
    dumped = dump("-o", "none", argv=[warm_paddle, "static.py"])
    assert dumped.code == 2
    assert "paddle was imported, but no module was called" in dumped.err
    assert "a static graph calls no layers" in dumped.err


def test_one_of_two_frameworks_can_be_chosen(dump, workshop, warm_both):
    text = NET + "import torch\ntrain(1)\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    (workshop / "both.py").write_text(text)
    for engine in ("torch", "paddle"):
        dumped = dump("--engine", engine, "--force", argv=[warm_both, "both.py"])
        assert [each["framework"] for each in dumped.run.processes()] == [engine]


def test_a_paddle_that_is_not_there_is_named_with_its_install_line(dump, workshop):
    (workshop / "hides.py").write_text(
        "import sys\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "import paddle\n"
    )
    dumped = dump(run=["hides.py"])
    assert dumped.code == 1 and "No module named 'paddle'" in dumped.err
    assert "looked for paddle, which is not installed in its environment" in dumped.err
    assert "pip install paddlepaddle" in dumped.err


def test_commands_for_torch_programs_say_so(workshop, warm_paddle, capfd):
    from driftline.cli.main import main

    (workshop / "alone.py").write_text(NET + "train(1)\n")
    assert main(["errcheck", "-o", "found", "--", warm_paddle, "alone.py"]) == 2
    assert "the program imported paddle, not torch" in capfd.readouterr().err
    program = ["--", warm_paddle, "alone.py"]
    run = str(workshop / "run")
    assert main(["dump", "-o", run, *program]) == 0
    reason = "the program imported paddle, and experiments need a torch program"
    for words in (
        ["replay", run, "-o", "again"],
        ["noise", "--dtype", "float32", "-o", "noise"],
        ["bisect", "--reference-run", run],
    ):
        capfd.readouterr()
        assert main([*words, *program]) == 2, words
        assert reason in capfd.readouterr().err, words
    assert main(["opcheck", "-i", run]) == 2
    assert "holds no operators: those of paddle are not captured" in capfd.readouterr().err
    assert main(["repeat", "-k", "2", *program]) == 0, "which needs digests alone"
    assert "deterministic: " in capfd.readouterr().out


def test_no_variant_of_a_paddle_program_is_tried_twice(workshop, warm_paddle, capfd):
    from driftline.cli.main import main

    (workshop / "counted.py").write_text(NET + "open('runs', 'a').write('x')\ntrain(1)\n")
    assert main(["noise", "-o", "noise", "--", warm_paddle, "counted.py"]) == 2
    assert "no variant can be made: the program imported paddle" in capfd.readouterr().err
    assert (workshop / "runs").read_text() == "x"


TWO = """
import sys, warnings
warnings.simplefilter("ignore")
import paddle
import paddle.distributed as dist
from driftline import register_saving_hook

def main():
    paddle.set_device("cpu")
    dist.init_parallel_env()
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.LayerNorm(4))
    model = register_saving_hook(model, "tree", "Linear")
    model = paddle.DataParallel(model)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    x = paddle.arange(8, dtype="float32").reshape([2, 4]) * (dist.get_rank() + 1)
    for _ in range(2):
        model(x).pow(3).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

if __name__ == "__main__":
    dist.spawn(main, nprocs=2, backend="gloo") if "spawn" in sys.argv else main()
"""


@pytest.mark.parametrize("way", ["launch", pytest.param("spawn", marks=pytest.mark.slow)])
def test_two_ranks_leave_two_folders_and_local_gradients_differ_from_reduced_ones(
    way, dump, workshop
):
    (workshop / "two.py").write_text(TWO)
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"]
    command = ["two.py", "spawn"] if way == "spawn" else [*launcher, "--log_dir", "log", "two.py"]
    dumped = dump("--level", "modules,gradients", "--step", "*", run=command)
    assert dumped.code == 0
    assert dumped.folders == ["rank0", "rank1"]
    assert sorted(each["world_size"] for each in dumped.run.processes()) == [2, 2]
    found = {
        (t.key.rank, t.key.port): t.numpy()
        for t in dumped.run.tensors()
        if (t.key.site, t.key.slot, t.key.step) == ("1", "weight", 0)
    }
    local = [found[rank, "param_grad"] for rank in (0, 1)]
    reduced = [found[rank, "optimizer_grad"] for rank in (0, 1)]
    assert np.array_equal(*reduced) and not np.array_equal(*local)
    assert np.allclose(reduced[0], (local[0] + local[1]) / 2, rtol=1e-4, atol=1e-5)
    tree = open_run(workshop / "tree")
    assert {record.key.rank for record in tree.records} == {0, 1}
    for kind, count in (("tensors", 2), ("grads", 4)):
        for rank in (0, 1):
            assert len([*(workshop / "tree" / kind / f"rank_{rank}").iterdir()]) == count
