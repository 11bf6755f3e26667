"""Two runs alone: who feeds whom by the edges that a dump knows, and how long its sums are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from driftline.comparison.verdict.growth import rounding
from driftline.comparison.verdict.module_kinds import sum_length
from driftline.comparison.verdict.sites import by_calls, by_edges
from driftline.diagnosis.api import diagnose
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import Call, CallTensor
from driftline.testing.faults import Setting
from driftline.testing.faults.trials import METHODS, planted

ROWS = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
CHAIN = [["stem", "0", "left", "0"], ["stem", "0", "right", "0"]]


def _run(
    off: dict[str, float],
    edges: list[Any] | None = None,
    weights: dict[str, list[int]] | None = None,
) -> Run:
    """Outputs alone, in order; each is off by so much of itself, every time another way."""
    sink = MemorySink(name="run")
    for at, (site, error) in enumerate(off.items()):
        noise = np.random.default_rng(at).standard_normal(ROWS.shape).astype(np.float32)
        values = np.ascontiguousarray(ROWS + error * noise)
        key = TensorKey.of(site, "output")
        sink.put(Record(key, 0, "float32", values.shape), values.reshape(-1).view(np.uint8))
    roots = [
        {
            "site": site,
            "class": "Linear",
            "parameters": [{"name": "weight", "dtype": "float32", "shape": shape}],
        }
        for site, shape in (weights or {}).items()
    ]
    if edges is not None or weights:
        sink.topology({"schema": 1, "roots": roots, "order": [], "edges": edges or []})
    return sink.run()


def test_a_fault_beside_another_branch_is_seen_by_the_edges_of_the_topology() -> None:
    """By order alone `right` would have been given what `left` made, and be excused by it."""
    clean = {"stem": 0.0, "left": 0.0, "right": 0.0}
    faulty = {"stem": 1e-6, "left": 0.1, "right": 0.1}
    blind = diagnose(_run(clean), _run(faulty))
    assert blind.culprits == ("left",)
    assert blind.evidence["inputs_by"] == {"order": 3}
    found = diagnose(_run(clean, CHAIN), _run(faulty))
    assert found.culprits == ("left", "right")
    assert found.site("right").error_in == pytest.approx(1e-6, rel=0.5)
    assert found.evidence["inputs_by"] == {"order": 1, "edges": 2}


def test_a_branch_that_reads_what_came_long_before_is_not_blamed() -> None:
    """What was made last before it is exact; what it really reads is not."""
    clean = {"stem": 0.0, "left": 0.0, "right": 0.0}
    rough = {"stem": 1.5e-6, "left": 0.0, "right": 8e-6}
    edges = [["stem", "0", "right", "0"]]
    leaves = {site: [8, 8] for site in clean}
    assert diagnose(_run(clean, weights=leaves), _run(rough)).first_site == "right"
    assert diagnose(_run(clean, edges, leaves), _run(rough)).verdict == "pass"
    by_candidate = diagnose(_run(clean), _run(rough, edges))
    assert by_candidate.verdict == "pass"


def test_edges_go_through_what_was_not_captured() -> None:
    edges = [("a", "cast"), ("cast", "view"), ("view", "b"), ("loop", "loop"), ("loop", "b")]
    assert by_edges(edges, {"a", "b"}) == {"b": frozenset({"a"})}


def test_a_list_of_calls_says_who_feeds_whom() -> None:
    def given(*source: Any) -> tuple[CallTensor, ...]:
        return tuple(CallTensor("0", "float32", (2, 2), source=one) for one in source)

    made = given(None)
    calls = [
        Call(0, "module", "a", "Linear", inputs=given("(outside).0"), outputs=given((1, "0"))),
        Call(1, "operator", "a/mm", "mm", inside=0, outputs=made),
        Call(2, "operator", "(root)/add", "add", inputs=given((1, "0")), outputs=made),
        Call(3, "module", "b", "Linear", inputs=given((2, "0")), outputs=given((4, "0"))),
        Call(4, "operator", "b/mm", "mm", inside=3, inputs=given((2, "0")), outputs=made),
    ]
    assert by_calls(calls, {"a", "b"}) == {"a": frozenset(), "b": frozenset({"a"})}
    assert by_calls(calls, {"a", "b", "b/mm"})["b/mm"] == {"a"}


@pytest.mark.parametrize("edges", [{"from": 1}, [1, "x"], [["a"]], None])
def test_edges_that_make_no_sense_are_passed_over(edges: Any) -> None:
    clean = {"stem": 0.0, "left": 0.0}
    found = diagnose(_run(clean, edges), _run(clean))
    assert found.verdict == "pass"


def test_long_sums_may_differ_by_more_than_short_ones() -> None:
    """80 units of float32: two right orders of a sum of 65 536 terms, no right SiLU."""
    clean, apart = {"first": 0.0}, {"first": 80 * 2.0**-24}
    # Of a site that no module tree knows, nobody can say what lies in it.
    assert diagnose(_run(clean), _run(apart)).verdict == "pass"
    assert diagnose(_run(clean, weights={"first": [8, 8]}), _run(apart)).verdict == "fail"
    long = {"first": [8, 65_536]}
    found = diagnose(_run(clean, weights=long), _run(apart))
    assert found.verdict == "pass"
    assert rounding(2.0**-24, 0, 65_536) > 4 * rounding(2.0**-24, 0, 64)


@pytest.mark.parametrize(
    ("name", "weight", "given", "length"),
    [
        ("Linear", (256, 64), (2, 40, 64), 64),
        ("Conv1D", (64, 256), (2, 40, 64), 64),
        ("LinearOperation", None, (40, 64), 64),
        ("Conv2d", (8, 3, 16, 16), (1, 3, 64, 64), 768),
        ("Conv1d", (8, 4, 5), (1, 4, 64), 20),
        ("LayerNorm", (64,), (2, 40, 64), 64),
        ("RmsNormOperation", None, (2, 40, 64), 64),
        ("Softmax", None, (1, 8, 40, 48), 48),
        ("aten.mm.default", None, (40, 64), 64),
        ("LlamaAttention", None, (2, 400, 64), 400),
        ("Embedding", (32_000, 64), (2, 40), 1),
        ("SiLU", None, (2, 40, 64), 1),
    ],
)
def test_the_longest_sum_of_a_module(
    name: str, weight: tuple[int, ...] | None, given: tuple[int, ...], length: int
) -> None:
    assert sum_length(name, weight, [given], []) == length


def test_a_single_quantised_layer_is_no_fault() -> None:
    """Of a GPT-2 `quantize_dynamic` takes the head alone; its class is called Linear still."""
    setting = Setting("gpt2", "torch-int8", 1101)
    pair = planted(setting)
    found = METHODS["two runs"](setting, pair)
    assert not found.detected, found
