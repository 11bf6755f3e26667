"""Decoder `.out` folders: the ones upstream really wrote, many prompts, bare ids, and a bomb."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from driftline import compare, open_run

DATA = Path(__file__).parents[1] / "data" / "aiu" / "generate_metrics"
(CPU,) = DATA.glob("*cpu_validation_info.0.out")
(CUDA,) = DATA.glob("*cuda_validation_info.0.out")


def test_tokens_and_logits_are_sites_and_a_token_is_a_step() -> None:
    run = open_run(CPU)
    saved = torch.load(CPU / "0.pt", weights_only=True)
    assert run.manifest["format"] == "decoder output"
    assert run.get("tokens").numpy().tolist() == saved["tokens"].tolist()
    for step, logits in enumerate(saved["logits"]):
        assert np.array_equal(run.get("logits", step=step).numpy(), logits.numpy())


def test_two_devices_compare_token_by_token() -> None:
    table = compare(CPU, CUDA)
    assert {row.status for row in table.rows} <= {"pass", "fail"}
    assert len(table.rows) == 9


def test_prompts_are_visits_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "m.cpu_validation_info.0.out"
    folder.mkdir()
    for prompt in range(12):
        logits = torch.full((3, 5), float(prompt))
        saved = {"tokens": torch.arange(prompt, prompt + 4), "logits": logits}
        torch.save(saved, folder / f"{prompt}.pt")
    run = open_run(folder)
    assert [r.key.visit for r in run.records if r.key.site == "tokens"] == list(range(12))
    assert run.get("logits", step=2, visit=11).numpy().tolist() == [11.0] * 5
    changed = tmp_path / "m.cuda_validation_info.0.out"
    changed.mkdir()
    for prompt in range(12):
        saved = torch.load(folder / f"{prompt}.pt", weights_only=True)
        if prompt == 10:
            saved["logits"][1, 2] += 1
        torch.save(saved, changed / f"{prompt}.pt")
    (failed,) = [row.key for row in compare(folder, changed).rows if row.status == "fail"]
    assert (failed.visit, failed.step) == (10, 1)


def test_bare_ids_are_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "level0.out"
    folder.mkdir()
    torch.save(torch.arange(7), folder / "0.pt")
    assert open_run(folder).get("tokens").numpy().tolist() == list(range(7))


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_code_in_a_prompt_is_not_run_and_the_others_stay_readable(tmp_path: Path) -> None:
    folder = tmp_path / "x.out"
    folder.mkdir()
    torch.save({"tokens": torch.arange(2)}, folder / "0.pt")
    torch.save({"tokens": torch.arange(2), "b": Bomb(tmp_path / "ran")}, folder / "1.pt")
    run = open_run(folder)
    assert not (tmp_path / "ran").exists()
    assert run.get("tokens").has_values
    assert "could run code" in run.get("tokens", visit=1).lost
