"""What real bugs taught: each is a small program with a fault, judged through the command line.

Names of arguments and classes say nothing here, so that what is found follows from the numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
import sys
import torch
from torch import nn

kind, bad, dtype = sys.argv[1], sys.argv[2] == "bad", getattr(torch, sys.argv[3])
torch.manual_seed(0)


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("paces", 1e4 ** (-torch.arange(0, 16, 2).float() / 16))

    def forward(self, x, places):
        angles = places[..., None].to(self.paces.dtype) * self.paces
        return angles.cos().to(x.dtype)


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.angles = nn.Linear(8, 8), Angles()

    def forward(self, x):
        return self.inner(x * self.angles(x, torch.arange(x.shape[1])))


class Spun(nn.Module):  # multiplies by complex numbers, made of nothing but a length
    def __init__(self):
        super().__init__()
        self.inner, self.spin = nn.Linear(8, 8), Spin()

    def forward(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (4, 2)))
        return self.inner(torch.view_as_real(pairs * self.spin(x.shape[1])).flatten(2).to(x.dtype))


class Spin(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("paces", 3.0 ** (-torch.arange(4).float()))

    def forward(self, length):
        angles = torch.arange(length)[:, None].float() * self.paces.float()
        if kind == "backwards" and bad:
            angles = -angles
        return torch.polar(torch.ones_like(angles), angles)


class Hot(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(1000.0 * self.first(x)) * 1e-6


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(50, 16)
        self.out = nn.Linear(16, 16)

    def forward(self, words):
        places = torch.arange(words.shape[1]).expand_as(words) + (2 if bad else 0)
        return self.out(self.words(words) + self.places(places))


class Gather(nn.Module):
    def forward(self, values, ends):
        return values[ends[0]] * 0.5


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gather = nn.Linear(16, 16), Gather()

    def forward(self, nodes, ends):
        if not bad:  # every node is its own neighbour
            loops = torch.arange(len(nodes)).expand(2, -1)
            ends = torch.cat([ends, loops], 1)
        sent = self.gather(self.inner(nodes), ends)
        return torch.zeros_like(nodes).index_add(0, ends[1], sent)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        drawn = torch.randn_like(x)
        return self.inner(x) + (0.8 if bad else 0.5) * drawn


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


@torch.no_grad()
def infer():
    if kind in ("buffer", "complex", "backwards"):
        model = Rotated() if kind == "buffer" else Spun()
        part = model.angles if kind == "buffer" else model.spin
        paces = part.paces
        model.to(dtype)
        if not bad or kind == "backwards":
            part.paces = paces
        model(torch.randn(2, 300, 8).to(dtype))
    elif kind == "overflow":
        model = Hot()
        nn.init.normal_(model.first.weight, std=1.5)
        nn.init.normal_(model.second.weight, std=0.5)
        model.to(dtype)(torch.randn(2, 8, 32).to(dtype))
    elif kind == "codes":
        Counted()(torch.randint(0, 50, (2, 20)))
    elif kind in ("drawing", "unseeded"):
        model, x = Drawing(), torch.randn(2, 40, 32)
        if kind == "unseeded":
            torch.seed()
        model(x)
    elif kind == "shapes":
        Graph()(torch.randn(12, 16), torch.randint(0, 12, (2, 30)))
    elif kind == "cast":  # called once as it was built, then cast
        model = Block()
        model(torch.randn(2, 40, 32))
        model.to(dtype)
        model(torch.randn(2, 40, 32).to(dtype))
    elif kind == "roots":  # two models, of which the second is called by nobody but the program
        first, second = Block(), Block()
        with torch.no_grad():
            if bad:
                second.up.weight *= 1.5
        second(first(torch.randn(2, 40, 32)))


def train():
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if bad else 0.05)
    for _ in range(3):
        x = torch.randn(4, 16, 32)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train() if kind == "train" else infer()
"""


@pytest.fixture(scope="module")
def judged(
    tmp_path_factory: pytest.TempPathFactory, driftline: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    """A candidate, replayed by the right program; what `diagnose --replay` says."""
    program = tmp_path_factory.mktemp("program") / "run.py"
    program.write_text(PROGRAM)

    def judge(kind: str, variant: str, dtype: str = "float32", *options: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(kind)
        runs = {"reference": ("good", "float32"), "candidate": (variant, dtype)}
        for name, words in runs.items():
            start = ("--", sys.executable, program, kind, *words)
            said = driftline("dump", "-o", folder / name, "--step", "*", *options, *start)
            assert said.code == 0, said.err
        start = ("--", sys.executable, program, kind, "good", "float32")
        said = driftline("replay", folder / "candidate", "-o", folder / "replay", *start)
        assert said.code == 0, said.err
        said = driftline(
            *("diagnose", folder / "reference", folder / "candidate"),
            *("--replay", folder / "replay", "--format", "json"),
        )
        return {"code": said.code, **json.loads(said.out), "folder": folder}

    return judge


def test_a_buffer_that_loses_its_digits_is_found_where_the_format_has_cost_it(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("buffer", "bad", "bfloat16")
    assert (finding["code"], finding["first_site"]) == (1, "angles")
    assert finding["cause"] == "low-precision"
    sites = json.loads((finding["folder"] / "replay" / "replay.json").read_text())["sites"]
    assert sites["angles"]["format_cost"] > 0.05


def test_a_buffer_that_keeps_its_digits_is_no_finding(
    judged: Callable[..., dict[str, Any]],
) -> None:
    assert judged("buffer", "good", "bfloat16")["verdict"] != "fail"


def test_digits_of_a_buffer_behind_complex_numbers_are_a_finding(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("complex", "bad", "bfloat16")
    assert (finding["code"], finding["first_site"]) == (1, "spin")
    assert finding["cause"] == "low-precision"
    assert judged("complex", "good", "bfloat16")["verdict"] != "fail"


def test_imaginary_halves_are_judged_by_replay_too(
    judged: Callable[..., dict[str, Any]],
) -> None:
    # Turned the other way, the real halves stay as they are.
    finding = judged("backwards", "bad", "bfloat16")
    assert (finding["code"], finding["first_site"]) == (1, "spin")
    (site,) = [site for site in finding["sites"] if site["site"] == "spin"]
    assert site["status"] == "introduced"


def test_what_overflows_in_the_candidates_format_is_no_noise_of_that_format(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("overflow", "good", "float16")
    assert (finding["code"], finding["first_site"], finding["cause"]) == (1, "second", "saturation")


def test_other_integers_that_code_passes_to_a_part_are_a_finding(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("codes", "bad")
    assert (finding["code"], finding["first_site"], finding["cause"]) == (1, "(root)", "shift")
    sites = json.loads((finding["folder"] / "replay" / "replay.json").read_text())["sites"]
    assert "other integers" in sites["(root)"]["differs"]


def test_of_one_seed_what_draws_random_numbers_stays_convicted_by_two_runs(
    judged: Callable[..., dict[str, Any]],
) -> None:
    assert judged("drawing", "good")["verdict"] == "pass"
    finding = judged("drawing", "bad")
    assert (finding["code"], finding["first_site"]) == (1, "(root)"), finding["finding"]


def test_of_two_seeds_nothing_is_concluded_from_what_draws(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("unseeded", "good")
    assert (finding["code"], finding["verdict"]) == (2, "incomplete"), finding["finding"]


def test_another_shape_at_the_border_of_a_part_is_a_finding(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("shapes", "bad")
    assert (finding["code"], finding["first_site"]) == (1, "(root)")
    assert "of shape (42, 16) to 'gather'" in finding["finding"][0] or "shape" in str(finding)


def test_a_model_that_is_cast_between_its_calls_is_judged_in_the_format_of_each(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("cast", "good", "bfloat16")
    assert finding["verdict"] != "fail", finding["finding"]


@pytest.mark.parametrize("variant", ["good", "bad"])
def test_a_model_that_another_root_calls_is_not_another_model(
    judged: Callable[..., dict[str, Any]], variant: str
) -> None:
    finding = judged("roots", variant)
    assert (finding["verdict"] == "fail") == (variant == "bad"), finding["finding"]
    if variant == "bad":
        assert finding["first_site"].endswith("up")


def test_calls_with_weights_that_were_learnt_convict_no_module(
    judged: Callable[..., dict[str, Any]],
) -> None:
    finding = judged("train", "bad")
    sites = json.loads((finding["folder"] / "replay" / "replay.json").read_text())["sites"]
    assert sites["up"]["updated_calls"] == 2
    assert finding["evidence"].get("by") != "replay"
