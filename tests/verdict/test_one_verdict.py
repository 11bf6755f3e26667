"""One judgement, whoever asks: compare, diagnose, report, check of a table and merge, by all
evidence; and more evidence never turns a FAIL into a PASS."""

from __future__ import annotations

import copy
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import driftline
from driftline.cli.main import main
from driftline.comparison.tolerance.tolerance import HALF, REST
from driftline.comparison.verdict.own_error import CHOICES

PROGRAM = """
import sys, torch
from torch import nn

torch.set_num_threads(1)
words = set(sys.argv[1:])

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(32, 50)
    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if "own-code" in words and number == 2:
                x = x * 1.3
        return self.head(x)

torch.manual_seed(0)
model = Model().eval()
if "scaled" in words:
    model.layers[1].down.register_forward_hook(lambda module, args, made: made * 1.2)
if "bf16" in words:
    model.bfloat16()
if __name__ == "__main__":
    with torch.no_grad():
        model(torch.arange(48).reshape(2, 24))
"""
SITES = {"own-code": "(root)", "scaled": "layers.1.down", "clean": None}
EVIDENCE = {
    "two runs": (),
    "replay": ("replay",),
    "all": ("replay", "noise", "bisect"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """Runs of the program, and experiments with it, by the commands that make them."""
    place = tmp_path_factory.mktemp("verdicts")
    program = place / "program.py"
    program.write_text(PROGRAM)
    reference = ("--exec", f"{warm_python} {program}")
    main(["dump", "-o", str(place / "ref"), *reference])
    for name in SITES:
        candidate = ("--exec", f"{warm_python} {program} bf16 {name}")
        main(["dump", "-o", str(place / name), *candidate])
        main(["replay", str(place / name), "-o", str(place / f"replay-{name}"), *reference])
    like = ("--like", str(place / "clean"), "--variant", "plain", "--variant", "dither")
    main(["noise", *like, "-o", str(place / "noise"), *reference])
    # What bisect prints where a site explains the end: the form of its JSON, cut to what is read.
    for name, site in SITES.items():
        proof: dict[str, Any] = {"schema": 1, "verdict": "spread", "site": "", "explains": 0.0}
        if site is not None:
            proof |= {"verdict": "found", "site": site, "explains": 0.93}
        proof |= {"own_code": False, "metric": "relative_l2", "slot": "0", "path": [], "tries": []}
        proof |= {"baseline": 0.3, "before": 0.3, "after": 0.02, "executions": 7}
        (place / f"bisect-{name}.json").write_text(json.dumps(proof))
    return place


def options_of(place: Path, name: str, kinds: tuple[str, ...]) -> list[object]:
    files = {"replay": f"replay-{name}", "noise": "noise", "bisect": f"bisect-{name}.json"}
    return [word for kind in kinds for word in (f"--{kind}", place / files[kind])]


def answer(said: Any) -> tuple[int, str, str | None]:
    """Exit code, verdict and the site to look at, of JSON."""
    document = json.loads(said.out)
    return said.code, document["verdict"], document["first_site"] or None


@pytest.mark.parametrize("kinds", EVIDENCE.values(), ids=EVIDENCE.keys())
@pytest.mark.parametrize("name", SITES)
def test_every_command_gives_the_same_verdict(
    name: str, kinds: tuple[str, ...], place: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    pair, options = (place / "ref", place / name), options_of(place, name, kinds)
    site = SITES[name]
    expected = (0, "pass", None) if site is None else (1, "fail", site)
    told = command("compare", *pair, *options, "--format", "json", "-o", tmp_path / "table")
    assert answer(told) == expected, told.out
    assert answer(command("diagnose", *pair, *options, "--format", "json")) == expected
    # What is stored is judged alike, with nothing but the table at hand.
    alone = tmp_path / "alone" / "table"
    shutil.copytree(tmp_path / "table", alone)
    again = command("check", alone, "--format", "json")
    assert answer(again) == expected
    assert json.loads(again.out)["finding"] == json.loads(told.out)["finding"]
    assert answer(command("diagnose", alone, "--format", "json")) == expected
    # A page takes a second; all of the evidence at once is the hardest to keep.
    for words in ((alone,), (*pair, *options)) if len(kinds) == 3 else ():
        page = tmp_path / "page.html"
        said = command("report", *words, "-o", page, "--force", "--bisect-exit", "-q")
        assert said.code == expected[0], words
        assert f'data-verdict="{expected[1]}"' in page.read_text()


def test_a_stored_table_takes_further_evidence(
    place: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    """A report of a table with a replay judges as a comparison with that replay does."""
    pair, replay = (place / "ref", place / "scaled"), ("--replay", place / "replay-scaled")
    command("compare", *pair, "-o", tmp_path / "table", "-q")
    command("report", tmp_path / "table", *replay, "-o", tmp_path / "page.html", "-q")
    assert 'data-verdict="fail"' in (tmp_path / "page.html").read_text()


def test_bisection_is_not_outvoted_by_silence(
    place: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    """Two runs, replay and noise runs accuse nobody; substitution does, and that decides."""
    kinds = ("replay", "noise")
    pair, options = (place / "ref", place / "clean"), options_of(place, "clean", kinds)
    proof = json.loads((place / "bisect-scaled.json").read_text())
    (tmp_path / "proof.json").write_text(json.dumps(proof | {"site": "layers.2.up"}))
    for verb in ("compare", "diagnose"):
        words = (verb, *pair, *options, "--bisect", tmp_path / "proof.json", "--format", "json")
        assert answer(command(*words)) == (1, "fail", "layers.2.up")


@pytest.mark.parametrize("trouble", [CHOICES, "it draws random numbers"])
def test_a_replay_that_can_say_nothing_of_a_site_acquits_it_of_nothing(
    trouble: str, place: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    """Two runs convict a site; that a replay is silent about it is no evidence for it."""
    words = options_of(place, "scaled", ("replay",))
    command("compare", place / "ref", place / "scaled", *words, "-o", tmp_path / "table", "-q")
    path = tmp_path / "table" / "table.json"
    document = json.loads(path.read_text())
    (own,) = (entry for site, entry in document["evidence"]["replayed"] if site == SITES["scaled"])
    assert own["introduced"]
    own |= {"introduced": False, "trouble": trouble, "noise": "nan", "reason": ""}
    path.write_text(json.dumps(document))
    said = command("check", tmp_path / "table", "--format", "json")
    assert answer(said) == (1, "fail", SITES["scaled"]), said.out


def test_evidence_and_limits_are_two_ways_to_judge(
    place: Path, command: Callable[..., Any]
) -> None:
    options = options_of(place, "scaled", ("replay",))
    said = command("compare", place / "ref", place / "scaled", *options, "--max", "relative_l2=1")
    assert said.code == 2 and "limits were asked for" in said.err


def test_damaged_evidence_of_a_table_is_no_verdict(
    place: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    words = options_of(place, "scaled", ("replay", "noise"))
    command("compare", place / "ref", place / "scaled", *words, "-o", tmp_path / "table", "-q")
    path = tmp_path / "table" / "table.json"
    document = json.loads(path.read_text())
    for spoiled in ({"replayed": [["a", {}]]}, {"floor": {"errors": [[1]]}}, {"proven": 3}):
        path.write_text(json.dumps({**document, "evidence": spoiled}))
        said = command("check", tmp_path / "table")
        assert said.code == 2 and "evidence of this table is damaged" in said.err


def test_merged_shards_take_the_second_look(tmp_path: Path, command: Callable[..., Any]) -> None:
    """An error that one half of the tokens shows is an accident, to shards as well."""
    (tmp_path / "program.py").write_text(PROGRAM)
    model = runpy.run_path(str(tmp_path / "program.py"))["model"]
    ids = torch.arange(48).reshape(2, 24)
    other = copy.deepcopy(model).bfloat16()

    def spoil(module: Any, args: Any, made: torch.Tensor) -> torch.Tensor:
        made = made.clone()
        made.view(48, -1)[1] *= 1.25
        return made

    other.layers[1].down.register_forward_hook(spoil)
    for name, side in (("ref", model), ("cand", other)):
        with torch.no_grad(), driftline.capture(side, tmp_path / name):
            side(ids)
    pair = (tmp_path / "ref", tmp_path / "cand")
    for number in (1, 2, 3):
        command("compare", *pair, "--shard", f"{number}/3", "-o", tmp_path / "parts", "-q")
    merged = command("merge", tmp_path / "parts", "--format", "json")
    told = command("compare", *pair, "--format", "json")
    assert (merged.code, json.loads(merged.out)) == (told.code, json.loads(told.out))
    table = driftline.compare(*pair)
    assert told.code == 0 and any(HALF in row.metrics for row in table.rows)
    assert driftline.merge(tmp_path / "parts") == table
    # Without that look the site would be accused.
    rows = [row._replace(metrics=_without_look(row.metrics)) for row in table.rows]
    assert driftline.check(table.with_rows(rows)).verdict == "fail"


def _without_look(metrics: Any) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in (HALF, REST)}


SHARED = """
import sys, torch
from torch import nn

torch.set_num_threads(1)
words = set(sys.argv[1:])
WIDTHS = (32, 48, 24, 40, 32)

class Block(nn.Module):
    def __init__(self, rows, columns, act):
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(rows, columns), nn.LayerNorm(columns), act
    def forward(self, x):
        return self.act(self.norm(self.linear(x)))

torch.manual_seed(0)
act = nn.SiLU()
model = nn.Sequential(*(Block(*widths, act) for widths in zip(WIDTHS, WIDTHS[1:]))).eval()
x = torch.randn(20, 32)
with torch.no_grad():
    if "warm" in words:
        model(x)
    if "bf16" in words:
        model, x = model.bfloat16(), x.bfloat16()
    if "replaced" in words:
        model[2].act = nn.ReLU()
    if "copied" in words:
        model[2].act = nn.SiLU()
    model(x)
"""


@pytest.mark.parametrize("start", ["warm", "cold"])
@pytest.mark.parametrize(("child", "verdict"), [("replaced", "fail"), ("copied", "pass")])
def test_a_replay_acquits_nobody_around_a_child_that_nobody_judged(
    start: str,
    child: str,
    verdict: str,
    command: Callable[..., Any],
    tmp_path: Path,
    warm_python: str,
) -> None:
    """One use of a shared activation is another module, which the reference never calls; after a
    warm-up the step in which it is called keeps no values, so that none of its calls is replayed.
    """
    (tmp_path / "program.py").write_text(SHARED)
    program = f"{warm_python} {tmp_path / 'program.py'} {start}"
    reference, candidate, replay = (tmp_path / name for name in ("ref", "cand", "replay"))
    command("dump", "-o", reference, "--exec", program)
    command("dump", "-o", candidate, "--exec", f"{program} bf16 {child}")
    made = command("replay", candidate, "-o", replay, "--exec", program)
    assert ("1 unknown" in made.out + made.err) == (start == "warm"), made
    for more in ((), ("--replay", replay)):
        for verb in ("compare", "diagnose"):
            said = command(verb, reference, candidate, *more, "--format", "json")
            assert answer(said)[1] == verdict, (verb, more, said.out)
    if (start, child) == ("cold", "replaced"):
        assert answer(said)[2] == "2", said.out
