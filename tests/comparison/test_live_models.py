"""Two live models: run on the same inputs, compared without a disk."""

import copy

import pytest
import torch
from torch import nn

import driftline
from driftline.errors import BadInput


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 10)
    ).eval()


def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_floating_inputs_are_cast_to_the_candidate_s_dtype(dtype):
    model = network()
    table = driftline.compare_models(model, copy.deepcopy(model).to(dtype), images())
    assert table.verdict == "pass"
    assert table.rows[0].candidate_dtype == str(dtype).removeprefix("torch.")


def test_one_tensor_a_tuple_and_a_dict_are_all_inputs():
    model = network()
    x = images()
    for inputs in (x, (x,), [x], {"input": x}):
        assert driftline.compare_models(model, model, inputs).verdict == "pass"
    with pytest.raises(BadInput, match="no inputs"):
        driftline.compare_models(model, model, None)


def test_a_model_that_works_in_place_does_not_change_what_the_other_is_given():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = images()
    before = x.clone()
    assert driftline.compare_models(InPlace(), InPlace(), x).verdict == "pass"
    assert torch.equal(x, before)


def test_dropout_draws_the_same_numbers_in_both_and_the_caller_s_stream_goes_on():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    other = copy.deepcopy(model)
    x = torch.randn(4, 8)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    table = driftline.compare_models(model, other, x)
    assert table.verdict == "pass"
    assert torch.equal(torch.rand(3), expected)


def test_a_changed_weight_is_named_and_limits_are_passed_on():
    model, other = network(), network()
    with torch.no_grad():
        other[3].weight *= 1.01
    table = driftline.compare_models(model, other, images())
    assert table.first_site == "3"
    assert "(Linear)" in table.finding
    kinder = driftline.compare_models(model, other, images(), limits={"relative_l2": 0.1})
    assert kinder.verdict == "pass"
    assert driftline.compare_models(model, other, images(), sites=["0"]).verdict == "pass"


def test_a_layer_that_only_one_model_has_is_missing():
    model = network()
    shorter = copy.deepcopy(model)[:3]
    table = driftline.compare_models(model, shorter, images())
    assert {row.site for row in table if row.status == "missing"} == {"3"}


def test_a_keyword_that_is_not_there_is_refused_with_the_nearest():
    model = network()
    for call in (driftline.compare_models, driftline.lockstep):
        with pytest.raises(TypeError, match="'metric'; did you mean 'metrics'"):
            call(model, model, images(), metric=["kl"])
        # `compare` takes it, and two live models do not.
        with pytest.raises(TypeError, match="'jobs'"):
            call(model, model, images(), jobs=2)
