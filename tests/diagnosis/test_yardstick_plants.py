"""The faults that the yardstick plants: they are where they say, and they can be found."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from driftline.testing.faults import ARCHITECTURES, FAULTS, specimen  # noqa: E402
from driftline.testing.faults.formats import FORMATS, in_format  # noqa: E402
from driftline.testing.faults.trials import METHODS, Setting, planted  # noqa: E402

NOT_IN_USE = {  # places where a plant is allowed to be without effect, and why
    ("gpt2", "dropout left on"): "eager attention draws with the functional form",
    ("bert", "dropout left on"): "the same",
    ("bert", "mask off by one"): "rows of a mask without causality are alike",
    ("t5", "mask off by one"): "the same, in the encoder",
    ("t5", "window"): "cross attention may look anywhere",
    ("vit", "mask missing"): "no mask",
    ("vit", "window"): "no mask",
    ("vit", "mask off by one"): "no mask",
}


def _output(model, inputs):
    torch.manual_seed(3)
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_plant_changes_bits_of_the_output(architecture):
    source = specimen(architecture, 4)
    clean = _output(*source)
    assert torch.equal(clean, _output(*specimen(architecture, 4))), "specimens are not repeatable"
    idle = set()
    for fault in FAULTS.values():
        sites = fault.sites(source.model)
        for amount in fault.amounts if sites else ():
            model, inputs = specimen(architecture, 4)
            fault.plant(model, sites[len(sites) // 2], amount, torch.Generator().manual_seed(1))
            if torch.equal(_output(model, inputs), clean):
                idle.add((architecture, fault.name))
    assert idle <= set(NOT_IN_USE)


def test_there_are_as_many_kinds_architectures_and_formats_as_promised():
    assert len(FAULTS) >= 25
    assert len(ARCHITECTURES) == 6
    assert len(FORMATS) == 5
    models = [specimen(name, 0).model for name in ARCHITECTURES]
    for fault in FAULTS.values():
        assert any(fault.sites(model) for model in models), fault.name


def test_int8_is_close_to_the_truth_and_not_equal_to_it():
    model, inputs = specimen("llama", 4)
    truth = _output(model, inputs)
    quantised = _output(*in_format(model, inputs, "int8"))
    apart = float((quantised - truth).norm() / truth.norm())
    assert 1e-4 < apart < 0.2


@pytest.mark.parametrize(
    ("architecture", "name", "kind"),
    [
        ("llama", "bf16", "scaled weight"),
        ("llama", "int8", "channels zeroed"),
        ("gpt2", "fp16", "activation"),
        ("bert", "bf16", "bias missing"),
        ("mixtral", "bf16", "channels permuted"),
    ],
)
def test_a_gross_fault_is_named_at_its_module_with_its_cause_by_replay(architecture, name, kind):
    fault = FAULTS[kind]
    setting = Setting(architecture, name, 5, fault, fault.amounts[0])
    pair = planted(setting)
    assert pair.changed
    found = METHODS["replay"](setting, pair)
    assert (found.detected, found.first_site) == (True, pair.site)
    assert found.cause in fault.causes


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8"])
def test_a_pair_without_a_fault_passes_with_replay_and_noise(name):
    setting = Setting("llama", name, 6)
    pair = planted(setting)
    for method in ("replay", "noise"):
        found = METHODS[method](setting, pair)
        assert not found.detected, (method, found)
        assert found.flagged == 0


def test_a_fixed_tolerance_flags_many_rows_where_replay_flags_the_culprit():
    fault = FAULTS["scaled weight"]
    setting = Setting("llama", "bf16", 5, fault, fault.amounts[0])
    pair = planted(setting)
    assert METHODS["fixed tolerance"](setting, pair).flagged > 10
    assert METHODS["replay"](setting, pair).flagged <= 2
