"""What differs between two models is named: small models with bugs that happened in public."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import driftline
from driftline.comparison.differences.difference import Difference, counted
from driftline.comparison.differences.find import differences_of
from driftline.formats.registry import open_run
from driftline.reporting.views import differences as view

Found = tuple[Difference, ...]


def fill(model: nn.Module) -> nn.Module:
    """Weights that follow from their names, so that two variants share all they have in common."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7919)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class Frequencies(nn.Module):
    def __init__(self, theta: float = 10_000.0) -> None:
        super().__init__()
        exponents = torch.arange(0, 16, 2).float() / 16
        self.register_buffer("inv_freq", theta**-exponents, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self.inv_freq.float()
        return angles.cos(), angles.sin()


class Scaled(nn.Module):
    """A projection with a low-rank adapter."""

    def __init__(self, scaling: float) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16, bias=False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.scaling = scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scaling


class Text(nn.Module):
    """Embedding, rotation, adapter, norm, head: a place for each bug."""

    def __init__(
        self,
        *,
        eps: float = 1e-12,
        theta: float = 10_000.0,
        scaling: float = 4.0,
        bias: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.embed_norm = nn.LayerNorm(16, eps=eps)
        self.rotary = Frequencies(theta)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=bias) for _ in range(3))
        self.adapter = Scaled(scaling)
        self.drop = nn.Dropout(0.1)
        self.lm_head = nn.Linear(16, 40, bias=False)
        fill(self)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_norm(self.embed(ids))
        cos, sin = self.rotary(torch.arange(ids.shape[1]))
        x = x * torch.cat([cos, sin], -1).to(x.dtype)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.drop(self.adapter(x)))


IDS = torch.arange(24).reshape(2, 12) % 40


def found(
    tmp_path: Path,
    reference: Callable[[], Any],
    candidate: Callable[[], Any],
    call: Callable[[Any], Any] = lambda model: model(IDS),
    **options: Any,
) -> Found:
    for name, make in (("ref", reference), ("cand", candidate)):
        model = make()
        with driftline.capture(model, tmp_path / name, **options), torch.no_grad():
            call(model)
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences is not None
    return differences


def own(differences: Found) -> dict[str, Difference]:
    return {difference.path: difference for difference in differences if difference.counts}


def test_the_epsilon_of_a_norm_is_named(tmp_path: Path) -> None:
    differences = own(found(tmp_path, lambda: Text().eval(), lambda: Text(eps=1e-5).eval()))
    assert list(differences) == ["embed_norm.eps"]
    assert differences["embed_norm.eps"].change == "1e-12 → 1e-05"


def test_the_epsilon_is_named_below_the_noise_of_bfloat16(tmp_path: Path) -> None:
    table = None
    for name, model in (("ref", Text()), ("cand", Text(eps=1e-5).bfloat16())):
        with driftline.capture(model.eval(), tmp_path / name), torch.no_grad():
            model(IDS)
    table = driftline.compare(tmp_path / "ref", tmp_path / "cand")
    assert table.differences is not None
    assert "embed_norm.eps" in own(table.differences)
    # Every weight differs in its number format, which is sound and one line.
    expected = [difference for difference in table.differences if not difference.counts]
    assert [difference.name for difference in expected] == ["number format of the weights"]
    assert expected[0].change == "float32 → bfloat16, 13 of 13 the same, or rounded to it"


def test_the_epsilon_of_a_batch_norm_is_named(tmp_path: Path) -> None:
    def net(eps: float) -> nn.Module:
        return fill(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=eps))).eval()

    picture = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)
    differences = found(
        tmp_path, lambda: net(1e-3), lambda: net(1e-5), lambda model: model(picture)
    )
    assert own(differences)["1.eps"].change == "0.001 → 1e-05"


def test_a_large_epsilon_is_no_factor(tmp_path: Path) -> None:
    differences = own(found(tmp_path, lambda: Text().eval(), lambda: Text(eps=0.5).eval()))
    words = "a normalised output that is sqrt((variance + 1e-12) / (variance + 0.5)) times as large"
    assert differences["embed_norm.eps"].explains == words


def test_what_torch_leaves_on_modules_laid_out_over_ranks_is_no_difference(tmp_path: Path) -> None:
    def pass_on(module: nn.Module, inputs: Any) -> None:
        del module, inputs

    def laid_out() -> nn.Module:
        model = Text().eval()
        model.embed_norm._distribute_module_applied = True
        model.embed_norm.register_forward_pre_hook(pass_on)
        return model

    # A hook that a program sets is one; those of `distribute_module` are not.
    assert list(own(found(tmp_path / "a", lambda: Text().eval(), laid_out))) == ["embed_norm.hooks"]
    pass_on.__module__ = "torch.distributed.tensor._api"
    assert not own(found(tmp_path / "b", lambda: Text().eval(), laid_out))


def test_frequencies_in_bfloat16_are_named(tmp_path: Path) -> None:
    def sound() -> nn.Module:
        model = Text()
        kept = model.rotary.inv_freq.clone()
        model.bfloat16().rotary.inv_freq = kept
        return model.eval()

    rounded = own(found(tmp_path, sound, lambda: Text().bfloat16().eval()))
    assert list(rounded) == ["rotary.inv_freq"]
    assert rounded["rotary.inv_freq"].change == "float32 → bfloat16, rounded"


def test_frequencies_of_another_base_are_named(tmp_path: Path) -> None:
    differences = own(found(tmp_path, lambda: Text(theta=5e5).eval(), lambda: Text().eval()))
    assert list(differences) == ["rotary.inv_freq"]
    difference = differences["rotary.inv_freq"]
    assert difference.relation == "different" and difference.kind == "buffer"
    assert difference.distance == pytest.approx(0.17, abs=0.1)


def test_biases_that_were_not_loaded_are_named(tmp_path: Path) -> None:
    differences = own(found(tmp_path, lambda: Text().eval(), lambda: Text(bias=False).eval()))
    bias = differences["layers.0.bias"]
    assert bias.relation == "missing" and bias.candidate == "(absent)"
    assert bias.sites == ("layers.0", "layers.1", "layers.2")


def test_the_scaling_of_an_adapter_is_named(tmp_path: Path) -> None:
    differences = own(found(tmp_path, lambda: Text().eval(), lambda: Text(scaling=1.0).eval()))
    assert list(differences) == ["adapter.scaling"]
    assert differences["adapter.scaling"].change == "4.0 → 1.0"
    assert "a factor of 0.25" in differences["adapter.scaling"].explains


def test_a_head_that_is_no_longer_tied_is_named(tmp_path: Path) -> None:
    differences = [
        difference
        for difference in found(tmp_path, lambda: Text().eval(), lambda: Text(tied=False).eval())
        if difference.counts
    ]
    assert {difference.path for difference in differences} == {"lm_head.weight"}
    assert [difference.relation for difference in differences] == ["tied", "unrelated"]
    assert differences[0].change == "tied to embed.weight → not tied"


def test_a_model_left_in_training_mode_is_named(tmp_path: Path) -> None:
    differences = own(found(tmp_path, lambda: Text().eval(), lambda: Text().train()))
    (mode,) = differences.values()
    assert mode.kind == "mode" and mode.change == "False → True"
    assert "drop" in mode.sites and "(root)" in mode.sites


# Training.


def train(path: Path, make_optimizer: Any, loss_of: Any, model: nn.Module | None = None) -> None:
    model = model or Text().train()
    model.drop.p = 0.0  # type: ignore[union-attr]
    optimizer = make_optimizer(model)
    with driftline.capture(model, path):
        for _ in range(2):
            loss = loss_of(model(IDS).flatten(0, 1), (IDS.flatten() + 1) % 40)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def trained(tmp_path: Path, one: tuple[Any, Any], two: tuple[Any, Any]) -> dict[str, Difference]:
    train(tmp_path / "ref", *one)
    train(tmp_path / "cand", *two)
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences is not None
    return own(differences)


def groups(decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        vectors = [p for p in model.parameters() if p.dim() == 1]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        settings = [{"params": matrices}, {"params": vectors, "weight_decay": decay}]
        return torch.optim.AdamW(settings, lr=0.01, weight_decay=0.1)

    return make


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_weight_decay_of_norms_is_named(tmp_path: Path) -> None:
    differences = trained(tmp_path, (groups(0.0), F.cross_entropy), (groups(0.1), F.cross_entropy))
    (decay,) = differences.values()
    assert decay.name == "AdamW weight_decay" and decay.change.startswith("0.0 → 0.1, for 5 par")
    assert "embed_norm.weight" in decay.relation


def test_the_same_settings_in_other_groups_are_no_difference(tmp_path: Path) -> None:
    def together(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    assert not trained(tmp_path, (groups(0.1), F.cross_entropy), (together, F.cross_entropy))


def smoothed(logits: torch.Tensor, labels: torch.Tensor, *, all_tokens: bool) -> torch.Tensor:
    counted_tokens = labels < 20
    log_p = logits.log_softmax(-1)
    picked = -log_p.gather(1, labels[:, None])[:, 0][counted_tokens].mean()
    smooth = -log_p.mean(-1)
    smooth = smooth.mean() if all_tokens else smooth[counted_tokens].mean()
    return 0.9 * picked + 0.1 * smooth


def test_a_loss_that_counts_ignored_tokens_is_named(tmp_path: Path) -> None:
    right = functools.partial(smoothed, all_tokens=False)
    wrong = functools.partial(smoothed, all_tokens=True)
    differences = trained(tmp_path, (sgd, right), (sgd, wrong))
    (loss,) = differences.values()
    assert loss.name == "functions of the loss in step 0"
    assert loss.change == "IndexBackward0 → (absent)"


def test_settings_of_a_loss_module_are_named(tmp_path: Path) -> None:
    def make(smoothing: float) -> Any:
        return nn.CrossEntropyLoss(label_smoothing=smoothing)

    for name, smoothing in (("ref", 0.1), ("cand", 0.2)):
        model, criterion = Text().train(), make(smoothing)
        model.criterion = criterion
        optimizer = sgd(model)
        with driftline.capture(model, tmp_path / name):
            criterion(model(IDS).flatten(0, 1), IDS.flatten()).backward()
            optimizer.step()
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences is not None
    assert own(differences)["criterion.label_smoothing"].change == "0.1 → 0.2"


def test_a_learning_rate_that_changes_later_is_named_with_its_step(tmp_path: Path) -> None:
    for name, second in (("ref", 0.01), ("cand", 0.1)):
        model = Text().train()
        model.drop.p = 0.0
        optimizer = sgd(model)
        with driftline.capture(model, tmp_path / name):
            for step in range(3):
                optimizer.param_groups[0]["lr"] = 0.01 if step < 2 else second
                F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences is not None
    (rate,) = own(differences).values()
    assert rate.name == "SGD lr in group 0 from step 2" and rate.change == "0.01 → 0.1"


def test_clipping_and_the_order_of_calls_are_named(tmp_path: Path) -> None:
    for name, limit in (("ref", 1.0), ("cand", None)):
        model = Text().train()
        model.drop.p = 0.0
        optimizer = sgd(model)
        with driftline.capture(model, tmp_path / name):
            F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences is not None
    kinds = {difference.kind: difference for difference in own(differences).values()}
    assert kinds["clipping"].change == "function=clip_grad_norm_, max_norm=1.0 → (absent)"
    assert kinds["order"].change == "forward backward clip step → forward backward step"


# Weights.


def linear(weight: torch.Tensor) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = nn.Parameter(weight.clone())
        return nn.Sequential(layer)

    return make


def weights(shape: tuple[int, int] = (96, 80)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda w: w, None),
        (lambda w: w.bfloat16().float(), "rounded to bfloat16"),
        (lambda w: w.half().float(), "rounded to float16"),
        (lambda w: w[torch.randperm(96, generator=torch.Generator().manual_seed(1))], "permuted"),
        (lambda w: w.clone().index_fill_(0, torch.tensor([7]), 0.0), "different"),
        (lambda w: torch.randn(w.shape, generator=torch.Generator().manual_seed(9)), "unrelated"),
    ],
    ids=["same", "bfloat16", "float16", "permuted", "different", "unrelated"],
)
def test_what_became_of_a_weight(tmp_path: Path, change: Any, word: str | None) -> None:
    weight = weights()
    differences = own(
        found(
            tmp_path, linear(weight), linear(change(weight)), lambda model: model(torch.ones(2, 80))
        )
    )
    assert [difference.relation for difference in differences.values()] == [word] * bool(word)


@pytest.mark.parametrize(
    ("elements", "word"), [(16, "rounded to bfloat16"), (1, "different")], ids=["all", "one"]
)
def test_a_short_weight_is_rounded_where_more_than_a_few_numbers_are(
    tmp_path: Path, elements: int, word: str
) -> None:
    weight = weights((1, 16))
    other = weight.clone()
    other[:, :elements] = weight[:, :elements].bfloat16().float()
    call = lambda model: model(torch.ones(2, 16))  # noqa: E731
    (difference,) = own(found(tmp_path, linear(weight), linear(other), call)).values()
    assert difference.relation == word


def test_a_small_weight_with_one_wrong_number_is_not_unrelated(tmp_path: Path) -> None:
    weight = weights((4, 8)) / 4
    other = weight.clone()
    other[3, 3] += 1.0
    call = lambda model: model(torch.ones(2, 8))  # noqa: E731
    (difference,) = own(found(tmp_path, linear(weight), linear(other), call)).values()
    assert difference.relation == "different" and difference.distance is not None
    assert difference.distance > 0.5


def test_recomputed_forward_passes_are_shown_and_not_counted(tmp_path: Path) -> None:
    def run(path: Path, *, recompute: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if not recompute:
                    return self.inner(x)
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

        net = Net()
        with driftline.capture(net, path):
            net(torch.ones(2, 4)).sum().backward()
        return path

    reference = open_run(run(tmp_path / "ref", recompute=False))
    candidate = open_run(run(tmp_path / "cand", recompute=True))
    listed = {d.name: d for d in differences_of(reference, candidate) or ()}
    shown = listed["recomputes_forward"]
    assert (shown.reference, shown.candidate, shown.counts) == ("False", "True", False)


def test_how_far_a_weight_is_off_is_said(tmp_path: Path) -> None:
    weight = weights()
    other = weight * 1.01
    differences = found(
        tmp_path, linear(weight), linear(other), lambda model: model(torch.ones(2, 80))
    )
    (difference,) = own(differences).values()
    # Estimated from sketches: 64 numbers tell a length to some ten percent.
    assert difference.distance == pytest.approx(0.01, rel=0.4)


@pytest.mark.parametrize("shape", [(80, 80), (8, 24)])
def test_a_transposed_weight_is_called_so(tmp_path: Path, shape: tuple[int, int]) -> None:
    weight = weights(shape)
    turned = weight.t().contiguous()

    def call(model: Any) -> None:
        model(torch.ones(2, model[0].weight.shape[1]))

    differences = own(found(tmp_path, linear(weight), linear(turned), call))
    weight_difference = differences["0.weight"]
    assert weight_difference.relation == "transposed (axes 1, 0)"


def test_rounding_and_transposing_at_once(tmp_path: Path) -> None:
    weight = weights((80, 80))
    turned = weight.t().contiguous().bfloat16()

    def call(model: Any) -> None:
        model(torch.ones(2, 80, dtype=model[0].weight.dtype))

    differences = own(found(tmp_path, linear(weight), linear(turned), call))
    assert differences["0.weight"].relation == "transposed (axes 1, 0)"


# No difference.


class Settings(nn.Module):
    """Holds what may differ between two sound programs."""

    def __init__(self, path: str, seed: int, names: set[str]) -> None:
        super().__init__()
        self.cache_dir = path
        self.seed = seed
        self.names = names
        self.where = f"<object at 0x{seed + 140_000_000_000:x}>"
        self.layer = fill(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def plain() -> nn.Module:
    return Text().eval()


def compiled_by_lightning() -> nn.Module:
    """What `torch.compile` returns once Lightning is imported: its arguments stay on the module."""
    model: Any = torch.compile(Text().eval(), backend="eager")
    model._compile_kwargs = {"backend": "eager"}
    return model


def compiled_in_place() -> nn.Module:
    model = Text().eval()
    model.compile(backend="eager")
    return model


def log_shapes(module: nn.Module, inputs: Any, output: Any, file: str = "") -> None:
    del module, inputs, output, file


def with_hook(path: str) -> nn.Module:
    model = Text().eval()
    model.embed_norm.register_forward_hook(functools.partial(log_shapes, file=path))
    return model


PROGRAMS: dict[str, Callable[[int], nn.Module]] = {
    "text": lambda n: Text().eval(),
    "text in bfloat16": lambda n: Text().bfloat16().eval(),
    "text without bias": lambda n: Text(bias=False).eval(),
    "untied": lambda n: Text(tied=False).eval(),
    "training": lambda n: Text().train(),
    "paths": lambda n: Settings(f"/tmp/cache{n}", 0, {"a"}),
    "paths in hooks": lambda n: with_hook(f"/tmp/run{n}/shapes.log"),
    "seeds": lambda n: Settings("/tmp", n, {"a"}),
    "addresses": lambda n: Settings("/tmp", n, {"a"}),
    "order of a set": lambda n: Settings("/tmp", 0, {"a", "b", "c"} if n else {"c", "b", "a"}),
    "compiled wrapper": lambda n: (
        torch.compile(Text().eval(), backend="eager") if n else Text().eval()
    ),
    "compiled by Lightning": lambda n: compiled_by_lightning() if n else Text().eval(),
    "compiled in place": lambda n: compiled_in_place() if n else Text().eval(),
    "wrapped for data parallelism": lambda n: (
        nn.DataParallel(Text().eval()) if n else Text().eval()
    ),
    "encoder": lambda n: fill(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sound_programs_show_no_difference(tmp_path: Path, name: str) -> None:
    make = PROGRAMS[name]

    def call(model: nn.Module, number: int) -> None:
        torch.manual_seed(number)
        first = next(model.parameters())
        inputs = IDS
        if isinstance(model, Settings):
            inputs = torch.ones(2, 4)
        elif isinstance(model, nn.TransformerEncoderLayer):
            inputs = torch.ones(1, 3, 16)
        model(inputs.to(first.device))

    for number, side in enumerate(("ref", "cand")):
        model = make(number)
        with driftline.capture(model, tmp_path / side), torch.no_grad():
            call(model, number)
    differences = differences_of(open_run(tmp_path / "ref"), open_run(tmp_path / "cand"))
    assert differences == ()


def test_inference_mode_explains_nothing_and_other_threads_explain_noise(tmp_path: Path) -> None:
    def call(model: Any) -> None:
        with torch.inference_mode(model.faulty):
            threads = torch.get_num_threads()
            torch.set_num_threads(threads + model.faulty)
            model(IDS)
            torch.set_num_threads(threads)

    def made(faulty: bool) -> nn.Module:
        model = Text().eval()
        object.__setattr__(model, "faulty", faulty)
        return model

    differences = found(tmp_path, lambda: made(faulty=False), lambda: made(faulty=True), call)
    explained = {d.name: d.explains for d in differences if d.kind == "process"}
    assert explained["inference_mode"] == ""
    assert explained["threads"] == "sums are added in another order, which is noise"


# Where they are shown.


def test_a_comparison_shows_what_lies_at_the_first_divergence_first(tmp_path: Path) -> None:
    class Other(Text):
        def __init__(self) -> None:
            super().__init__(scaling=1.0, eps=1e-5)

    Other.__name__, Other.__qualname__ = Text.__name__, Text.__qualname__
    for name, model in (("ref", Text()), ("cand", Other())):
        model.embed.weight.data *= 100  # so that the epsilon does not show
        with driftline.capture(model.eval(), tmp_path / name), torch.no_grad():
            model(IDS)
    table = driftline.compare(tmp_path / "ref", tmp_path / "cand")
    assert table.verdict == "fail" and table.first_site == "adapter"
    assert table.differences is not None
    positions = [(d.path, d.position) for d in table.differences if d.counts]
    assert positions[:2] == [("adapter.scaling", "at"), ("embed_norm.eps", "upstream")]
    again = driftline.open_table(table.write(tmp_path / "table"))
    assert again.differences == table.differences


def test_a_difference_alone_changes_no_verdict(tmp_path: Path) -> None:
    model, other = Text().eval(), Text().eval()
    other.adapter.note = "another"
    for name, each in (("ref", model), ("cand", other)):
        with driftline.capture(each, tmp_path / name), torch.no_grad():
            each(IDS)
    table = driftline.compare(tmp_path / "ref", tmp_path / "cand")
    assert table.verdict == "pass" and table.differences is not None
    assert counted(table.differences) == 1
    (remark,) = view.remark(table.differences, table.verdict)
    assert remark == ("and the models differ in 'adapter.note'", "doubtful")


def test_changed_code_is_named_with_its_line(tmp_path: Path) -> None:
    sources = {"ref": "        return y * 2\n", "cand": "        return y * 3\n"}
    for name, line in sources.items():
        text = (
            "import torch\n\n\nclass Net(torch.nn.Module):\n    def twice(self, y):\n"
            f"        # scaled\n{line}\n    def forward(self, x):\n        return self.twice(x)\n"
        )
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        space: dict[str, Any] = {"__name__": "net"}
        code = compile(text, str(path), "exec")
        _run(code, space)
        model = space["Net"]()
        with driftline.capture(model, tmp_path / f"{name}_run"):
            model(torch.ones(2))
    runs = open_run(tmp_path / "ref_run"), open_run(tmp_path / "cand_run")
    differences = differences_of(*runs)
    assert differences is not None
    (change,) = [d for d in differences if d.counts]
    assert change.kind == "code" and change.name == "twice"
    assert change.source == f"{tmp_path}/cand.py:7"


def _run(code: Any, space: dict[str, Any]) -> None:
    import types

    types.FunctionType(code, space)()


def test_runs_without_facts_say_how_to_get_them(tmp_path: Path) -> None:
    for name in ("ref", "cand"):
        model = Text().eval()
        with driftline.capture(model, tmp_path / name, model_facts=False), torch.no_grad():
            model(IDS)
        assert not (tmp_path / name / "rank0" / "model.jsonl").exists()
    runs = open_run(tmp_path / "ref"), open_run(tmp_path / "cand")
    assert differences_of(*runs) is None
    assert "--no-model-facts" in view.view(None, "ref", "cand").blocks[0][0]  # type: ignore[index]


# Causes.


def diagnosed(tmp_path: Path, reference: nn.Module, candidate: nn.Module, *inputs: Any) -> Any:
    for name, model in (("ref", reference), ("cand", candidate)):
        with driftline.capture(model, tmp_path / name), torch.no_grad():
            model(*inputs or (IDS,))
    return driftline.diagnose(tmp_path / "ref", tmp_path / "cand")


def fall(sentence: str) -> tuple[float, float]:
    """The error before and after, as a finding says it."""
    before, _, after = sentence.partition("falls from ")[2].rstrip(".").partition(" to ")
    return float(before), float(after)


def test_a_scaling_is_proven_to_be_the_cause(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, Text().eval(), Text(scaling=1.0).eval())
    assert diagnosis.first_site == "adapter" and diagnosis.cause == "scale"
    sentence = diagnosis.sentences[1]
    assert "attribute `scaling` is 1.0 in the candidate, 4.0 in the reference" in sentence
    before, after = fall(sentence)
    assert before > 0.1 and after < 1e-5
    shown = diagnosis.as_json()["differences"]
    assert shown[0]["name"] == "scaling" and shown[0]["position"] == "at"


def test_a_missing_bias_is_proven_to_be_the_cause(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, Text().eval(), Text(bias=False).eval())
    assert diagnosis.first_site == "layers.0" and diagnosis.cause == "offset"
    before, after = fall(diagnosis.sentences[1])
    assert after < before / 1e3


@pytest.mark.parametrize("norm", ["layer", "batch", "mode"])
def test_norms_are_recomputed_with_the_reference_value(tmp_path: Path, norm: str) -> None:
    def net(eps: float) -> nn.Module:
        last = nn.LayerNorm(8, eps=eps) if norm == "layer" else nn.BatchNorm2d(4, eps=eps)
        return fill(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), last)).eval()

    reference, candidate = net(1e-3), net(1e-3 if norm == "mode" else 1e-1)
    if norm == "mode":
        candidate.train()
    picture = torch.linspace(-1, 1, 3 * 64).sin().reshape(1, 3, 8, 8)
    diagnosis = diagnosed(tmp_path, reference, candidate, picture)
    assert diagnosis.first_site == "1"
    before, after = fall(diagnosis.sentences[1])
    assert before > 1e-3 and after < 1e-5
    word = "training" if norm == "mode" else "eps"
    assert f"`{word}`" in diagnosis.sentences[1]


def test_rotations_are_recomputed_with_the_reference_frequencies(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, Text(theta=5e5).eval(), Text().eval())
    assert diagnosis.first_site == "rotary"
    # The tables are read as angles of another base; that says more than that a buffer differs.
    assert diagnosis.cause == "positions"
    assert "`inv_freq`" in diagnosis.sentences[1]
    before, after = fall(diagnosis.sentences[1])
    assert before > 1e-2 and after < 1e-5


def test_a_difference_that_explains_nothing_is_not_called_proven(tmp_path: Path) -> None:
    other = Text().eval()
    with torch.no_grad():
        other.layers[0].bias.add_(0.3)
    other.layers[0].note = 3.0
    diagnosis = diagnosed(tmp_path, Text().eval(), other)
    assert diagnosis.first_site == "layers.0"
    # The bias is what is proven, not the attribute that nobody reads.
    assert "`bias`" in diagnosis.sentences[1] and "`note`" not in diagnosis.sentences[1]


# What comes to differ while programs run.


class _Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.factor


def _run_of_steps(path: Path, act: Callable[[_Changing, int], None], steps: int = 9) -> Path:
    torch.manual_seed(0)
    model = _Changing().eval()
    with driftline.capture(model, path), torch.no_grad():
        for step in range(steps):
            act(model, step)
            model(torch.ones(1, 4))
    return path


def _differences_that_count(reference: Path, candidate: Path) -> list[Difference]:
    listed = differences_of(open_run(reference), open_run(candidate))
    assert listed is not None
    return [difference for difference in listed if difference.counts]


def _change_factor(model: _Changing, step: int) -> None:
    if step == 3:
        model.factor = 2.0


@pytest.mark.parametrize(
    ("act", "name", "values"),
    [
        (_change_factor, "factor", ("1.0", "2.0")),
        (lambda m, step: m.train(step == 8), "training", ("False", "True")),
        (
            lambda m, step: m.linear.register_forward_hook(print) if step == 8 else None,
            "hooks",
            ("none", "forward: builtins.print"),
        ),
        (
            lambda m, step: m.add_module("late", nn.Linear(2, 2)) if step == 8 else None,
            "",
            ("(absent)", "Linear"),
        ),
    ],
)
def test_what_one_side_changes_later_is_a_difference(
    tmp_path: Path, act: Any, name: str, values: tuple[str, str]
) -> None:
    runs = _run_of_steps(tmp_path / "ref", lambda *_: None), _run_of_steps(tmp_path / "cand", act)
    changed = _differences_that_count(*runs)
    assert [(d.reference, d.candidate) for d in changed] == [values]
    assert changed[0].name.startswith(f"{name} (changed in step".lstrip())
    assert changed[0].step is not None and changed[0].step <= 9


def test_what_both_sides_change_alike_is_no_difference(tmp_path: Path) -> None:
    runs = [_run_of_steps(tmp_path / name, _change_factor) for name in ("ref", "cand")]
    assert not _differences_that_count(*runs)


def test_a_counter_of_a_longer_program_is_no_difference(tmp_path: Path) -> None:
    """The two last looks are at other steps: what counts calls has counted on."""
    first = _run_of_steps(tmp_path / "ref", lambda *_: None)
    second = _run_of_steps(tmp_path / "cand", lambda *_: None, steps=13)
    assert not _differences_that_count(first, second)


# Ranks.


class Stage(nn.Module):
    """Some of the layers of a model, by the names that they have in the whole."""

    def __init__(self, numbers: range, eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.LayerNorm(16, eps=eps) for n in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def on_ranks(monkeypatch: pytest.MonkeyPatch, path: Path, models: list[Stage]) -> Path:
    """What a launcher's processes would leave: each has its folder in the run."""
    monkeypatch.setenv("WORLD_SIZE", str(len(models)))
    for rank, model in enumerate(models):
        monkeypatch.setenv("RANK", str(rank))
        place = path if rank == 0 else path.with_name(f"{path.name}-{rank}")
        with driftline.capture(model, place), torch.no_grad():
            model(torch.ones(2, 16))
        if rank:
            about = json.loads((place / f"rank{rank}" / "process.json").read_text())
            # It says to which run it belongs, and moves to another one.
            kept = {name: value for name, value in about.items() if name not in ("run", "job")}
            (place / f"rank{rank}").rename(path / f"rank{rank}")
            (path / f"rank{rank}" / "process.json").write_text(json.dumps(kept))
    return path


LAYERS = {"whole": [range(4)], "stages": [range(2), range(2, 4)], "copies": [range(4), range(4)]}


@pytest.mark.parametrize(
    ("kinds", "faulty", "name"),
    [
        (("stages", "stages"), 1, "layers.2.eps"),
        (("whole", "stages"), 1, "layers.2.eps"),
        (("copies", "copies"), 1, "layers.0.eps (rank 1)"),
        (("whole", "copies"), 1, "layers.0.eps (rank 1)"),
        (("whole", "copies"), 0, "layers.0.eps (rank 0)"),
    ],
)
def test_what_one_rank_differs_in_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, str],
    faulty: int,
    name: str,
) -> None:
    numbers = LAYERS[kinds[1]]
    on_ranks(monkeypatch, tmp_path / "ref", [Stage(own) for own in LAYERS[kinds[0]]])
    on_ranks(monkeypatch, tmp_path / "same", [Stage(own) for own in numbers])
    models = [Stage(own, 1e-3 if r == faulty else 1e-5) for r, own in enumerate(numbers)]
    on_ranks(monkeypatch, tmp_path / "cand", models)
    reference = open_run(tmp_path / "ref")
    assert not own(differences_of(reference, open_run(tmp_path / "same")) or ())
    named = own(differences_of(reference, open_run(tmp_path / "cand")) or ())
    assert list(named) == [name]
    assert (named[name].reference, named[name].candidate) == ("1e-05", "0.001")
