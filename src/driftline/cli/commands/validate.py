"""`driftline validate`: does a decoder on a device give the tokens of a trusted device?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from cyclopts import Parameter

from driftline import settings
from driftline.cli import python_script as script
from driftline.cli.options import (
    LIMITS,
    MODEL,
    OUTPUT,
    PROMPTS,
    TARGETS,
    DecoderOptions,
    VerdictFormat,
    WorkerOptions,
    spelt,
)
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, BadInput

if TYPE_CHECKING:
    from driftline.decoding.options import ValidateOptions
    from driftline.decoding.validate import Verdict


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True)
class ValidateModel:
    """The models.

    Attributes:
        model_paths: Folders or ids of causal language models.
        from_model_configuration: File with one JSON object per line: a model and its limits.
            Replaces --model_paths.
        from_model_configuration_frequency: Use only lines of that file with at most this frequency.
            Default: 0.
        micro_layers: Test a micro model with only this many layers of each model.
        micro_weights: Weights of the micro model: random, or local for those of the model's own
            layers.
        micro_models_home: Folder with trained micro models, under the names of the full models.
    """

    model_paths: Annotated[str, spelt("model_paths", "M[,M]")] = ""
    from_model_configuration: Annotated[Path | None, spelt("from_model_configuration", "FILE")] = (
        None
    )
    from_model_configuration_frequency: Annotated[
        str, spelt("from_model_configuration_frequency", "N")
    ] = ""
    micro_layers: Annotated[str, spelt("micro_layers", "N")] = ""
    micro_weights: Annotated[Literal["random", "local"] | None, spelt("micro_weights")] = None
    micro_models_home: Annotated[Path | None, spelt("micro_models_home", "DIR")] = None

    @property
    def is_micro(self) -> bool:
        """Whether a smaller model replaces the full one."""
        return bool(self.micro_layers or self.micro_weights or self.micro_models_home)


@Parameter(name="*", group=PROMPTS)
@dataclass(frozen=True)
class ValidateShapes:
    """Which shapes are run.

    Attributes:
        batch_sizes: Prompts per round. Default: 1,2,4,8.
        seq_lengths: Sequence lengths. Default: 64,2048.
        max_new_tokens: Tokens generated per prompt and round. Default: 128.
        cumulative_test_tokens_per_sequence: Tokens per prompt in all rounds of level 1. Default:
            1024.
    """

    batch_sizes: Annotated[str, spelt("batch_sizes", "N[,N]")] = ""
    seq_lengths: Annotated[str, spelt("seq_lengths", "N[,N]")] = ""
    max_new_tokens: Annotated[str, spelt("max_new_tokens", "N[,N]")] = ""
    cumulative_test_tokens_per_sequence: Annotated[
        str, spelt("cumulative_test_tokens_per_sequence", "N")
    ] = ""


@Parameter(name="*", group=TARGETS)
@dataclass(frozen=True)
class ValidateTargets:
    """How the candidate computes.

    Attributes:
        attn_type: sdpa (default) or math; paged, math_fp8 or paged_fp8 load the models with
            ibm-fms.
        distributed: Under torchrun, split the candidate over the ranks.
    """

    attn_type: Annotated[str, spelt("attn_type", "NAME")] = ""
    distributed: bool = False


@Parameter(name="*", group=LIMITS)
@dataclass(frozen=True)
class ValidateLimits:
    """How much a token may differ, and how many tokens may fail.

    Attributes:
        metrics_threshold: Limits of ce and mean difference; they override all other limits.
        thresholds: File of `driftline thresholds` with the limits.
        threshold_table: Your own JSON table of limits by model. If the file does not exist, it is
            created with the documented values.
        failure_threshold: The check fails if the fraction of failing tokens reaches this. Default:
            0.01.
        skip_assertions: ce or mean_diff: report it, but do not judge it.
        force_validation_level_1: Run level 1 even if all tokens are equal.
    """

    metrics_threshold: Annotated[str, spelt("metrics_threshold", "CE,DIFF")] = ""
    thresholds: Annotated[Path | None, Parameter(metavar="FILE")] = None
    threshold_table: Annotated[Path | None, spelt("threshold_table", "FILE")] = None
    failure_threshold: Annotated[str, spelt("failure_threshold", "SHARE")] = ""
    skip_assertions: Annotated[str, spelt("skip_assertions", "NAME[,NAME]")] = ""
    force_validation_level_1: Annotated[bool, spelt("force_validation_level_1")] = False


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class ValidateOutput:
    """What is printed and written.

    Attributes:
        validation_info_dir: Folder with saved outputs, such as those of `driftline metrics`; saved
            outputs of the reference are used instead of running it.
        save_validation_info_outputs: Save the outputs of both sides to that folder.
        output: Also write the verdict, the rates and the scores of every token to this folder, and
            with --explain the layers; for `driftline report DIR`.
        explain: If the check fails, compare all layers on the text before the first failing token.
        timing: Print how long generation takes.
        format: table prints lines for people as it goes. markdown (for reviews), github
            (annotations and a step summary) and junit (for CI) print the result at the end, and the
            lines go to stderr.
    """

    validation_info_dir: Annotated[Path | None, spelt("validation_info_dir", "DIR")] = None
    save_validation_info_outputs: Annotated[bool, spelt("save_validation_info_outputs")] = False
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="DIR")] = None
    explain: bool = False
    timing: Literal["e2e", "per-token"] | None = None
    format: VerdictFormat = "table"


def validate(
    *,
    model: ValidateModel = ValidateModel(),
    decoder: DecoderOptions = DecoderOptions(),
    shapes: ValidateShapes = ValidateShapes(),
    targets: ValidateTargets = ValidateTargets(),
    limits: ValidateLimits = ValidateLimits(),
    output: ValidateOutput = ValidateOutput(),
    workers: WorkerOptions = WorkerOptions(),
) -> int:
    """Check that a decoder gives the same tokens on a device as on a trusted one, or nearly.

        driftline validate --model_paths=M --sharegpt_path=share_gpt.json --batch_sizes=1
            --seq_lengths=64 --max_new_tokens=128 --thresholds=out/M-thresholds.json

    Level 0: both sides generate freely. The check passes if all tokens are equal. Otherwise level 1
    follows: the candidate reads the reference's tokens, and a token fails if its ce or its mean
    difference reaches the limit. The fraction of failing tokens must stay below
    --failure_threshold. Exit code 0: passed, 1: failed. The same check is a pytest suite: pytest
    --pyargs driftline.suites.test_decoders.

    The default candidate is the AIU if its package is installed, else CUDA, else the CPU, in fp16.
    If an option is not given, its value comes from the environment:
    FMS_TEST_SHAPES_COMMON_BATCH_SIZES for --batch_sizes, FMS_TEST_SHAPES_METRICS_THRESHOLD for
    --metrics_threshold, and so on; DRIFTLINE_TEST_SHAPES_… works too. SHARE_GPT_DATASET_PATH is the
    default of --sharegpt_path. With --jobs or --executor, the shapes are divided among processes,
    and each process loads its own models.
    """
    from driftline.decoding.option_reader import validate_options, validate_words

    groups = (model, decoder, shapes, targets, limits, output)
    read = validate_words({name: value for group in groups for name, value in vars(group).items()})
    is_first_rank = settings.job_place().rank == 0
    tasks = validate_options(read, report=_print_line if is_first_rank else _print_nothing)
    if not tasks:
        raise BadInput(
            "no model is named",
            hint="give --model_paths, or set FMS_TEST_SHAPES_COMMON_MODEL_PATHS",
        )
    if script.is_script():
        _write_script(tasks, workers, output.output)
    return _Validation(tasks, output, explain=output.explain or read("EXPLAIN") == "1").run(workers)


class _Validation:
    """All models and shapes of one command, and their results."""

    def __init__(
        self, tasks: list[ValidateOptions], output: ValidateOutput, *, explain: bool
    ) -> None:
        from driftline.decoding.pipeline import Session
        from driftline.decoding.torchrun import join_job

        self.tasks = tasks
        self.output = output
        self.explain = explain
        self.session = Session()
        # Under torchrun, all ranks join before the first model is loaded.
        self.job = join_job(tasks[0].distributed)
        self.verdicts: list[Verdict] = []
        self.failed: list[str] = []
        # If stdout is read by a program, the lines for people go to stderr.
        self.stream: TextIO = sys.stdout if output.format == "table" else sys.stderr

    def run(self, workers: WorkerOptions) -> int:
        from driftline.decoding.validate import validate as validate_one
        from driftline.decoding.validate import validate_shapes

        if workers.shared:
            validate_shapes(
                self.tasks,
                jobs=workers.jobs,
                executor=workers.executor,
                report=self._print_progress,
                ready=self._finish,
            )
        else:
            for options in self.tasks:
                verdict = validate_one(options, report=self._print_progress, session=self.session)
                self._finish(options, verdict)
        if self.output.output is not None and self.job.writes:
            folder = self.output.output
            self._say(f"written to {folder}; driftline report {folder} -o report.html shows it")
        if len(self.tasks) > 1:
            passed = len(self.tasks) - len(self.failed)
            self._say(f"{passed} of {len(self.tasks)} passed")
        if self.job.writes and self.output.format != "table":
            _print_verdicts(self.verdicts, self.output.format)
        self.job.leave()
        script.end(*([self.verdicts] if workers.shared else self.verdicts))
        # Only rank 0 returns a failure: torchrun stops all ranks when one of them fails, and rank 0
        # could not finish printing.
        return EXIT_DIFFERENT if self.failed and self.job.writes else EXIT_FINE

    def _print_progress(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def _say(self, line: str) -> None:
        """Print a result; only one rank of a job does."""
        if self.job.writes:
            self._print_progress(line)

    def _finish(self, options: ValidateOptions, verdict: Verdict) -> None:
        """Print and write the result of one model and shape."""
        from driftline.decoding.validate import SPLIT_NOTE, lines_of

        self.verdicts.append(verdict)
        for line in lines_of(verdict, self.session.tokenizer(options)):
            self._say(line)
        if self.output.output is not None and self.job.writes:
            from driftline.decoding.files.validation_files import write_validation

            write_validation(verdict, self.output.output, self.session.tokenizer(options))
        if verdict.passed:
            self._say(f"PASSED {options.id} in {verdict.seconds:.1f} s")
            return
        self._say(f"FAILED {options.id} - {verdict.complaint}")
        self.failed.append(options.id)
        if self.explain and options.splits(self.job.size):
            self._say(SPLIT_NOTE)
        elif self.explain and self.job.writes:
            self._explain(options, verdict)

    def _explain(self, options: ValidateOptions, verdict: Verdict) -> None:
        from driftline.comparison.verdict.judge import judge
        from driftline.decoding.explain import explain
        from driftline.reporting import writers

        if verdict.first is None:
            return
        self._print_progress("layers, on the text before the first failing token:")
        folder = self.output.output
        if folder is None:
            table = judge(explain(options, verdict.first, self.session))
        else:
            from driftline.decoding.explain import write_layers
            from driftline.decoding.files.names import LAYER_TABLE

            table = judge(write_layers(options, verdict.first, self.session, folder))
            # Replaced without --force, like the verdict in the same folder, which was just written.
            table.write(folder / f"{options.prefix}{LAYER_TABLE}", force=True)
        writers.table(table, "table", self.stream)


def _write_script(
    tasks: list[ValidateOptions], workers: WorkerOptions, output: Path | None
) -> None:
    """Record the same calls for `--python`."""
    from driftline.decoding.pipeline import Session
    from driftline.decoding.validate import validate, validate_shapes, write_verdicts

    if workers.shared:
        verdicts = script.step(
            "verdicts", validate_shapes, tasks, jobs=workers.jobs, executor=workers.executor
        )
        if output is not None:
            script.act(write_verdicts, verdicts, output)
        script.end(verdicts)
    session = script.step("session", Session)
    separate: list[Verdict] = []
    for options in tasks:
        separate.append(script.step("verdict", validate, options, session=session))
        if output is not None:
            from driftline.decoding.files.validation_files import write_validation

            tokenizer = script.part(Session.tokenizer, session, options)
            script.act(write_validation, separate[-1], output, tokenizer)
    script.end(*separate)


def _print_verdicts(verdicts: list[Verdict], format: str) -> None:
    from driftline.decoding.validate import lines_of
    from driftline.reporting import writers
    from driftline.reporting.ci import of_verdicts

    checks = of_verdicts(verdicts, lines_of)
    writers.write(format, sys.stdout, view=lambda: checks.summary, checks=lambda: checks)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _print_nothing(line: str) -> None:
    del line
