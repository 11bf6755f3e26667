"""However a program starts Python, its models are captured; what it brought along still works."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap
import tomllib
import venv
from pathlib import Path

import numpy as np
import pytest
import torch

from driftline import compare
from support.programs import running

PROJECT = Path(__file__).parents[2]


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))


def test_a_script_is_captured_unchanged_and_its_output_is_its_own(dump, workshop, warm_python):
    plain = subprocess.run(
        [warm_python, "infer.py", "2"], capture_output=True, text=True, timeout=110
    )
    dumped = dump("--exec", f"'{sys.executable}' infer.py 2")
    assert dumped.code == 0, dumped.err
    assert dumped.out == plain.stdout
    assert dumped.folders == ["rank0"]
    run = dumped.run
    assert run.sealed and {key.site for key in (r.key for r in run.records)} == {
        "(root)", "first", "body", "body.0", "body.1", "norm", "last",
    }  # fmt: skip
    x = run.get(site="first", port="input", slot="input").numpy()
    assert np.array_equal(x, np.ones((2, 4), np.float32))
    assert "steps 0-1 (step 0 in full)" in dumped.err
    assert f"{len(run)} tensors" in dumped.err
    assert "driftline compare out" in dumped.err


def test_a_shell_script_with_several_pythons_keeps_them_apart(dump, workshop, warm_python):
    (workshop / "tool").mkdir()
    (workshop / "tool" / "__main__.py").write_text("from model import run\nrun()\n")
    write(
        workshop / "run.sh",
        f"""
        set -e
        "{sys.executable}" -c "print('no torch here')"
        "{warm_python}" infer.py | grep sum > kept.txt
        "{warm_python}" -m tool
        """,
    )
    dumped = dump(argv=["bash", "run.sh"])
    assert dumped.code == 0, dumped.err
    assert dumped.folders == ["rank0", "rank0.p1"]
    assert "2 processes" in dumped.err
    assert dumped.run.sealed
    commands = [fact["command"] for fact in dumped.run.processes()]
    assert sorted("tool" in command for command in commands) == [False, True]


def test_children_of_subprocess_and_of_every_multiprocessing_method_are_captured_and_sealed(
    quick, workshop
):
    write(
        workshop / "family.py",
        """
        import multiprocessing, os, subprocess, sys
        from model import run
        from driftline.captures.torch.device.backend import TorchDeviceBackend

        # As if they were on a device: a thread hands them over later, also while a process ends.
        TorchDeviceBackend.takes = lambda self, tensor: True

        def child():
            run()

        if __name__ == "__main__":
            run()
            subprocess.run([sys.executable, "infer.py"], check=True)
            for method in ("fork", "spawn", "forkserver"):
                process = multiprocessing.get_context(method).Process(target=child)
                process.start()
                process.join()
                assert process.exitcode == 0
        """,
    )
    dumped = quick(run=["family.py"])
    assert dumped.code == 0, dumped.err
    assert dumped.folders == ["rank0", "rank0.p1", "rank0.p2", "rank0.p3", "rank0.p4"]
    run = dumped.run
    assert run.sealed and not run.losses
    per_process: dict[int, list[str]] = {}
    for record in run.records:
        per_process.setdefault(record.key.process, []).append(record.digest)
    assert len({tuple(digests) for digests in per_process.values()}) == 1


def test_workers_of_a_pool_lose_nothing_although_they_are_terminated(quick, workshop):
    write(
        workshop / "pool.py",
        """
        import multiprocessing, sys
        from model import run

        def work(number):
            return float(run().sum())

        if __name__ == "__main__":
            for method in ("fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    pool.map(work, [0])
        """,
    )
    dumped = quick(run=["pool.py"])
    assert dumped.code == 0, dumped.err
    counts = [len([r for r in dumped.run.records if r.key.process == p]) for p in (0, 1)]
    alone = quick("-o", "alone", run=["infer.py"])
    assert f"{counts[0]} tensors" in alone.err and counts[1] == counts[0], dumped.err


def test_torchrun_gives_every_rank_a_folder_and_its_launcher_none(quick, workshop):
    write(
        workshop / "ranks.py",
        """
        import torch.distributed as dist
        import torch
        from model import Net
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        with torch.no_grad():
            y = Net()(torch.ones(2, 4) * (1 + dist.get_rank()))
        dist.all_reduce(y)
        dist.destroy_process_group()
        """,
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    dumped = quick(run=[*torchrun, "ranks.py"])
    assert dumped.code == 0, dumped.err
    assert dumped.folders == ["rank0", "rank1"]
    assert dumped.run.get(site="first", port="input", slot="input", rank=1).numpy()[0, 0] == 2.0


def test_ranks_told_to_torch_only_are_known_and_can_be_chosen(quick, workshop):
    write(
        workshop / "spawned.py",
        """
        import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
        from model import run

        def work(rank, store):
            dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
            run()
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(work, (tempfile.mktemp(),), nprocs=2)
        """,
    )
    dumped = quick("--rank", "1", run=["spawned.py"])
    assert dumped.code == 0, dumped.err
    assert dumped.folders == ["rank1"]


def test_the_users_path_and_sitecustomize_still_work(dump, workshop, monkeypatch):
    (workshop / "mine").mkdir()
    (workshop / "mine" / "sitecustomize.py").write_text(
        "import builtins\nbuiltins.customized = 1\n"
    )
    (workshop / "mine" / "treasure.py").write_text("value = 42\n")
    paths = [str(workshop / "mine"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    write(
        workshop / "asks.py",
        """
        import sys, treasure, sitecustomize
        from model import run
        run()
        print(customized, treasure.value, sitecustomize.__file__.endswith("mine/sitecustomize.py"))
        """,
    )
    dumped = dump(run=["asks.py"])
    assert dumped.code == 0, dumped.err
    assert dumped.out == "1 42 True\n"
    assert len(dumped.run)


def test_looking_for_torch_does_not_import_it(dump, workshop):
    write(
        workshop / "asks.py",
        """
        import importlib.util, sys
        spec = importlib.util.find_spec("torch")
        print(spec is not None, "torch" in sys.modules, "numpy" in sys.modules)
        print(sorted(m for m in sys.modules if m.startswith("driftline")))
        """,
    )
    dumped = dump(run=["asks.py"])
    assert dumped.code == 2
    first, second = dumped.out.splitlines()
    assert first == "True False False"
    assert (
        second == "['driftline', 'driftline.captures', 'driftline.captures.launch', "
        "'driftline.captures.launch.bootstrap']"
    )
    assert "1 Python process ran, none imported torch or paddle" in dumped.err


def test_input_is_passed_on_to_the_program(workshop, warm_python):
    write(
        workshop / "chat.py",
        """
        from model import run
        name = input("who? ")
        run()
        print("hello", name)
        """,
    )
    words = [sys.executable, "-m", "driftline", "dump", "-o", "out", "--", warm_python, "chat.py"]
    result = subprocess.run(
        words, input="Ada\n", capture_output=True, text=True, check=False, timeout=110
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "who? hello Ada\n"


def test_a_terminal_stays_a_terminal(workshop):
    (workshop / "asks.py").write_text(
        "import os\nsame_group = os.getpgrp() == os.getpgid(os.getppid())\n"
        "print(*map(os.isatty, range(3)), same_group)\n"
    )
    words = [
        sys.executable,
        "-m",
        "driftline",
        "dump",
        "-o",
        "out",
        "--",
        sys.executable,
        "asks.py",
    ]
    master, slave = pty.openpty()
    with running(words, stdin=slave, stdout=slave, stderr=slave) as launcher:
        os.close(slave)
        answer = b""
        while b"\n" not in answer:
            answer += os.read(master, 1000)
        assert answer.split() == [b"True"] * 4
        assert launcher.wait(timeout=120) == 2  # no torch, so nothing was captured
    os.close(master)


@pytest.fixture
def foreign(workshop, monkeypatch) -> Path:
    """An environment with torch and without driftline: a venv that borrows this one's packages."""
    home = workshop / "foreign"
    venv.create(home, with_pip=False, symlinks=True)
    [site] = home.glob("lib/python*/site-packages")
    # A path line does not run the .pth files of the folder it names: driftline is not found there.
    (site / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return home


def test_a_foreign_environment_sees_driftline_and_nothing_else_of_ours(dump, workshop, foreign):
    write(
        workshop / "foreigner.py",
        """
        import os, sys
        from model import run
        run()
        [ours] = [p for p in sys.path if "driftline-" in p]
        print(sorted(n for n in os.listdir(ours) if not n.startswith("__")))
        """,
    )
    dumped = dump(argv=[str(foreign / "bin" / "python"), "foreigner.py"])
    assert dumped.code == 0, dumped.err
    assert dumped.out == "['driftline', 'sitecustomize.py', 'usercustomize.py']\n"
    assert len(dumped.run)


def test_isolated_python_is_reached_only_through_an_installation(dump, workshop, foreign):
    (workshop / "alone.py").write_text("import sys\nsys.path.insert(0, '.')\nimport infer\n")
    isolated = [str(foreign / "bin" / "python"), "-I", "alone.py"]
    missed = dump(argv=[*isolated[:2], "-c", "pass"])
    assert missed.code == 2 and "no Python process could be reached" in missed.err
    assert not missed.path.exists()

    [site] = foreign.glob("lib/python*/site-packages")
    build = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    for file in build["generate"]:
        (site / file["path"]).write_text(file["template"])
    broken = subprocess.run(
        [*isolated[:2], "-c", "print('up')"],
        env={"DRIFTLINE_LAUNCH": "/nowhere/plan.json"},
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    assert (broken.stdout, broken.stderr) == ("up\n", "")  # installed, and driftline itself missing

    (site / "_driftline_source.pth").write_text(str(PROJECT / "src") + "\n")
    lines = f"{' '.join(isolated)} && PYTHONPATH=. {isolated[0]} infer.py"
    reached = dump(argv=["bash", "-c", lines])
    assert reached.code == 0, reached.err
    assert reached.folders == ["rank0", "rank0.p1"]


def test_a_comparison_says_which_torch_computed_its_sides(quick):
    dumped = quick(run=["infer.py"])
    table = compare(dumped.path, dumped.path)
    about = table.reference.about
    assert about["versions"]["torch"] == torch.__version__
    assert about["framework"] == "torch" and about["default_dtype"] == "float32"
    assert about["command"][-1] == "infer.py"
