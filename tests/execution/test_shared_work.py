"""Operators of `opcheck` and shapes of `metrics` and `validate`, shared out: the same results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from written_runs import Here

from driftline.errors import BadInput
from driftline.execution.codec import decode, encode
from driftline.operators.api import check
from driftline.operators.result import Figures, OperatorCall
from driftline.runs.records import TensorKey

DATA = Path(__file__).parents[1] / "data"
MINI = DATA / "ascend" / "mini_atb"


def same(one, other):
    """Equal, NaN and arrays included."""
    assert encode(one) == encode(other) or repr(encode(one)) == repr(encode(other))


def test_operators_of_an_atb_dump_are_shared_out_and_told_in_order(tmp_path):
    for dump in sorted(path for path in MINI.iterdir() if path.is_dir()):
        said = []
        try:
            one = check(dump, metrics=("abs", "cos_sim", "kl"))
        except BadInput:
            continue
        other = check(
            dump,
            metrics=("abs", "cos_sim", "kl"),
            executor=Here(3, elsewhere=True),
            progress=lambda *counts, said=said: said.append(counts),
        )
        same(one, other)
        assert said[-1] == (one.coverage.operators,) * 2
        return
    raise AssertionError("no dump was checked")


@pytest.mark.parametrize(
    "who", [{"executor": Here()}, pytest.param({"jobs": 2}, marks=pytest.mark.slow)]
)
def test_operators_of_a_run_are_shared_out(tmp_path, who):
    import torch

    import driftline

    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    torch.manual_seed(0)
    with torch.no_grad(), driftline.capture(model, tmp_path / "run", levels="ops"):
        model(torch.randn(4, 16))
    one = check(tmp_path / "run", repro=tmp_path / "a")
    other = check(tmp_path / "run", repro=tmp_path / "b", **who)
    same(one._replace(scripts=()), other._replace(scripts=()))
    assert one.coverage.operators > 2


def test_another_dump_under_the_same_path_is_noticed(tmp_path):
    from driftline.operators.source import CheckOptions
    from driftline.operators.workers import PLACE, OperatorsWorker

    dump = next(path for path in MINI.iterdir() if path.is_dir())
    about = {"path": str(dump), "options": encode(CheckOptions()), "calls": "others", "threads": 0}
    ((place, said),) = OperatorsWorker(about).absent()
    assert place == PLACE and str(dump) in said


def test_only_kinds_that_are_named_are_decoded():
    call = OperatorCall("a", "b", param={"c": (1, 2.5, None)})
    assert decode(encode(call), (OperatorCall,)) == call
    with pytest.raises(ValueError, match="is none of our values"):
        decode(encode(call), (Figures,))
    with pytest.raises(TypeError, match="cannot be sent a object"):
        encode(object())


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, (2, "x")], 3: frozenset({"y"})},
        np.arange(6, dtype=np.float16).reshape(2, 3),
        Path("a/b"),
        TensorKey.of("a", "input"),
        np.float32(0.1),
        b"bytes",
    ],
    ids=repr,
)
def test_our_values_come_back_as_they_were(value):
    from driftline.execution import codec

    found = decode(codec.unpack(codec.pack(encode(value))), (TensorKey,))
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype and (found == value).all()
    else:
        assert found == value
        assert isinstance(value, np.generic) or type(found) is type(value)


AIU = DATA / "aiu" / "fixtures"


def shapes(folder):
    from driftline.decoding.options import MetricsOptions

    return [
        MetricsOptions(
            model_path=str(AIU / "tiny-llama"),
            tokenizer="",
            prompts=AIU / "share_gpt_tiny.json",
            output_dir=folder,
            batch_size=batch,
            length=32,
            new_tokens=4,
        )
        for batch in (1, 2, 3)
    ]


def files_of(folder):
    """Every file of results but for when, where and how long."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".csv", ".pt")
    }


def test_shapes_of_metrics_are_shared_out_and_told_in_order(tmp_path):
    from driftline.decoding.metrics import run_shapes

    said, ready = [], []
    one = run_shapes(shapes(tmp_path / "one"), report=lambda line: None)
    other = run_shapes(
        shapes(tmp_path / "other"),
        executor=Here(2, elsewhere=True),  # does the last one first
        report=said.append,
        ready=lambda ask, outcome: ready.append((ask.batch_size, outcome.tokens)),
    )
    for here, there in zip(one, other, strict=True):
        same(here._replace(folder=""), there._replace(folder=""))
    assert ready == [(1, one[0].tokens), (2, one[1].tokens), (3, one[2].tokens)]
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")
    assert len(files_of(tmp_path / "one")) > 12
    assert said[0].startswith(one[2].prefix)
    assert not list((tmp_path / "other").glob(".driftline*"))
    told = [json.loads(path.read_text()) for path in tmp_path.glob("*/*.provenance.json")]
    assert len(told) == 6 and len({str(each["command"]) for each in told}) == 1


def asks(**words):
    from driftline.decoding.option_reader import validate_options

    said = {
        "COMMON_MODEL_PATHS": str(AIU / "tiny-llama"),
        "COMMON_BATCH_SIZES": "1,2",
        "COMMON_SEQ_LENGTHS": "32",
        "COMMON_MAX_NEW_TOKENS": "8",
        "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "16",
        "USE_MICRO_MODELS": "0",
        "SHAREGPT_PATH": str(AIU / "share_gpt_tiny.json"),
        "REFERENCE": "device=cpu,dtype=fp32",
        "CANDIDATE": "device=cpu,dtype=fp16",
        "FORCE_VALIDATION_LEVEL_1": "1",
        "METRICS_THRESHOLD": "1e-9,1e-9",
        **words,
    }
    return validate_options(lambda name: said.get(name, ""))


def test_shapes_of_validate_are_shared_out_and_say_the_same_in_the_same_order(tmp_path):
    from driftline.decoding.validate import validate_shapes

    lines, others = [], []
    one = validate_shapes(asks(), report=lines.append)
    other = validate_shapes(asks(), report=others.append, executor=Here(2))
    for here, there in zip(one, other, strict=True):
        assert here.first is not None  # a failing token, with its text
        same(here._replace(seconds=0.0), there._replace(seconds=0.0))

    def timeless(said):
        return [line for line in said if " took " not in line]

    assert timeless(others) == timeless(lines)


@pytest.mark.slow
def test_processes_validate_shapes_from_the_command_line(tmp_path, capsys):
    from driftline.cli.main import main

    words = [
        *("validate", f"--model_paths={AIU / 'tiny-llama'}", "--batch_sizes=1,2"),
        *("--seq_lengths=32", "--max_new_tokens=8", "--metrics_threshold=1e-9,1e-9"),
        *(f"--sharegpt_path={AIU / 'share_gpt_tiny.json'}", "--force_validation_level_1"),
        *("--cumulative_test_tokens_per_sequence=16", "--candidate=device=cpu,dtype=fp16"),
    ]
    assert main(words) == 1
    one = capsys.readouterr().out
    assert main([*words, "--jobs", "2"]) == 1

    def told(text):
        return [line.partition(" in ")[0] for line in text.splitlines() if " took " not in line]

    assert told(capsys.readouterr().out) == told(one)


def test_a_split_model_is_not_shared_out_too(tmp_path):
    from driftline.decoding.metrics import run_shapes
    from driftline.decoding.validate import validate_shapes

    with pytest.raises(BadInput, match="give each process a shape of its own"):
        run_shapes([replace(each, distributed=True) for each in shapes(tmp_path)], jobs=2)
    with pytest.raises(BadInput, match="no shape is asked for"):
        validate_shapes([], jobs=2)


def test_a_machine_that_does_not_see_the_results_says_so(tmp_path):
    from driftline.decoding.pipeline import FILES, MetricsWorker

    here, nowhere = tmp_path / "here", tmp_path / "nowhere"
    here.touch()
    about = {"threads": 1, "files": [str(here), str(nowhere)], "command": ["driftline"]}
    assert MetricsWorker(about).absent() == [(FILES, f"cannot see '{nowhere}'")]
