"""The faults that the yardstick plants: they are where they say, and they can be found."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from driftline.testing.faults import ARCHITECTURES, FAULTS, specimen  # noqa: E402
from driftline.testing.faults.trials import (  # noqa: E402
    METHODS,
    Setting,
    candidate_of,
    effect_of,
    output_of,
    planted,
    reference_of,
)
from driftline.testing.faults.variants import (  # noqa: E402
    FORMATS,
    IMPLEMENTATIONS,
    in_format,
    trusted,
)

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


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small models: threads would only wait for each other
    yield
    torch.set_num_threads(before)


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
    assert len(FORMATS) >= 5
    models = [specimen(name, 0).model for name in ARCHITECTURES]
    for fault in FAULTS.values():
        assert any(fault.sites(model) for model in models), fault.name


@pytest.mark.parametrize("name", ["int8", "torch-int8"])
def test_int8_is_close_to_the_truth_and_not_equal_to_it(name):
    model, inputs = specimen("llama", 4)
    truth = _output(model, inputs)
    quantised = _output(*in_format(model, inputs, name))
    apart = float((quantised - truth).norm() / truth.norm())
    assert 1e-4 < apart < 0.2


@pytest.mark.parametrize("name", ["int8", "torch-int8"])
def test_a_fault_of_computing_stays_when_its_layer_is_quantised(name):
    fault = FAULTS["tile zeroed"]
    setting = Setting("llama", name, 4, fault, fault.amounts[0])
    assert not torch.equal(
        output_of(*candidate_of(setting)), output_of(*candidate_of(setting, planted=False))
    )
    assert all(
        type(module).__module__ != "torch.nn.modules.linear"
        for module in candidate_of(setting).model.modules()
    ), "the layer at fault was left in float32"


def test_rotary_frequencies_stay_in_float32_in_sixteen_bits():
    model, _ = candidate_of(Setting("llama", "bf16", 4))
    kinds = {name: buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name}
    assert kinds and set(kinds.values()) == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["other attention", "other norms"])
def test_another_implementation_means_the_same_and_rounds_otherwise(architecture, name):
    setting = Setting(architecture, "fp32", 4)
    truth = output_of(*reference_of(setting))
    model, inputs = reference_of(setting)
    assert torch.allclose(
        output_of(IMPLEMENTATIONS[name](model), inputs), truth, rtol=1e-4, atol=1e-5
    )
    setting = setting._replace(format="bf16", implementation="as it is")
    other = setting._replace(implementation=name)
    assert not torch.equal(output_of(*candidate_of(setting)), output_of(*candidate_of(other)))


def test_a_fault_free_candidate_is_none_of_its_own_noise_runs():
    setting = Setting("llama", "bf16", 4)
    output = output_of(*candidate_of(setting))
    source = reference_of(setting)
    ways = list(trusted(source.model, source.inputs, "bf16", "as it is"))
    assert [name for name, _, _ in ways][:2] == ["other attention", "other norms"]
    assert not any(torch.equal(output_of(model, inputs), output) for _, model, inputs in ways)


def test_a_sub_noise_fault_has_a_size_of_its_own():
    fault = FAULTS["scale of 0.2 %"]
    assert effect_of(Setting("llama", "bf16", 4, fault, 0.002)) == pytest.approx(0.002, rel=1e-3)
    assert effect_of(Setting("llama", "bf16", 4, FAULTS["norm epsilon"], 1e-4)) > 2e-4


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


@pytest.mark.parametrize(("architecture", "seed"), [("llama", 1106), ("t5", 1109)])
def test_integers_in_every_layer_are_no_fault_of_the_model_around_them(architecture, seed):
    """No layer errs by too much, and what they make together is more than the model may alone."""
    setting = Setting(architecture, "torch-int8", seed, implementation="other attention")
    pair = planted(setting)
    found = METHODS["two runs"](setting, pair)
    assert not found.detected, found
    assert found.flagged == 0
    assert pair.error > 0.1


def test_a_fixed_tolerance_flags_many_rows_where_replay_flags_the_culprit():
    fault = FAULTS["scaled weight"]
    setting = Setting("llama", "bf16", 5, fault, fault.amounts[0])
    pair = planted(setting)
    fixed = METHODS["fixed tolerance"](setting, pair)
    assert fixed.flagged > 10
    assert fixed.wrong > fixed.flagged / 2, "most of them only inherit"
    found = METHODS["replay"](setting, pair)
    assert found.flagged <= 2
    assert found.wrong == 0


def test_fixed_rules_name_the_first_row_in_order_of_execution():
    fault = FAULTS["scaled weight"]
    setting = Setting("llama", "fp32", 5, fault, fault.amounts[0])
    pair = planted(setting)
    for method in ("fixed tolerance", "three-way"):
        found = METHODS[method](setting, pair)
        assert (found.detected, found.first_site) == (True, pair.site), method
