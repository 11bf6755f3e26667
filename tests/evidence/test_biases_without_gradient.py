"""Biases whose gradient is zero by construction: no false alarm, and no cover for a wrong one.

The twins compute attention, and a batch norm, in two ways that round differently; an Adam optimizer
makes whole steps of what that leaves in the gradients of such biases.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import driftline
from driftline.comparison.shards import compare_shard, merge

WIDTH, HEADS, WORDS, STEPS = 16, 2, 19, 3
LEVELS = ["modules", "gradients"]


class Attention(nn.Module):
    def __init__(self, by_hand, fused=False):
        super().__init__()
        self.by_hand, self.fused = by_hand, fused
        self.norm = nn.LayerNorm(WIDTH)
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        b, t, _ = x.shape
        parts = (
            self.qkv(x).chunk(3, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
        )
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in parts)
        if self.by_hand:
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            mixed = torch.softmax(scores, -1) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Text(nn.Module):
    def __init__(self, by_hand, fused=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attention = Attention(by_hand, fused)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden + self.attention(hidden))


class Pictures(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.by_hand = by_hand
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, WORDS)

    def forward(self, x):
        x = self.conv(x)
        if self.by_hand:
            self.norm(x.detach())  # so that both have the same modules
            mean = x.mean((0, 2, 3), keepdim=True)
            spread = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
            x = (x - mean) * torch.rsqrt(spread + self.norm.eps)
            x = x * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]
        else:
            x = self.norm(x)
        return self.head(x.relu().mean((2, 3)))


def trained(model, folder, plant=None, *, optimizer=torch.optim.Adam, **asked):
    torch.manual_seed(1)
    given = torch.randn(4, 3, 9, 9) if isinstance(model, Pictures) else torch.arange(18).view(2, 9)
    count = len(given) if isinstance(model, Pictures) else given.numel()
    step = optimizer(model.parameters(), 0.01)
    with driftline.capture(model, folder, levels=LEVELS, **{"steps": "*", **asked}):
        for number in range(STEPS):
            if plant is not None:
                plant(model, number)
            out = model(given).reshape(-1, WORDS)
            nn.functional.cross_entropy(out, torch.arange(count) % WORDS).backward()
            step.step()
            step.zero_grad()
    return folder


def twins(kind, *more):
    torch.manual_seed(0)
    ours, theirs = kind(False, *more), kind(True, *more)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    ours, theirs = twins(Text)
    start = {name: value.clone() for name, value in theirs.state_dict().items()}
    trained(ours, folder / "ours")

    def compare(name, plant=None):
        theirs = Text(True)
        theirs.load_state_dict(start)
        trained(theirs, folder / name, plant)
        return driftline.compare(folder / "ours", folder / name)

    compare.folder = folder
    return compare


def rows_at(table, site, port, slot=None):
    return [
        row
        for row in table.rows
        if (row.key.site, row.key.port) == (site, port) and slot in (None, row.key.slot)
    ]


def test_a_key_that_adam_moved_by_rounding_is_no_failure_and_the_row_says_why(compared):
    table = compared("clean")
    assert table.verdict == "pass", table.finding
    moved = [row for row in rows_at(table, "attention.key", "output") if row.reason]
    assert [row.key.step for row in moved] == [1, 2]
    for row in moved:
        assert row.metrics["relative_l2"] > 1e-4 and row.metrics["beyond_bias"] < 1e-5
        assert row.decided_by == "beyond_bias" and "one number per channel" in row.reason


def test_the_parts_of_a_fused_projection_are_told_apart(tmp_path):
    ours, theirs = twins(Text, True)
    reference = trained(ours, tmp_path / "ours")
    assert driftline.compare(reference, trained(theirs, tmp_path / "clean")).verdict == "pass"

    ours, theirs = twins(Text, True)

    def plant(model, step):
        if step == 2:  # of the value, not of the key
            with torch.no_grad():
                model.attention.qkv.bias[-1] += 0.1

    table = driftline.compare(reference, trained(theirs, tmp_path / "moved", plant))
    assert (table.first.key.site, table.first.key.step) == ("attention.qkv", 2)


def test_a_bias_in_front_of_a_batch_norm_and_whoever_is_given_it_are_no_failures(tmp_path):
    ours, theirs = twins(Pictures)
    table = driftline.compare(
        trained(ours, tmp_path / "ours"), trained(theirs, tmp_path / "theirs")
    )
    assert not table.failing, table.finding
    (row, _) = [row for row in rows_at(table, "norm", "input") if row.key.step]
    assert "differs as 'conv' does" in row.reason


def test_a_key_that_differs_by_more_than_its_bias_fails(compared):
    def plant(model, step):
        if step == 1:
            with torch.no_grad():
                model.attention.key.weight[3, 5] += 0.01

    table = compared("weight", plant)
    assert (table.first.key.site, table.first.key.step) == ("attention.key", 1)


def test_a_bias_that_has_a_gradient_and_was_moved_otherwise_fails(compared):
    def plant(model, step):
        if step == 1:
            with torch.no_grad():
                model.attention.value.bias += 0.01

    table = compared("value", plant)
    assert (table.first.key.site, table.first.key.step) == ("attention.value", 1)


@pytest.mark.parametrize("which", ["key", "query"])
def test_a_wrong_gradient_of_a_bias_fails_and_excuses_nothing(compared, which):
    def plant(model, step):
        if step == 0:
            bias = getattr(model.attention, which).bias
            bias.register_hook(lambda gradient: gradient + 1e-3)

    table = compared(f"wrong {which}", plant)
    site = f"attention.{which}"
    assert table.first.key.site == site
    assert (table.first.key.port, table.first.key.slot) == ("param_grad", "bias")
    later = [row for row in rows_at(table, site, "output") if row.key.step]
    assert all(row.status == "fail" for row in later)


def test_where_only_summaries_were_kept_it_cannot_be_told_and_that_is_no_pass(tmp_path):
    ours, theirs = twins(Text)
    table = driftline.compare(
        trained(ours, tmp_path / "ours", keep="summary"),
        trained(theirs, tmp_path / "theirs", keep="summary"),
    )
    assert not table.failing
    later = [row for row in rows_at(table, "attention.key", "output") if row.key.step]
    assert {row.status for row in later} == {"incomparable"}


def test_limits_of_the_users_own_are_held_as_they_are(compared):
    compared("asked")
    table = driftline.compare(
        compared.folder / "ours", compared.folder / "asked", limits={"relative_l2": 1e-4}
    )
    assert "attention.key" in {row.key.site for row in table.failing}


def test_shards_find_the_same(compared):
    whole = compared("shards")
    sides = compared.folder / "ours", compared.folder / "shards"
    merged = merge([compare_shard(*sides, f"{number}/3") for number in (1, 2, 3)])
    assert merged.rows == whole.rows and merged.verdict == "pass"


def test_a_diagnosis_does_not_take_it_for_a_fault_either(compared):
    compared("diagnosed")
    clean = driftline.diagnose(compared.folder / "ours", compared.folder / "diagnosed")
    assert clean.verdict == "pass", clean.sentences

    def plant(model, step):
        if step == 0:
            model.attention.query.bias.register_hook(lambda gradient: gradient * 1.5)

    compared("diagnosed fault", plant)
    found = driftline.diagnose(compared.folder / "ours", compared.folder / "diagnosed fault")
    assert found.verdict == "fail" and found.first_site == "attention.query"
