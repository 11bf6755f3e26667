"""The pytest plugin in anybody's own tests: `def test_x(expect): expect(model, inputs)`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch  # here, so that pytester keeps it from run to run

import driftline

pytest_plugins = ("pytester",)

MODEL = """
import torch
from torch import nn

torch.set_num_threads(1)

def network(dtype=torch.float32):
    torch.manual_seed(3)
    layers = (nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))
    return nn.Sequential(*layers).to(dtype)
"""
TEST = """
import torch
from toy import network

def test_x(expect):
    model = network()
    {plant}
    expect(model, torch.arange(12).unsqueeze(0))
"""
FOLDER = Path("tests/resources/expectations")


@pytest.fixture
def desk(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of somebody else; the plugin comes as its entry point would bring it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "220")
    pytester.makepyfile(toy=MODEL)
    return pytester


def run(desk: pytest.Pytester, *words: str) -> pytest.RunResult:
    return desk.runpytest_inprocess(
        "-p", "driftline.testing.expectations.pytest_plugin", "-p", "no:cacheprovider", *words
    )


def write_test(desk: pytest.Pytester, plant: str = "pass") -> None:
    desk.makepyfile(test_toy=TEST.format(plant=plant))


def captured(desk: pytest.Pytester, plant: str = "pass") -> None:
    write_test(desk, plant)
    run(desk, "--driftline-update=new").assert_outcomes(passed=1)


def test_a_missing_expectation_names_the_command_that_makes_it(desk: pytest.Pytester) -> None:
    write_test(desk)
    result = run(desk)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Signature file failed to load, please re-run the tests with --capture_expectation",
            "*nothing has been captured for test_toy.test_x yet: there is no *test_x.output*",
            "*this makes it: pytest -p driftline.testing.expectations.pytest_plugin "
            "*--capture_expectation",
            "Weights Key file failed to load*",
        ]
    )
    assert not (desk.path / FOLDER).exists()


def test_new_writes_once_and_every_later_run_checks(desk: pytest.Pytester) -> None:
    write_test(desk)
    result = run(desk, "--driftline-update=new")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["written: *test_toy.test_x.output", "written: *weight_keys"])
    before = {p.name: p.read_bytes() for p in (desk.path / FOLDER).iterdir()}
    assert set(before) == {
        "test_toy.test_x.layers",
        "test_toy.test_x.output",
        "test_toy.test_x.output.json",
        "test_toy.test_x.weight_keys",
        "test_toy.test_x.weight_keys.json",
    }
    for word in ("none", "new", "failed"):
        result = run(desk, f"--driftline-update={word}")
        result.assert_outcomes(passed=1)
        assert "written" not in result.stdout.str()
        assert {p.name: p.read_bytes() for p in (desk.path / FOLDER).iterdir()} == before


def test_the_fingerprint_says_where_it_was_made(desk: pytest.Pytester) -> None:
    captured(desk)
    facts = json.loads((desk.path / FOLDER / "test_toy.test_x.output.json").read_text())
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert facts["dtype"] == "float32"
    assert facts["seed"] == 42
    assert "last bit" in facts["allowed"]["why"]
    assert not any(str(desk.path) in str(value) for value in facts.values())


def test_capture_expectation_writes_and_fails_on_purpose(desk: pytest.Pytester) -> None:
    write_test(desk)
    for state in ("written", "rewritten"):
        result = run(desk, "--capture_expectation")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "Signature and Weights Key file has been saved, please re-run the tests without "
                "--capture_expectation",
                f"{state}: *test_toy.test_x.output",
            ]
        )
    run(desk).assert_outcomes(passed=1)


def test_a_changed_weight_says_how_many_positions_how_much_and_where(desk: pytest.Pytester) -> None:
    captured(desk)
    write_test(desk, "model[0].weight.data[7] += 0.5")
    result = run(desk)
    result.assert_outcomes(failed=1)
    # Token 7 stands at position 7 only; the smallest range, which all others stand on, is not it.
    result.stdout.fnmatch_lines(
        [
            "the output of test_toy.test_x is not what was captured",
            "*1 of 12 positions are off by more than *; the worst is position 7: captured *, now *"
            "(off by *), * times what is allowed",
            "*allowed: 2 times what flipping the last bit of half of the weights does (4 runs)",
            "*captured 20*, in the same environment",
            "*--driftline-update=failed takes it over*",
        ]
    )
    assert "weight keys" not in result.stdout.str()


def test_failed_takes_over_what_differs_and_nothing_else(desk: pytest.Pytester) -> None:
    captured(desk)
    keys = desk.path / FOLDER / "test_toy.test_x.weight_keys.json"
    before = keys.stat().st_mtime_ns
    write_test(desk, "model[3].weight.data *= 1.5")
    run(desk, "--driftline-update=new").assert_outcomes(failed=1)
    result = run(desk, "--driftline-update=failed")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["rewritten: *test_x.output"])
    assert keys.stat().st_mtime_ns == before
    run(desk).assert_outcomes(passed=1)


def test_a_renamed_weight_is_named_on_both_sides(desk: pytest.Pytester) -> None:
    captured(desk)
    wrapped = "torch.nn.Sequential(*model[:3], torch.nn.Sequential(model[3]))"
    write_test(desk, f"model = {wrapped}")
    result = run(desk)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "the weight keys of test_toy.test_x are not the captured ones: 2 appeared, 2 vanished, "
            "3 are the same",
            "*appeared: 3.0.bias",
            "*appeared: 3.0.weight",
            "*vanished: 3.bias",
            "*vanished: 3.weight",
        ]
    )
    assert "positions are off" not in result.stdout.str()


def test_weights_of_another_shape_under_the_same_keys_are_said(desk: pytest.Pytester) -> None:
    captured(desk)
    plant = "from torch import nn; model[1] = nn.Linear(16, 48); model[3] = nn.Linear(48, 24)"
    write_test(desk, plant)
    result = run(desk)
    result.stdout.fnmatch_lines(
        ["*have the captured keys, but 3 have other shapes", "*shape: 1.bias was [[]32], is [[]48]"]
    )


def test_another_number_format_is_another_experiment(desk: pytest.Pytester) -> None:
    captured(desk, "model = network(torch.bfloat16)")
    write_test(desk)
    result = run(desk)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*it was captured with dtype bfloat16, this is dtype float32*"])


def test_a_permuted_vocabulary_is_seen_though_no_range_changes(desk: pytest.Pytester) -> None:
    captured(desk)
    write_test(desk, "[p.data.copy_(p.data.flip(0).clone()) for p in model[3].parameters()]")
    result = run(desk)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*though their ranges agree: a permutation, or a shift of all*"])


def test_rounding_elsewhere_passes(desk: pytest.Pytester) -> None:
    captured(desk)
    write_test(desk, "wide = network().double(); model = lambda x: wide(x).float()")
    # The same weights in float64, rounded at the end: no bit need be the same, nothing is wrong.
    run(desk).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("words", "passes"),
    [("rtol=0.5", True), ("atol=100.0", True), ("rtol=1e-9", False), ("rtol=0, atol=0", False)],
)
def test_limits_in_the_test_replace_measured_ones(
    desk: pytest.Pytester, words: str, passes: bool
) -> None:
    captured(desk)
    text = TEST.format(plant="model[0].weight.data[7] += 0.01")
    desk.makepyfile(test_toy=text.replace("unsqueeze(0))", f"unsqueeze(0), {words})"))
    run(desk).assert_outcomes(passed=passes, failed=not passes)
    marked = f"import pytest\npytestmark = pytest.mark.driftline({words})\n" + text
    desk.makepyfile(test_toy=marked)
    run(desk, "--strict-markers").assert_outcomes(passed=passes, failed=not passes)


def test_several_calls_of_one_test_and_parameters_have_files_of_their_own(
    desk: pytest.Pytester,
) -> None:
    desk.makepyfile(
        test_many="""
        import pytest, torch

        class TestMany:
            @pytest.mark.parametrize("size", ["a/b", 4])
            def test_outputs(self, expect, size):
                expect(torch.ones(2, 3))
                expect((torch.zeros(2, 3), torch.ones(2, 3)))
                expect(torch.arange(3.0), name="last")
        """
    )
    run(desk, "--capture_expectation").assert_outcomes(failed=2)  # and yet all of it is there
    names = {p.name for p in (desk.path / FOLDER).iterdir() if p.suffix != ".json"}
    stem = "test_many.TestMany.test_outputs"
    assert names == {
        f"{stem}[{size}]{call}.output" for size in ("a-b", "4") for call in ("", ".2", ".last")
    }
    run(desk).assert_outcomes(passed=2)


def test_two_expectations_of_one_name_are_refused(desk: pytest.Pytester) -> None:
    desk.makepyfile(
        test_twice="""
        import torch

        def test_x(expect):
            expect(torch.ones(2), name="same")
            expect(torch.zeros(2), name="same")
        """
    )
    result = run(desk, "--driftline-update=all")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["test_twice.test_x.same is expected by *(call 1) already"])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("expect(torch.tensor([1.0, float('nan')]))", "*1 values that are NaN or infinite*"),
        ("expect(torch.ones(2), nmae='x')", "an expectation has no 'nmae'"),
        ("expect(torch.ones(2), rtol=-1)", "rtol is -1.0; it must be 0 or more"),
        ("expect(torch.arange(3))", "*holds no floating-point tensor"),
        ("expect(torch.ones(2), name='n' * 300)", "an expectation cannot be called *255"),
    ],
)
def test_what_cannot_be_expected_is_a_sentence(
    desk: pytest.Pytester, body: str, sentence: str
) -> None:
    desk.makepyfile(test_bad=f"import torch\n\ndef test_x(expect):\n    {body}\n")
    result = run(desk, "--driftline-update=new")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([sentence])
    assert "Traceback" not in result.stdout.str()
    assert "expecting.py" not in result.stdout.str()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("output", "1.0,two,3.0", "*is no signature: 'two' is no number"),
        ("output", "1.0,nan", "*holds 1 numbers that are not finite"),
        ("output", "1.0,2.0", "*: 2 positions were, 12 are now"),
        ("output.json", "{", "the fingerprint *cannot be read: it is not valid JSON"),
        ("output.json", "[]", "the fingerprint *is no JSON object"),
        ("output.json", '{"allowed": {"largest": "x"}}', "*does not say how much is allowed"),
    ],
)
def test_a_damaged_expectation_is_a_sentence(
    desk: pytest.Pytester, name: str, content: str, sentence: str
) -> None:
    captured(desk)
    (desk.path / FOLDER / f"test_toy.test_x.{name}").write_text(content)
    write_test(desk, "model[3].weight.data *= 1.01")
    result = run(desk)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([sentence])
    assert "expecting.py" not in result.stdout.str()


def test_the_folder_comes_from_the_ini_file_or_the_command_line(desk: pytest.Pytester) -> None:
    desk.makeini("[pytest]\ndriftline_expectations_dir = kept/here\n")
    captured(desk)
    assert (desk.path / "kept" / "here" / "test_toy.test_x.output").is_file()
    run(desk, "--driftline-expectations-dir=there").assert_outcomes(failed=1)
    run(desk, "--driftline-expectations-dir=there", "--driftline-update=new")
    assert (desk.path / "there" / "test_toy.test_x.output").is_file()


def test_a_folder_that_cannot_be_made_is_a_sentence(desk: pytest.Pytester) -> None:
    write_test(desk)
    (desk.path / "occupied").write_text("a file")
    result = run(desk, "--driftline-expectations-dir=occupied/x", "--driftline-update=new")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the expectation *occupied/x/test_toy.test_x.output cannot be *"])


def test_a_suite_with_the_same_option_of_its_own_keeps_it(desk: pytest.Pytester) -> None:
    desk.makeconftest(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--capture_expectation', action='store_true', default=False)\n"
    )
    write_test(desk)
    run(desk, "--capture_expectation").assert_outcomes(failed=1)
    run(desk).assert_outcomes(passed=1)


def test_the_model_is_left_as_it_was(desk: pytest.Pytester) -> None:
    desk.makepyfile(
        test_left="""
        import copy
        import torch
        from toy import network

        def test_x(expect):
            model = network(torch.float16)
            model[2].eval()
            before = copy.deepcopy(model.state_dict())
            modes = [part.training for part in model.modules()]
            torch.manual_seed(1)
            expect(model, torch.arange(12).unsqueeze(0))
            drawn = torch.rand(3)
            torch.manual_seed(1)
            assert torch.equal(drawn, torch.rand(3))
            assert modes == [part.training for part in model.modules()]
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key]), key
        """
    )
    run(desk, "--driftline-update=new").assert_outcomes(passed=1)


def test_a_word_that_update_does_not_know_is_a_usage_error(desk: pytest.Pytester) -> None:
    result = run(desk, "--driftline-update=some")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*invalid choice: 'some'*"])


def test_the_plugin_and_its_options_are_in_the_help(desk: pytest.Pytester) -> None:
    result = run(desk, "--help")
    for word in ("--capture_expectation", "--driftline-update", "driftline_expectations_dir"):
        assert word in result.stdout.str()
    markers = run(desk, "--markers").stdout.str()
    assert "@pytest.mark.driftline(name=, seed=, rtol=, atol=)" in markers


def test_workers_of_xdist_write_and_the_summary_lists_it(
    desk: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(driftline.__file__).parents[1]))
    write_test(desk)
    plugins = (
        "-p",
        "driftline.testing.expectations.pytest_plugin",
        "-p",
        "xdist.plugin",
        "-p",
        "no:cacheprovider",
    )
    result = desk.runpytest_subprocess(*plugins, "-n", "1", "--driftline-update=new")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["written: *test_toy.test_x.output"])


def test_a_failure_names_the_layer_and_shows_the_tree(desk: pytest.Pytester) -> None:
    captured(desk)
    layers = desk.path / FOLDER / "test_toy.test_x.layers"
    assert layers.stat().st_size < 10_000
    write_test(desk, "model[2] = torch.nn.ReLU()")
    result = run(desk)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*the drift starts at '2' (GELU*in the candidate ReLU*", "*2*GELU → ReLU*◀ starts here"]
    )


TWO_MODELS = """
import copy
import driftline
import pytest
import torch
from toy import network

@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_x(scale):
    right = network()
    ported = copy.deepcopy(right).to(torch.bfloat16)
    ported[1].weight.data *= scale
    driftline.assert_no_drift(right, ported, torch.arange(12).unsqueeze(0))
"""


def test_two_models_in_one_assertion(desk: pytest.Pytester) -> None:
    desk.makepyfile(test_toy=TWO_MODELS)
    result = run(desk)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * AssertionError: FAIL: the drift starts at '1' (Linear)*",
            "E * 1 * Linear * fail *◀ starts here",
        ]
    )
    # The last line of the traceback is the test's own.
    assert "layers.py:" not in result.stdout.str()
