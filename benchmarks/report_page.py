"""The report in a real browser: time to open 50 000 rows, and delays while they are scrolled.

Chromium is driven as in tests/browser, and its own trace is read: the tasks of the page's main
thread while the table is scrolled, and the time between frames. Without Chromium a message is
printed and nothing is measured. `python -m benchmarks.report_page TRACE.json` also stores the
trace, for chrome://tracing.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

ROWS = 50_000
ROUNDS = 3
_SCROLLS = 8
"""Number of traces of the same work; the best counts, since other load only delays frames."""
_MAIN = "CrRendererMain"
_PARTS = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *("self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp.gate_proj", "mlp.act_fn"),
    *("mlp.up_proj", "mlp.down_proj", "mlp", ""),
)


def big_table(rows: int = ROWS) -> Any:
    """A judged table like that of a deep decoder over many steps; drift starts in layer 40."""
    from driftline.comparison.metrics.catalogue import STANDARD
    from driftline.comparison.table.row import Row
    from driftline.comparison.table.table import Side, Table
    from driftline.comparison.verdict.judge import judge
    from driftline.runs.records import TensorKey

    rng = random.Random(0)
    found: list[Row] = []
    step = 0
    while len(found) < rows:
        error = 1e-3
        for layer, part, port in (
            (layer, part, port)
            for layer in range(64)
            for part in _PARTS
            for port in ("input", "output")
        ):
            if len(found) >= rows:
                break
            error *= 1.001
            if (layer, part, port) == (40, "mlp.act_fn", "output"):
                error *= 20.0
            value = error * math.exp(rng.gauss(0.0, 0.2))
            metrics: dict[str, float] = {
                "relative_l2": value,
                "cosine": 1.0 - value * value / 2.0,
                "max_abs_error": 3.0 * value,
                "mean_abs_error": 0.5 * value,
                "rmse": 0.7 * value,
                "max_rel_error": 900.0 * value,
                "mean_rel_error": 2.0 * value,
                "projection": 0.01 * value,
                "max_ulp": float(int(1e5 * value)),
                "outside_share": min(1.0, 4.0 * value),
                "different": 1000,
                "one_sided": 0,
                "max_abs_error_at": rng.randrange(1 << 20),
            }
            for side in ("reference", "candidate"):
                for what in ("min", "max", "mean", "std", "l2"):
                    metrics[f"{side}_{what}"] = rng.gauss(0.0, 1.0)
            site = f"model.layers.{layer}" + (f".{part}" if part else "")
            key = TensorKey.of(site, port, "0" if port == "output" else "hidden", step=step)  # pyright: ignore
            row = Row(key, "unjudged", order=len(found), class_name=part.rpartition(".")[2])
            shape = (1, 128, 4096)
            found.append(
                row._replace(
                    reference_dtype="float32",
                    candidate_dtype="bfloat16",
                    reference_shape=shape,
                    candidate_shape=shape,
                    basis="values",
                    by="name",
                    metrics=metrics,
                )
            )
        step += 1
    columns = tuple(metric.column for metric in STANDARD)
    return judge(Table(tuple(found), columns, reference=Side("ref"), candidate=Side("cand")))


def _chromium() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support import chromium

    return chromium


def _opened(page: Any, path: Path) -> float:
    """Seconds from the start of loading until the page is ready, by the page's own clock."""
    page.goto("about:blank")
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    return float(page.evaluate("performance.getEntriesByName('ready')[0].startTime")) / 1000.0


def _trace(page: Any, selector: str) -> list[dict[str, Any]]:
    """Chromium's trace while the table is scrolled, first by the wheel, then by bar jumps."""
    x, y = _chromium().point(page, selector)
    browser = page.context.browser
    browser.start_tracing(
        page=page,
        categories=[
            *("devtools.timeline", "toplevel", "disabled-by-default-devtools.timeline.frame"),
            *("disabled-by-default-devtools.timeline", "__metadata"),
            *("latencyInfo", "blink.user_timing"),
        ],
    )
    # Chromium's own protocol is used, because playwright turns the wheel in one jump.
    page.context.new_cdp_session(page).send(
        "Input.synthesizeScrollGesture",
        {"x": x, "y": y, "yDistance": -6000, "speed": 6000, "gestureSourceType": "mouse"},
    )
    page.evaluate(
        """(selector) => new Promise((done) => {
          const box = document.querySelector(selector);
          let left = 15;
          const move = () => {
            if (left-- > 0) {
              box.scrollTop = Math.random() * box.scrollHeight;
              requestAnimationFrame(move);
            } else {
              performance.mark("jumped");
              requestAnimationFrame(() => requestAnimationFrame(() => done(true)));
            }
          };
          performance.mark("jumping");
          requestAnimationFrame(move);
        })""",
        selector,
    )
    return json.loads(browser.stop_tracing())["traceEvents"]


def between_frames(trace: list[dict[str, Any]]) -> float:
    """Longest wait of a scrolling user for the next drawn frame, in ms.

    It is measured from the first turn of the wheel to the last, and from the first jump to the
    last. The time before and between them is not a wait: the page does not move and Chromium draws
    nothing. (The first gesture of a page begins 30 to 40 ms after the frame before it, which was
    drawn when the table was brought into view.)
    """

    def when(name: str, kinds: str) -> list[float]:
        return sorted(
            event["ts"] for event in trace if event.get("name") == name and event["ph"] in kinds
        )

    drawn = when("DrawFrame", "I")
    wheel = when("InputLatency::MouseWheel", "b")
    jumping, jumped = when("jumping", "IR"), when("jumped", "IR")
    if not (drawn and wheel and jumping and jumped):
        raise RuntimeError("Chromium's trace lacks the frames, the wheel or the jumps")
    longest = 0.0
    for start, stop, most in (
        (wheel[0], wheel[-1], jumping[0]),
        (jumping[0], jumped[-1], math.inf),
    ):
        inside = [at for at in drawn if start < at < stop]
        last = next((at for at in drawn if stop <= at < most), stop)
        longest = max(longest, *(b - a for a, b in pairwise([start, *inside, last])))
    return longest / 1000.0


def frames(trace: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Longest wall time and processor time of a main-thread task, in ms; number of frames."""
    names = {
        (event["pid"], event["tid"])
        for event in trace
        if event.get("name") == "thread_name" and event["args"].get("name") == _MAIN
    }
    busy = {
        (event["pid"], event["tid"])
        for event in trace
        if event.get("name") in ("FunctionCall", "FireAnimationFrame")
    }
    tasks = [
        event
        for event in trace
        if event.get("ph") == "X"
        and event.get("name") in ("RunTask", "ThreadControllerImpl::RunTask")
        and (event["pid"], event["tid"]) in (names & busy or names)
    ]
    wall = max((event.get("dur", 0) for event in tasks), default=0) / 1000.0
    cpu = max((event.get("tdur", 0) for event in tasks), default=0) / 1000.0
    drawn = sum(event.get("name") == "FireAnimationFrame" for event in trace)
    return wall, cpu, drawn


def run(keep: Path | None = None) -> list[dict[str, object]]:
    from driftline.reporting.html.document import page_data
    from driftline.reporting.html.page import embedded_page

    text = embedded_page(page_data(big_table()))
    code = len(text) - len(text.partition('id="data">')[2].partition("</script>")[0])
    chromium = _chromium()
    try:
        with chromium.launched() as browser, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            path.write_text(text, encoding="utf-8")
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            opened, firsts = [], []
            for _ in range(ROUNDS):
                opened.append(_opened(page, path))
                firsts.append(_trace(page, ".grid"))
            traces = [*firsts, *(_trace(page, ".grid") for _ in range(_SCROLLS - ROUNDS))]
    except chromium.NoChromium as problem:
        print(f"  {problem}: nothing was measured")
        return []
    measured = [frames(trace) for trace in traces]
    gaps = [between_frames(trace) for trace in traces]
    if keep is not None:
        best = min(range(_SCROLLS), key=lambda index: measured[index][0])
        keep.write_text(json.dumps({"traceEvents": traces[best]}))
    wall = min(each[0] for each in measured)
    cpu = max(each[1] for each in measured)
    drawn = sum(each[2] for each in measured)
    walls = ", ".join(f"{each[0]:.0f}" for each in measured)
    waits = ", ".join(f"{gap:.0f}" for gap in gaps)
    size = f"{len(text) / 1e6:.1f} MB"
    return [
        _figure(f"report of {ROWS} rows opens", min(opened), 2.0, "s", f"a file of {size}"),
        _figure("longest task while scrolling", wall, 50.0, "ms", f"all rounds: {walls}"),
        _figure("longest wait for a frame", min(gaps), 50.0, "ms", f"all rounds: {waits}"),
        _figure(
            "  in the first scroll after loading",
            min(gaps[:ROUNDS]),
            50.0,
            "ms",
            f"the first {ROUNDS} of these rounds",
        ),
        _figure("  processor time of the worst", cpu, 50.0, "ms", f"of {drawn} frames"),
        _figure("code in the page", code / 1000.0, 150.0, "kB", "script, style and HTML"),
    ]


def _figure(what: str, value: float, goal: float, unit: str, note: str) -> dict[str, object]:
    return {
        "what": what,
        "value": value,
        "goal": goal,
        "better": "lower",
        "unit": unit,
        "note": note,
    }


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(run(Path(sys.argv[1]) if len(sys.argv) > 1 else None))  # pyright: ignore
