"""Gradients of a Paddle layer's inputs, whatever its operations are and whoever else uses them.

Each layer is called on its own, with detached inputs, to say what it sends back; a run without
capture says what the program computes.
"""

from __future__ import annotations

import gc
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute
from test_paddle_capture import Captured

from driftline.captures.paddle import backward_graph, list_operations


class Halves(PyLayer):
    """Takes two tensors, of which the second needs no gradient, and gives two."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale, x + 1

    @staticmethod
    def backward(ctx, one, two):
        (scale,) = ctx.saved_tensor()
        return one * scale + two, None


def halves(layer, x):
    one, two = Halves.apply(x, paddle.full([1], 3.0))
    return one * two


def index_put(layer, x):
    places = (paddle.to_tensor([0]), paddle.to_tensor([1]))
    return paddle.index_put(x, places, paddle.ones([1, 4]))


LAYERS = {
    "concat": lambda layer, x: paddle.concat([x, x * 2], axis=1),
    "stack": lambda layer, x: paddle.stack([x, x * 2, x], axis=-1).sum(-1),
    "add_n": lambda layer, x: paddle.add_n([x, x * 2, x]),
    "einsum": lambda layer, x: paddle.einsum("bij,bkj->bik", x, x),
    "einsum alone": lambda layer, x: paddle.einsum("bij->bj", x),
    "einsum of three": lambda layer, x: paddle.einsum("bij,bkj,bkl->il", x, x, x),
    "einsum with dots": lambda layer, x: paddle.einsum("...ij,...kj->...ik", x, x),
    "time major lstm": lambda layer, x: layer.by_time(x)[0],
    "lstm": lambda layer, x: layer.lstm(x)[0],
    "PyLayer": halves,
    "index_put": index_put,
    "recompute": lambda layer, x: recompute(lambda t: paddle.concat([t, t * 3], 1), x),
    "kron": lambda layer, x: paddle.kron(x, paddle.ones([1, 2, 2])),
    "interpolate": lambda layer, x: F.interpolate(x.unsqueeze(1), scale_factor=2, mode="bilinear"),
    "cumprod": lambda layer, x: paddle.cumprod(x, dim=1),
    "parts": lambda layer, q, k, v: q * 2 + k * v + paddle.tanh(k),
    "joined parts": lambda layer, q, k, v: paddle.concat([q, v, k], axis=1),
}


class Inner(nn.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.lstm = nn.LSTM(4, 4)
        self.by_time = nn.LSTM(4, 4, time_major=True)

    def forward(self, *inputs):
        return self.function(self, *inputs)


class Net(nn.Layer):
    """`inner` in the middle, and `others` more who use its first input."""

    def __init__(self, kind, others):
        super().__init__()
        self.parts = 3 if "parts" in kind else 1
        self.others = others
        self.first, self.norm = nn.Linear(4, 4 * self.parts), nn.LayerNorm(4)
        self.inner = Inner(LAYERS[kind])

    def forward(self, x):
        hidden = self.first(x)
        self.given = list(paddle.split(hidden, 3, -1)) if self.parts == 3 else [hidden]
        loss = self.inner(*self.given).square().sum()
        for number in range(self.others):
            loss = loss + (self.norm(self.given[0]) * self.given[0] * (number + 1)).sum()
        return loss


def run(kind, others, captured):
    paddle.seed(3)
    net = Net(kind, others)
    x = paddle.to_tensor(np.random.RandomState(1).randn(2, 3, 4).astype("float32"))
    with captured(net) as capture:
        loss = net(x)
        loss.backward()
    left = [loss, *(p.grad for p in net.parameters() if p.grad is not None)]
    return [one.numpy().tobytes() for one in left], capture, net


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_what_the_layer_alone_sends_back_and_no_bit_of_the_program_changes(kind, others):
    plain, _, _ = run(kind, others, lambda net: nullcontext())
    watched, capture, net = run(kind, others, Captured)
    assert plain == watched
    assert not capture.said("gradient-lost") and not capture.said("capture-fault")
    alone = [tensor.detach() for tensor in net.given]
    for tensor in alone:
        tensor.stop_gradient = False
    arrived = paddle.to_tensor(capture.one("inner", "grad_output"))
    paddle.autograd.backward([net.inner(*alone)], [arrived])
    slots = sorted(
        s for site, port, s, *_ in capture.rows if (site, port) == ("inner", "grad_input")
    )
    assert len(slots) == len(alone)
    for slot, tensor in zip(slots, alone, strict=True):
        found, own = capture.one("inner", "grad_input", slot), tensor.grad.numpy()
        assert np.abs(found - own).max() <= (1e-5 if others else 1e-7) * np.abs(own).max()


class Residual(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        return hidden + self.lstm(hidden)[0]


def test_a_second_pass_over_the_same_graph_gives_the_same_again():
    with Captured(model := Residual()) as capture:
        loss = model(paddle.ones([2, 3, 4])).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    one, two = (capture.one("lstm", "grad_input", "inputs", visit=visit) for visit in (0, 1))
    assert np.array_equal(one, two) and not capture.said("gradient-lost")


def test_what_still_cannot_be_seen_is_named():
    """Two operations that show nothing, one in the layer and one outside of it."""

    class Two(nn.Layer):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.one, self.two = (nn.LSTM(3, 3, time_major=True) for _ in range(2))

        def forward(self, x):
            hidden = self.lin(x)
            return self.one(hidden)[0] + self.two(hidden)[0]

    with Captured(model := Two()) as capture:
        model(paddle.ones([2, 2, 3])).sum().backward()
    lost = capture.said("gradient-lost")
    assert len(lost) == 2 and "input gradient of one" in lost[0] and "Rnn" in lost[0]
    assert ("one", "grad_output", "0", 0, 0) in capture.rows
    assert ("one", "grad_input", "inputs", 0, 0) not in capture.rows


def test_nothing_stays_behind_a_capture():
    plain = paddle._C_ops.concat, paddle.base.core.eager.run_backward, Halves.apply
    with Captured(model := Residual()):
        for _ in range(3):
            model(paddle.ones([2, 3, 4])).sum().backward()
    assert (paddle._C_ops.concat, paddle.base.core.eager.run_backward, Halves.apply) == plain
    gc.collect()
    assert not list(list_operations._senders.items()) and not backward_graph._listeners


def test_no_operation_that_is_hooked_takes_a_list_of_tensors():
    header = Path(paddle.__file__).parent / "include/paddle/phi/api/include/api.h"
    found = re.findall(r"^PADDLE_API\s+.*?\s(\w+)\((.*?)\);", header.read_text(), re.M | re.S)
    lists = {name for name, arguments in found if re.search(r"vector<(const )?Tensor", arguments)}
    assert len(lists) > 20 and {"concat", "stack", "rnn", "einsum"} <= lists
    assert not {backward_graph.node_name(name) for name in lists} & backward_graph.hookable()
    assert {
        backward_graph.node_name(name) for name in backward_graph.USUAL
    } <= backward_graph.hookable()
    assert len(backward_graph.hookable()) > 500
