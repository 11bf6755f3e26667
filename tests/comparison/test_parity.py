"""Every way into a comparison gives one table: the same rows, statuses and verdict for each option.

`driftline.compare` in one process is the measure. Each option is given alone, to each entry point
that takes it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.alignment.align import AlignOptions
from driftline.comparison.options import CompareOptions
from driftline.comparison.table.table import Table
from driftline.diagnosis import api as diagnosis_api
from driftline.diagnosis.pipeline import Assembly
from driftline.errors import BadFile
from driftline.reporting.html.report import PageOptions, page_of
from driftline.reporting.viewer.api import serve
from driftline.runs.memory import MemorySink
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

PAD_MASK = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], np.int64)
WIDTH = 8

# --- runs


def write_decoder(path: Path, framework: str, *, candidate: bool, drift: bool = False) -> Path:
    """Three layers over a padded batch, two steps; a candidate holds other numbers at its pads."""
    writer = RunWriter(path, seal_at_exit=False)
    writer.describe(framework=framework)
    draw = np.random.default_rng(0)
    noise = np.random.default_rng(1)
    for step in (0, 1):
        for name, values in _layers(draw, noise, step, candidate=candidate, drift=drift).items():
            site, port, slot = name.split("/")
            key = TensorKey.of(site, port, slot, step=step)  # type: ignore[arg-type]
            record_into(writer, key, values)
    writer.close()
    return path


def _layers(
    draw: np.random.Generator,
    noise: np.random.Generator,
    step: int,
    *,
    candidate: bool,
    drift: bool,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model/input/input_ids": np.arange(10).reshape(2, 5) + step,
        "model/input/attention_mask": PAD_MASK,
    }
    for layer in range(3):
        hidden = draw.standard_normal((2, 5, WIDTH)).astype(np.float32)
        error = noise.standard_normal(hidden.shape).astype(np.float32)
        if candidate:
            hidden += 1e-6 * error
            hidden[1, 0] = 3.0 + layer
            if layer == 1:
                hidden[1, 1] = np.nan
            if drift and layer == 2:
                hidden[0] += 0.05 * error[0]
        # One layer has another name in the candidate: what maps and structure are for.
        name = "block.middle" if candidate and layer == 1 else f"layers.{layer}"
        found[f"{name}/output/0"] = hidden
    head = draw.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    found["head/param/weight"] = head + np.float32(1e-7) if candidate else head
    found["only.candidate/output/0" if candidate else "only.reference/output/0"] = head[0]
    return found


def write_ranks(path: Path, ranks: int, *, odd: bool = False) -> Path:
    """A tensor that is cut over ranks and one that each of them holds."""
    wide = np.random.default_rng(5).standard_normal((4, 8)).astype(np.float32)
    copied = np.random.default_rng(6).standard_normal(16).astype(np.float32)
    for rank in range(ranks):
        writer = RunWriter(path, rank=rank, world_size=ranks, seal_at_exit=False)
        for name, values in (
            ("wide", np.split(wide, ranks, axis=1)[rank]),
            ("copied", copied + np.float32(0.5 * (odd and rank == 1))),
        ):
            key = TensorKey.of(name, "output", "0", rank=rank)
            record_into(writer, key, values)
        writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parity")
    write_decoder(place / "ref", "torch", candidate=False)
    # Two engines that differ at pads only, one engine that does, and a real difference besides.
    write_decoder(place / "engine", "onnxruntime", candidate=True)
    write_decoder(place / "same", "torch", candidate=True)
    write_decoder(place / "drift", "onnxruntime", candidate=True, drift=True)
    write_ranks(place / "whole", 1)
    write_ranks(place / "cut", 2, odd=True)
    np.save(place / "mask.npy", PAD_MASK)
    (place / "pairs.json").write_text('{"layers.1": "block.middle"}')
    from driftline.alignment.plan_file import write_plan

    chosen = driftline.align(place / "ref", place / "engine", sites=["layers.*"])
    write_plan(chosen, place / "plan.toml", "ref", "cand")
    clean = driftline.compare(place / "ref", place / "engine")
    driftline.calibrate([clean], metrics=["relative_l2"], sites=["layers.*"]).write(
        place / "thresholds.json"
    )
    return place


TOLERANCES: dict[str, dict[str, Any]] = {
    "metric": {"metrics": ["kl"]},
    "metric and its limit": {"metrics": ["kl"], "limits": {"kl": 0.5}},
    "limit of kl alone": {"limits": {"kl": 0.001}},
    "limit of sqnr alone": {"limits": {"sqnr": 40}},
    "limit": {"limits": {"relative_l2": 1e-7}},
    "rtol": {"rtol": 1e-4},
    "atol": {"atol": 1e-3},
    "coverage": {"min_coverage": 0.999},
}
"""What is allowed. Values of `{folder}` stand for files of the fixture."""
BELONGING: dict[str, dict[str, Any]] = {
    "sites": {"sites": ["layers.*", "head"]},
    "ports": {"ports": ["output"]},
}
ALIGNMENT: dict[str, dict[str, Any]] = {
    **BELONGING,
    "maps": {"maps": ["layers.1=block.middle"]},
    "mapping": {"mapping": "{folder}/pairs.json"},
    "mask captured": {"masks": ["captured"]},
    "mask file": {"masks": ["{folder}/mask.npy"]},
    "step map": {"step_map": {0: 1}},
    "plan": {"plan": "{folder}/plan.toml"},
    "not structural": {"structural": False},
}
UNMASKED = {"masks": ["none"]}
THRESHOLDS = {"thresholds": "{folder}/thresholds.json"}
EVERYTHING: dict[str, dict[str, Any]] = {
    "nothing": {},
    **TOLERANCES,
    "thresholds": THRESHOLDS,
    **ALIGNMENT,
    "pads count": UNMASKED,
    "threads": {"threads": 1},
}
DECIDED_BY_PADS = ("nothing", "limit of kl alone", "thresholds", "mask captured", "pads count")
CASES = [
    *((name, "drift") for name in EVERYTHING),
    *((name, candidate) for name in DECIDED_BY_PADS for candidate in ("engine", "same")),
]
"""Each option with a candidate that differs, and those that matter with one that does at pads."""


def _filled(folder: Path, option: dict[str, Any]) -> dict[str, Any]:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{folder}", str(folder))
        return [fill(item) for item in value] if isinstance(value, list) else value

    return {name: fill(value) for name, value in option.items()}


def assert_same(table: Table, measure: Table) -> None:
    """One table: rows with all their numbers, verdict, words."""
    assert [(str(row.key), row.status) for row in table.rows] == [
        (str(row.key), row.status) for row in measure.rows
    ]
    # As text: a NaN is no other NaN.
    assert [repr(row.as_json()) for row in table.rows] == [
        repr(row.as_json()) for row in measure.rows
    ]
    assert (table.verdict, table.first_site) == (measure.verdict, measure.first_site)
    assert (table.finding, table.notes) == (measure.finding, measure.notes)
    assert [column.name for column in table.columns] == [column.name for column in measure.columns]


# --- processes, parts, clusters


def in_processes(reference: Path, candidate: Path, **options: Any) -> Table:
    return driftline.compare(reference, candidate, jobs=2, **options)


def in_shards(reference: Path, candidate: Path, **options: Any) -> Table:
    parts = [driftline.compare_shard(reference, candidate, f"{n}/3", **options) for n in (1, 2, 3)]
    return driftline.merge(parts)


@pytest.mark.parametrize(("name", "candidate"), CASES)
def test_shards_give_the_table_of_compare(folder: Path, name: str, candidate: str) -> None:
    option = _filled(folder, EVERYTHING[name])
    sides = folder / "ref", folder / candidate
    assert_same(in_shards(*sides, **option), driftline.compare(*sides, **option))


@pytest.mark.parametrize("name", DECIDED_BY_PADS)
def test_files_of_shards_give_the_table_of_compare(folder: Path, name: str, tmp_path: Path) -> None:
    option = _filled(folder, EVERYTHING[name])
    sides = folder / "ref", folder / "engine"
    for number in (1, 2):
        driftline.compare_shard(*sides, f"{number}/2", **option).write(tmp_path)
    assert_same(driftline.merge(tmp_path), driftline.compare(*sides, **option))


@pytest.mark.parametrize("name", ["nothing", "limit of kl alone", "thresholds", "mask captured"])
def test_processes_give_the_table_of_compare(folder: Path, name: str) -> None:
    option = _filled(folder, EVERYTHING[name])
    sides = folder / "ref", folder / "drift"
    assert_same(in_processes(*sides, **option), driftline.compare(*sides, **option))


@pytest.mark.parametrize("option", [{}, {"placements": ["wide=shard(1)"]}])
@pytest.mark.parametrize("way", [in_processes, in_shards])
def test_ranks_are_gathered_and_told_apart_everywhere(
    folder: Path, way: Callable[..., Table], option: dict[str, Any]
) -> None:
    sides = folder / "whole", folder / "cut"
    measure = driftline.compare(*sides, **option)
    assert measure.verdict == "fail" and measure.column("replica_gap") is not None
    assert_same(way(*sides, **option), measure)
    assert_same(viewed(folder, *sides, AlignOptions(**_options(option))), measure)


def _options(option: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) for name, value in option.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "limit of kl alone", "thresholds"])
def test_ray_gives_the_table_of_compare(folder: Path, name: str) -> None:
    ray = pytest.importorskip("ray")
    option = _filled(folder, EVERYTHING[name])
    sides = folder / "ref", folder / "drift"
    try:
        table = driftline.compare(*sides, executor="ray", jobs=1, **option)
    finally:
        ray.shutdown()
    assert_same(table, driftline.compare(*sides, **option))


# --- options


@pytest.mark.parametrize("name", EVERYTHING)
def test_options_survive_a_file(folder: Path, name: str) -> None:
    options = CompareOptions.of(**_filled(folder, EVERYTHING[name]))
    again = CompareOptions.from_json(json.loads(json.dumps(options.to_json())))
    assert again.to_json() == options.to_json()
    assert (again.align, again.metrics) == (options.align, options.metrics)
    assert str(again.tolerance) == str(options.tolerance)
    assert again.execution == options.execution


@pytest.mark.parametrize("damage", [{}, {"align": 3}, {"metrics": None}, {"tolerance": {}}])
def test_options_that_are_none_are_refused(damage: dict[str, Any]) -> None:
    document = {**CompareOptions().to_json(), **damage} if damage else {}
    with pytest.raises(BadFile):
        CompareOptions.from_json(document)


# --- the page, the viewer, the diagnosis


def reported(folder: Path, reference: Path, candidate: Path, options: Any, **more: Any) -> Table:
    del folder
    wanted = PageOptions(options=options, pictures=0, diagnosis=False, **more)
    return page_of(reference, candidate, wanted).table


def viewed(folder: Path, reference: Path, candidate: Path, options: Any, **more: Any) -> Table:
    del folder
    with serve(reference, candidate, options=options, diagnosis=False, **more) as viewer:
        return viewer.server.session.page.table


def diagnosed(folder: Path, reference: Path, candidate: Path, options: Any, **more: Any) -> Table:
    """The table that a diagnosis reads."""
    del folder
    seen: list[Table] = []

    class Watched(Assembly):
        def __init__(self, table: Table, *others: Any) -> None:
            seen.append(table)
            super().__init__(table, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis_api, "Assembly", Watched)
        diagnosis_api.diagnose(reference, candidate, options=options, **more)
    (table,) = seen
    return table


def _align_options(option: dict[str, Any]) -> AlignOptions:
    """The options of `compare` as the other doors take them."""
    names = {"mapping": "mapping_file", "plan": "plan_file"}
    made: dict[str, Any] = {}
    for name, value in option.items():
        if name in names:
            made[names[name]] = Path(value)
        elif name == "step_map":
            made[name] = tuple(f"{ours}={theirs}" for ours, theirs in value.items())
        else:
            made[name] = value if isinstance(value, bool) else tuple(value)
    return AlignOptions(**made)


DOORS = {"report": reported, "view": viewed, "diagnose": diagnosed}


@pytest.mark.parametrize(
    ("name", "candidate"),
    [(n, c) for n, c in CASES if n in ("nothing", *ALIGNMENT, "pads count")],
)
@pytest.mark.parametrize("door", DOORS)
def test_pages_and_diagnoses_read_the_table_of_compare(
    folder: Path, door: str, name: str, candidate: str
) -> None:
    option = _filled(folder, EVERYTHING[name])
    sides = folder / "ref", folder / candidate
    table = DOORS[door](folder, *sides, _align_options(option))
    assert_same(table, driftline.compare(*sides, **option))


@pytest.mark.parametrize(
    ("name", "candidate"), [("thresholds", "engine"), ("thresholds", "drift"), ("threads", "drift")]
)
@pytest.mark.parametrize("door", ["report", "view"])
def test_pages_judge_by_what_compare_is_told(
    folder: Path, door: str, name: str, candidate: str
) -> None:
    option = _filled(folder, EVERYTHING[name])
    sides = folder / "ref", folder / candidate
    table = DOORS[door](folder, *sides, None, **option)
    assert_same(table, driftline.compare(*sides, **option))


@pytest.mark.parametrize("candidate", ["same", "drift", "engine"])
def test_a_diagnosis_and_a_comparison_have_one_verdict(folder: Path, candidate: str) -> None:
    sides = folder / "ref", folder / candidate
    diagnosis = driftline.diagnose(*sides)
    assert diagnosis.verdict == driftline.compare(*sides).verdict


# --- trusted runs


class Normed(nn.Module):
    """A bias in front of a norm has no gradient: what is left of it is rounding."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.up, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(x.chunk(self.parts, 1), self.up.weight.chunk(self.parts, 1), strict=True)
        return self.norm(sum((a @ w.T for a, w in pieces), start=self.up.bias))


def train(path: Path, parts: int, scale: float = 1.0) -> Path:
    torch.manual_seed(0)
    model, x = Normed(parts), torch.randn(24, 16)
    with driftline.capture(model, path, levels=["modules", "gradients"]):
        (scale * model(x)).sin().sum().backward()
    return path


def test_trusted_runs_are_measured_alike_for_a_report_and_a_diagnosis(tmp_path: Path) -> None:
    ours, theirs = train(tmp_path / "ref", 1), train(tmp_path / "cand", 2, 1.001)
    trusted = train(tmp_path / "trusted", 4)
    seen: list[Any] = []

    class Watched(Assembly):
        def __init__(self, table: Table, variants: Any, *others: Any) -> None:
            seen.append([variant.table for variant in variants])
            super().__init__(table, variants, *others)

    from driftline.reporting.html import report as html_report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis_api, "Assembly", Watched)
        patch.setattr(html_report, "Assembly", Watched, raising=False)
        diagnosis_api.diagnose(ours, theirs, noise=[trusted])
        page_of(ours, theirs, PageOptions(noise=[trusted], pictures=0))
    (diagnosed_noise,), (reported_noise,) = seen
    assert_same(reported_noise, diagnosed_noise)
    assert_same(diagnosed_noise, driftline.compare(ours, trusted))
    rows = [row for row in diagnosed_noise.rows if row.limit_from.endswith("weight's gradient")]
    assert rows, "no gradient of this fixture is judged on another scale"


# --- two live models


class Decoder(nn.Module):
    """Embeds, attends where the mask lets it, projects; as built, it fills its pads in one way."""

    def __init__(self, pads: float = 0.0) -> None:
        super().__init__()
        self.pads = pads
        self.embed, self.up = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        hidden = torch.where(attention_mask[..., None] > 0, hidden, hidden + self.pads)
        return self.down(self.up(hidden))


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    good = Decoder()
    pads = copy.deepcopy(good)
    pads.pads = 0.5
    bad = copy.deepcopy(good)
    with torch.no_grad():
        bad.down.weight[0, 0] += 0.05
    return {"good": good, "pads": pads, "bad": bad}


def inputs() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(10).reshape(2, 5),
        "attention_mask": torch.from_numpy(PAD_MASK),
    }


def captured(model: nn.Module, name: str) -> Any:
    sink = MemorySink(name=name)
    with torch.no_grad(), driftline.capture(model, sink):
        model(**inputs())
    return sink.run()


LIVE: dict[str, dict[str, Any]] = {
    "nothing": {},
    **TOLERANCES,
    "thresholds": {"thresholds": None},
    "sites": {"sites": ["up", "down"]},
    "ports": {"ports": ["output"]},
}


@pytest.mark.parametrize("candidate", ["pads", "bad"])
@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("way", ["lockstep", "compare_models"])
def test_live_models_give_the_table_of_their_captures(
    models: dict[str, nn.Module], way: str, name: str, candidate: str
) -> None:
    sides = captured(models["good"], "reference"), captured(models[candidate], "candidate")
    option = dict(LIVE[name])
    if name == "thresholds":
        clean = driftline.compare(*sides)
        option["thresholds"] = driftline.calibrate([clean], metrics=["relative_l2"], sites=["up"])
    table = getattr(driftline, way)(models["good"], models[candidate], inputs(), **option)
    measure = driftline.compare(*sides, **option)
    assert [(row.key, row.status) for row in table.rows] == [
        (row.key, row.status) for row in measure.rows
    ]
    assert [repr(row.metrics) for row in table.rows] == [repr(row.metrics) for row in measure.rows]
    assert (table.verdict, table.finding, table.notes) == (
        measure.verdict,
        measure.finding,
        measure.notes,
    )


# --- dialects and experiments


def test_labels_are_compared_as_runs_are(tmp_path: Path) -> None:
    from driftline.dialects.aclcmp.label_store import LabelWriter, Value
    from driftline.dialects.aclcmp.report import report_tasks

    draw = np.random.default_rng(0)
    writer = LabelWriter(tmp_path / "store")
    runs = {"pta": MemorySink(name="pta labels"), "acl": MemorySink(name="acl labels")}
    for name, error in (("a", 0.0), ("b", 1e-6), ("c", 0.3)):
        values = draw.standard_normal((4, 6)).astype(np.float32)
        for source, sink in runs.items():
            labelled = values * np.float32(1 + error * (source == "acl"))
            raw = labelled.reshape(-1).view(np.uint8)
            writer.add("", source, name, Value("float32", (4, 6), raw), "")
            record_into(sink, label_key(name), labelled)
    writer.close()
    (outcome,) = report_tasks(tmp_path / "store", tmp_path)
    measure = driftline.compare(runs["pta"].run(), runs["acl"].run())
    assert [(row.site, row.status, row.metrics) for row in outcome.table.rows] == [
        (row.site, row.status, row.metrics) for row in measure.rows
    ]
    assert (outcome.table.verdict, outcome.table.finding) == (measure.verdict, measure.finding)


def label_key(site: str) -> TensorKey:
    """The address that the dialect gives a label."""
    return TensorKey.of(site, "output")


PROGRAM = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
x = torch.randn(3, 8)
with torch.no_grad():
    model[1].weight[0, 0] += float(sys.argv[1])
    model(x)
"""


@pytest.mark.parametrize("metric", ["relative_l2", "outside_share"])
def test_bisect_measures_the_end_as_compare_does(
    tmp_path: Path, warm_python: str, metric: str
) -> None:
    from driftline.cli.main import main
    from driftline.diagnosis.experiments.bisect import bisect

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for name, error in (("ref", "0"), ("cand", "1e-6")):
        words = f"{warm_python} {program} {error}"
        assert main(["dump", "--exec", words, "-o", str(tmp_path / name)]) == 0
    table = driftline.compare(tmp_path / "ref", tmp_path / "cand")
    (end,) = (row for row in table.rows if row.port == "output" and row.site == "(root)")
    found = bisect([*warm_python.split(), str(program), "1e-6"], tmp_path / "ref", metric=metric)
    assert found.baseline == float(end.metrics[metric])


def test_hook_trees_show_the_cosine_of_compare(tmp_path: Path) -> None:
    import csv

    from driftline.dialects.paddle_hook.tree_checker import check_trees

    draw = np.random.default_rng(0)
    name = "tensor_idx_0_layer_class_Linear_layer_name_linear_0_micro_step_0"
    values = draw.standard_normal((3, 5)).astype(np.float32)
    for tree, shown in (("a", values), ("b", values + np.float32(0.1))):
        (tmp_path / tree / "tensors" / "rank_0").mkdir(parents=True)
        np.save(tmp_path / tree / "tensors" / "rank_0" / f"{name}.npy", shown)
    (row,) = driftline.compare(tmp_path / "a", tmp_path / "b").rows
    (checked,) = check_trees(tmp_path / "a", tmp_path / "b")
    with checked.csv.open(newline="") as stream:
        (shown,) = list(csv.reader(stream))[1:]
    assert float(shown[1]) == pytest.approx(float(row.metrics["cosine"]), abs=1e-12)
