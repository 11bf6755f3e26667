"""Operators of captured torch programs: right ones pass, planted faults are named."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from aten_programs import KINDS, MORE_KINDS, program, train
from torch import nn
from torch.nn import functional

import driftline
from driftline.numerics.kernel import digest
from driftline.operators.api import check
from driftline.operators.aten.calls import Unfit, operator_of
from driftline.operators.aten.kinds import BY_INDEX

WHOLE = "ops"


def captured(path, model, act, levels=WHOLE, **options):
    with driftline.capture(model, path, levels=levels, **options):
        act()
    return path


class Given(nn.Module):
    """A module that does what it is told, for operators of which a test needs just a few."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args):
        return self.act(*args)


def checked(tmp_path, act, *args, **options):
    model = Given(act)
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(*args))
    return check(tmp_path / "run", **options)


def share_checked(found):
    cover = found.coverage
    return (cover.passed + cover.failed) / cover.operators


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_operator_of_a_forward_pass_is_right(tmp_path, kind, dtype):
    model, loss = program(kind, dtype)
    model.eval()
    with torch.no_grad():
        captured(tmp_path / "run", model, loss)
    found = check(tmp_path / "run")
    assert not found.failing, [(r.call.op_type, r.slot, r.figures) for r in found.failing]
    assert share_checked(found) > 0.95
    assert found.coverage.operators > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS + MORE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_operator_of_training_is_right(tmp_path, kind, dtype):
    model, loss = program(kind, dtype)
    captured(tmp_path / "run", model, lambda: train(model, loss))
    found = check(tmp_path / "run")
    assert not found.failing, [(r.call.op_type, r.slot, r.figures) for r in found.failing]
    assert share_checked(found) > 0.9, found.coverage
    assert {r.call.phase for r in found.rows} >= {"forward", "backward"}


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_optimizers_are_replayed_whichever_way_they_write(tmp_path, how):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(4, 6)
    captured(tmp_path / "run", model, lambda: train(model, lambda: model(x).square().mean(), **how))
    found = check(tmp_path / "run")
    assert not found.failing
    steps = [r for r in found.rows if r.call.site.startswith("AdamW/") and r.status == "pass"]
    assert steps and {r.call.step for r in steps} == {0, 1}
    if how.get("fused"):
        assert {"self.0", "exp_avgs.3", "exp_avg_sqs.1"} <= {r.slot for r in steps}


def test_a_weight_is_read_in_the_order_the_operator_saw(tmp_path):
    model, x = nn.Linear(5, 5), torch.randn(3, 5)
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(x))
    run = driftline.open_run(tmp_path / "run")
    kept = run.get("(root)/aten.addmm", "param", "mat2", moment="before").numpy()
    assert np.array_equal(kept, model.weight.detach().numpy())  # as it lies in memory
    found = check(tmp_path / "run")
    assert [(r.call.op_type, r.status) for r in found.rows] == [("aten.addmm.default", "pass")]


# --- planted faults


def spoil(path, site, factor=None, index=0, value=None):
    """Change what an operator gave, as if it were wrong."""
    run = driftline.open_run(path)
    record = next(r for r in run.records if r.key.site == site and r.key.port == "output")
    del run
    held = (path / "rank0" / record.blob.shard).read_bytes()
    kind = np.dtype({"float32": "<f4", "int64": "<i8"}[record.dtype])
    begin, length = record.blob.offset, record.blob.length
    values = np.frombuffer(held[begin : begin + length], kind).copy()
    if factor is not None:
        values *= factor
    else:
        values[index] = value
    replace(path, record, values.tobytes())


def replace(path, record, content):
    """Put other bytes in place of a record's, as if the program had made them."""
    shard = path / "rank0" / record.blob.shard
    held = bytearray(shard.read_bytes())
    begin = record.blob.offset
    held[begin : begin + len(content)] = content
    shard.write_bytes(bytes(held))
    whole = np.frombuffer(bytes(held[begin : begin + record.blob.length]), np.uint8)
    index = path / "rank0" / "index.jsonl"
    lines = []
    for text in index.read_text().splitlines():
        line = json.loads(text)
        if (line.get("shard"), line.get("offset")) == (record.blob.shard, begin):
            line["digest"] = digest(whole)
        lines.append(json.dumps(line))
    index.write_text("\n".join(lines) + "\n")


def test_a_wrong_output_is_named_and_only_that(tmp_path):
    model, loss = program("llama", torch.float32)
    model.eval()
    with torch.no_grad():
        captured(tmp_path / "run", model, loss)
    spoil(tmp_path / "run", "model.layers.1.mlp.down_proj/aten.mm", factor=1.01)
    found = check(tmp_path / "run")
    names = {r.call.site for r in found.failing}
    assert "model.layers.1.mlp.down_proj/aten.mm" in names
    # Equal bytes are stored once: what only passes them on has read the damaged ones.
    assert all(r.call.op_type.startswith(("aten.mm", "aten.add")) for r in found.failing)


WRONG = {
    "_softmax": (
        "aten::_softmax",
        lambda x, dim, half: x.exp() / (x.exp().sum(dim, keepdim=True) * 1.002),
        lambda x: functional.softmax(x, -1),
    ),
    "mm": (
        "aten::mm",
        lambda a, b: torch.einsum("ij,jk->ik", a[:, 1:], b[1:]),
        lambda x: x @ x.T,
    ),
    "gelu": (
        "aten::gelu",
        lambda x, approximate="none": x * torch.sigmoid(1.702 * x),
        lambda x: functional.gelu(x),
    ),
}

PLANTED = """
import sys, torch, driftline
from torch import nn
sys.path[:0] = {path!r}
from test_opcheck_aten import WRONG, Given
name, kernel, act = WRONG[{kind!r}]
library = torch.library.Library("aten", "IMPL")
if {kind!r} == "mm":
    kernel = lambda a, b: (a[:, 1:, None] * b[None, 1:]).sum(1)
library.impl(name.removeprefix("aten::"), kernel, "CPU")
model = Given(act)
torch.manual_seed(0)
with torch.no_grad(), driftline.capture(model, {run!r}, levels="ops"):
    model(torch.randn(16, 24))
"""


@pytest.mark.parametrize("kind", WRONG)
def test_a_kernel_that_computes_something_else_is_named(tmp_path, kind, warm_python):
    run = str(tmp_path / "run")
    text = PLANTED.format(path=sys.path, kind=kind, run=run)
    subprocess.run([warm_python, "-c", text], check=True, capture_output=True, text=True)
    found = check(run)
    assert {r.call.op_type for r in found.failing} == {f"aten.{kind}.default"}, found.rows
    assert "outside the bound" in found.failing[0].figures.reason


def test_a_result_that_is_not_finite_where_it_should_be_is_named(tmp_path):
    model = Given(lambda x: x + 1)
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(torch.ones(8)))
    spoil(tmp_path / "run", "(root)/aten.add", index=3, value=np.inf)
    row = check(tmp_path / "run").failing[0]
    assert "the first is element 3" in row.figures.reason


# --- kinds of operators


def test_values_that_are_moved_must_be_equal(tmp_path):
    model, x = Given(lambda x: torch.cat([x, x])), torch.randn(8)
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(x))
    assert check(tmp_path / "run").rows[0].figures.bound_name == "exact"
    value = np.float32(driftline.open_run(tmp_path / "run").get("(root)/aten.cat").numpy()[2])
    spoil(tmp_path / "run", "(root)/aten.cat", index=2, value=np.nextafter(value, np.float32(9)))
    assert check(tmp_path / "run").failing


def test_in_place_out_and_written_arguments_are_held_to_what_was_there_before(tmp_path):
    def act(x):
        y = x.clone()
        y.mul_(3).add_(x, alpha=0.5)
        z = torch.empty(4, 4)
        torch.mm(y, x, out=z)
        z[1] = 7
        z.masked_fill_(z > 0, -1.0)
        z.index_put_((torch.tensor([0, 0]), torch.tensor([1, 1])), x[0, :2], accumulate=True)
        z.copy_(x[0])
        z.zero_()
        return z

    found = checked(tmp_path, act, torch.randn(4, 4))
    assert not found.failing
    names = {r.call.op_type for r in found.rows if r.status == "pass"}
    assert {"aten.mul_.Tensor", "aten.add_.Tensor", "aten.mm.out", "aten.copy_.default"} <= names
    assert {"aten.masked_fill_.Scalar", "aten.index_put_.default", "aten.zero_.default"} <= names
    assert all(r.status == "pass" for r in found.rows)


def test_numbers_of_every_kind_and_lists_with_gaps_come_back(tmp_path):
    def act(x):
        y = x.masked_fill(x > 0.1, float("-inf")).softmax(-1)
        y = y[:, torch.tensor([1, 0])] + x.to(torch.complex64).mul(1 + 2j).real[:, :2]
        torch.arange(5, dtype=torch.float32)
        torch.full((2, 3), 0.1, dtype=torch.bfloat16)
        torch.linspace(0, 1, 7)
        torch.nonzero(x > 0)
        (x > 0).sum().div(3)
        x.var(0, unbiased=False)
        torch.stack([x, x], 1)
        torch._foreach_mul([x, y], [2.0, 3.0])
        x.to(torch.bfloat16).to(torch.int64)
        return functional.pad(y, (1, 2), value=float("inf"))

    found = checked(tmp_path, act, torch.randn(3, 4).clamp(-3, 3))
    bad = [(r.call.op_type, r.figures) for r in found.rows if r.status != "pass"]
    assert not bad, bad
    assert found.coverage.operators > 15


def test_random_operators_say_why_they_cannot_be_checked_and_dropout_of_nothing_can(tmp_path):
    def act(x):
        torch.rand(3)
        torch.randn_like(x)
        functional.dropout(x, 0.5, training=True)
        torch.native_dropout(x, 0.5, False)
        torch.multinomial(x.softmax(-1), 2)
        return x + x.clone().bernoulli_(0.5)

    found = checked(tmp_path, act, torch.randn(3, 4))
    reasons = {r.call.op_type: r.figures.reason for r in found.rows if r.status == "not checked"}
    for name in ("rand", "randn_like", "multinomial", "bernoulli_"):
        mine = [why for kind, why in reasons.items() if kind.split(".")[1] == name]
        assert mine and mine[0] == "it draws random numbers", (name, reasons)
    passed = {r.call.op_type for r in found.rows if r.status == "pass"}
    assert "aten.native_dropout.default" in passed
    assert not found.failing


def test_views_and_fresh_memory_are_no_operators_here_and_that_is_said(tmp_path):
    def act(x):
        return torch.empty(3).fill_(1.0) + x.T[0].reshape(-1)

    found = checked(tmp_path, act, torch.ones(3, 3))
    assert {r.call.op_type for r in found.rows} == {"aten.fill_.Scalar", "aten.add.Tensor"}
    assert any("views" in text for text in found.remarks)


def test_other_places_of_equal_values_are_as_good(tmp_path):
    model = Given(lambda x: x.topk(2))
    with torch.no_grad():
        captured(tmp_path / "run", model, lambda: model(torch.tensor([1.0, 5.0, 5.0, 5.0, 2.0])))
    run = driftline.open_run(tmp_path / "run")
    places = run.get("(root)/aten.topk", slot="1").numpy().tolist()
    other = next(place for place in (1, 2, 3) if place not in places)
    record = next(r for r in run.records if r.key.port == "output" and r.key.slot == "1")
    for value, status in ((other, "pass"), (4, "fail")):
        replace(tmp_path / "run", record, np.int64(value).tobytes())
        rows = {r.slot: r for r in check(tmp_path / "run").rows}
        assert (rows["0"].status, rows["1"].status) == ("pass", status)


def test_a_comparison_with_a_number_that_the_type_rounds_is_right(tmp_path):
    x = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    found = checked(tmp_path, lambda x: (x > 0.1, x == 0.1, x.clamp(max=0.1)), x)
    assert {r.status for r in found.rows} == {"pass"}


def test_a_long_sum_in_half_precision_is_no_failure_and_says_its_bound(tmp_path):
    torch.manual_seed(1)
    a, b = torch.randn(8, 8192).half(), torch.randn(8192, 8).half()

    def slowly(a, b):  # adds up in float16, one after the other, as a poor device does
        return torch.cumsum(a[0] * b[:, 0], 0)

    found = checked(tmp_path, slowly, a, b)
    assert not found.failing
    found = checked(tmp_path / "mm", lambda a, b: a @ b, a, b)
    assert [r.status for r in found.rows] == ["pass"]


def test_terms_that_cancel_only_in_the_end_leave_the_errors_of_what_stood_between(tmp_path):
    torch.manual_seed(4)
    ahead = torch.linspace(1.0, 2.0, 256)
    row = torch.cat([ahead, -ahead]) * (1 + 1e-6 * torch.randn(512))
    found = checked(tmp_path, lambda x: x @ torch.ones(512, 4), row[None])
    assert not found.failing, found.failing[0].figures
    spoil(tmp_path / "run", "(root)/aten.mm", index=1, value=np.float32(0.5))
    assert check(tmp_path / "run").failing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_a_norm_that_a_cpu_adds_up_in_16_bits_are_no_failure(tmp_path, dtype):
    torch.manual_seed(5)
    model = nn.LayerNorm(48).to(dtype)
    x = torch.randn(64, 48).to(dtype)
    given = (3e-5 + 1e-6 * torch.randn(64, 48)).to(dtype)  # of one sign, as real ones often are
    captured(tmp_path / "run", model, lambda: model(x).backward(given))
    found = check(tmp_path / "run")
    assert not found.failing, [(r.slot, r.figures) for r in found.failing]
    assert any(r.call.op_type == "aten.native_layer_norm_backward.default" for r in found.rows)


def test_formulas_in_which_digits_cancel_are_right_in_every_format(tmp_path):
    torch.manual_seed(2)
    wide = torch.tensor([[120.0, 0.5, -90.0, 119.0], [3.0, -3.0, 3.0, 3.0]])

    def act(x):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            y = x.to(dtype)
            functional.log_softmax(y, -1)
            torch.logsumexp(y, -1)
            functional.gelu(y.clamp(-6, 6))
            functional.softplus(-y)
            functional.layer_norm(y + 100, (4,))
            functional.interpolate(y[None], size=7, mode="linear")
            y.var(1)
            torch.sinc(y)
        torch.sinc(torch.arange(9))
        torch.linalg.svd(x)
        return torch.tensor([1e30, 1e-30]).sqrt().prod()

    found = checked(tmp_path, act, wide)
    assert not found.failing, [(r.call.op_type, r.dtype, r.figures) for r in found.failing]
    unchecked = {r.figures.reason for r in found.rows if r.status == "not checked"}
    assert unchecked <= {"its result is one of several that are right"}


def test_a_recurrent_backward_that_reads_scratch_memory_says_so(tmp_path):
    model, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    captured(tmp_path / "run", model, lambda: model(x)[0].sum().backward())
    found = check(tmp_path / "run")
    assert not found.failing
    reasons = [r.figures.reason for r in found.rows if r.status == "not checked"]
    assert all("scratch memory" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "name",
    ["aten.add", "aten.add.Tensor.more", "aten..Tensor", "aten.add.", "os.sys tem.x", "aten.a-b.c"],
)
def test_a_word_of_a_run_that_names_no_operator_is_looked_up_nowhere(name: str) -> None:
    with pytest.raises(Unfit, match="is not the name of an operator"):
        operator_of(name)


@pytest.mark.parametrize("name", sorted(BY_INDEX))
def test_places_of_values_and_of_where_they_were_are_torchs(name: str) -> None:
    x = torch.randn(5, 7)
    more = {"topk": (3,), "kthvalue": (2,), "max": (1,), "min": (1,), "median": (1,)}
    more |= {"nanmedian": (1,), "cummax": (1,), "cummin": (1,), "argmax": (1,), "argmin": (1,)}
    made = getattr(torch, name)(x, *more.get(name, ()))
    outputs = tuple(made) if not isinstance(made, torch.Tensor) else (made,)
    values, where = BY_INDEX[name]
    assert outputs[where].dtype == torch.int64
    if values is None:
        assert len(outputs) == 1
    else:
        index = outputs[where].reshape(5, -1)
        assert torch.equal(outputs[values].reshape(5, -1), x.gather(1, index))
