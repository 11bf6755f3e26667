"""Programs killed at any moment: a run is there from the first watched call on, and what it lists
is whole.

A warm parent forks the programs, so that a thousand of them take minutes and not an hour of
importing torch. Each is killed after a random time; the parent knows what the program had computed
by then, because the program writes a line at the end of every call.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import json, os, random, select, shutil, signal, sys, threading, time
import torch
import driftline, driftline.errors
from driftline.runs.reader import open_run
from driftline.runs.verify import verify

SAFE = 0.2
BEAT = 0.01

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 64)

    def forward(self, x, log):
        # By now the capture has seen the call, and there must be a run.
        os.write(log, b"begun %d\\n" % time.monotonic_ns())
        return self.second(self.first(x))

def beat(log):
    # A thread like the one that writes: how long it gets no turn, that one may not get one either.
    while True:
        os.write(log, b"beat %d\\n" % time.monotonic_ns())
        time.sleep(BEAT)

def starved(beats, killed):
    # Nanoseconds without a turn in the last moments.
    moments = [at for at in beats if at > killed - 2 * SAFE * 1e9] + [killed]
    gaps = (later - earlier for earlier, later in zip(moments, moments[1:]))
    return sum(max(0, gap - 2 * BEAT * 1e9) for gap in gaps)

def program(folder, log, pause):
    signal.alarm(60)  # its parent is gone
    torch.set_num_threads(1)
    model = Model()
    x = torch.ones(8, 64)
    watch = threading.Thread(target=beat, args=(log,), daemon=True)
    with driftline.capture(model, folder, steps="*"):
        time.sleep(pause)
        while True:
            x = model(x, log)
            os.write(log, b"done %d\\n" % time.monotonic_ns())
            if not watch.ident:
                watch.start()
            time.sleep(0.01)

def trial(folder, dice, number):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            program(folder, writer, dice.uniform(0, 0.05))
        finally:
            os._exit(3)
    os.close(writer)
    # Every third one while it starts, the others from their first watched call on.
    if number % 3 == 0:
        time.sleep(dice.uniform(0.0, 0.4))
    else:
        select.select([reader], [], [], 20)
        time.sleep(dice.choice((0.0, 0.01, 0.3, 1.0)) * dice.random())
    killed = time.monotonic_ns()
    os.kill(pid, (signal.SIGKILL, signal.SIGTERM)[number % 2])
    os.waitpid(pid, 0)
    with os.fdopen(reader) as stream:
        lines = [line.split() for line in stream.read().splitlines()]
    begun = sum(word == "begun" for word, _ in lines)
    steps = [int(time) for word, time in lines if word == "done"]
    waited = starved([int(time) for word, time in lines if word == "beat"], killed)
    result = {"begun": begun, "done": len(steps), "exists": os.path.isdir(folder)}
    if not result["exists"]:
        return result
    try:
        run = open_run(folder)
    except driftline.errors.BadRun:
        result["exists"] = False  # killed between the folder and its first file
        return result
    result["tensors"] = len(run)
    result["losses"] = [loss.reason for loss in run.losses]
    result["torn"] = [str(loss) for loss in verify(run) if loss.key is not None]
    last = max((record.key.step for record in run.records), default=-1)
    for word, room in (("late", SAFE * 1e9), ("unexcused", SAFE * 1e9 + waited)):
        result[word] = max(0, sum(1 for at in steps if at < killed - room) - (last + 1))
    result["waited"] = waited / 1e9
    return result

# Once in the parent: what a capture imports at its first use takes longer than a program lives.
torch.set_num_threads(1)
warm = os.path.join(sys.argv[1], "warm")
model = Model()
with driftline.capture(model, warm, steps="*"), open(os.devnull, "wb") as nothing:
    model(torch.ones(8, 64), nothing.fileno())
list(verify(open_run(warm)))
dice = random.Random(int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    folder = os.path.join(sys.argv[1], "run%d" % number)
    print(json.dumps(trial(folder, dice, number)), flush=True)
    shutil.rmtree(folder, ignore_errors=True)
"""


def kill(folder: Path, seed: int, count: int) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(folder), str(seed), str(count)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100 + 2 * count,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(trials: list[dict[str, object]]) -> None:
    # Nothing torn, nothing unreadable, and a run wherever a call was seen.
    assert not [trial for trial in trials if trial.get("torn")]
    assert not [trial for trial in trials if trial["begun"] and not trial["exists"]]
    for trial in trials:
        losses = trial.get("losses", [])
        if not trial["begun"] and trial["exists"]:
            assert losses, trial
        if trial["begun"] and not trial["tensors"]:
            assert losses == ["the program was killed before its first tensor was written"], trial
        elif trial["begun"]:
            assert any("was not closed: it was killed" in loss for loss in losses), trial
    # What was computed 0.2 s before the kill is there, in all of them. The writing thread needs a
    # core for that, and a busy machine may give it none: what another thread of the same program
    # had to wait for its turn comes on top.
    late = [trial for trial in trials if trial.get("late")]
    assert not [trial for trial in trials if trial.get("unexcused")], late
    early = sum(1 for trial in trials if trial["begun"] and not trial["tensors"])
    print(
        f"{len(trials)} kills: {sum(bool(t['begun']) for t in trials)} after the first call, "
        f"{early} before the first tensor, {len(late)} lost more than 0.2 s, 0 torn"
    )


def test_killed_programs_leave_a_run_that_says_so(tmp_path: Path) -> None:
    check(kill(tmp_path, 1, 24))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_kills(tmp_path: Path) -> None:
    check(kill(tmp_path, random.randrange(1 << 30), 1000))
