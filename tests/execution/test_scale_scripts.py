"""The scripts that docs/scale.md shows for Slurm and CI are run, with what those set for them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from written_runs import FILES, write_run

import driftline

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text("utf-8")


def shell(script, place, **environment):
    tools = place.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "driftline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m driftline "$@"\n')
    (tools / "driftline").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-ec", script],
        cwd=place,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )


def kitchen(tmp_path):
    place = tmp_path / "here"
    place.mkdir()
    write_run(place / "ref", 0.0, layers=3)
    write_run(place / "cand", 1e-3, layers=3)
    return place


def same_as_one(place, monkeypatch):
    monkeypatch.chdir(place)
    driftline.compare("ref", "cand").write("one")
    return all(Path("one", n).read_bytes() == Path("table", n).read_bytes() for n in FILES)


def test_the_slurm_array_works(tmp_path, monkeypatch):
    place = kitchen(tmp_path)
    array, after = re.findall(r"```bash\n(#!/bin/bash.*?)```", PAGE, re.DOTALL)
    array = array.replace("/8 --jobs 2", "/3")  # less of the same
    for task in (2, 1, 3):
        done = shell(array, place, SLURM_ARRAY_TASK_ID=str(task))
        assert done.returncode == 0, done.stderr
    assert shell(after, place).returncode == 1
    assert same_as_one(place, monkeypatch)


def test_the_matrix_of_github_actions_works(tmp_path, monkeypatch):
    place = kitchen(tmp_path)
    (workflow,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    compare, merge = re.findall(r"- run: (.*)", workflow)
    shards = re.findall(r"shard: \[(.*)\]", workflow)[0].split(", ")
    for shard in shards:
        done = shell(compare.replace("${{ matrix.shard }}", shard), place)
        assert done.returncode == 0, done.stderr
        artifact = place / "downloaded" / f"part-{shard}"
        artifact.mkdir(parents=True)
        (part,) = (place / "parts").iterdir()
        part.rename(artifact / part.name)
    (place / "parts").rmdir()
    (place / "downloaded").rename(place / "parts")
    done = shell(merge, place, GITHUB_STEP_SUMMARY="")
    assert done.returncode == 1 and "::error" in done.stdout, done.stderr
    assert same_as_one(place, monkeypatch)
