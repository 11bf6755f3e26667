"""When a saved result may stand for one that would be computed now: one rule for three commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import LLAMA, PROMPTS

from driftline.decoding.layers import run_layers
from driftline.decoding.metrics import run_metrics
from driftline.decoding.models.targets import Target
from driftline.decoding.options import LayerOptions, Limits, MetricsOptions, ValidateOptions
from driftline.decoding.pipeline import Session, differences
from driftline.decoding.validate import validate
from driftline.errors import AlreadyThere, BadInput


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(LLAMA, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return Path(shutil.copy(PROMPTS, tmp_path / "prompts.json"))


@pytest.fixture
def layers(tmp_path: Path, model: Path, prompts: Path) -> LayerOptions:
    return LayerOptions(
        model_path=str(model),
        prompts=prompts,
        output_path=tmp_path / "layers",
        mode="model-forward",
        length=24,
        new_tokens=2,
    )


@pytest.fixture
def metrics(tmp_path: Path, model: Path, prompts: Path) -> MetricsOptions:
    return MetricsOptions(
        model_path=str(model),
        prompts=prompts,
        output_dir=tmp_path / "metrics",
        length=32,
        new_tokens=4,
    )


@pytest.fixture
def validation(tmp_path: Path, model: Path, prompts: Path) -> ValidateOptions:
    return ValidateOptions(
        name=str(model),
        model_path=str(model),
        prompts=prompts,
        limits=Limits(9.0, 0.5, "a test"),
        length=32,
        new_tokens=4,
        tokens_per_sequence=4,
        info_dir=tmp_path / "saved",
        force_level_1=True,
    )


def quiet(line: str) -> None:
    del line


def change_a_weight(model: Path) -> None:
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def change_the_prompts(prompts: Path) -> None:
    conversations = json.loads(prompts.read_text())
    prompts.write_text(json.dumps(conversations[::-1]))


def run(command: str, options: Any) -> Any:
    runner = {"layers": run_layers, "metrics": run_metrics}[command]
    return runner(options, report=quiet)


@pytest.mark.parametrize("command", ["layers", "metrics"])
@pytest.mark.parametrize("changed", ["prompts", "weights"])
def test_a_folder_is_not_done_after_prompts_or_weights_changed_in_place(
    command: str, changed: str, request: pytest.FixtureRequest, model: Path, prompts: Path
) -> None:
    options = request.getfixturevalue(command)
    assert not run(command, options).skipped
    assert run(command, options).skipped
    change_the_prompts(prompts) if changed == "prompts" else change_a_weight(model)
    with pytest.raises(AlreadyThere, match=f"made under other settings: {changed}"):
        run(command, options)
    assert not run(command, replace(options, force=True)).skipped
    assert run(command, options).skipped


def test_layer_metrics_that_do_not_say_their_weights_are_still_done(layers: LayerOptions) -> None:
    """As 0.1.0 wrote them: the name of the prompt file, and nothing about content and weights."""
    run("layers", layers)
    content = json.loads(layers.provenance.read_text())
    for name in ("weights", "prompts_digest"):
        del content["settings"][name]
    layers.provenance.write_text(json.dumps(content))
    assert run("layers", layers).skipped
    with pytest.raises(AlreadyThere, match="order was head, is doc"):
        run("layers", replace(layers, order="doc"))


@pytest.mark.parametrize("saved_by", ["validate", "metrics"])
def test_a_saved_reference_of_another_target_is_refused(
    saved_by: str, validation: ValidateOptions, metrics: MetricsOptions
) -> None:
    if saved_by == "metrics":
        run_metrics(metrics, report=quiet)
        validation = replace(validation, info_dir=metrics.output_dir)
    else:
        validate(replace(validation, save=True), report=quiet)
    lines: list[str] = []
    validate(validation, report=lines.append)
    assert any("-- loading it" in line for line in lines), "the same reference is used again"
    other = replace(validation, reference=Target("cpu", "bf16"))
    with pytest.raises(BadInput, match="target was 'device=cpu,dtype=fp32', is 'device=cpu,dtype"):
        validate(other, report=quiet)


def test_a_saved_reference_of_a_micro_model_with_other_layers_is_refused(
    validation: ValidateOptions,
) -> None:
    micro = replace(validation, micro_layers=1, random_weights=True, save=True)
    validate(micro, report=quiet)
    validate(micro, report=quiet)
    with pytest.raises(BadInput, match="micro_layers was 1, is 2"):
        validate(replace(micro, micro_layers=2), report=quiet)


def test_metrics_and_validate_compute_with_the_same_number_of_threads(
    metrics: MetricsOptions, validation: ValidateOptions
) -> None:
    threads: dict[str, set[int]] = {"metrics": set(), "validate": set()}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for command, options in (("metrics", metrics), ("validate", validation)):
            session = Session()
            for side in ("reference", "candidate"):
                session.model(options, side).module.register_forward_pre_hook(
                    lambda *_, command=command: threads[command].add(torch.get_num_threads())
                )
            if isinstance(options, MetricsOptions):
                run_metrics(options, report=quiet, session=session)
            else:
                validate(options, report=quiet, session=session)
        assert torch.get_num_threads() == 2, "the number is put back"
    finally:
        torch.set_num_threads(before)
    assert threads["metrics"] == threads["validate"] != set()


def test_a_session_loads_a_model_again_that_changed_on_disk(
    layers: LayerOptions, model: Path
) -> None:
    session = Session()
    first = session.model(layers, "reference")
    assert session.model(layers, "reference") is first
    change_a_weight(model)
    second = session.model(layers, "reference")
    assert second is not first
    assert session.model(layers, "reference") is second


def test_a_session_samples_prompts_again_that_changed_on_disk(
    layers: LayerOptions, prompts: Path
) -> None:
    session = Session()
    names = [prompt.name for prompt in session.prompts(replace(layers, batch_size=3))]
    change_the_prompts(prompts)
    assert [p.name for p in session.prompts(replace(layers, batch_size=3))] != names


def test_settings_contradict_only_where_both_are_named() -> None:
    wanted = {"target": "cpu", "weights": "a", "library": "fms"}
    assert differences({}, wanted) == []
    assert differences({"target": "cpu", "weights": None}, wanted) == []
    assert differences({"weights": "b"}, {"weights": None}) == []
    (only,) = differences({"target": "cuda", "weights": "a", "other": 1}, wanted)
    assert only == ("target", "cuda", "cpu")
