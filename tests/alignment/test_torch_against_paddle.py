"""One small transformer in torch and in Paddle, with copied weights: forward and backward.

Nobody says which module is which. Twins without a fault have no failing row; a planted fault is
named where it was planted.
"""

from __future__ import annotations

import contextlib

import numpy as np
import paddle
import pytest
import torch

import driftline
from driftline.dialects.paddle_hook.hook import wait_until_saved

WIDTH, HEADS, WORDS, LAYERS = 16, 4, 23, 2
IDS = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
LEVELS = ["modules", "gradients", "params"]
AFTER = ("param", "after")


class TorchBuiltIn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.norm(self.encoder(self.embed(ids))))


class PaddleBuiltIn(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed = paddle.nn.Embedding(WORDS, WIDTH)
        layer = paddle.nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0)
        self.encoder = paddle.nn.TransformerEncoder(layer, LAYERS)
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.head = paddle.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.norm(self.encoder(self.embed(ids))))


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.proj = (
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.up, self.down = torch.nn.Linear(WIDTH, 40), torch.nn.Linear(40, WIDTH)
        self.act = torch.nn.GELU()

    def forward(self, x):
        hidden = self.ln_1(x)
        b, t, _ = hidden.shape
        q, k, v = (
            p(hidden).view(b, t, HEADS, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(self.act(self.up(self.ln_2(x))))


class TorchOwn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(TorchBlock() for _ in range(LAYERS))
        self.ln_f = torch.nn.LayerNorm(WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class PaddleAttention(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        b, t, _ = hidden.shape
        q, k, v = (p(hidden).reshape([b, t, HEADS, -1]) for p in (self.q, self.k, self.v))
        mixed = paddle.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.reshape([b, t, WIDTH]))


class PaddleBlock(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = paddle.nn.LayerNorm(WIDTH), PaddleAttention()
        self.norm2, self.fc1 = paddle.nn.LayerNorm(WIDTH), paddle.nn.Linear(WIDTH, 40)
        self.gelu, self.fc2 = paddle.nn.GELU(), paddle.nn.Linear(40, WIDTH)
        self.drop = paddle.nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.fc2(self.gelu(self.fc1(self.norm2(x)))))


class PaddleOwn(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.embeddings = paddle.nn.Embedding(WORDS, WIDTH)
        self.layers = paddle.nn.LayerList([PaddleBlock() for _ in range(LAYERS)])
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.out = paddle.nn.Linear(WIDTH, WORDS, bias_attr=False)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


OTHER_NAMES = {
    "wte": "embeddings",
    "blocks": "layers",
    "ln_f": "norm",
    "lm_head": "out",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "up": "fc1",
    "down": "fc2",
    "query": "attn.q",
    "key": "attn.k",
    "value": "attn.v",
    "proj": "attn.o",
}
TWINS = {"built in": (TorchBuiltIn, PaddleBuiltIn), "own": (TorchOwn, PaddleOwn)}


def copy_weights(ours, theirs):
    """Linear weights lie [out, in] in torch and [in, out] in Paddle."""
    weights = {}
    for name, value in ours.state_dict().items():
        value = value.numpy()
        name = ".".join(OTHER_NAMES.get(part, part) for part in name.split("."))
        if "in_proj_" in name:
            holder, kind = name.split("in_proj_")
            parts = zip("qkv", np.split(value, 3), strict=True)
            weights |= {f"{holder}{which}_proj.{kind}": part.T for which, part in parts}
        else:
            turned = value.ndim == 2 and "embed" not in name
            weights[name] = value.T if turned else value
    assert weights.keys() == theirs.state_dict().keys()
    theirs.set_state_dict({name: paddle.to_tensor(v.copy()) for name, v in weights.items()})


@pytest.fixture(scope="module", params=TWINS)
def twins(request, tmp_path_factory):
    """What torch computed; and a function that plants a fault in Paddle's and compares."""
    folder = tmp_path_factory.mktemp("twins")
    torch.manual_seed(0)
    ours, kind = TWINS[request.param][0](), TWINS[request.param][1]
    start = {name: value.clone() for name, value in ours.state_dict().items()}
    optimizer = torch.optim.SGD(ours.parameters(), 0.05)
    with driftline.capture(ours, folder / "torch", levels=LEVELS, steps="*"):
        for _ in range(2):
            out = ours(torch.tensor(IDS)).reshape(-1, WORDS)
            torch.nn.functional.cross_entropy(out, torch.tensor(IDS).reshape(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    ours.load_state_dict(start)

    def compared(name, plant=None, rate=0.05):
        paddle.seed(5)
        theirs = kind()
        copy_weights(ours, theirs)
        if plant is not None:
            plant(theirs)
        optimizer = paddle.optimizer.SGD(rate, parameters=theirs.parameters())
        with driftline.capture(theirs, folder / name, levels=LEVELS, steps="*"):
            for _ in range(2):
                out = theirs(paddle.to_tensor(IDS)).reshape([-1, WORDS])
                goal = paddle.to_tensor(IDS).reshape([-1])
                paddle.nn.functional.cross_entropy(out, goal).backward()
                optimizer.step()
                optimizer.clear_grad()
        return driftline.compare(folder / "torch", folder / name)

    compared.kind = request.param
    return compared


def test_copied_weights_give_no_failing_row_and_all_of_torch_is_compared(twins):
    table = twins("clean")
    assert table.verdict == "pass"
    compared = [row for row in table.rows if row.status == "pass"]
    # Weights after an update are captured of torch only.
    apart = [row for row in table.rows if row.status not in ("pass", "extra")]
    assert not [str(row.key) for row in apart if (row.key.port, row.key.moment) != AFTER]
    ports = {row.key.port for row in compared}
    assert ports >= {"input", "output", "grad_input", "grad_output", "param", "param_grad"}
    assert "optimizer_grad" in ports
    assert {row.key.step for row in compared} == {0, 1}
    # What Paddle has more: the attention as a layer of its own, its projections as layers.
    assert all(
        "attn" in row.key.site or "drop" in row.key.site
        for row in table.rows
        if row.status == "extra"
    )
    # Of two frameworks, other settings, other code and turned matrices are no differences.
    assert not [d for d in table.differences or () if d.counts]
    assert table.training is not None and table.training.compared == (1,)


def test_another_learning_rate_is_named_at_the_update(twins):
    table = twins("rate", rate=0.08)
    assert table.verdict == "fail"
    assert table.training is not None and table.training.broken is not None
    assert (table.training.broken.step, table.training.broken.stage) == (0, "update")
    assert "the update is 1.6 times as large" in table.finding
    assert "SGD lr: 0.05 → 0.08" in table.finding


def place(twins, theirs, which):
    """A layer of the second block by what it does, and torch's name of it."""
    if twins.kind == "built in":
        block = theirs.encoder.layers[1]
        found = {"norm": "norm1", "drop": "dropout2", "attention": "self_attn.out_proj"}[which]
        layer = block
        for part in found.split("."):
            layer = getattr(layer, part)
        return layer, f"encoder.layers.1.{found}"
    block = theirs.layers[1]
    return {
        "norm": (block.norm2, "blocks.1.ln_2"),
        "drop": (block.drop, "blocks.1"),
        "attention": (block.attn.k, "blocks.1.key"),
    }[which]


def test_another_epsilon_is_named_at_its_norm(twins):
    named = []

    def plant(theirs):
        layer, site = place(twins, theirs, "norm")
        layer._epsilon = 1e-3
        named.append(site)

    table = twins("epsilon", plant)
    assert table.verdict == "fail"
    assert table.first.key.site == named[0]
    assert [(d.path, d.change) for d in table.differences or () if d.counts] == [
        (f"{named[0]}.eps", "1e-05 → 0.001")
    ]


def test_a_dropout_left_on_is_named(twins):
    named = []

    def plant(theirs):
        layer, site = place(twins, theirs, "drop")
        layer.p = 0.3
        named.append(site)

    table = twins("dropout", plant)
    assert table.verdict == "fail"
    assert table.first.key.site == named[0]


def test_a_square_weight_that_was_not_turned_is_named_and_not_aligned_away(twins):
    named = []

    def plant(theirs):
        layer, site = place(twins, theirs, "attention")
        layer.weight.set_value(layer.weight.numpy().T.copy())
        named.append(site)

    table = twins("turned", plant)
    assert table.verdict == "fail"
    first = table.first.key
    assert (first.site, first.port, first.slot) == (named[0], "param", "weight")
    wrong = [row for row in table.rows if row.status == "fail" and row.key.port == "param"]
    assert len(wrong) == 1


def test_weights_that_were_exchanged_are_named(twins):
    def plant(theirs):
        if twins.kind == "built in":
            attention = theirs.encoder.layers[0].self_attn
            first, second = attention.q_proj, attention.k_proj
        else:
            first, second = theirs.layers[0].attn.q, theirs.layers[0].attn.k
        q, k = first.weight.numpy().copy(), second.weight.numpy().copy()
        first.weight.set_value(k)
        second.weight.set_value(q)

    table = twins("exchanged", plant)
    wrong = [row for row in table.rows if row.status == "fail" and row.key.port == "param"]
    assert len(wrong) == 2 and all(row.key.slot.endswith("weight") for row in wrong)
    own = {"blocks.0.query", "blocks.0.key"}
    fused = {"encoder.layers.0.self_attn"}
    assert {row.key.site for row in wrong} == (fused if twins.kind == "built in" else own)


def trained_with_adam(folder, wrap):
    """Both twins, three steps of Adam each, as `wrap(model, folder)` watches them."""
    torch.manual_seed(0)
    ours, theirs = TorchOwn(), PaddleOwn()
    copy_weights(ours, theirs)
    steps = torch.optim.Adam(ours.parameters(), 0.01)
    with wrap(ours, folder / "torch"):
        for _ in range(3):
            out = ours(torch.tensor(IDS)).reshape(-1, WORDS)
            torch.nn.functional.cross_entropy(out, torch.tensor(IDS).reshape(-1)).backward()
            steps.step()
            steps.zero_grad()
    steps = paddle.optimizer.Adam(0.01, parameters=theirs.parameters())
    with wrap(theirs, folder / "paddle"):
        for _ in range(3):
            out = theirs(paddle.to_tensor(IDS)).reshape([-1, WORDS])
            goal = paddle.to_tensor(IDS).reshape([-1])
            paddle.nn.functional.cross_entropy(out, goal).backward()
            steps.step()
            steps.clear_grad()
    return driftline.compare(folder / "torch", folder / "paddle")


def test_a_key_bias_without_gradient_that_adam_moves_is_no_false_alarm(tmp_path):
    table = trained_with_adam(
        tmp_path, lambda model, folder: driftline.capture(model, folder, levels=LEVELS, steps="*")
    )
    assert not table.failing, table.finding
    moved = {row.key.site for row in table.rows if row.decided_by == "beyond_bias"}
    assert moved == {"blocks.0.key", "blocks.1.key"}


def test_nor_is_it_in_trees_of_the_saving_hook_which_hold_no_gradients_of_layers(tmp_path):
    @contextlib.contextmanager
    def hooked(model, folder):
        driftline.register_saving_hook(model, folder, ["Linear", "LayerNorm"], -1, -1)
        yield
        wait_until_saved()

    table = trained_with_adam(tmp_path, hooked)
    assert not table.failing and table.coverage.share == 1.0, table.finding
    rounding = {row.key.site for row in table.rows if "nothing but rounding" in row.reason}
    assert rounding == {"blocks.0.key", "blocks.1.key"}


def pictures(framework):
    """A small network of convolutions, in either framework."""
    nn = {"torch": torch.nn, "paddle": paddle.nn}[framework]
    conv, norm, pool = (
        (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d)
        if framework == "torch"
        else (nn.Conv2D, nn.BatchNorm2D, nn.AdaptiveAvgPool2D)
    )
    return nn.Sequential(
        conv(3, 6, 3),
        norm(6),
        nn.ReLU(),
        conv(6, 8, 3, stride=2),
        norm(8),
        nn.ReLU(),
        pool(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
@pytest.mark.parametrize("steps", ["*", None], ids=["in full", "by default"])
def test_a_network_of_convolutions_agrees_and_another_epsilon_is_named(tmp_path, epsilon, steps):
    torch.manual_seed(0)
    ours, theirs = pictures("torch"), pictures("paddle")
    called = {"running_mean": "_mean", "running_var": "_variance"}
    weights = {}
    for name, value in ours.state_dict().items():
        place, _, slot = name.rpartition(".")
        value = value.numpy()
        weights[f"{place}.{called.get(slot, slot)}"] = value.T if name == "8.weight" else value
    theirs.set_state_dict({n: paddle.to_tensor(v.copy()) for n, v in weights.items()})
    theirs[4]._epsilon = epsilon
    x = np.random.RandomState(0).randn(4, 3, 11, 11).astype("float32")
    optimizer = torch.optim.Adam(ours.parameters(), 0.01)
    with driftline.capture(ours, tmp_path / "torch", levels=LEVELS, steps=steps):
        for _ in range(2):
            ours(torch.tensor(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer = paddle.optimizer.Adam(0.01, parameters=theirs.parameters())
    with driftline.capture(theirs, tmp_path / "paddle", levels=LEVELS, steps=steps):
        for _ in range(2):
            theirs(paddle.to_tensor(x)).square().sum().backward()
            optimizer.step()
            optimizer.clear_grad()
    table = driftline.compare(tmp_path / "torch", tmp_path / "paddle")
    if epsilon != 1e-5:
        assert (table.first.key.site, table.first.key.port) == ("4", "output")
        return
    assert not table.failing, table.finding
    apart = [row.key for row in table.rows if row.status != "pass"]
    alone = {key.slot for key in apart if (key.port, key.moment) != AFTER}
    # Summaries of later steps do not say what a bias of no gradient, or a turned weight, hides.
    assert alone == {"num_batches_tracked"} or not steps
