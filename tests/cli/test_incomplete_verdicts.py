"""INCOMPLETE through the command line: what was compared agrees, and is not enough to tell.

Real dumps of one small program; each case is what a person would do with it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from driftline.cli.main import main
from driftline.comparison.pipeline import compare
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

PROGRAM = """
import os, signal, sys, time, torch
from torch import nn

words = set(sys.argv[1:])

class Attention(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        return self.out(torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v)

class Layer(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.name = "mixer" if "renamed" in words else "attention"
        setattr(self, self.name, Attention(width, fused))
        self.up, self.act, self.down = nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)
    def forward(self, x):
        x = x + getattr(self, self.name)(self.norm(x))
        return x + self.down(self.act(self.up(x)))

class Model(nn.Module):
    def __init__(self, layers, fused):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer(16, fused) for _ in range(layers))
        self.head = nn.Linear(16, 50)
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

torch.set_num_threads(1)
steps = int(next((word[6:] for word in words if word.startswith("steps=")), "1"))
layers = 12 if "deep" in words else 3
torch.manual_seed(0)
model = Model(layers, False).eval()
if "fused" in words:
    plain, model = model.state_dict(), Model(layers, True).eval()
    joined = {
        name: torch.cat([plain[name.replace("qkv", part)] for part in "qkv"])
        if ".qkv." in name else plain[name]
        for name in model.state_dict()
    }
    model.load_state_dict(joined)
ids = torch.arange(6).reshape(1, 6)
if "twice" in words:
    ids = ids.repeat(2, 1)
if "other-row" in words:
    ids = torch.cat([ids, ids + 9])
if "longer" in words:
    ids = torch.arange(8).reshape(1, 8)
called = torch.compile(model, backend="eager") if "compiled" in words else model
if "compiled-layers" in words:
    for layer in model.layers:
        layer.compile(backend="eager")

def stop(*_):
    if "killed" in words:
        time.sleep(2.5)  # what was captured so far is on disk after two seconds
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no memory left")

with torch.no_grad():
    for step in range(steps):
        if {"killed", "raises"} & words and step == steps - 1:
            model.layers[1].register_forward_pre_hook(stop)
        try:
            called(ids)
        except ValueError:
            if "caught" not in words:
                raise
if "raises-after" in words:
    raise RuntimeError("after all steps")
if "status" in words:
    sys.exit(3)
"""

Dump = Callable[..., str]


@pytest.fixture(scope="module")
def dump(
    tmp_path_factory: pytest.TempPathFactory, warm_python: str, request: pytest.FixtureRequest
) -> Dump:
    """Dump the program with these words once; options of `dump` come after `--`."""
    place = tmp_path_factory.mktemp("runs")
    (place / "infer.py").write_text(PROGRAM)
    made: dict[tuple[str, ...], str] = {}

    def run(*words: str, options: tuple[str, ...] = ()) -> str:
        key = (*words, *options)
        if key not in made:
            made[key] = path = str(place / f"run{len(made)}")
            compiles = any("compiled" in word for word in words)
            python = request.getfixturevalue("warm_compiler") if compiles else warm_python
            main(["dump", "-o", path, *options, "--", python, str(place / "infer.py"), *words])
        return made[key]

    return run


def verdict(out: str) -> str:
    """The first sentence, however the terminal broke it."""
    return " ".join(out.partition("\n\n")[0].split())


# --- where programs end


def test_a_killed_program_is_incomplete(driftline: Any, dump: Dump) -> None:
    said = driftline("compare", dump(), dump("killed"))
    assert said.code == 2
    assert verdict(said.out).startswith(
        "INCOMPLETE: the candidate's program was ended by signal 9 (SIGKILL)"
    )
    assert driftline("compare", dump("killed"), dump()).code == 2
    shown = driftline("show", dump("killed")).out
    assert shown.startswith("the program was ended by signal 9 (SIGKILL)")


def test_a_program_killed_before_anything_was_written_is_said_to_be(
    driftline: Any, dump: Dump, tmp_path: Path
) -> None:
    shutil.copytree(dump("killed"), tmp_path / "early")
    (index,) = (tmp_path / "early").glob("rank*/index.jsonl")
    index.write_text("")
    said = driftline("compare", dump(), tmp_path / "early")
    assert said.code == 2
    words = " ".join(said.err.split())
    assert "holds no tensor: its program was ended by signal 9 (SIGKILL)" in words
    assert "hint: let it come to its end, then compare" in words


def test_an_exception_inside_the_model_is_incomplete(driftline: Any, dump: Dump) -> None:
    run = dump("raises", "steps=3", options=("--step", "*"))
    said = driftline("compare", dump("steps=3", options=("--step", "*")), run)
    assert said.code == 2
    first = verdict(said.out)
    assert "left step 2 (ValueError was raised inside layers.1) unfinished" in first
    assert "ended with ValueError: no memory left" in first
    shown = driftline("show", run, "--format", "json").out
    scope = json.loads(shown)["scope"]
    assert (scope["status"], scope["exception"]) == (1, "ValueError: no memory left")


def test_an_exception_that_the_program_expected_is_none(driftline: Any, dump: Dump) -> None:
    run = dump("raises", "caught")
    assert driftline("compare", run, run).code == 0


def test_the_end_after_the_last_step_is_a_note(driftline: Any, dump: Dump) -> None:
    for words, ending in (
        ("raises-after", "ended with RuntimeError: after all steps"),
        ("status", "ended with status 3"),
    ):
        said = driftline("compare", dump(), dump(words))
        assert said.code == 0
        assert verdict(said.out).endswith(f"the candidate's program {ending}")
        assert driftline("show", dump(words)).out.startswith(f"the program {ending}")


def test_it_is_more_than_a_note_where_the_other_side_has_more_steps(
    driftline: Any, dump: Dump
) -> None:
    all_steps = ("--step", "*")
    longer = dump("steps=3", options=all_steps)
    said = driftline("compare", longer, dump("raises-after", options=all_steps))
    assert said.code == 2
    assert "ended with RuntimeError: after all steps, before steps 1-2" in verdict(said.out)
    said = driftline("compare", longer, dump(options=all_steps))
    assert (said.code, "steps 1-2 ran in the reference only" in verdict(said.out)) == (2, True)


# --- how much was covered


def test_a_compiled_model_hides_its_modules(driftline: Any, dump: Dump) -> None:
    said = driftline("compare", dump(), dump("compiled"))
    assert said.code == 2
    first = verdict(said.out)
    assert first.startswith("INCOMPLETE: only 0.0% of the 26 calls of leaf modules")
    assert "the candidate's dump notes: torch.compile: only inputs and outputs" in first
    assert "--graph auto records what runs inside" in first


def test_small_compiled_parts_stand_for_what_is_in_them(driftline: Any, dump: Dump) -> None:
    said = driftline("compare", dump("deep"), dump("deep", "compiled-layers"))
    assert said.code == 0, said.out
    # Of three layers each is more than a tenth of the model.
    assert driftline("compare", dump(), dump("compiled-layers")).code == 2


def test_fused_projections_are_covered(driftline: Any, dump: Dump) -> None:
    said = driftline("compare", dump(), dump("fused"))
    assert said.code == 0, said.out
    assert driftline("compare", dump("fused"), dump()).code == 0


def test_modules_against_modules_and_operators_are_covered(driftline: Any, dump: Dump) -> None:
    operators = dump(options=("--level", "modules", "ops"))
    said = driftline("compare", dump(), operators)
    assert said.code == 0, said.out
    assert driftline("compare", operators, dump()).code == 0


def test_what_filters_exclude_is_named_and_not_missed(driftline: Any, dump: Dump) -> None:
    filtered = dump(options=("--site", "layers.0*"))
    said = driftline("compare", dump(), filtered)
    assert said.code == 0
    assert "the candidate holds only --site layers.0*" in verdict(said.out)
    said = driftline("compare", dump(), dump(), "--site", "layers.1*", "--port", "output")
    assert said.code == 0
    assert "only --site layers.1*, --port output" in verdict(said.out)


def test_a_saved_plan_leaves_out_what_it_does_not_name(
    driftline: Any, dump: Dump, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    driftline("compare", dump(), dump(), "--save-plan", plan, "-q")
    head, *pairs = plan.read_text().split("\n[[pair]]")
    kept = [pair for pair in pairs if "layers.0" in pair]
    plan.write_text("\n[[pair]]".join([head, *kept]))
    said = driftline("compare", dump(), dump(), "--plan", plan)
    assert said.code == 0, said.out
    assert "only the plan" in verdict(said.out)


def test_half_of_a_model_is_incomplete(driftline: Any, dump: Dump) -> None:
    words = ("compare", dump(), dump("renamed"), "--no-structure")
    said = driftline(*words)
    assert said.code == 2
    assert "only 53.8% of the 26 calls of leaf modules" in verdict(said.out)
    # A share of all tensors takes the place of that.
    assert driftline(*words, "--min-coverage", "0.3").code == 0
    said = driftline(*words, "--min-coverage", "0.99")
    assert said.code == 2 and "99.0% are asked for" in verdict(said.out)
    # What is called differently is found by structure.
    assert driftline(*words[:-1]).code == 0


# --- elements, rows and steps


def test_the_smaller_batch_is_repeated_where_rows_are_the_same(driftline: Any, dump: Dump) -> None:
    for pair in ((dump(), dump("twice")), (dump("twice"), dump())):
        said = driftline("compare", *pair)
        assert said.code == 0, said.out
        assert "inputs repeat their rows" in said.out
        table = compare(*pair)
        assert table.covered is not None and table.covered.elements_left_out == 0


def test_other_rows_are_named(driftline: Any, dump: Dump) -> None:
    said = driftline("compare", dump(), dump("other-row"), "--format", "json")
    assert said.code == 2
    document = json.loads(said.out)
    assert document["verdict"] == "incomplete"
    assert "not compared: row 1 of 2 of the candidate" in document["finding"]
    assert document["coverage"]["elements"]["left_out"] > 0
    assert document["coverage"]["left_out"] == ["row 1 of 2 of the candidate"]


def test_tokens_that_only_one_side_has_are_named(driftline: Any, dump: Dump) -> None:
    said = driftline("compare", dump(), dump("longer"), "--port", "input", "--site", "embed")
    assert said.code == 2
    table = compare(dump(), dump("longer"), sites=["embed"])
    assert table.verdict == "incomplete"
    assert "tokens 6-7 of 8 of the candidate" in table.finding


def test_a_saved_plan_keeps_what_was_left_out(driftline: Any, dump: Dump, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    driftline("compare", dump(), dump("other-row"), "--save-plan", plan, "-q")
    said = driftline("compare", dump(), dump("other-row"), "--plan", plan)
    assert said.code == 2 and "row 1 of 2 of the candidate" in verdict(said.out)


def test_steps_that_ran_and_were_not_captured_are_said(
    driftline: Any, dump: Dump, tmp_path: Path
) -> None:
    first = dump("steps=12", options=("--step", "0"))
    said = driftline("compare", first, first)
    assert said.code == 0
    assert verdict(said.out).endswith("step 0 of 12")
    document = json.loads(driftline("compare", first, first, "--format", "json").out)
    assert document["coverage"]["steps"]["compared"] == [0]
    assert document["coverage"]["steps"]["ran"] == {"reference": 12, "candidate": 12}
    page = tmp_path / "page.html"
    driftline("report", first, first, "-o", page, "--no-diagnosis", "-q")
    assert "<dt>Steps</dt><dd>step 0 of 12" in page.read_text()
    # What one side captured besides is left out by the other's selection.
    every, one = (dump("steps=3", options=("--step", steps)) for steps in ("*", "0"))
    assert driftline("compare", every, one).code == 0


def test_a_rank_that_nobody_looked_at_is_named(driftline: Any, tmp_path: Path) -> None:
    def write(name: str, ranks: tuple[int, ...]) -> Path:
        for rank in ranks:
            writer = RunWriter(tmp_path / name, rank=rank, world_size=2)
            values = np.random.default_rng(rank).standard_normal((2, 8)).astype(np.float32)
            for site in ("first", "second"):
                record_into(writer, TensorKey.of(site, "output"), values, class_name="Linear")
            writer.close()
        return tmp_path / name

    both, one = write("both", (0, 1)), write("one", (0,))
    assert driftline("compare", both, both).code == 0
    for sides, name in (((both, one), "reference"), ((one, both), "candidate")):
        said = driftline("compare", *sides)
        assert said.code == 2
        assert f"nothing of rank1 of the {name} was compared" in verdict(said.out)
        assert driftline("compare", *sides, "--rank", "0").code == 0


# --- the word in every output, and the exit codes


def test_the_word_is_in_every_output(driftline: Any, dump: Dump, tmp_path: Path) -> None:
    words = ("compare", dump(), dump("other-row"))
    assert driftline(*words, "--format", "markdown").out.startswith("INCOMPLETE: ")
    assert (
        "::error title=driftline compare::INCOMPLETE: "
        in driftline(*words, "--format", "github").out
    )
    suite = ElementTree.fromstring(driftline(*words, "--format", "junit").out)[0]
    (failure,) = suite.iter("failure")
    assert failure.get("message", "").startswith("INCOMPLETE: ")
    page = tmp_path / "page.html"
    driftline("report", dump(), dump("other-row"), "-o", page, "-q", "--no-diagnosis")
    text = page.read_text()
    assert 'data-verdict="incomplete"' in text and "Not enough was compared to tell" in text
    assert compare(dump(), dump("other-row")).verdict == "incomplete"


def test_incomplete_may_be_allowed(driftline: Any, dump: Dump) -> None:
    words = ("compare", dump(), dump("other-row"), "--allow-incomplete")
    said = driftline(*words)
    assert said.code == 0 and said.out.startswith("INCOMPLETE")
    assert (
        "::warning title=driftline compare::INCOMPLETE"
        in driftline(*words, "--format", "github").out
    )
    suite = ElementTree.fromstring(driftline(*words, "--format", "junit").out)[0]
    assert suite.get("failures") == "0" and suite.find("testcase/skipped") is not None


def test_bisect_exit_says_skip(driftline: Any, dump: Dump, tmp_path: Path) -> None:
    ours, other = dump(), dump("other-row")
    assert driftline("compare", ours, other, "--bisect-exit").code == 125
    assert driftline("compare", ours, ours, "--bisect-exit").code == 0
    assert driftline("compare", ours, other, "--bisect-exit", "--allow-incomplete").code == 0
    # What cannot be compared at all is skipped, too.
    assert driftline("compare", ours, tmp_path / "nothing", "--bisect-exit").code == 125
    assert driftline("compare", ours, ours, "--no-such-option", "--bisect-exit").code == 125
    page = tmp_path / "page.html"
    words = ("report", ours, other, "-o", page, "-q", "--no-diagnosis", "--force")
    assert driftline(*words).code == 0
    assert driftline(*words, "--bisect-exit").code == 125
    table = tmp_path / "table"
    driftline("compare", ours, other, "-o", table, "-q")
    assert driftline("check", table, "--max", "relative_l2=0.1", "--bisect-exit").code == 125


def test_a_table_and_merged_shards_say_the_same(driftline: Any, dump: Dump, tmp_path: Path) -> None:
    for other in (dump("killed"), dump("other-row"), dump("compiled")):
        folder = tmp_path / os.path.basename(other)  # noqa: PTH119
        whole = driftline("compare", dump(), other, "-o", folder / "table")
        for shard in ("1/2", "2/2"):
            driftline("compare", dump(), other, "--shard", shard, "-o", folder / "parts")
        merged = driftline("merge", folder / "parts")
        assert (merged.code, merged.out) == (whole.code, whole.out)
        checked = driftline("check", folder / "table", "--max", "relative_l2=0.1")
        assert checked.code == 2 and verdict(checked.out) == verdict(whole.out)
        assert driftline("show", folder / "table").out == whole.out


def test_a_dump_says_what_people_need_next(
    capfd: pytest.CaptureFixture[str], warm_python: str, tmp_path: Path
) -> None:
    (tmp_path / "infer.py").write_text(PROGRAM)
    words = ["--", warm_python, str(tmp_path / "infer.py"), "steps=3"]
    assert main(["dump", "-o", str(tmp_path / "run"), "--step", "0", *words]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert any(
        "select all steps with --step '*', or these with --step 1-2" in line for line in lines
    )
    assert "CANDIDATE (if this is the candidate: driftline compare REFERENCE" in lines[-1]
