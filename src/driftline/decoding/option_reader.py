"""Options of the decoder commands from flags and environment variables, by one rule.

A flag overrides an environment variable, which overrides the default. `metrics_options` and
`layer_options` take the options of their commands by name; `validate_options` takes the documented
variables (`COMMON_MODEL_PATHS`, `METRICS_THRESHOLD`, …), which `validate_words` also reads from
flags. All combinations of several values become one set of options each. Nothing is loaded here.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from driftline import settings
from driftline.decoding.failures import CHECKS
from driftline.decoding.files import names
from driftline.decoding.known_limits import (
    DEFAULT_LIMITS,
    DOCUMENTED,
    ModelLimits,
    look_up,
    read_list,
    read_table,
    seed_table,
)
from driftline.decoding.models.loading import HF_ARCHITECTURE
from driftline.decoding.models.paged_cache import FP8, OF_FMS
from driftline.decoding.models.targets import (
    Target,
    default_targets,
    dtype_name,
    parse_target,
    suite_targets,
)
from driftline.decoding.options import LayerOptions, Limits, MetricsOptions, Report, ValidateOptions
from driftline.errors import BadInput, did_you_mean

Read = Callable[[str], str]
"""Returns what the user set for a name, or an empty text."""
ATTENTION = {"sdpa": "", "math": "eager", **{name: name for name in OF_FMS}}
"""Kinds of attention by their documented names, and as targets call them."""
VALIDATE_DEFAULTS = {
    "COMMON_BATCH_SIZES": "1,2,4,8",
    "COMMON_SEQ_LENGTHS": "64,2048",
    "COMMON_MAX_NEW_TOKENS": "128",
    "USE_MICRO_MODELS": "1",
    "MICRO_LAYERS": "3",
    "MICRO_WEIGHTS": "random",
    "ATTN_TYPE": "sdpa",
    "FAILURE_THRESHOLD": "0.01",
    "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "1024",
    "FROM_MODEL_CONFIGURATION_FREQUENCY": "0",
    "DTYPE": "fp16",
}
"""Defaults of a validation, by the documented variable names."""


class OptionReader:
    """Texts of options: a flag overrides an environment variable, which overrides the default.

    Args:
        flags: The values of the command line, by option.
        variable: Returns the value of an environment variable.
        variables: Name of the environment variable of each option that has one.
        command: For the hint of a refusal.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        variable: Read,
        variables: Mapping[str, str],
        command: str,
    ) -> None:
        self._flags = flags
        self._variable = variable
        self._variables = variables
        self.hint = f"see driftline {command} --help"

    def flag(self, name: str) -> Any:
        """The value of an option on the command line; None if it is not given."""
        return self._flags.get(name)

    def text(self, name: str, default: str = "") -> str:
        """One option as text."""
        # An empty flag counts as not given: scripts pass variables that may be unset.
        flag = self.flag(name)
        variable = self._variable(name) if name in self._variables else ""
        return str(flag) if flag else variable or default

    def words(self, name: str, default: str = "") -> list[str]:
        """Texts between commas, each once."""
        return split_words(self.text(name, default))

    def numbers(
        self, name: str, default: str = "", *, least: int = 0, optional: bool = False
    ) -> list[int]:
        """Whole numbers between commas, each once.

        Args:
            name: The option.
            default: The value if nobody sets it.
            least: The smallest allowed number.
            optional: Whether it may be empty.

        Raises:
            BadInput: A word is no such number, or there is none.
        """
        words = self.words(name, default)
        wrong = [word for word in words if not word.isdecimal() or int(word) < least]
        if wrong or not (words or optional):
            raise self.number_refusal(name, wrong[0] if wrong else "", least)
        return list(dict.fromkeys(map(int, words)))

    def number_refusal(self, name: str, word: str, least: int) -> BadInput:
        """The error for a word that is not a number; an empty word means that none is given."""
        del least
        if not word:
            return BadInput(f"--{name} names no number", hint=self.hint)
        option = f"--{name}" if self.flag(name) else self._variables[name]
        return BadInput(f"{option} takes whole numbers, not '{word}'", hint=self.hint)


def split_words(text: str) -> list[str]:
    """Words between commas, each once.

    >>> split_words("64, 2048,,64")
    ['64', '2048']
    """
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def metrics_options(flags: Mapping[str, Any]) -> list[MetricsOptions]:
    """The options of every requested shape of `driftline metrics`, in the order of the runs.

    Args:
        flags: The command's options by name; missing ones are taken from the environment.

    Raises:
        BadInput: A value is invalid, or a required one is missing.
    """
    reader = OptionReader(flags, settings.metrics_variable, settings.METRICS_VARIABLES, "metrics")
    folder: Path | None = reader.flag("output_dir")
    if folder is None:
        raise BadInput("`driftline metrics` needs --output_dir", hint=reader.hint)
    # Without a default: results of one length say little about another.
    lengths = reader.numbers("min_pad_length", optional=True)
    if not lengths:
        raise BadInput(
            "`driftline metrics` needs --min_pad_length, the sequence length",
            hint="64 and 2048 are usual; SEQ_LENS in the environment is taken as well",
        )
    variant = reader.text("variant")
    # If only a variant is given, it is loaded: the environment must not replace it.
    path = str(reader.flag("model_path") or "") if variant else reader.text("model_path")
    prompts = reader.text("sharegpt_path")
    dynamic = bool(reader.flag("compile_dynamic"))
    topk: int | None = reader.flag("topk_per_token")  # 0 is a number that is refused later
    common: dict[str, Any] = {
        "model_path": path,
        "variant": variant,
        "tokenizer": reader.text("tokenizer"),
        "prompts": Path(prompts) if prompts else None,
        "output_dir": folder,
        "tokens_per_sequence": reader.flag("num_test_tokens_per_sequence"),
        "architecture": reader.text("architecture", HF_ARCHITECTURE),
        "library": reader.text("library"),
        "unfuse_weights": bool(reader.flag("unfuse_weights")),
        "extra": _loader_arguments(reader.flag("extra_get_model_kwargs") or (), reader.hint),
        "order": reader.text("order", "head"),
        "topk": 20 if topk is None else topk,
        "keep": reader.text("logits", "full"),
        "skip_computation": bool(reader.flag("skip_computation")),
        "compile_dynamic": dynamic,
        "distributed": bool(reader.flag("distributed")),
        "force": bool(reader.flag("force")),
    }
    # Checked before any shape is built: a misspelt word is reported at once.
    dtypes = [dtype_name(word) for word in reader.words("default_dtype")] or ["fp16"]
    return [
        MetricsOptions(
            **common,
            reference=_dynamic(parse_target(reader.text("reference")), dynamic),
            candidate=_dynamic(_candidate(reader.text("candidate"), dtype), dynamic),
            new_tokens=new,
            length=length,
            batch_size=batch,
        )
        for dtype in dtypes
        for new in reader.numbers("max_new_tokens", "100")
        for length in lengths
        for batch in reader.numbers("batch_size", "1")
    ]


def layer_options(flags: Mapping[str, Any]) -> list[LayerOptions]:
    """The options of every requested model and shape of `driftline layer-metrics`."""
    reader = OptionReader(flags, settings.layer_variable, settings.LAYER_VARIABLES, "layer-metrics")
    if reader.flag("mode") is None:
        raise BadInput(
            "`driftline layer-metrics` needs --mode", hint="--mode generate, or model-forward"
        )
    folder = reader.text("output_path")
    if not folder:
        raise BadInput(
            "`driftline layer-metrics` needs --output_path",
            hint="OUTPUT_PATH in the environment is taken as well",
        )
    variant = reader.text("variant")
    models = split_words(
        str(reader.flag("model_paths") or "") if variant else reader.text("model_paths")
    )
    if not models and not variant:
        raise BadInput(
            "no model is named", hint="give --model_paths, or MODEL_PATHS in the environment"
        )
    if variant and len(models) > 1:
        raise BadInput(f"--variant names one model, and {len(models)} are given", hint=reader.hint)
    common: dict[str, Any] = {
        "variant": variant,
        "tokenizer": reader.text("tokenizer"),
        "prompts": Path(reader.text("sharegpt_path", settings.home_prompts())),
        "output_path": Path(folder),
        "mode": reader.flag("mode"),
        "reference": parse_target(reader.text("reference")),
        "candidate": _candidate(
            reader.text("candidate"), dtype_name(reader.text("default_dtype", "fp16"))
        ),
        "architecture": reader.text("architecture", HF_ARCHITECTURE),
        "library": reader.text("library"),
        "unfuse_weights": not reader.flag("fused_weights"),
        "order": reader.text("order", "head"),
        "elements": bool(reader.flag("elements")),
        "compiled": reader.text("compile_unit", "block"),
        "force": bool(reader.flag("force")),
    }
    return [
        LayerOptions(**common, model_path=model, length=length, batch_size=batch, new_tokens=new)
        # The documented order of layer-metrics; that of metrics is another one.
        for model in models or [""]
        for length in reader.numbers("seq_lengths", "64")
        for batch in reader.numbers("batch_sizes", "1")
        for new in reader.numbers("max_new_tokens", "128")
    ]


def _candidate(text: str, dtype: str) -> Target:
    return parse_target(text, dtype=dtype) if text else default_targets(dtype)[1]


def _dynamic(target: Target, requested: bool) -> Target:
    # Only a compiled target can be compiled for all lengths at once.
    return target._replace(dynamic=bool(target.compile) and (requested or target.dynamic))


def _loader_arguments(words: Iterable[str], hint: str) -> dict[str, Any]:
    """Arguments `name=value` for a library's loader; a value is a Python literal, or text."""
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--extra_get_model_kwargs takes name=value, not '{word}'", hint=hint)
        try:
            # Literals only: nothing that a user types here is run.
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def validate_words(flags: Mapping[str, Any]) -> Read:
    """A function that reads a variable from the options of `driftline validate` or the environment.

    Args:
        flags: The command's options by name.
    """
    texts = {
        _COMMON.get(name, name.upper()): "1" if value is True else str(value)
        for name, value in flags.items()
        if value
    }
    micro = any(flags.get(name) for name in ("micro_layers", "micro_weights", "micro_models_home"))

    def read(name: str) -> str:
        if name == "USE_MICRO_MODELS" and micro:
            return "1"
        # The documented variable is on by default; a command line without micro options is not.
        default = "0" if name == "USE_MICRO_MODELS" else ""
        return texts.get(name) or settings.shapes_variable(name) or default

    return read


_COMMON = {
    name: f"COMMON_{name.upper()}"
    for name in ("model_paths", "batch_sizes", "seq_lengths", "max_new_tokens")
}
"""Options whose documented variable has a prefix of its own."""


def validate_options(read: Read, *, report: Report = print) -> list[ValidateOptions]:
    """Every model and shape to validate, the full product in the documented order.

    Args:
        read: Returns what the user set for a documented variable.
        report: Takes lines about odd entries of a list of models, or a table that was created.

    Returns:
        Nothing, if no model is named.

    Raises:
        BadInput: A word has no meaning.
    """
    return _ValidateReader(read, report).options()


class _ValidateReader(OptionReader):
    """The documented variables of a validation, turned into options.

    Flags are among the variables already: see `validate_words`.
    """

    def __init__(self, read: Read, report: Report) -> None:
        super().__init__({}, read, {}, "validate")
        self._read = read
        self._report = report

    def text(self, name: str, default: str = "") -> str:
        return self._read(name) or VALIDATE_DEFAULTS.get(name, default)

    def number_refusal(self, name: str, word: str, least: int) -> BadInput:
        # All that was set is shown, as the variable may hold a list from somewhere else.
        return BadInput(
            f"{self._label(name)} takes whole numbers from {least} with commas between them, "
            f"not '{self.text(name)}'"
        )

    def options(self) -> list[ValidateOptions]:
        models = self._models()
        micro = 0
        if self._switch("USE_MICRO_MODELS") and not self.text("FROM_MODEL_CONFIGURATION"):
            micro = self.numbers("MICRO_LAYERS", least=1)[0]
        skip = self._skipped_checks()
        if not models:
            return []
        reference, candidate = self._targets()
        folder = self.text("VALIDATION_INFO_DIR")
        save = self._switch("SAVE_VALIDATION_INFO_OUTPUTS")
        common: dict[str, Any] = {
            "reference": reference,
            "candidate": candidate,
            "library": self._library(reference, candidate),
            "micro_layers": micro,
            "info_dir": Path(folder) if folder else None,
            "save": save,
            "skip": skip,
        }
        table = self._table()
        if save and not folder:
            raise BadInput(
                "outputs are to be saved, but no folder is named",
                hint="set FMS_TEST_SHAPES_VALIDATION_INFO_DIR, or give --validation_info_dir",
            )
        listed = [
            options for limits in models for options in self._shapes(limits, table, micro, common)
        ]
        # The highest seed has the longest name; nothing is computed that could not be saved.
        for options in listed if folder else ():
            names.require_short(names.out_name(options.prefix, names.DEVICE, options.rounds))
        return listed

    def _shapes(
        self,
        model: ModelLimits,
        table: Sequence[ModelLimits],
        micro: int,
        common: Mapping[str, Any],
    ) -> Iterator[ValidateOptions]:
        trained = self._trained(model.model_id) if micro else ""
        drawn = bool(micro) and not trained and self._draws_weights()
        limits = self._limits(model, table, micro=bool(micro), drawn=drawn)
        for batch in self.numbers("COMMON_BATCH_SIZES", least=1):
            for length in self.numbers("COMMON_SEQ_LENGTHS", least=1):
                for new in self.numbers("COMMON_MAX_NEW_TOKENS", least=1):
                    yield ValidateOptions(
                        **common,
                        name=model.model_id,
                        model_path=trained or model.model_id,
                        prompts=self._prompts(),
                        batch_size=batch,
                        length=length,
                        new_tokens=new,
                        tokens_per_sequence=self.numbers(
                            "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE", least=1
                        )[0],
                        limits=limits,
                        failure_threshold=self._share(),
                        force_level_1=self._switch("FORCE_VALIDATION_LEVEL_1"),
                        random_weights=drawn,
                        trained=bool(trained),
                        tokenizer=self.text("TOKENIZER"),
                        distributed=self._switch("DISTRIBUTED"),
                        timing=self._timing(),
                    )

    def _label(self, name: str) -> str:
        """How messages name an option."""
        return f"FMS_TEST_SHAPES_{name} (--{name.lower().removeprefix('common_')})"

    def _switch(self, name: str) -> bool:
        word = self.text(name).lower()
        if word not in ("", "0", "1", "true", "false"):
            raise BadInput(f"{self._label(name)} takes 1 or 0, not '{self.text(name)}'")
        return word in ("1", "true")

    def _share(self) -> float:
        name = "FAILURE_THRESHOLD"
        try:
            share = float(self.text(name))
        except ValueError:
            share = math.nan
        # Written so that NaN is refused as well.
        if not 0.0 <= share <= 1.0:
            raise BadInput(
                f"{self._label(name)} takes a share from 0 to 1, not '{self.text(name)}'"
            )
        return share

    def _skipped_checks(self) -> frozenset[str]:
        words = self.words("SKIP_ASSERTIONS")
        for word in words:
            if word not in CHECKS:
                raise BadInput(
                    f"{self._label('SKIP_ASSERTIONS')} takes ce and mean_diff, not '{word}'",
                    hint=did_you_mean(word, CHECKS),
                )
        return frozenset(words)

    def _timing(self) -> str:
        # The documented variable has no prefix, unlike all others.
        word = self.text("TIMING") or settings.shapes_timing()
        if word not in ("", "e2e", "per-token"):
            raise BadInput(f"TIMING (--timing) takes e2e or per-token, not '{word}'")
        return word

    def _prompts(self) -> Path:
        named = self.text("SHAREGPT_PATH") or settings.layer_variable("sharegpt_path")
        return Path(named or settings.home_prompts())

    def _models(self) -> list[ModelLimits]:
        """The models of a list with their limits, or named ones, whose limits are looked up."""
        listed = self.text("FROM_MODEL_CONFIGURATION")
        if listed:
            # The list replaces named models, as documented.
            frequency = self.numbers("FROM_MODEL_CONFIGURATION_FREQUENCY")[0]
            models = read_list(Path(listed), frequency)
            for complaint in models.complaints:
                self._report(complaint)
            return list(models.models)
        return [
            ModelLimits(name, False, math.nan, math.nan)
            for name in self.words("COMMON_MODEL_PATHS")
        ]

    def _targets(self) -> tuple[Target, Target]:
        dtype = self.text("DTYPE")
        attention = self.text("ATTN_TYPE")
        if attention not in ATTENTION:
            raise BadInput(
                f"{self._label('ATTN_TYPE')} can be {', '.join(ATTENTION)}, not '{attention}'",
                hint=did_you_mean(attention, ATTENTION),
            )
        if self.text("CANDIDATE"):
            candidate = parse_target(self.text("CANDIDATE"), dtype=dtype)
        else:
            _, candidate = suite_targets(dtype)
        reference = parse_target(self.text("REFERENCE"))
        if ATTENTION[attention] and not candidate.attention:
            candidate = candidate._replace(attention=ATTENTION[attention])
        if attention in FP8 and not reference.attention:
            # The cost of fp8 itself is not an error of the device, so both sides round.
            reference = reference._replace(attention=attention)
        return reference, candidate

    def _library(self, *targets: Target) -> str:
        """The library that loads the models: ibm-fms if it has the attention, else as given."""
        library = self.text("LIBRARY")
        needed = [target.attention for target in targets if target.attention in OF_FMS]
        if needed and library not in ("", "fms"):
            raise BadInput(
                f"{needed[0]} is an attention of ibm-fms, and {self._label('LIBRARY')} says "
                f"{library}",
                hint="say fms, or nothing",
            )
        return "fms" if needed else library

    def _trained(self, model: str) -> str:
        """The folder of a trained micro model, under one of the spellings of the model's name."""
        home = self.text("MICRO_MODELS_HOME")
        if not home:
            return ""
        name = model.rstrip("/")
        for spelling in (name, names.flat_name(name), name.rpartition("/")[2]):
            folder = Path(home) / spelling
            # An absolute path would replace the home folder instead of naming a folder in it.
            inside = bool(spelling) and not Path(spelling).is_absolute()
            if inside and (folder / "config.json").is_file():
                return str(folder)
        return ""

    def _draws_weights(self) -> bool:
        """Whether a micro model's weights are drawn; else its layers keep the model's own."""
        word = self.text("MICRO_WEIGHTS")
        if word not in ("random", "local"):
            raise BadInput(f"{self._label('MICRO_WEIGHTS')} takes random or local, not '{word}'")
        return word == "random"

    def _table(self) -> tuple[ModelLimits, ...]:
        """The user's table if one is named, created with the documented values if it is missing."""
        if not self.text("THRESHOLD_TABLE"):
            return DOCUMENTED
        path = Path(self.text("THRESHOLD_TABLE"))
        if seed_table(path):
            self._report(f"made {path} with the documented limits; it is yours to edit")
        return read_table(path)

    def _limits(
        self, model: ModelLimits, table: Sequence[ModelLimits], *, micro: bool, drawn: bool
    ) -> Limits:
        """The limits from the first source that has them: METRICS_THRESHOLD, a thresholds file, the
        list of models, the table, the default.
        """
        pair = self.text("METRICS_THRESHOLD")
        if pair:
            return Limits(*self._two_numbers(pair), "METRICS_THRESHOLD")
        path = self.text("THRESHOLDS")
        if path:
            from driftline.comparison.tolerance.thresholds import load_thresholds

            thresholds = load_thresholds(path, model=model.model_id)
            ce, mean_diff = (thresholds.limit(name) for name in ("ce", "diff_mean"))
            assert ce is not None and mean_diff is not None  # only layers may lack a limit
            return Limits(ce, mean_diff, path)
        if not math.isnan(model.ce):
            return Limits(model.ce, model.mean_diff, "the list of models")
        # Limits in tables are of trained weights; drawn ones give flatter distributions.
        listed = None if drawn else look_up(tuple(table), model.model_id, micro=micro)
        if listed is not None:
            which = "table of limits" if self.text("THRESHOLD_TABLE") else "documented limits"
            return Limits(listed.ce, listed.mean_diff, which)
        why = "weights are drawn" if drawn else "no list names this model"
        return Limits(*DEFAULT_LIMITS, f"default: {why}")

    def _two_numbers(self, text: str) -> tuple[float, float]:
        try:
            # Not `split_words`: two equal limits are two numbers.
            numbers = [float(word) for word in text.split(",") if word.strip()]
        except ValueError:
            numbers = []
        if len(numbers) != 2 or not all(math.isfinite(number) for number in numbers):
            raise BadInput(
                f"{self._label('METRICS_THRESHOLD')} takes two numbers, ce and mean diff, "
                f"not '{text}'",
                hint="as in 2.8364005851745624,0.0007839603102183846",
            )
        return numbers[0], numbers[1]
