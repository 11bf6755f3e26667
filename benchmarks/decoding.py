"""Scoring saved logits, compared with the documented formulas token by token on one thread.

The data are 128 tokens of 8 prompts over 128 256 entries, float32 against float16. The slow side is
a direct implementation of the documents: for each token and formula, it converts both rows to
float32 and takes the reference's 20 largest values and the candidate's values at their places. It
is timed on a few tokens, interleaved with `score`, because all 1 024 would take seconds without
more information. The minimum time of each side counts, because other work on the machine only adds
to it. `score` computes all its figures, not only these four.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from driftline.decoding.scoring import score
from driftline.numerics import kernel

TOKENS, VOCABULARY, BATCH, TOPK = 128, 128_256, 8, 20
GOAL = 30.0
Row = dict[str, Any]


def _ce(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(r, t.softmax(dim=1))


def _prob_mean(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (r.softmax(dim=1) / t.softmax(dim=1) - 1.0).mean()


def _prob_std(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (r.softmax(dim=1) / t.softmax(dim=1)).std()


def _diff_mean(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (r.softmax(dim=1) - t.softmax(dim=1)).abs().mean()


def _token_by_token(reference: torch.Tensor, candidate: torch.Tensor) -> list[list[float]]:
    columns: list[list[float]] = []
    for formula in (_ce, _prob_mean, _prob_std, _diff_mean):
        column: list[float] = []
        for r, t in zip(reference, candidate, strict=True):
            values, places = torch.topk(r.unsqueeze(0).float(), TOPK, dim=1)
            there = t.unsqueeze(0).float()[:, places.squeeze(0)]
            column.append(float(formula(values, there)))
        columns.append(column)
    return columns


def run() -> list[Row]:
    draw = torch.Generator().manual_seed(5)
    before = torch.get_num_threads()
    reference = torch.randn(BATCH, TOKENS, VOCABULARY, generator=draw) * 3
    candidate = torch.empty(BATCH, TOKENS, VOCABULARY, dtype=torch.float16)
    for prompt in range(BATCH):
        noise = torch.randn(TOKENS, VOCABULARY, generator=draw) * 0.01
        candidate[prompt] = (reference[prompt] + noise).half()
    tokens = reference.argmax(dim=-1)
    slow: list[float] = []
    slow_cpu: list[float] = []
    fast: list[float] = []
    one: list[float] = []
    try:
        torch.set_num_threads(1)
        _token_by_token(reference[0, :2], candidate[0, :2])
        for prompt in range(BATCH):
            few = slice(0, 16)
            start, begun = time.perf_counter(), time.thread_time()
            plain = _token_by_token(reference[prompt, few], candidate[prompt, few])
            slow.append((time.perf_counter() - start) / 16)
            slow_cpu.append((time.thread_time() - begun) / 16)
            for _ in range(4):
                start = time.perf_counter()
                scores = score(reference[prompt], candidate[prompt], tokens[prompt])
                fast.append((time.perf_counter() - start) / TOKENS)
            start = time.thread_time()
            score(reference[prompt, :64], candidate[prompt, :64], tokens[prompt, :64], threads=1)
            one.append((time.thread_time() - start) / 64)
            for name, column in zip(
                ("ce", "prob_mean", "prob_std", "diff_mean"), plain, strict=True
            ):
                ours = torch.from_numpy(getattr(scores, name)[few]).float()
                assert torch.allclose(ours, torch.tensor(column), rtol=1e-4, atol=1e-6), name
    finally:
        torch.set_num_threads(before)
    least = [min(times) for times in (slow, fast, one)]
    note = (
        f"{least[0] * 1e6:.0f} us a token against {least[1] * 1e6:.0f} on all cores; CPU time "
        f"{min(slow_cpu) * 1e6:.0f} against {least[2] * 1e6:.0f} on one, "
        f"{min(slow_cpu) / least[2]:.1f} x ({kernel.active()})"
    )
    figure = {"goal": GOAL, "better": "higher", "unit": "x", "note": note}
    return [{"what": "scoring saved logits, times faster", "value": least[0] / least[1]} | figure]


if __name__ == "__main__":
    for row in run():
        print(row)
