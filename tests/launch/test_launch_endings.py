"""How a program ends decides the exit status, and an empty dump says why it is empty."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

from support.programs import running


def write(path, text):
    path.write_text(textwrap.dedent(text))


UNTIL_WRITTEN = """
import os, pathlib, signal, time
signal.alarm(100)  # whoever waits for this program has given up
index = pathlib.Path("out/rank0/index.jsonl")
while not index.exists() or index.read_text().count("\\n") < 16:
    time.sleep(0.05)
"""
"""Waits for the writing thread, which works ten times a second."""


def test_the_programs_own_failure_wins_and_what_it_computed_is_kept(quick, workshop):
    (workshop / "fails.py").write_text("from model import run\nrun()\nraise RuntimeError('boom')\n")
    dumped = quick(run=["fails.py"])
    assert dumped.code == 1
    assert "RuntimeError: boom" in dumped.err
    assert "the program ended with status 1" in dumped.err
    assert dumped.run.sealed and len(dumped.run)


def test_a_killed_program_gives_128_plus_the_signal_and_a_readable_run(dump, workshop):
    die = "os.kill(os.getpid(), signal.SIGTERM)\n"
    dumped = dump(run=["-c", "from model import run\nrun()\n" + UNTIL_WRITTEN + die])
    assert dumped.code == 128 + signal.SIGTERM
    assert "the program was ended by signal 15 (SIGTERM)" in dumped.err
    assert len(dumped.run) and not dumped.run.sealed
    assert dumped.run.get(site="last", port="output").numpy().shape == (2, 2)


def test_a_status_of_the_program_is_passed_on_although_nothing_was_captured(dump):
    dumped = dump(argv=["bash", "-c", "exit 7"])
    assert dumped.code == 7
    assert "no Python process could be reached" in dumped.err


def test_a_request_to_end_reaches_the_program(workshop):
    write(
        workshop / "waits.py",
        """
        import signal, sys, time
        def leave(*_):
            print("asked to leave", flush=True)
            sys.exit(5)
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        time.sleep(60)
        """,
    )
    words = ["-m", "driftline", "dump", "-o", "out", "--", sys.executable, "waits.py"]
    with running([sys.executable, *words], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.terminate()
        assert launcher.stdout.readline() == "asked to leave\n"
        assert launcher.wait(timeout=120) == 5


def test_an_interrupt_is_the_programs_business(workshop):
    write(
        workshop / "loops.py",
        """
        import time
        from model import run
        run()
        try:
            print("up", flush=True)
            for _ in range(600):  # a signal just before one long sleep would not end it
                time.sleep(0.1)
        except KeyboardInterrupt:
            print("bye", flush=True)
        """,
    )
    words = ["-m", "driftline", "dump", "-o", "out", "--", sys.executable, "loops.py"]
    with running(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite that was started in the background ignores Ctrl-C, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        out, err = launcher.communicate(timeout=120)
    assert (out, launcher.returncode) == ("bye\n", 0), err
    assert "tensors" in err


def test_no_python_no_torch_and_no_module_are_told_apart(dump, workshop):
    dumped = dump(argv=["true"])
    assert dumped.code == 2 and "no Python process could be reached" in dumped.err
    assert not dumped.path.exists()  # the next try can use the name
    (workshop / "bare.py").write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    dumped = dump(run=["bare.py"])
    assert dumped.code == 2
    assert "torch was imported, but no module was called" in dumped.err
    assert "--level ops also sees operators" in dumped.err


def test_filters_that_leave_nothing_are_named(quick, workshop):
    dumped = quick("--site", "frist", run=["infer.py"])
    assert dumped.code == 2
    assert "--site 'frist' matches no module; did you mean 'first'" in dumped.err
    dumped = quick("-er", "5,6", run=["infer.py", "2"])
    assert dumped.code == 2
    assert "steps 0-1 ran, and none of them is selected" in dumped.err
    assert "select all steps with --step '*', or these with --step 0-1" in dumped.err


def test_a_pattern_without_a_match_is_said_although_others_matched(quick):
    dumped = quick("-opname", "linear,lstm", run=["infer.py"])
    assert dumped.code == 0
    assert "-opname 'lstm' matches no module" in dumped.err


def test_capture_that_cannot_start_does_not_stop_the_program(dump, workshop):
    write(
        workshop / "spoils.py",
        """
        import sys
        sys.modules["driftline.captures.launch.jobs"] = None
        import model
        print("ran", model.run().shape)
        """,
    )
    dumped = dump(run=["spoils.py"])
    assert dumped.code == 2
    assert dumped.out == "ran torch.Size([2, 2])\n"
    assert "capture could not start (ModuleNotFoundError" in dumped.err


def test_a_program_that_leaves_without_goodbye_loses_nothing(quick, workshop):
    dumped = quick(run=["-c", "import os\nfrom model import run\nrun()\nos._exit(3)\n"])
    assert dumped.code == 3, dumped.err
    assert len(dumped.run) == 16 and dumped.run.sealed
    (workshop / "again.py").write_text(
        "import os, sys\nfrom model import run\nrun()\n"
        "if not sys.argv[1:]:\n    os.execvp(sys.executable, [sys.executable, 'again.py', 'x'])\n"
    )
    dumped = quick("--force", run=["again.py"])
    assert dumped.code == 0, dumped.err
    assert [len([r for r in dumped.run.records if r.key.process == p]) for p in (0, 1)] == [16, 16]


def test_a_tree_cut_short_by_the_disk_says_so_in_the_systems_words(quick, workshop):
    # A limit on the size of files is a full disk that needs no root.
    (workshop / "big.py").write_text(
        "import resource, torch\nfrom torch import nn\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4000))(torch.ones(1, 2))\nprint('went on')\n"
    )
    dumped = quick("--layout", "ait", run=["big.py"])
    assert dumped.code == 0 and "went on" in dumped.out
    assert "driftline: 4 tensors" in dumped.err
    assert "note: the ait tree is incomplete from here on: File too large" in dumped.err
