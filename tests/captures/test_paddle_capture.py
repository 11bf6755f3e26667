"""Capture of Paddle models: it tells the truth, and it changes nothing."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute

import driftline
from driftline.captures.paddle import module_calls
from driftline.captures.paddle.tensors import snapshot
from driftline.captures.recorder import Refusal
from driftline.errors import BadInput
from driftline.runs.memory import MemorySink

ALL = ("modules", "gradients", "params")


class Captured:
    """A capture into memory, with its tensors by (site, port, slot, step, visit)."""

    def __init__(self, model, levels=ALL, **options):
        self.sink = MemorySink()
        self.capture = driftline.capture(model, self.sink, levels=levels, **options)

    def __enter__(self):
        self.capture.__enter__()
        return self

    def __exit__(self, *error):
        self.capture.__exit__(*error)
        run = self.sink.run()
        self.events = [dict(event) for event in run.events()]
        self.records = list(run.records)
        self.keys = [record.key for record in self.records]
        self.rows = {
            (t.key.site, t.key.port, t.key.slot, t.key.step, t.key.visit): t.numpy()
            for t in run.tensors()
            if t.record.kept == "full" and t.key.phase != "recompute"
        }

    def one(self, site, port, slot="0", step=0, visit=0):
        return self.rows[site, port, slot, step, visit]

    def said(self, kind):
        return [event["message"] for event in self.events if event["kind"] == kind]


class Double(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Mixture(nn.Layer):
    """Operations behind which no hook can stand, and some that change their input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.embed = nn.Embedding(9, 6, sparse=True)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = paddle.split(self.a(x).tile([1, 1, 3]), 3, axis=-1)
        joined = paddle.concat([q, k * v], axis=1)
        x = recompute(self.b, paddle.stack([joined, joined]).sum(0)) + Double.apply(joined)
        x = F.relu_(x * 1)
        y = paddle.einsum("bij,bkj->bik", x, x)
        y[:, 0] = 1.0
        return y


class Transformer(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2), 2)
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)))


class Pictures(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 25)
        self.conv, self.norm = nn.Conv2D(1, 3, 3), nn.BatchNorm2D(3)
        self.pool, self.lstm = nn.MaxPool2D(2), nn.LSTM(3, 4)

    def forward(self, ids):
        x = self.embed(ids).reshape([-1, 1, 5, 5])
        x = self.pool(F.gelu(self.norm(self.conv(x)))).reshape([ids.shape[0], -1, 3])
        return self.lstm(x)[0]


class Half(nn.Layer):
    def __init__(self):
        super().__init__()
        self.inner = Transformer()

    def forward(self, ids):
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            return self.inner(ids).astype("float32")


def trained(kind, captured):
    paddle.seed(7)
    model = kind()
    optimizer = paddle.optimizer.Adam(
        0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByNorm(0.5)
    )
    left = []
    with captured(model) as capture:
        for _ in range(2):
            for _ in range(2):
                out = model(paddle.to_tensor([[1, 2, 3], [4, 5, 6]]))
                out.square().mean().backward()
                left.append(out.numpy())
            left += [p.grad.numpy() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.clear_grad()
    return [*left, *(p.numpy() for p in model.parameters())], capture


@pytest.mark.parametrize("kind", [Transformer, Mixture, Pictures, Half])
def test_outputs_gradients_and_weights_are_bitwise_what_they_are_without(kind):
    plain, _ = trained(kind, lambda model: nullcontext())
    watched, capture = trained(kind, Captured)
    assert [a.tobytes() for a in plain] == [a.tobytes() for a in watched]
    assert capture.rows and not capture.said("capture-fault")
    assert {key.step for key in capture.keys} == {0, 1}
    # Only the gradient of a sparse embedding: the buffer that an LSTM never fills is no loss.
    assert len(capture.said("refused")) == (kind is Mixture)


def test_every_tensor_is_what_a_hook_that_copies_it_sees():
    paddle.seed(0)
    model = Transformer()
    seen = {}

    def keep(name):
        def hook(layer, inputs, output):
            seen[name, "input"] = inputs[0].numpy().copy() if inputs else None
            seen[name, "output"] = output.numpy().copy()
            output.register_hook(keep_gradient)

        def keep_gradient(gradient):
            seen[name, "grad_output"] = gradient.numpy().copy()

        return hook

    for name, layer in model.named_sublayers():
        if not isinstance(layer, nn.LayerList):
            layer.register_forward_post_hook(keep(name))
    with Captured(model) as capture:
        model(paddle.to_tensor([[1, 2, 3]])).sum().backward()
    assert len(seen) > 60
    for (name, port), value in seen.items():
        slots = [s for site, p, s, *_ in capture.rows if (site, p) == (name, port)]
        if value is not None:
            assert np.array_equal(capture.one(name, port, slots[0]), value), (name, port)
    for name, parameter in model.named_parameters():
        site, _, slot = name.rpartition(".")
        assert np.array_equal(capture.one(site, "param_grad", slot), parameter.grad.numpy())
        assert np.array_equal(capture.one(site, "param", slot), parameter.numpy())


def test_an_input_gradient_is_the_layer_s_own_share_and_adds_up_its_paths():
    class Twice(nn.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return self.one(x) + self.two(x) + y

    class Net(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.twice = nn.Linear(4, 4), Twice()

        def forward(self, x):
            hidden = self.first(x)
            return self.twice(hidden, y=hidden * 3) + hidden * 5

    model = Net()
    with Captured(model) as capture:
        model(paddle.ones([2, 4])).sum().backward()
    arrived = np.ones((2, 4), np.float32)
    one, two = (arrived @ getattr(model.twice, n).weight.numpy().T for n in ("one", "two"))
    assert np.allclose(capture.one("twice.one", "grad_input", "input"), one, atol=1e-6)
    assert np.allclose(capture.one("twice", "grad_input", "x"), one + two, atol=1e-6)
    assert np.array_equal(capture.one("twice", "grad_input", "y"), arrived)
    total = capture.one("first", "grad_output")
    assert np.allclose(total, one + two + 8 * arrived, atol=1e-5)


def test_what_is_changed_in_place_afterwards_is_kept_as_it_was():
    class Spoils(nn.Layer):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            y = self.lin(x)
            before.append(y.numpy().copy())
            y.zero_()
            x.fill_(7.0)
            return y

    before = []
    with paddle.no_grad(), Captured(model := Spoils(), steps="*") as capture:
        for _ in range(2):
            model(paddle.ones([1, 3]))
    for step in (0, 1):
        assert np.array_equal(capture.one("lin", "output", step=step), before[step])
        assert np.array_equal(capture.one("(root)", "input", "x", step=step), np.ones((1, 3)))


def test_arguments_by_name_nested_results_and_views():
    class Net(nn.Layer):
        def forward(self, x, *, mask=None, past=()):
            return {"out": x[1:].t(), "cache": (past[0], x[:, 1])}

    x = paddle.arange(6, dtype="float32").reshape([2, 3])
    with Captured(model := Net(), levels="modules") as capture:
        model(x=x, mask=x > 2, past=[x * 2])
    assert np.array_equal(capture.one("(root)", "input", "mask"), x.numpy() > 2)
    assert np.array_equal(capture.one("(root)", "input", "past.0"), x.numpy() * 2)
    assert np.array_equal(capture.one("(root)", "output", "out"), x.numpy()[1:].T)
    assert np.array_equal(capture.one("(root)", "output", "cache.1"), x.numpy()[:, 1])


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float64", "float8_e4m3fn"]
)
def test_every_number_format_keeps_its_bytes(dtype):
    values = paddle.to_tensor([0.0, 1.0, 2.0]).astype(dtype)
    with Captured(model := nn.Identity(), levels="modules") as capture:
        model(values)
    assert {record.dtype for record in capture.records} == {dtype}
    run = capture.sink.run()
    assert len(next(iter(run.tensors())).numpy()) == 3


def test_what_has_no_plain_values_is_refused_with_a_reason():
    sparse = paddle.sparse.sparse_coo_tensor([[0], [1]], [1.0], [2, 2])
    assert snapshot(sparse) == Refusal("sparse tensors are not stored")
    empty = snapshot(paddle.zeros([0, 3]))
    assert not isinstance(empty, Refusal) and (empty.shape, empty.length) == ((0, 3), 0)


def test_selection_and_reduction_are_those_of_torch(tmp_path):
    model = Transformer()
    model.eval()
    ids = paddle.to_tensor([[1, 2]])
    with Captured(model, levels="modules", classes="Linear", ports="output", steps=1) as capture:
        for _ in range(3):
            model(ids)
    assert {record.class_name for record in capture.records} == {"Linear"}
    assert {(key.port, key.step) for key in capture.keys} == {("output", 1)}
    for keep in ("summary", "digest", "sample(4)", "describe"):
        with Captured(model, levels="modules", sites="head", keep=keep) as capture:
            model(ids)
        assert {record.kept for record in capture.records} == {keep.partition("(")[0]}
    with driftline.capture(model, tmp_path / "run", sites="encoder.layers.0.*") as capture:
        model(ids)
    run = driftline.open_run(tmp_path / "run")
    assert all(record.key.site.startswith("encoder.layers.0.") for record in run.records)
    with (
        pytest.warns(UserWarning, match="no site matches 'encoder.layer'"),
        driftline.capture(model, tmp_path / "none", sites="encoder.layer"),
    ):
        model(ids)


class Own(paddle.optimizer.SGD):
    """An optimizer with a step of its own."""

    def step(self):
        super().step()


def test_steps_end_with_the_optimizer_s_and_micro_batches_are_visits():
    model = nn.Sequential(nn.Linear(2, 2))
    x = paddle.ones([1, 2])
    for kind in (paddle.optimizer.SGD, paddle.optimizer.AdamW, Own):
        with Captured(model) as capture:

            class Late(kind):
                def step(self):
                    super().step()

            optimizer = Late(0.1, parameters=model.parameters())
            for _ in range(2):
                for _ in range(2):
                    model(x).sum().backward()
                optimizer.step()
                optimizer.clear_grad()
            optimizer.minimize(model(x).sum())
            model.eval()
            model(x)
            model.train()
        calls = sorted({(k.step, k.visit) for k in capture.keys if k.port == "output"})
        assert calls == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
        first, second = (capture.one("0", "param_grad", "weight", visit=v) for v in (0, 1))
        assert np.array_equal(first, second)
        assert np.array_equal(capture.one("0", "optimizer_grad", "weight"), first + second)


def test_parameter_groups_are_one_step_and_clipped_gradients_are_shown():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(one, two)
    groups = [{"params": one.parameters()}, {"params": two.parameters(), "learning_rate": 0.5}]
    optimizer = paddle.optimizer.Adam(
        0.1, parameters=groups, grad_clip=nn.ClipGradByNorm(0.25), weight_decay=0.1
    )
    with Captured(model) as capture:
        for _ in range(2):
            model(paddle.ones([4, 2])).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
    assert {key.step for key in capture.keys} == {0, 1}
    for site in ("0", "1"):
        clipped = capture.one(site, "optimizer_grad", "weight")
        assert np.isclose(np.linalg.norm(clipped), 0.25, rtol=1e-5)


def test_driftline_step_takes_over():
    model = nn.Linear(2, 2)
    model.eval()
    with Captured(model, levels="modules") as capture:
        for _ in range(2):
            model(paddle.ones([1, 2]))
            model(paddle.ones([1, 2]))
            driftline.step()
    steps = [(key.step, key.visit) for key in capture.keys if key.port == "output"]
    assert steps == [(0, 0), (1, 0), (2, 0), (2, 1)]


def test_a_recomputed_forward_has_a_phase_of_its_own():
    class Net(nn.Layer):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            return recompute(self.lin, x * 1.0)

    x = paddle.ones([1, 2])
    x.stop_gradient = False
    with Captured(model := Net()) as capture:
        model(x).sum().backward()
    phases = [key.phase for key in capture.keys if (key.site, key.port) == ("lin", "output")]
    assert phases == ["forward", "recompute"]


def test_a_second_backward_pass_takes_the_next_visit():
    model = nn.Sequential(nn.Linear(2, 2))
    with Captured(model) as capture:
        loss = model(paddle.ones([1, 2])).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    found = sorted(k.visit for k in capture.keys if (k.site, k.port) == ("0", "grad_output"))
    assert found == [0, 1]


def test_an_exception_of_the_program_is_its_own_and_the_next_call_is_seen():
    class Fails(nn.Layer):
        def forward(self, x):
            if x.shape[0] == 1:
                raise KeyError("mine")
            return x

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    with Captured(model, steps="*", steps_by="call") as capture:
        with pytest.raises(KeyError, match="mine"):
            model(paddle.ones([1, 2]))
        model(paddle.ones([2, 2])).sum().backward()
    assert capture.said("exception") == ["KeyError was raised inside 1"]
    assert ("1", "output", "0", 1, 0) in capture.rows


def test_a_fault_of_the_capture_is_an_event_and_never_the_program_s(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(module_calls.layers, "outputs", broken)
    model = nn.Linear(2, 2)
    with Captured(model, levels="modules") as capture:
        model(paddle.ones([1, 2]))
    assert any("ZeroDivisionError" in text for text in capture.said("capture-fault"))


@pytest.mark.parametrize("full_graph", [True, False])
def test_a_static_graph_is_what_it_is_without_and_only_its_ends_are_seen(full_graph, monkeypatch):
    monkeypatch.setenv("MIN_GRAPH_SIZE", "0")
    paddle.seed(3)
    model = Transformer()
    model.eval()
    ids = paddle.to_tensor([[1, 2, 3]])
    static = paddle.jit.to_static(model, full_graph=full_graph)
    plain = static(ids).numpy()
    with Captured(static, levels="modules") as capture:
        watched = static(ids).numpy()
    assert watched.tobytes() == plain.tobytes()
    assert {(key.site, key.port) for key in capture.keys} == {
        ("(root)", "input"),
        ("(root)", "output"),
    }
    (text,) = capture.said("compiled")
    assert "paddle.jit.to_static" in text
    assert capture.keys[0].slot == "ids"


def test_a_static_layer_that_is_called_as_it_was_written_shows_all_and_no_note():
    paddle.seed(3)
    static = paddle.jit.to_static(Transformer())
    static.eval()
    paddle.jit.enable_to_static(False)
    try:
        with Captured(static, levels="modules") as capture:
            static(paddle.to_tensor([[1, 2, 3]]))
    finally:
        paddle.jit.enable_to_static(True)
    assert len({key.site for key in capture.keys}) > 5
    assert not capture.said("compiled")


def test_two_static_programs_agree_in_nothing_but_their_ends(tmp_path):
    ids = paddle.to_tensor([[1, 2, 3]])
    for name in ("one", "other"):
        paddle.seed(3)
        model = Transformer()
        model.eval()
        static = paddle.jit.to_static(model)
        with driftline.capture(static, tmp_path / name):
            static(ids)
    table = driftline.compare(tmp_path / "one", tmp_path / "other")
    assert table.verdict == "incomplete"
    assert "of '(root)' only inputs and outputs are known" in table.finding
    assert table.finding.count("paddle.jit.to_static") == 1


def test_wrappers_for_data_parallelism_leave_no_trace_in_names():
    model = paddle.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    with Captured(model, levels="modules") as capture:
        model(paddle.ones([1, 2]))
    assert {key.site for key in capture.keys} == {"(root)", "0"}


def test_the_graph_of_a_step_is_gone_after_it_as_it_is_without_capture():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = paddle.ones([2048, 64])  # 0.5 MB: a graph of some 8 MB
    with Captured(model, levels="gradients", keep="describe"):
        for step in range(25):
            model(x).sum().backward()
            model.clear_gradients()
            if step == 5:
                before = resident()
    assert resident() - before < 12e6  # with `tensor.grad_fn` as Paddle gives it: 28 MB


def test_a_second_derivative_is_what_it_is_without():
    def penalised(captured):
        paddle.seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = paddle.randn([3, 4])
        x.stop_gradient = False
        with captured(model):
            out = model(x).sum()
            (slope,) = paddle.grad(out, [x], create_graph=True)
            (out + (slope.norm() - 1) ** 2).backward()
        return [
            slope.numpy().tobytes(),
            *(p.grad.numpy().tobytes() for p in model.parameters()[:3]),
        ]

    assert penalised(Captured) == penalised(lambda model: nullcontext())


def test_layers_nested_by_the_hundred_do_not_run_out_of_stack():
    model = nn.Linear(2, 2)
    for _ in range(250):
        model = nn.Sequential(model)
    limit = sys.getrecursionlimit()
    with Captured(model, levels="modules") as capture:
        model(paddle.ones([1, 2]))
    assert len(capture.records) == 502 and sys.getrecursionlimit() == limit


def test_operators_are_refused_in_a_sentence_and_strangers_too():
    with pytest.raises(BadInput, match="operators of Paddle programs are not seen"):
        driftline.capture(nn.Linear(2, 2), MemorySink(), levels=["modules", "ops"])
    with pytest.raises(BadInput, match="Tensor is not a torch module"):
        driftline.capture(paddle.ones([1]), MemorySink())


def test_the_plain_call_is_back_when_the_last_capture_has_ended():
    before = paddle.nn.Layer.__call__, paddle.optimizer.Adam.step, paddle.optimizer.Optimizer.step
    model = nn.Linear(2, 2)
    with Captured(model) as outer, Captured(model) as inner:
        model(paddle.ones([1, 2])).sum().backward()
        assert paddle.nn.Layer.__call__ is not before[0]
    assert outer.rows.keys() == inner.rows.keys()
    after = paddle.nn.Layer.__call__, paddle.optimizer.Adam.step, paddle.optimizer.Optimizer.step
    assert after == before
    model(paddle.ones([1, 2])).sum().backward()
