"""Cost of diagnosis: a table of 10 000 sites, alone and with the tables of two noise runs.

Times are processor times, the best of some rounds, so other work on the machine does not count. The
cost of a replay is measured in `replay`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SITES = 10_000
GUILTY = 7003
ROUNDS = 3


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Measure all figures of this suite, as described in the module's docstring."""
    from driftline.diagnosis.api import diagnose_table

    table, trusted = _table(0, GUILTY), [_table(seed, SITES) for seed in (1, 2)]
    found = diagnose_table(table, noise=trusted)
    assert found.first_site == f"model.layers.{GUILTY // 10}.part{GUILTY % 10}", found.first_site
    return [
        {
            "what": f"diagnosis of a table of {SITES} sites{words}",
            "value": _best(lambda given=given: diagnose_table(table, noise=given), rounds),
            "goal": 2.0,
            "better": "lower",
            "unit": "s",
            "note": f"{len(found.sites)} sites judged",
        }
        for words, given in (("", ()), (", two noise tables", trusted))
    ]


def _best(call: Callable[[], Any], rounds: int) -> float:
    taken: list[float] = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return min(taken)


def _table(seed: int, guilty: int) -> Any:
    """A chain of sites with inputs and outputs; from `guilty` on the error is 40 times as large."""
    import numpy as np

    from driftline.comparison.table.row import Row
    from driftline.comparison.table.table import Table
    from driftline.runs.records import TensorKey

    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for at in range(SITES):
        name = f"model.layers.{at // 10}.part{at % 10}"
        for order, port in ((2 * at, "input"), (2 * at + 1, "output")):
            beyond = at > guilty or (at == guilty and port == "output")
            error = (0.2 if beyond else 0.005) * (1 + 0.1 * rng.random())
            rows.append(
                Row(
                    TensorKey.of(name, port),
                    "unjudged",
                    order=order,
                    class_name="Linear",
                    reference_dtype="float32",
                    candidate_dtype="bfloat16",
                    basis="values",
                    metrics={"relative_l2": error, "projection": 0.0, "one_sided": 0},
                )
            )
    return Table(tuple(rows))


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(run())  # type: ignore[arg-type]
