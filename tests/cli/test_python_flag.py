"""`--python` prints, for every command, a program that does the same."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftline.cli import python_script as script
from driftline.cli.app import COMMANDS
from driftline.cli.main import main
from driftline.cli.python_script import Inline, Name, Script, quoted
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into
from support.atb import AtbDump, Operation, Value

AIU = Path(__file__).parents[1] / "data" / "aiu"
AWKWARD = 'it\'s "quoted" \\ and\nbroken \t %s {x} 模型'
TINY = "--model_path tiny-llama --sharegpt_path share_gpt.json"
SHAPE = "--batch_sizes 1 --seq_lengths 16 --max_new_tokens 4"

WORDS: dict[str, list[list[str]]] = {
    "dump": [
        ["dump", "-o", "run", "--", sys.executable, "model.py"],
        [
            *("dump", "--site", AWKWARD, "-er", "3,5,7,7", "--level", "ops,params", "--keep"),
            *("summary", "--max-bytes", "2GB", "-o", "run", "--force", "--", "prog", AWKWARD),
        ],
    ],
    "errcheck": [
        ["errcheck", "--type", "nan", "saturation", "-o", "o", "--", sys.executable, "model.py"]
    ],
    "compare": [
        ["compare", "ref", "cand"],
        [
            *("compare", "ref", "cand", "--max", "relative_l2=0.5", "--min", "cosine=0.1"),
            *("--site", "model.*", "--step", "0", "-o", "out", "--csv", "rows.csv"),
        ],
        ["compare", "ref", "cand", "--save-plan", "plan.toml", "--step-map", "0=0,1=1"],
        ["compare", "-gp", "ref", "-mp", "cand", "-o", "."],
        ["compare", "ref", "cand", "--dry-run", "--no-structure"],
        ["compare", "ref", "cand", "--thresholds", "limits.json", "--rtol", "0.1"],
        ["compare", "ref", "cand", "--jobs", "2"],
        ["compare", "ref", "cand", "--shard", "2/3", "-o", "pieces", "--site", "model.*"],
    ],
    "push": [["push", "ref", "memory://runs/ref", "--force"]],
    "merge": [["merge", "parts", "-o", "merged", "--csv", "merged.csv"]],
    "calibrate": [["calibrate", "table", "-o", "new.json", "--margin", "3", "--metric", "cosine"]],
    "check": [
        ["check", "table", "--thresholds", "limits.json"],
        ["check", "table", "--max", "relative_l2=1e-3", "-o", "judged"],
        ["check", "layers", "--thresholds", "layer-limits.json", "--slack", "2"],
    ],
    "labels": [["labels", "--", sys.executable, "label.py"]],
    "check-hooks": [["check-hooks", "--pathA", "hooks_a", "--pathB", "hooks_b"]],
    "opcheck": [
        ["opcheck", "-i", "ait_dump", "--repro", "shown"],
        ["opcheck", "-i", "ait_dump", "--jobs", "2"],
        ["opcheck", "-i", "ait_dump", "-opname", "soft,", "lin", "-metric", "kl", "--format=json"],
    ],
    "metrics": [
        [
            *("metrics", *TINY.split(), "--min_pad_length", "16", "--max_new_tokens", "4"),
            *("-o", "scores"),
        ],
        [
            *("metrics", *TINY.split(), "--min_pad_length", "16", "--max_new_tokens", "4"),
            *("-o", "shared", "--batch_size", "1,2", "--jobs", "2"),
        ],
    ],
    "layer-metrics": [
        [
            *("layer-metrics", "--mode", "model-forward", *TINY.split(), *SHAPE.split()),
            *("-o", "made", "--candidate", "dtype=bf16"),
        ]
    ],
    "thresholds": [
        ["thresholds", "--models", "models/tiny-llama", "--metrics", "ce", "--file_base", "base"]
    ],
    "validate": [
        [
            *("validate", "--model_paths", "tiny-llama", "--sharegpt_path", "share_gpt.json"),
            *(*SHAPE.split(), "--metrics_threshold", "9,9", "--force_validation_level_1"),
        ],
        [
            *("validate", "--model_paths", "tiny-llama", "--sharegpt_path", "share_gpt.json"),
            *(*SHAPE.split(), "--metrics_threshold", "9,9", "--jobs", "2", "-o", "found"),
        ],
    ],
    "diagnose": [
        ["diagnose", "ref", "cand", "--site", "model.*"],
        ["diagnose", "table"],
    ],
    "replay": [["replay", "cand", "-o", "again", "--partial", "--", sys.executable, "model.py"]],
    "noise": [["noise", "-o", "n", "--variant", "plain", "--", sys.executable, "model.py"]],
    "bisect": [["bisect", "--reference-run", "live", "--", sys.executable, "model.py"]],
    "repeat": [["repeat", "-k", "2", "--", sys.executable, "model.py"]],
    "trend": [
        ["trend", "ref", "--figure", "max_abs", "--site", "model.*"],
        ["trend", "ref", "cand"],
    ],
    "report": [["report", "ref", "cand", "-o", "page.html", "--pictures", "1"]],
    "view": [["view", "ref", "cand"]],
    "show": [
        ["show", "ref"],
        ["show", "ref", "--site", "model.*", "--format", "csv"],
        ["show", "table", "--format", "markdown"],
        ["show", "limits.json", "--format", "json"],
        ["show", "ref", "--verify"],
    ],
    "convert": [["convert", "ref", "-o", "files", "--to", "npy"]],
    "topology": [
        ["topology", "ref", "--table", "table", "--metric", "cosine", "-o", "g.onnx"],
        ["topology", "ref", "--to", "model-explorer", "--level", "1"],
    ],
    "doctor": [["doctor"]],
    "demo": [["demo", "-o", "tour"], ["demo", "--copy", "programs"]],
    "completion": [["completion", "zsh"]],
    "compat": [["compat", "install", "scripts"]],
    "diff": [
        ["diff", "prog a", "prog b", "--site", AWKWARD, "--keep", "summary"],
        ["diff", "prog", "--rev", "A..B", "--env", "X=1", "-o", "out", "--class", AWKWARD],
    ],
}
"""What is printed and, but for those below, executed."""

LAUNCHES = ("demo", "diff", "dump", "errcheck", "labels", "replay", "noise", "bisect", "repeat")
"""Start a program with torch in it, for seconds each: executed by the long set."""
LOADS = ("metrics", "layer-metrics", "validate")
"""Load a model, twice: executed by the long set."""
ENDLESS = ("view",)
"""Waits until somebody stops it: only its values are checked here."""

MODEL = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
with torch.no_grad():
    net(torch.ones(2, 4))
"""
LABEL = """
import numpy
from driftline import gen_id, set_label, set_task_id
set_task_id()
one = gen_id()
set_label("pta", one, data_val=numpy.ones(4))
set_label("acl", one, data_val=numpy.ones(4))
"""


def write_run(path: Path, scale: float) -> None:
    writer = RunWriter(path)
    dice = np.random.default_rng(1)
    for step in (0, 1):
        for at, site in enumerate(("model.a", "model.b", "model.c", "head")):
            values = dice.standard_normal((2, 8)).astype(np.float32)
            values *= np.float32(scale if at else 1.0)
            record_into(
                writer, TensorKey.of(site, "output", step=step), values, class_name="Linear"
            )
    writer.close()


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands take."""
    import driftline

    place = tmp_path_factory.mktemp("kitchen")
    write_run(place / "ref", 1.0)
    write_run(place / "cand", 1.01)
    (place / "model.py").write_text(MODEL)
    (place / "label.py").write_text(LABEL)
    shutil.copytree(AIU / "fixtures" / "tiny-llama", place / "tiny-llama")
    shutil.copy(AIU / "fixtures" / "share_gpt_tiny.json", place / "share_gpt.json")
    with contextlib.chdir(place):
        table = driftline.compare("ref", "cand")
        table.write("table")
        driftline.compare_shard("ref", "cand", "1/1").write("parts")
        driftline.calibrate([table]).write("limits.json")
        for tree in ("hooks_a", "hooks_b"):
            (place / tree / "tensors" / "rank_0").mkdir(parents=True)
            np.save(place / tree / "tensors" / "rank_0" / "a.npy", np.arange(4.0))
        zeros = Value("x", np.zeros(4, np.float32))
        wrong = Value("p", np.full(4, 0.3, np.float32))
        AtbDump(place, "G2").execute(
            [Operation("SoftmaxOperation", [zeros], [wrong], {"axes": [-1]})]
        )
        for file in (AIU / "generate_metrics").glob("*seq-length-16*.csv"):
            (place / "base").mkdir(exist_ok=True)
            shutil.copy(file, place / "base")
        (place / "layers").mkdir()
        prefix = "acme--tiny_max-new-tokens-4_batch-size-1_seq-length-16_dtype-fp16"
        for layer in ("model.layers0", "model.layers1"):
            file = place / "layers" / f"{prefix}--{layer}.abs_diff.csv"
            file.write_text("abs_diff\n" + "0.5\n" * 4)
        words = ["--metrics", "abs_diff", "--file_base", "layers", "--layer_io", "-o", "."]
        assert main(["thresholds", "--models", "acme/tiny", *words]) == 0
        Path("acme--tiny-thresholds.json").rename("layer-limits.json")
    return place


def printed(words: list[str]) -> str:
    """What `--python` prints for a command line."""
    out = io.StringIO()
    at = words.index("--") if "--" in words else len(words)
    with contextlib.redirect_stdout(out):
        assert main([*words[:at], "--python", *words[at:]]) == 0
    return out.getvalue()


def executed(code: str) -> str:
    """What the printed program prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "printed", "exec"), {"__name__": "printed"})  # noqa: S102 - the point
    return out.getvalue()


def ids(case: list[str]) -> str:
    return re.sub(r"[^\w .,=-]", "", " ".join(case).replace(sys.executable, "python"))[:60]


EVERY = [(name, words) for name, cases in WORDS.items() for words in cases]


def test_every_command_is_among_those_that_are_tried() -> None:
    assert set(WORDS) == set(COMMANDS)


class Noted:
    """Every call that a command makes, and every one that its printed program makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_command: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        self.by_program: list[tuple[str, dict[str, Any]]] = []
        self._patch = monkeypatch
        self._methods: dict[str, Callable[..., Any]] = {}
        for method in ("assign", "act", "inline"):
            self._patch.setattr(Script, method, self._noting(getattr(Script, method)))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def note(program: Script, *words: Any) -> Any:
            function, args, kwargs = words[-3:]
            if function is not print:
                self.by_command.append((function, bound(function, args, kwargs)))
            return method(program, *words)

        return note

    def watch(self) -> None:
        """From here on those functions note that they are called, and do nothing."""
        for function in {function for function, _ in self.by_command}:
            *path, last = function.__qualname__.split(".")
            owner: Any = sys.modules[function.__module__]
            for part in path:
                owner = getattr(owner, part)
            if function.__module__ != "builtins" and not inspect.isclass(function):
                self._methods[last] = self._standing_in(function)
                self._patch.setattr(owner, last, self._methods[last])

    def _standing_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.by_program.append((function.__qualname__, bound(function, args, kwargs)))
            return Result(self._methods)

        return stand_in


def forget_doors() -> None:
    """The package remembers the functions behind its doors once they were used."""
    import driftline

    for name in vars(driftline)["_ADDRESSES"]:
        vars(driftline).pop(name, None)


class Result:
    """Stands for what a call gives; its methods are calls like others."""

    def __init__(self, methods: dict[str, Callable[..., Any]]) -> None:
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._methods[name](self, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        known = inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # a builtin that does not say
        return {}
    known.apply_defaults()
    return {name: plain(value) for name, value in known.arguments.items()}


REPORTS = "something that reports"


def plain(value: Any) -> Any:
    """Values as far as they matter: a path is its text, a list its items, nothing is nothing."""
    if isinstance(value, Name | Inline | Result):
        return "a result"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(plain(each) for each in value) or None
    if isinstance(value, tuple) and any(callable(each) for each in value):
        return REPORTS
    if hasattr(value, "write") or callable(value):
        return REPORTS
    if type(value).__module__.startswith("driftline.cli"):
        return REPORTS
    if type(value).__name__ in ("Subjects", "LayerModels"):
        return "a result"
    return value or None


@pytest.mark.parametrize(("name", "words"), EVERY, ids=[ids(words) for _, words in EVERY])
def test_the_printed_program_makes_the_same_calls_with_the_same_values(
    name: str, words: list[str], kitchen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kitchen)
    noted = Noted(monkeypatch)
    code = printed(words)
    noted.watch()
    forget_doors()
    try:
        executed(code)
    finally:
        forget_doors()
    made = list(noted.by_program)
    for function, values in noted.by_command:
        if inspect.isclass(function):
            continue
        fitting = [at for at, (called, _) in enumerate(made) if called == function.__qualname__]
        if not fitting:  # a door that is given a path opens it itself
            assert function.__name__ in ("open_run", "open_table", "load_thresholds")
            continue
        _, found = made.pop(fitting[0])
        for key, value in values.items():
            if REPORTS in (value, found[key]):
                continue
            either = {"a result"} & {str(value), str(found[key])}
            opened = bool(either) or "a result" in str(value)
            assert found[key] == value or opened, (function.__qualname__, key, found[key], value)
    assert made == []


END = script.end


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What commands hand to `end`, which their programs print."""
    found: list[str] = []

    def end(*shown: Any) -> None:
        if script.is_script():
            END(*shown)
        found.extend(f"{each}\n" for each in shown)

    monkeypatch.setattr(script, "end", end)
    return found


def masked(text: str) -> str:
    """Without what differs between two runs of the same thing."""
    # A moment stands alone; seconds and errors may have fourteen digits behind their point, too.
    text = re.sub(r"\d{8}_\d{6}(_\d+)?|(?<![\d.])\d{14}(?!\d)", "TIME", text)
    text = re.sub(r"/[\w/.-]*/(one|two)\b", "HERE", text)
    text = re.sub(r"\b(one|two)/", "HERE/", text)
    text = re.sub(r"(seconds|own_pid|pid)=[\d.e+-]+", r"\1=N", text)
    return re.sub(r"0x[0-9a-f]+|\d{4}-\d\d-\d\d[T ][\d:.+]+", "N", text)


def files(place: Path) -> set[str]:
    names = (str(each.relative_to(place)) for each in place.rglob("*"))
    return {
        re.sub(r"TIME(_\d+)?|[0-9a-f]{8,}|\d{3,}", "N", masked(name))
        for name in names
        if "__pycache__" not in name
    }


def tried_both_ways(
    words: list[str], kitchen: Path, tmp_path: Path, results: list[str]
) -> tuple[str, str]:
    """What a command gives, and what its printed program prints; in two folders alike."""
    for name in ("one", "two"):
        shutil.copytree(kitchen, tmp_path / name)
    out = io.StringIO()
    with contextlib.chdir(tmp_path / "one"):
        code = printed(words)
        with contextlib.redirect_stdout(out):
            assert main(words) in (0, 1)
    with contextlib.chdir(tmp_path / "two"):
        said = executed(code.replace(str(tmp_path / "one"), str(tmp_path / "two")))
    assert files(tmp_path / "one") == files(tmp_path / "two")
    return masked("".join(results) or out.getvalue()), masked(said)


AT_ONCE = [words for name, words in EVERY if name not in (*LAUNCHES, *LOADS, *ENDLESS)]
LONG = [words for name, words in EVERY if name in (*LAUNCHES, *LOADS) and AWKWARD not in words]


@pytest.mark.parametrize("words", AT_ONCE, ids=ids)
def test_the_printed_program_gives_what_the_command_gives(
    words: list[str],
    kitchen: Path,
    tmp_path: Path,
    results: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command, program = tried_both_ways(words, kitchen, tmp_path, results)
    assert program.splitlines()[-len(command.splitlines()) :] == command.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("words", LONG, ids=ids)
def test_so_do_the_programs_of_commands_that_start_others(
    words: list[str], kitchen: Path, tmp_path: Path, results: list[str]
) -> None:
    with contextlib.chdir(kitchen):
        if words[0] in ("bisect", "replay") and not Path("live").exists():
            assert main(["dump", "-o", "live", "--", sys.executable, "model.py"]) == 0
    words = ["live" if word == "cand" else word for word in words]
    results.clear()
    command, program = tried_both_ways(words, kitchen, tmp_path, results)
    # Messages on the way go to stdout as well; what is printed last is the result.
    # Figures and ids are another run's: threads may sum otherwise, processes have other numbers.
    figures = re.compile(r"array\(\[[^]]*\]\)|[\w.+-]*\d[\w.+-]*|\s+")
    lines = [figures.sub("N", line) for line in command.splitlines()]
    said = [figures.sub("N", line) for line in program.splitlines()]
    assert lines and said[-len(lines) :] == lines


def test_the_words_of_a_program_are_its_own() -> None:
    code = printed(["dump", "-o", "x", "--", "prog", "--python", AWKWARD])
    assert '"--python"' in code and repr(AWKWARD) in code


def test_output_that_is_there_already_does_not_stand_in_the_way(
    kitchen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kitchen)
    assert 'table.write("table")' in printed(["compare", "ref", "cand", "-o", "table"])


def test_words_that_a_command_refuses_are_refused_as_ever(
    kitchen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(kitchen)
    assert main(["compare", "ref", "--python"]) == 2
    assert main(["compare", "ref", "cand", "--max", "nonsense=1", "--python"]) == 2
    assert main(["compare", "ref", "cand", "--pyton"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "did you mean --python" in said.err


@pytest.mark.parametrize("text", ["", AWKWARD, "\udcff", "\u2028", "a\x00b", "'''", '"""'])
def test_any_text_is_quoted_so_that_python_reads_it_back(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text
