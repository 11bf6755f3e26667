"""What modules are called and which step a call belongs to, in unchanged programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import capture_zoo as zoo
import pytest
import torch
from torch import nn

import driftline
from driftline.captures.selection import Selection
from driftline.captures.torch.framework import capture
from driftline.captures.torch.session import CaptureSession
from driftline.runs.memory import MemorySink


def _watch(program: Callable[[], Any], **options: Any) -> MemorySink:
    """Run something with every module call of the process captured, as `driftline dump` does."""
    sink = MemorySink()
    session = CaptureSession(sink, options.pop("selection", None), **options).start()
    try:
        program()
    finally:
        session.stop()
    assert not [e for e in sink._events if e["kind"] == "capture-fault"]
    return sink


def _sites(sink: MemorySink, port: str = "output") -> list[tuple[str, int, int]]:
    return [(r.key.site, r.key.step, r.key.visit) for r in sink.run().records if r.key.port == port]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_the_first_model_keeps_plain_names_and_later_ones_are_prefixed() -> None:
    first, second, third = Tiny(), Tiny(), nn.Sequential(nn.Linear(2, 2))

    def program() -> None:
        for model in (first, second, third):
            model(torch.ones(1, 2))

    assert [site for site, _, _ in _sites(_watch(program))] == [
        *("a", "b", "(root)"),
        *("Tiny_1.a", "Tiny_1.b", "Tiny_1"),
        *("Sequential.0", "Sequential"),
    ]


def test_a_parametrization_that_runs_before_the_model_is_no_model() -> None:
    def program() -> None:
        model = Tiny()
        # Registering computes the weight once, in a module of torch's own.
        nn.utils.parametrizations.spectral_norm(model.a)
        assert model.a.weight.shape == (2, 2)
        model(torch.ones(1, 2))

    sites = [site for site, _, _ in _sites(_watch(program))]
    assert sites[-3:] == ["a", "b", "(root)"]
    assert all(site.startswith("a.parametrizations.") for site in sites[:-3])


def test_losses_are_no_steps_even_when_made_anew_each_time() -> None:
    model = Tiny()

    def program() -> None:
        for _ in range(3):
            nn.CrossEntropyLoss()(model(torch.ones(1, 2)), torch.tensor([1]))

    seen = _sites(_watch(program))
    assert [s for s in seen if s[0] == "CrossEntropyLoss"] == [
        ("CrossEntropyLoss", step, 0) for step in range(3)
    ]
    assert [s for s in seen if s[0] == "(root)"] == [("(root)", step, 0) for step in range(3)]


def test_a_normalisation_before_the_model_does_not_take_its_name() -> None:
    model, prepare = Tiny(), nn.Softmax(dim=-1)
    seen = _sites(_watch(lambda: model(prepare(torch.ones(1, 2)))))
    assert [site for site, _, _ in seen] == ["Softmax", "a", "b", "(root)"]


@pytest.mark.parametrize("copied", [False, True])
def test_an_encoder_called_by_itself_has_its_name_in_the_model(copied: bool) -> None:
    model = zoo.t5().eval()
    if copied:
        model = copy.deepcopy(model)
    prompt = torch.tensor([[3, 4, 5]])

    def program() -> None:
        for _ in range(2):
            model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)

    seen = _sites(_watch(program, reduction=driftline_digest()))
    encoder = [(site, step) for site, step, _ in seen if site == "encoder"]
    assert set(encoder) == {("encoder", 0), ("encoder", 3)}
    assert {step for site, step, _ in seen if site == "lm_head"} == set(range(6))
    names = {"(root)", *(name for name, _ in model.named_modules())}
    assert {site for site, _, _ in seen} <= names


def driftline_digest() -> Any:
    from driftline.captures.options import Reduction

    return Reduction("digest")


def test_a_shared_module_has_one_site_and_separate_visits() -> None:
    model, inputs = zoo.build("inplace_shared"), zoo.feed("inplace_shared")
    sink = MemorySink()
    with capture(model, sink):
        model(**inputs)
    seen = _sites(sink)
    assert [visit for site, _, visit in seen if site == "block"] == [0, 1, 2]
    assert not [site for site, _, _ in seen if site.startswith("again")]


def test_modules_outside_the_tree_are_named_after_their_caller() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.hidden = [nn.Linear(2, 2), nn.Linear(2, 2)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.hidden:
                x = layer(x)
            return nn.Softmax(dim=-1)(self.inner(x))

    model = nn.Sequential(Hiding())
    sink = MemorySink()
    with capture(model, sink):
        model(torch.ones(1, 2))
        model[0].late = nn.Linear(2, 2)
        model[0].inner = model[0].late
        model(torch.ones(1, 2))
    seen = _sites(sink)
    assert [s for s in seen if s[1] == 0] == [
        ("0.Linear", 0, 0),
        ("0.Linear", 0, 1),
        ("0.inner", 0, 0),
        ("0.Softmax", 0, 0),
        ("0", 0, 0),
        ("(root)", 0, 0),
    ]
    assert "0.inner" in {site for site, step, _ in seen if step == 1}


def test_the_optimizer_step_is_the_boundary_of_training() -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(1, 2))

    roots = [(step, visit) for site, step, visit in _sites(_watch(program)) if site == "(root)"]
    assert roots == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0)]


def test_an_evaluation_between_training_steps_has_a_step_of_its_own() -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(1, 2))

    roots = [(step, visit) for site, step, visit in _sites(_watch(program)) if site == "(root)"]
    assert roots == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_parts_of_a_model_that_is_never_called_itself_count_its_steps() -> None:
    harness = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)})

    def program() -> None:
        with torch.no_grad():
            for _ in range(3):
                harness["decoder"](harness["encoder"](torch.ones(1, 2)))

    assert _sites(_watch(program)) == [
        (site, step, 0) for step in range(3) for site in ("encoder", "decoder")
    ]


def test_two_models_in_one_program_count_their_own_calls() -> None:
    draft, target = Tiny(), Tiny()

    def program() -> None:
        with torch.no_grad():
            for _ in range(2):
                for _ in range(2):
                    draft(torch.ones(1, 2))
                target(torch.ones(1, 2))

    seen = [
        (site, step) for site, step, _ in _sites(_watch(program)) if site in ("(root)", "Tiny_1")
    ]
    assert seen == [
        *(("(root)", 0), ("(root)", 1), ("Tiny_1", 0)),
        *(("(root)", 2), ("(root)", 3), ("Tiny_1", 1)),
    ]


def test_the_program_may_count_its_own_steps() -> None:
    model = Tiny()
    sink = MemorySink()
    with capture(model, sink, steps_by="manual") as running:
        for _ in range(2):
            model(torch.ones(1, 2))
            model(torch.ones(1, 2))
            driftline.step()
        running.step()
        model(torch.ones(1, 2))
    roots = [(step, visit) for site, step, visit in _sites(sink) if site == "(root)"]
    assert roots == [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]


def test_only_selected_steps_are_taken_and_the_others_are_counted() -> None:
    model, sink = Tiny(), MemorySink()
    with capture(model, sink, steps="1-2", ports="output", sites="(root)"):
        for _ in range(5):
            model(torch.ones(1, 2))
    assert [step for _, step, _ in _sites(sink)] == [1, 2]
    told = next(e for e in sink._events if e["kind"] == "steps-skipped")
    assert told["message"] == "5 steps ran, 2 of them selected"


def test_a_pattern_that_matches_nothing_is_told_with_the_nearest_name() -> None:
    model, sink = Tiny(), MemorySink()
    with (
        pytest.warns(UserWarning, match=r"no site matches '\(rot\)'; did you mean '\(root\)'"),
        capture(model, sink, sites=["(rot)", "a"], classes="Lin*"),
    ):
        model(torch.ones(1, 2))
    told = [e for e in sink._events if e["kind"] == "no-match"]
    assert [e["message"] for e in told] == ["no site matches '(rot)'"]
    assert "(root)" in told[0]["details"]["hint"]
    assert {site for site, _, _ in _sites(sink)} == {"a"}


def test_ids_and_names_of_operations_select_as_in_the_seed() -> None:
    model = nn.Sequential(Tiny(), Tiny(), nn.ReLU())

    def taken(**filters: Any) -> set[str]:
        sink = MemorySink()
        with capture(model, sink, selection=Selection(**filters)):
            model(torch.ones(1, 2))
        return {site for site, _, _ in _sites(sink)}

    assert taken(ids=("0",)) == {"0", "0.a", "0.b"}
    assert taken(ids=("0",), children=False) == {"0"}
    assert taken(ids=("1_0",)) == {"1.a"}
    assert taken(opnames=("lin",)) == {"0.a", "0.b", "1.a", "1.b"}
    assert taken(opnames=("B",)) == {"0.b", "1.b"}
    assert taken(ids=("2",), opnames=("tiny",)) == {"0", "1", "2"}
    assert taken(part=0) == set()


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_distributed_wrappers_leave_no_trace_in_names_and_values(tmp_path: Any, kind: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Tiny()
    plain = model(torch.ones(1, 2))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        if kind == "replicated":
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (1,))
            fully_shard(model.a, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        seen: list[torch.Tensor] = []
        sink = _watch(lambda: seen.append(wrapped(torch.ones(1, 2))))
    finally:
        dist.destroy_process_group()
    assert torch.equal(plain, seen[0])
    assert [site for site, _, _ in _sites(sink)] == ["a", "b", "(root)"]
    assert {r.class_name for r in sink.run().records} == {"Tiny", "Linear"}
    assert not [e for e in sink._events if e["kind"] == "compiled"]


def test_parametrised_modules_keep_their_class() -> None:
    model = Tiny()
    nn.utils.parametrizations.weight_norm(model.a)
    sink = _watch(lambda: model(torch.ones(1, 2)))
    assert next(r.class_name for r in sink.run().records if r.key.site == "a") == "Linear"


def test_wrappers_leave_no_trace_in_the_names() -> None:
    model = Tiny()
    wrapped = nn.DataParallel(model)
    sink = _watch(lambda: wrapped(torch.ones(1, 2)))
    assert [site for site, _, _ in _sites(sink)] == ["a", "b", "(root)"]
    assert sink._tree is not None
    assert sink._tree["roots"][0]["class"] == "Tiny"


def test_a_traced_graph_that_is_the_model_is_captured_like_any_other() -> None:
    model = torch.fx.symbolic_trace(Tiny())
    sites = [site for site, _, _ in _sites(_watch(lambda: model(torch.ones(1, 2))))]
    assert sites == ["a", "b", "(root)"]


def test_a_data_loader_worker_makes_no_noise() -> None:
    class Images(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self) -> None:
            self.transform = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            with torch.no_grad():
                return self.transform(torch.ones(2) * index)

    model = Tiny()

    def program() -> None:
        for batch in torch.utils.data.DataLoader(Images(), batch_size=2, num_workers=1):
            model(batch)

    assert {site for site, _, _ in _sites(_watch(program))} == {"a", "b", "(root)"}


def test_a_forked_child_writes_a_folder_of_its_own(tmp_path: Any) -> None:
    import multiprocessing

    from driftline.runs.writer import RunWriter

    model = Tiny()
    session = CaptureSession(RunWriter(tmp_path / "run")).start()
    try:
        with torch.no_grad():
            model(torch.ones(1, 2))
            child = multiprocessing.get_context("fork").Process(
                target=model, args=(torch.ones(1, 2),)
            )
            child.start()
            child.join()
    finally:
        session.stop()
    assert child.exitcode == 0
    run = driftline.open_run(tmp_path / "run")
    assert {r.key.process for r in run.records} == {0, 1}
    assert len({r.key.site for r in run.records if r.key.process == 1}) == 3


def test_the_module_tree_carries_ids_parameters_and_execution_order() -> None:
    from driftline.graphs.module_tree import ModuleTree

    model, sink = nn.Sequential(Tiny(), nn.ReLU()), MemorySink()
    with capture(model, sink):
        model(torch.ones(1, 2))
    assert sink._tree is not None
    tree = ModuleTree.from_json(sink._tree)
    assert [(n.site, n.ids, n.class_name) for n in tree.walk()] == [
        ("(root)", "", "Sequential"),
        ("0", "0", "Tiny"),
        ("0.a", "0_0", "Linear"),
        ("0.b", "0_1", "Linear"),
        ("1", "1", "ReLU"),
    ]
    weight = next(n for n in tree.walk() if n.site == "0.a").parameters[0]
    assert (weight.name, weight.dtype, weight.shape, weight.trainable) == (
        "weight",
        "float32",
        (2, 2),
        True,
    )
    assert tree.order == ("(root)", "0", "0.a", "0.b", "1")
    assert ModuleTree.from_json(tree.to_json()) == tree


def test_an_estimate_is_given_after_the_first_step() -> None:
    model, sink = Tiny(), MemorySink()
    with capture(model, sink, steps="0-9") as running:
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        assert running.session.bytes_in_first_step
    told = next(e for e in sink._events if e["kind"] == "estimate")["details"]
    assert told["total"] == 10 * told["bytes"]


def test_a_layer_that_is_wrapped_while_captured_moves_below_its_wrapper() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x)

    model, sink = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), MemorySink()
    with capture(model, sink, ports="output"):
        model(torch.ones(1, 2))
        model[0] = Adapter(model[0])
        model(torch.ones(1, 2))
    assert [(site, step) for site, step, _ in _sites(sink)] == [
        ("0", 0), ("1", 0), ("(root)", 0), ("0.base", 1), ("0", 1), ("1", 1), ("(root)", 1),
    ]  # fmt: skip
