"""Scores of tokens: the documented figures to float precision, companions, the end of a text."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
import torch
from tiny_decoders import DATA

from driftline.decoding.scoring import DOCUMENTED, kept_before_eos, score
from driftline.errors import BadInput
from driftline.numerics import kernel

CASES = json.loads((DATA / "metrics_vectors" / "cases.json").read_text())


def pair(rows: int = 4, size: int = 500, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    reference = (draw.standard_normal((rows, size)) * 3).astype(np.float32)
    other = reference + draw.standard_normal(reference.shape).astype(np.float32) * noise
    return reference, other


@pytest.mark.parametrize("path", kernel.available())
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_four_documented_scores_are_the_recorded_ones(case, path):
    reference = torch.tensor([case["ref"]])
    candidate = torch.tensor([case["dev"]]).to(getattr(torch, case["dev_dtype"].split(".")[1]))
    for k, wanted in case["out"].items():
        found = score(reference, candidate, reference.argmax(dim=1), topk=int(k), path=path)
        for name in DOCUMENTED:
            value, ours = float(wanted[name]), float(getattr(found, name)[0])
            if math.isnan(value):
                assert math.isnan(ours)
            else:
                assert ours == pytest.approx(value, rel=3e-7, abs=2e-7), (k, name)


def test_companions_are_what_torch_says_over_the_whole_vocabulary():
    reference, candidate = pair()
    tokens = reference.argmax(axis=1)
    found = score(reference, candidate, tokens)
    log_p, log_q = (torch.tensor(x).double().log_softmax(-1) for x in (reference, candidate))
    p, q = log_p.exp(), log_q.exp()
    np.testing.assert_allclose(found.kl_rc, (p * (log_p - log_q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.kl_cr, (q * (log_q - log_p)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.total_variation, 0.5 * (p - q).abs().sum(-1), rtol=1e-5)
    ordered = np.sort(reference, axis=1)
    np.testing.assert_allclose(found.gap, ordered[:, -1] - ordered[:, -2], rtol=1e-5)
    assert found.top1_agree.all()
    assert found.rank_of_reference.tolist() == [1] * 4
    assert not found.odd.any()


def test_a_wrong_token_outside_the_top_k_is_seen_by_the_companions_alone():
    reference, _ = pair()
    candidate = reference.copy()
    worst = int(reference[2].argmin())
    candidate[2, worst] = reference[2].max() + 5.0
    found = score(reference, candidate, reference.argmax(axis=1))
    assert found.diff_mean[2] == pytest.approx(0.0, abs=1e-9)
    assert found.top1_agree.tolist() == [True, True, False, True]
    assert found.rank_of_reference[2] == 2
    assert found.total_variation[2] > 0.9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_never_hidden(value):
    reference, candidate = pair()
    candidate[1, int(reference[1].argmin())] = value
    found = score(reference, candidate, reference.argmax(axis=1))
    assert found.odd.tolist() == [False, True, False, False]
    assert math.isnan(found.kl_rc[1])
    if not value < 0:
        assert not found.top1_agree[1]
    reference[3, 7] = float("nan")
    found = score(reference, candidate, np.zeros(4, np.int64))
    assert math.isnan(found.ce[3])
    assert not found.top1_agree[3]


def test_bfloat16_and_float64_logits_are_taken_as_they_are():
    reference, candidate = (torch.tensor(side) for side in pair())
    tokens = reference.argmax(dim=1)
    wanted = score(reference, candidate.bfloat16().float(), tokens)
    for found in (
        score(reference, candidate.bfloat16(), tokens),
        score(reference.double(), candidate.bfloat16().double(), tokens),
    ):
        np.testing.assert_allclose(found.ce, wanted.ce, rtol=1e-7)
        np.testing.assert_allclose(found.kl_rc, wanted.kl_rc, rtol=1e-5)


def test_logits_of_another_vocabulary_or_shape_are_refused():
    reference, candidate = pair()
    with pytest.raises(BadInput, match="vocabulary of 500, the candidate of 4 over 499"):
        score(reference, candidate[:, :499], np.zeros(4))
    with pytest.raises(BadInput, match=r"\[tokens, vocabulary\] is expected"):
        score(reference[0], candidate[0], [0])
    with pytest.raises(BadInput, match="a token is 500"):
        score(reference, candidate, [0, 0, 0, 500])
    with pytest.raises(BadInput, match="of type int64"):
        score(reference.astype(np.int64), candidate, [0] * 4)


def test_no_copy_of_the_logits_is_made():
    reference, candidate = pair(64, 20_000)
    tokens = reference.argmax(axis=1)
    score(reference, candidate, tokens)
    tracemalloc.start()
    score(reference, candidate, tokens)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if kernel.active() != "numpy":
        assert most < reference.nbytes / 4


def test_tokens_from_the_first_end_of_text_on_do_not_count():
    tokens = torch.tensor([0, 0, 2, 5, 7, 9, 3, 7])
    assert kept_before_eos(tokens, (2, 3), 4) == 2
    assert kept_before_eos(tokens, (2,), 4) == 4
    assert kept_before_eos(tokens, (7,), 4) == 0
    assert kept_before_eos(tokens, (), 4) == 4
