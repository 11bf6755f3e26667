"""The suite of named models: captured, checked, and told apart by what was planted."""

from __future__ import annotations

import importlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from driftline.cli.main import main
from driftline.decoding.models.loading import ModelSource, load_model
from driftline.decoding.models.targets import Target
from driftline.suites.subjects import SuiteOptions, load
from driftline.testing.expectations.expectations import Expectations, documented_label, model_label
from driftline.testing.expectations.signature import flipped
from support import aiu

pytest_plugins = ("pytester",)

DATA = Path(__file__).parents[1] / "data" / "aiu"
LLAMA = DATA / "fixtures" / "tiny-llama"
ROBERTA = DATA / "fixtures" / "tiny-roberta-qa"
FOLDER = Path("tests/resources/expectations")
STEM = "models.test_model_expectations.TestAIUDecoderModels"
PLUGINS = ("-p", "driftline.testing.expectations.pytest_plugin", "-p", "no:cacheprovider")
SUITE = ("--pyargs", "driftline.suites.test_model_expectations")


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    """pytester forgets what a run imports; transformers and the compiler must not load twice."""
    importlib.import_module("torch._dynamo.repro.after_dynamo")
    torch.set_num_threads(1)
    for path in (LLAMA, ROBERTA):
        load_model(ModelSource(str(path), as_written=True), Target())


@pytest.fixture
def desk(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty folder, but for two models in it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "250")
    for path in (LLAMA, ROBERTA):
        shutil.copytree(path, pytester.path / "acme" / path.name)
    return pytester


def run(
    desk: pytest.Pytester,
    *words: str,
    suite: str = "TestAIUDecoderModels",
    place: tuple[str, ...] = SUITE,
) -> pytest.RunResult:
    *before, module = place
    return desk.runpytest_inprocess(*PLUGINS, *before, f"{module}::{suite}", *words)


def llama(desk: pytest.Pytester, *words: str, place: tuple[str, ...] = SUITE) -> pytest.RunResult:
    return run(desk, "--driftline-decoder-models=acme/tiny-llama", *words, place=place)


def plant(desk: pytest.Pytester, key: str, scale: float = 1.0, *, rename: str = "") -> None:
    path = desk.path / "acme" / "tiny-llama" / "model.safetensors"
    weights = load_file(path)
    weights[rename or key] = weights.pop(key) * scale
    save_file(weights, path, metadata={"format": "pt"})


def test_capture_then_verify_as_documented(desk: pytest.Pytester) -> None:
    result = llama(desk, "--capture_expectation")
    result.assert_outcomes(failed=2, skipped=1)
    again = "please re-run the tests without --capture_expectation"
    result.stdout.fnmatch_lines(
        [
            f"FAILED *::TestAIUDecoderModels::test_model_output[[]acme/tiny-llama-True] - Failed: "
            f"Signature file has been saved, {again}",
            f"FAILED *::TestAIUDecoderModels::test_model_weight_keys[[]acme/tiny-llama-True] - "
            f"Failed: Weights Key file has been saved, {again}",
        ]
    )
    result = llama(desk, "-vv")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*::TestAIUDecoderModels::test_model_output[[]acme/tiny-llama-False] *PASSED*",
            "*::TestAIUDecoderModels::test_model_weight_keys[[]acme/tiny-llama-False] *PASSED*",
            "*::TestAIUDecoderModels::test_model_unfused[[]acme/tiny-llama] *SKIPPED "
            "(All AIU models are already unfused)*",
            "*2 passed, 1 skipped*",
        ]
    )


def test_the_document_s_own_command_uses_the_device(desk: pytest.Pytester) -> None:
    """`pytest tests/models/test_model_expectations.py::…` after `driftline compat install`."""
    assert main(["compat", "install", str(desk.path)]) == 0
    place = ("tests/models/test_model_expectations.py",)
    with aiu.installed(desk.path / "packages"):
        result = llama(desk, "--capture_expectation", place=place)
        result.assert_outcomes(failed=2, skipped=1)
        result.stdout.fnmatch_lines(["driftline: models on aiu in fp16, compiled by sendnn"])
        (facts,) = (desk.path / FOLDER).glob("*test_model_output.json")
        assert json.loads(facts.read_text())["device"] == "aiu"
        result = llama(desk, "--driftline-target=device=cpu,dtype=fp32", place=place)
        result.stdout.fnmatch_lines(["driftline: models on cpu in fp32, not compiled*"])


def test_the_device_is_used_where_it_is_and_named(desk: pytest.Pytester) -> None:
    """As `driftline validate` does; `--driftline-target` overrides it."""
    line = "driftline: models on {}"
    with aiu.installed(desk.path / "packages"):
        result = llama(desk, "--capture_expectation")
        result.assert_outcomes(failed=2, skipped=1)
        result.stdout.fnmatch_lines([line.format("aiu in fp16, compiled by sendnn")])
        facts = json.loads(
            (desk.path / FOLDER / f"{STEM}.acme--tiny-llama.test_model_output.json").read_text()
        )
        assert (facts["device"], facts["compile"]) == ("aiu", "sendnn")
        result = llama(desk)
        result.assert_outcomes(passed=2, skipped=1)
        result = llama(desk, "--driftline-target=device=cpu,dtype=fp32")
        result.stdout.fnmatch_lines([line.format("cpu in fp32, not compiled (no AIU is involved)")])
    result = llama(desk, "-q")
    result.stdout.fnmatch_lines([line.format("cpu in fp16, not compiled (no AIU is involved)")])
    result = llama(desk, "--driftline-target=device=aiu")
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines(["*device=aiu needs the package torch_sendnn*"])


def test_the_files_have_the_documented_content_under_names_that_do_not_collide(
    desk: pytest.Pytester,
) -> None:
    llama(desk, "--capture_expectation")
    here = desk.path / FOLDER
    line = (here / f"{STEM}.acme--tiny-llama.test_model_output").read_text()
    documented = (DATA / "expectations" / f"{STEM}.tiny-llama.test_model_output").read_text()
    ours, theirs = ([float(word) for word in text.split(",")] for text in (line, documented))
    assert "\n" not in line
    assert len(ours) == len(theirs) == 64
    assert ours[:4] == theirs[:4] == [0.0] * 4
    # Another library's arithmetic in float16: the same to three digits.
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.02
    keys = (here / f"{STEM}.acme--tiny-llama.test_model_weight_keys").read_text().split(",")
    assert keys == sorted(keys)
    assert keys[0] == "lm_head.weight"
    assert len(keys) == 21
    facts = json.loads((here / f"{STEM}.acme--tiny-llama.test_model_output.json").read_text())
    assert (facts["model"], facts["dtype"], facts["seed"]) == ("acme--tiny-llama", "float16", 42)
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"


def test_an_expectation_under_its_documented_name_is_read(desk: pytest.Pytester) -> None:
    (desk.path / FOLDER).mkdir(parents=True)
    name = f"{STEM}.tiny-llama.test_model_output"
    shutil.copy(DATA / "expectations" / name, desk.path / FOLDER)
    llama(desk, "-k", "output").assert_outcomes(passed=1, deselected=2)
    plant(desk, "model.layers.1.mlp.down_proj.weight", 1.2)
    result = llama(desk, "-k", "output")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines([f"*expected: *{name}"])


def test_the_golden_expectations_hold(desk: pytest.Pytester) -> None:
    """Written by `tests/support/golden_dumps.py` from the document's words alone."""
    (desk.path / FOLDER).mkdir(parents=True)
    with zipfile.ZipFile(DATA.parent / "seeds" / "expectations.zip") as file:
        file.extractall(desk.path / FOLDER)
    llama(desk).assert_outcomes(passed=2, skipped=1)
    plant(desk, "model.layers.0.self_attn.o_proj.weight", 1.2)
    llama(desk).assert_outcomes(failed=1, passed=1, skipped=1)


def test_keys_of_another_library_say_so(desk: pytest.Pytester) -> None:
    (desk.path / FOLDER).mkdir(parents=True)
    name = f"{STEM}.tiny-llama.test_model_weight_keys"
    shutil.copy(DATA / "expectations" / name, desk.path / FOLDER)
    result = llama(desk, "-k", "keys")
    result.stdout.fnmatch_lines(
        [
            "*21 appeared, 21 vanished, 0 are the same",
            "*appeared: lm_head.weight",
            "*vanished: base_model.dec_norm.weight",
            "*no key is shared: was it captured with another library?*",
        ]
    )


def test_the_documented_files_are_reproduced_byte_for_byte_with_ibm_fms(tmp_path: Path) -> None:
    pytest.importorskip("fms")
    model = load(str(LLAMA), SuiteOptions(library="fms"), tuple_output=False)
    here = Expectations(tmp_path, "all")
    for test, keep in (("output", here.output), ("weight_keys", here.weight_keys)):
        name = f"{STEM}.tiny-llama.test_model_{test}"
        keep(model.subject, [name])
        assert (tmp_path / name).read_bytes() == (DATA / "expectations" / name).read_bytes()


def test_a_changed_weight_is_said_with_positions_and_sizes(desk: pytest.Pytester) -> None:
    llama(desk, "--driftline-update=new").assert_outcomes(passed=2, skipped=1)
    plant(desk, "model.layers.1.self_attn.v_proj.weight", 1.2)
    result = llama(desk)
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "the output of acme/tiny-llama is not what was captured",
            "* of 60 positions are off by more than *; the worst is position *: captured *, now *",
            "*the first is position *",
            "*over all positions the rms is *, allowed is *",
        ]
    )


@pytest.mark.parametrize("target", ["attention=eager", "compile=aot_eager"])
def test_other_kernels_of_the_same_model_pass(desk: pytest.Pytester, target: str) -> None:
    llama(desk, "--driftline-update=new")
    llama(desk, f"--driftline-target={target}").assert_outcomes(passed=2, skipped=1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_measured_limits_hold_other_kernels_with_room_and_see_a_zeroed_row(
    tmp_path: Path, dtype: str
) -> None:
    usual = load(str(LLAMA), SuiteOptions(f"dtype={dtype}"), tuple_output=False)
    other = load(str(LLAMA), SuiteOptions(f"dtype={dtype},attention=eager"), tuple_output=False)
    Expectations(tmp_path, "new").output(usual.subject, ["x"])
    check = Expectations(tmp_path)
    assert check.output(other.subject, ["x"]).state == "same"
    weight = usual.subject.module.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():
        weight[3:7] = 0.0
    assert check.output(usual.subject, ["x"]).state == "different"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("model", [LLAMA, ROBERTA], ids=lambda path: path.name)
def test_what_a_cpu_has_captured_holds_on_a_gpu(tmp_path: Path, model: Path, dtype: str) -> None:
    several = model == ROBERTA
    cpu = load(str(model), SuiteOptions(f"device=cpu,dtype={dtype}"), tuple_output=several)
    gpu = load(str(model), SuiteOptions(f"device=cuda,dtype={dtype}"), tuple_output=several)
    Expectations(tmp_path, "new").output(cpu.subject, ["x"])
    assert Expectations(tmp_path).output(gpu.subject, ["x"]).state == "same"


def test_flipping_bits_changes_half_of_the_weights_and_is_undone() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        module = torch.nn.Linear(50, 40).to(dtype)
        before = module.weight.detach().clone()
        with flipped(module, 0):
            share = (module.weight != before).float().mean().item()
            assert 0.4 < share < 0.6
            # The last bit of a subnormal number is more than eps of it, and fp16 draws such ones.
            limits = torch.finfo(dtype)
            step = limits.smallest_normal * limits.eps
            assert torch.allclose(module.weight, before, rtol=limits.eps, atol=step)
        assert torch.equal(module.weight, before)


def test_a_renamed_weight_key_is_named(desk: pytest.Pytester) -> None:
    llama(desk, "--driftline-update=new")
    keys = desk.path / FOLDER / f"{STEM}.acme--tiny-llama.test_model_weight_keys"
    keys.write_text(keys.read_text().replace("model.norm.weight", "model.final_norm.weight"))
    result = llama(desk)
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*: 1 appeared, 1 vanished, 20 are the same",
            "*appeared: model.norm.weight",
            "*vanished: model.final_norm.weight",
        ]
    )


def test_another_number_format_is_refused_even_when_the_numbers_are_near(
    desk: pytest.Pytester,
) -> None:
    llama(desk, "--driftline-update=new")
    result = llama(desk, "--driftline-target=device=cpu,dtype=fp32")
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*captured with dtype float16, this is dtype float32*"])


def test_a_missing_expectation_names_the_command(desk: pytest.Pytester) -> None:
    result = llama(desk)
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "Signature file failed to load, please re-run the tests with --capture_expectation",
            f"*there is no *{STEM}.acme--tiny-llama.test_model_output "
            f"(nor {STEM}.tiny-llama.test_model_output)",
            "*this makes it: pytest *--pyargs driftline.suites.test_model_expectations::* "
            "--driftline-decoder-models=acme/tiny-llama --capture_expectation",
        ]
    )


def test_tuple_outputs_are_joined_into_one_signature(desk: pytest.Pytester) -> None:
    words = ("--driftline-tuple-output-models=acme/tiny-roberta-qa",)
    suite = "TestAIUModelsTupleOutput"
    run(desk, *words, "--capture_expectation", suite=suite).assert_outcomes(failed=2, skipped=1)
    run(desk, *words, suite=suite).assert_outcomes(passed=2, skipped=1)
    name = f"models.test_model_expectations.{suite}.acme--tiny-roberta-qa.test_model_output"
    assert len((desk.path / FOLDER / name).read_text().split(",")) == 128
    path = desk.path / "acme" / "tiny-roberta-qa" / "model.safetensors"
    weights = load_file(path)
    weights["qa_outputs.weight"][1] *= 1.5  # the second of the two outputs
    save_file(weights, path, metadata={"format": "pt"})
    result = run(desk, *words, suite=suite)
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*of 120 positions are off*"])


def test_a_tuple_model_among_the_decoders_is_told_where_it_belongs(desk: pytest.Pytester) -> None:
    result = run(desk, "--driftline-decoder-models=acme/tiny-roberta-qa", "--capture_expectation")
    result.stdout.fnmatch_lines(["*gives 2 tensors; a decoder gives one", "*TestAIUModelsTuple*"])


def test_models_and_target_come_from_the_ini_file(desk: pytest.Pytester) -> None:
    desk.makeini(
        "[pytest]\n"
        "driftline_decoder_models =\n    acme/tiny-llama\n"
        "driftline_tuple_output_models = acme/tiny-roberta-qa\n"
        "driftline_target = device=cpu,dtype=bf16\n"
        "driftline_expectations_dir = kept\n"
    )
    result = desk.runpytest_inprocess(*PLUGINS, *SUITE, "--driftline-update=new")
    result.assert_outcomes(passed=4, skipped=2)
    name = f"{STEM}.acme--tiny-llama.test_model_output.json"
    facts = json.loads((desk.path / "kept" / name).read_text())
    assert facts["dtype"] == "bfloat16"
    desk.runpytest_inprocess(*PLUGINS, *SUITE).assert_outcomes(passed=4, skipped=2)


def test_no_model_named_is_skipped_with_a_sentence(desk: pytest.Pytester) -> None:
    result = run(desk, "-rs")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["*no model is named: give --driftline-decoder-models MODEL*"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--driftline-decoder-models=acme/none/at/all"], "there is no model folder *"),
        (["--driftline-target=dtype=fp12"], "'fp12' is no number format*"),
        (["--driftline-target=device=npu"], "device=npu needs the package torch_npu*"),
        (["--driftline-library=tf"], "models come from transformers or fms, not from 'tf'"),
        (["--driftline-micro-layers=none"], "'none' is no number of layers"),
        (["--driftline-micro-layers=3"], "*3 layers cannot be kept of a model that has 2*"),
        (["--driftline-thresholds=nowhere.json"], "*nowhere.json cannot be read: *"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    desk: pytest.Pytester, words: list[str], sentence: str
) -> None:
    if "models" not in words[0]:
        words = ["--driftline-decoder-models=acme/tiny-llama", *words]
    result = run(desk, "--driftline-update=new", *words)
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines([sentence])
    assert "Error:" not in result.stdout.str()
    assert not (desk.path / FOLDER).exists()


def test_a_micro_model_has_random_weights_and_a_name_of_its_own(desk: pytest.Pytester) -> None:
    micro = "--driftline-micro-layers=1"
    llama(desk, micro, "--driftline-update=new").assert_outcomes(passed=2, skipped=1)
    name = f"{STEM}.acme--tiny-llama-micro1.test_model_weight_keys"
    keys = (desk.path / FOLDER / name).read_text()
    assert "layers.0." in keys
    assert "layers.1." not in keys
    plant(desk, "model.norm.weight", 3.0)  # not read
    llama(desk, micro).assert_outcomes(passed=2, skipped=1)


def test_two_models_of_one_last_name_do_not_share_files(desk: pytest.Pytester) -> None:
    shutil.copytree(desk.path / "acme", desk.path / "other")
    plant(desk, "model.norm.weight", 2.0)
    both = "--driftline-decoder-models=acme/tiny-llama,other/tiny-llama"
    run(desk, both, "--driftline-update=new").assert_outcomes(passed=4, skipped=2)
    run(desk, both).assert_outcomes(passed=4, skipped=2)


def test_limits_come_from_a_thresholds_file_when_one_is_given(desk: pytest.Pytester) -> None:
    llama(desk, "--driftline-update=new")
    plant(desk, "model.layers.1.self_attn.v_proj.weight", 1.2)
    file = desk.path / "acme--tiny-llama-thresholds.json"
    file.write_text('{"model_id": "acme--tiny-llama", "relative_l2": 0.5}')
    llama(desk, f"--driftline-thresholds={file.name}").assert_outcomes(passed=2, skipped=1)
    file.write_text('{"model_id": "acme--tiny-llama", "relative_l2": 1e-6}')
    result = llama(desk, f"--driftline-thresholds={file.name}")
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*allowed: a relative L2 of 1e-06, by *thresholds.json"])
    file.write_text('{"model_id": "acme--tiny-granite", "relative_l2": 0.5}')
    result = llama(desk, f"--driftline-thresholds={file.name}")
    result.stdout.fnmatch_lines(["*is for the model 'acme--tiny-granite', not for *"])


def test_a_model_elsewhere_after_a_blank_is_not_taken_for_the_tests_root(
    desk: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory
) -> None:
    away = tmp_path_factory.mktemp("away") / "tiny-llama"
    shutil.copytree(LLAMA, away)
    words = ("--driftline-decoder-models", str(away), "--driftline-update=new")
    run(desk, *words).assert_outcomes(passed=2, skipped=1)
    assert (desk.path / FOLDER).is_dir()
    desk.makeini("[pytest]\ndriftline_target = dtype=bf16\n")  # which pytest would not read
    result = run(desk, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*join it to its option *--driftline-decoder-models={away}"])
    assert not list(away.rglob("expectations"))


def test_a_test_file_of_ones_own_lists_its_models(desk: pytest.Pytester) -> None:
    folder = desk.mkdir("tests").joinpath("models")
    folder.mkdir()
    (folder / "test_model_expectations.py").write_text(
        "from driftline.suites.test_model_expectations import TestAIUDecoderModels\n\n"
        "decoder_models = ['acme/tiny-llama']\n"
    )
    words = (*PLUGINS, "tests/models/test_model_expectations.py::TestAIUDecoderModels")
    desk.runpytest_inprocess(*words, "--capture_expectation").assert_outcomes(failed=2, skipped=1)
    desk.runpytest_inprocess(*words).assert_outcomes(passed=2, skipped=1)


@pytest.mark.parametrize(
    ("model", "label", "older"),
    [
        ("mistralai/Mistral-7B", "mistralai--Mistral-7B", "Mistral-7B"),
        ("/tmp/models/mistralai/Mistral-7B/", "mistralai--Mistral-7B", "Mistral-7B"),
        ("tiny", "tiny", "tiny"),
        ("../tiny/", "tiny", "tiny"),
        ("/hub/models--acme--tiny/snapshots/0a1b", "acme--tiny", "0a1b"),
        ("a b/c:d", "a-b--c-d", "c-d"),
        ("/", "model", "model"),
    ],
)
def test_a_model_is_called_by_its_last_two_names(model: str, label: str, older: str) -> None:
    assert model_label(model) == label
    assert documented_label(model) == older
