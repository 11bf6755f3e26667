"""The decoder's part of a page, from files as the commands leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftline.decoding.failures import Candidate, FirstFailure, PromptCount, Rate
from driftline.decoding.files.names import out_name
from driftline.decoding.files.outputs import write_out
from driftline.decoding.files.token_table import SCORES, rows_of, write_part
from driftline.decoding.files.validation_files import write_validation
from driftline.decoding.models.targets import Target
from driftline.decoding.options import Limits, ValidateOptions
from driftline.decoding.validate import Verdict
from driftline.errors import BadFile, BadInput
from driftline.reporting.html.decoder import decoder_folder
from driftline.reporting.html.report import PageOptions, page_of
from driftline.reporting.html.tokens import of_steps
from driftline.testing.runs import run_of

torch = pytest.importorskip("torch")

PREFIX = "acme--tiny_max-new-tokens-4_batch-size-2_seq-length-8_dtype-fp16"
VOCABULARY = 16


class Letters:
    """A tokenizer that is as small as one can be."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in ids)


def scores(bad: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {name: np.full(4, 0.5) for name in SCORES}
    found["diff_mean"] = np.array([1e-4, 2e-4, 3e-4, 4e-4])
    found["top1_agree"] = np.ones(4, bool)
    found["rank_of_reference"] = np.ones(4, np.int64)
    if bad is not None:
        found["diff_mean"][bad] = 0.5
    return found


def rows(bad: int | None = 2) -> list[Any]:
    tokens = np.array([3, 4, 5, 6])
    return [
        rows_of(0, 0, "first", tokens, scores(), 4),
        rows_of(0, 1, "second", tokens, scores(bad), 4),
    ]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """What `driftline metrics` leaves: scores, saved logits, and a file of thresholds beside."""
    write_part(tmp_path / f"{PREFIX}.tokens.parquet", rows(), {})
    for side, best in (("cpu", 5), ("cuda", 7)):
        logits = [torch.zeros(4, VOCABULARY) for _ in range(2)]
        logits[1][2, best] = 9.0
        tokens = [torch.arange(8 + 4) % VOCABULARY] * 2
        write_out(tmp_path / out_name(PREFIX, side, 0), tokens, logits)  # type: ignore[arg-type]
    (tmp_path / "acme--tiny-thresholds.json").write_text(
        json.dumps({"model_id": "acme--tiny", "ce": 3.0, "diff_mean": 0.01})
    )
    return tmp_path


def test_scores_and_limits_make_a_verdict_and_the_first_failing_token(metrics: Path) -> None:
    document = page_of(metrics).document
    (part,) = document["decoder"]
    assert document["verdict"]["status"] == part["verdict"] == "fail"
    assert "mean diff fails at 1 of 8 tokens (12.5 %" in part["sentence"]
    assert "1 of 2 prompts has failing tokens" in part["sentence"]
    checks = {check["name"]: check for check in part["checks"]}
    assert checks["diff_mean"]["failing"] == 1 and not checks["diff_mean"]["passed"]
    assert checks["ce"]["passed"] and checks["ce"]["limit"] == 3.0
    assert [prompt["failing"]["diff_mean"] for prompt in part["prompts"]] == [0, 1]
    first = part["first"]
    assert (first["prompt"], first["position"], first["name"]) == (1, 2, "second")
    assert len(first["reference"]) == len(first["candidate"]) == 5
    assert (first["reference"][0]["token"], first["candidate"][0]["token"]) == (5, 7)
    assert first["reference"][0]["probability"] == pytest.approx(0.998, abs=0.01)
    assert part["tokens"]["count"] == 8


def test_without_limits_nothing_is_judged(metrics: Path) -> None:
    (metrics / "acme--tiny-thresholds.json").unlink()
    (part,) = page_of(metrics).document["decoder"]
    assert part["verdict"] == "unjudged" and part["checks"] == [] and part["first"] is None
    assert "no limits were given" in part["sentence"]
    other = metrics / "other.json"
    other.write_text(json.dumps({"model_id": "acme--huge", "ce": 0.0, "diff_mean": 0.0}))
    assert (
        page_of(metrics, wanted=PageOptions(thresholds=other)).document["decoder"][0]["checks"]
        == []
    )


def validation(folder: Path) -> Path:
    ask = ValidateOptions(
        name="acme/tiny",
        model_path="acme/tiny",
        prompts=Path("prompts"),
        batch_size=2,
        length=8,
        new_tokens=4,
        tokens_per_sequence=4,
        reference=Target(),
        candidate=Target("cpu", "fp16"),
        limits=Limits(3.0, 0.01, "said by a test"),
    )
    rates = (Rate("mean_diff", 1, 8, 0.01, 0.01), Rate("ce", 0, 8, 3.0, 0.01))
    prompts = (
        PromptCount(0, 0, "first", 4, {"mean_diff": 0, "ce": 0}),
        PromptCount(0, 1, "second", 4, {"mean_diff": 1, "ce": 0}),
    )
    first = FirstFailure(
        *(0, 1, "second", 2, 5),
        {"mean_diff": 0.5, "ce": 0.5},
        (Candidate(5, 0.9), Candidate(6, 0.1)),
        (Candidate(7, 0.8), Candidate(5, 0.2)),
        torch.arange(10),
    )
    found = Verdict(
        ask, False, (1, 2), rates, prompts, first, agreed=7, variation=0.5, rows=tuple(rows())
    )
    return write_validation(found, folder, Letters())


def test_what_validate_found_is_shown_as_it_found_it(tmp_path: Path) -> None:
    place = validation(tmp_path)
    assert place.name == f"{PREFIX}.validation.json"
    _, (part,) = decoder_folder(tmp_path)
    assert part["verdict"] == "fail" and part["checks"][0]["from"] == "said by a test"
    assert part["first"]["text"] == "f" and part["first"]["candidate"][0]["text"] == "h"
    assert part["first"]["before"] == "abcdefghij"
    assert set(part["tokens"]["columns"]["text"]["words"]) == {"d", "e", "f", "g"}


def test_a_damaged_validation_is_refused_in_a_sentence(tmp_path: Path) -> None:
    place = validation(tmp_path)
    place.write_text(json.dumps({"verdict": "fail", "rates": [{"name": "nobody"}]}))
    with pytest.raises(BadFile, match="damaged"):
        decoder_folder(tmp_path)


def test_a_folder_of_something_else_is_refused_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no comparison, and holds no scores"):
        page_of(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(BadInput, match="a report needs two"):
        page_of(tmp_path)


def test_tokens_against_layers_come_from_steps(tmp_path: Path) -> None:
    from driftline.comparison.pipeline import compare
    from driftline.runs.records import TensorKey

    values = np.ones((2, 4), np.float32)
    keys = [TensorKey.of(f"l{at}", "output", step=step) for step in range(4) for at in range(2)]
    ours = dict.fromkeys(keys, values)
    theirs = {key: values * (2 if key.site == "l1" and key.step == 3 else 1) for key in keys}
    table = compare(run_of(ours), run_of(theirs))
    found = of_steps(table)
    assert found is not None and found["sites"] == ["l0", "l1"]
    shaped = found["values"].reshape(2, 4)
    assert shaped[1, 3] == pytest.approx(1.0) and shaped[0].max() == 0.0
    assert found["status"].reshape(2, 4)[1].tolist() == [1, 1, 1, 2]
    assert found["passes"] == ["forward", "forward"]
    two = {key: values for key in keys if key.step < 2}
    assert of_steps(compare(run_of(two), run_of(two))) is None
