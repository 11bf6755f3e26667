"""Options of the decoder commands: a flag wins over an environment variable, then a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driftline.decoding.models.targets import Target
from driftline.decoding.option_reader import (
    layer_options,
    metrics_options,
    validate_options,
    validate_words,
)
from driftline.decoding.options import LayerOptions, MetricsOptions
from driftline.errors import BadInput

VARIABLES = (
    *("MODEL_PATH", "MODEL_PATHS", "BATCH_SIZES", "SEQ_LENS", "SEQ_LENGTHS", "MAX_NEW_TOKENS"),
    *("DEFAULT_TYPES", "DS_PATH", "OUTPUT_PATH", "SHARE_GPT_DATASET_PATH"),
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def metrics(**flags: Any) -> list[MetricsOptions]:
    usual = {"model_path": "acme/tiny", "min_pad_length": "16", "output_dir": Path("out")}
    return metrics_options(usual | {"candidate": "dtype=fp16"} | flags)


def layers(**flags: Any) -> list[LayerOptions]:
    usual = {"mode": "generate", "model_paths": "acme/tiny", "output_path": Path("out")}
    return layer_options(usual | {"candidate": "dtype=fp16"} | flags)


def test_a_flag_wins_over_a_variable_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [options.batch_size for options in metrics()] == [1]
    monkeypatch.setenv("BATCH_SIZES", "2, 4,2")
    assert [options.batch_size for options in metrics()] == [2, 4]
    assert [options.batch_size for options in metrics(batch_size="8")] == [8]
    assert [options.batch_size for options in layers()] == [2, 4]
    assert [options.batch_size for options in layers(batch_sizes="8")] == [8]


def test_every_combination_is_run_in_the_documented_order() -> None:
    shapes = metrics(default_dtype="fp16,bf16", candidate="device=cpu", max_new_tokens="4,8")
    assert [(o.candidate.dtype, o.new_tokens) for o in shapes] == [
        *(("fp16", 4), ("fp16", 8), ("bf16", 4), ("bf16", 8)),
    ]
    shapes_of_layers = layers(model_paths="a/b,c/d", seq_lengths="8,16")
    assert [(o.model, o.length) for o in shapes_of_layers] == [
        *(("a/b", 8), ("a/b", 16), ("c/d", 8), ("c/d", 16)),
    ]


def test_a_variant_alone_is_not_replaced_by_a_model_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MODEL_PATH", "acme/other")
    monkeypatch.setenv("MODEL_PATHS", "acme/other")
    assert metrics(model_path="", variant="acme/mine")[0].source == "acme/mine"
    assert layers(model_paths="", variant="acme/mine")[0].source == "acme/mine"
    assert metrics(model_path="")[0].source == "acme/other"
    assert layers(model_paths="")[0].source == "acme/other"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch_size": "a"}, "--batch_size takes whole numbers, not 'a'"),
        ({"batch_size": "-1"}, "--batch_size takes whole numbers, not '-1'"),
        ({"batch_size": "²"}, "--batch_size takes whole numbers, not '²'"),
        ({"batch_size": ","}, "--batch_size names no number"),
        ({"min_pad_length": ""}, "needs --min_pad_length, the sequence length"),
        ({"output_dir": None}, "needs --output_dir"),
        ({"extra_get_model_kwargs": ["a b"]}, "takes name=value, not 'a b'"),
    ],
)
def test_words_without_meaning_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        metrics(**flags)


def test_a_refused_variable_is_named_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQ_LENS", "long")
    with pytest.raises(BadInput, match="SEQ_LENS takes whole numbers, not 'long'"):
        metrics(min_pad_length="")


@pytest.mark.parametrize("number", [0, -3])
def test_numbers_that_are_too_small_reach_the_check(number: int) -> None:
    (options,) = metrics(topk_per_token=number)
    with pytest.raises(BadInput, match=f"--topk_per_token must be at least 1, not {number}"):
        options.check()
    (options,) = metrics(num_test_tokens_per_sequence=number)
    with pytest.raises(BadInput, match="is less than one round"):
        options.check()


def test_arguments_for_the_loader_are_literals_or_text() -> None:
    (options,) = metrics(extra_get_model_kwargs=["a=1", "b=[2]", "c=open('x')"])
    assert options.extra == {"a": 1, "b": [2], "c": "open('x')"}


def test_only_a_compiled_target_is_compiled_for_all_lengths() -> None:
    (options,) = metrics(compile_dynamic=True, candidate="compile=inductor,dtype=fp16")
    assert options.candidate == Target("cpu", "fp16", "inductor", True)
    assert options.reference == Target("cpu", "fp32")


def test_flags_of_validate_stand_for_the_documented_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FMS_TEST_SHAPES_COMMON_BATCH_SIZES", "4")
    monkeypatch.setenv("FMS_TEST_SHAPES_COMMON_SEQ_LENGTHS", "32")
    read = validate_words(
        {"model_paths": "acme/tiny", "batch_sizes": "2", "candidate": "dtype=fp16"}
    )
    assert read("USE_MICRO_MODELS") == "0", "a command line without micro options tests the model"
    (options,) = validate_options(read)
    assert (options.batch_size, options.length, options.micro) == (2, 32, False)
    assert options.model == options.source == "acme/tiny"
    assert validate_words({"micro_layers": "2"})("USE_MICRO_MODELS") == "1"


def test_two_equal_limits_are_two_numbers() -> None:
    flags = {"model_paths": "a/b", "metrics_threshold": "0.5,0.5", "candidate": "dtype=fp16"}
    flags |= {"batch_sizes": "1", "seq_lengths": "8"}
    (options,) = validate_options(validate_words(flags))
    assert options.limits[:2] == (0.5, 0.5)
