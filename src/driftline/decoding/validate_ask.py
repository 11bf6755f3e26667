"""What a validation is asked: model, shape, targets, limits, where outputs lie; from words.

The words are those of the documented variables (`COMMON_MODEL_PATHS`, `METRICS_THRESHOLD`, …),
whether they came from the environment or the command line. Nothing is loaded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from driftline import settings
from driftline.decoding import out_files
from driftline.decoding.failing import METRICS
from driftline.decoding.known_thresholds import (
    DEFAULT,
    DOCUMENTED,
    Known,
    look_up,
    read_list,
    read_table,
    seed_table,
)
from driftline.decoding.paged import FP8, OF_FMS
from driftline.decoding.targets import (
    AIU_BACKEND,
    AIU_PACKAGE,
    Target,
    default_targets,
    parse_target,
)
from driftline.errors import BadInput, did_you_mean

TINY = "tiny_models"
"""Folder below the saved outputs that holds those of micro models."""
ATTENTION = {"sdpa": "", "math": "eager", **{name: name for name in OF_FMS}}
"""Kinds of attention by their documented names, as targets call them."""
DEFAULTS = {
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
"""What is meant where a word is not said."""
Read = Callable[[str], str]
"""Gives what was said for a word, or an empty text."""
Say = Callable[[str], None]


class Limits(NamedTuple):
    """Where a token begins to fail, and who says so."""

    ce: float
    mean_diff: float
    source: str

    def __str__(self) -> str:
        return f"ce {self.ce:g}, mean diff {self.mean_diff:g} ({self.source})"


class ValidateAsk(NamedTuple):
    """One model and shape to validate.

    Attributes:
        model: Id or folder, as it was named: what files and test ids are made of.
        source: What is loaded: the model itself, or a trained micro model of it.
        prompts: File of the prompts.
        batch_size: Prompts of one round.
        length: Sequence length.
        new_tokens: Tokens generated per prompt and round.
        tokens_per_sequence: In all rounds of level 1 together.
        reference: The trusted target.
        candidate: The target in question.
        limits: Where tokens fail.
        failure_threshold: The share of failing tokens must stay below it.
        skip: Checks that are told, but not judged.
        force_level_1: Run level 1 even if level 0 passes.
        micro_layers: Layers that are kept of the model; 0: all.
        random_weights: The weights are drawn.
        trained: The source is a trained micro model, and taken whole.
        info_dir: Folder of saved outputs; None: none are used or saved.
        save: Save both sides' outputs there.
        tokenizer: Where it is; empty: with the model.
        library: Who loads the model; empty: as `decoding.models` decides.
        distributed: Split the candidate over the ranks.
        timing: `e2e` or `per-token`: generations are timed.
    """

    model: str
    source: str
    prompts: Path
    batch_size: int
    length: int
    new_tokens: int
    tokens_per_sequence: int
    reference: Target
    candidate: Target
    limits: Limits
    failure_threshold: float = 0.01
    skip: frozenset[str] = frozenset()
    force_level_1: bool = False
    micro_layers: int = 0
    random_weights: bool = False
    trained: bool = False
    info_dir: Path | None = None
    save: bool = False
    tokenizer: str = ""
    library: str = ""
    distributed: bool = False
    timing: str = ""

    @property
    def micro(self) -> bool:
        return self.micro_layers > 0

    @property
    def rounds(self) -> int:
        return max(1, self.tokens_per_sequence // self.new_tokens)

    def split(self, ranks: int) -> bool:
        """Whether the candidate's matrices lie apart on so many ranks; drawn ones never do."""
        return ranks > 1 and not self.random_weights

    @property
    def id(self) -> str:
        return f"{self.model}-{self.batch_size}-{self.length}-{self.new_tokens}"

    @property
    def prefix(self) -> str:
        shape = (self.new_tokens, self.batch_size, self.length, self.candidate.dtype)
        return out_files.prefix(self.model, *shape, attention=self.reference.attention)

    def out(self, side: out_files.Side, seed: int) -> Path | None:
        if self.info_dir is None:
            return None
        folder = self.info_dir / TINY if self.micro else self.info_dir
        return folder / out_files.out_name(self.prefix, side, seed)


def asks_from(said: Read, *, say: Say = print) -> list[ValidateAsk]:
    """Every model and shape that is asked for, the full product in the documented order.

    Args:
        said: What was said for a word.
        say: Where odd lines of a list of models, or a table that was made, are told.

    Returns:
        Nothing, if no model is named.

    Raises:
        BadInput: A word that cannot mean anything.
    """

    def read(name: str) -> str:
        return said(name) or DEFAULTS.get(name, "")

    models = _models(read, say)
    micro = 0
    if _flag(read, "USE_MICRO_MODELS") and not read("FROM_MODEL_CONFIGURATION"):
        micro = _numbers(read, "MICRO_LAYERS")[0]
    if not models:
        _skip(read)
        return []
    targets = _targets(read)
    library = _library(read, targets)
    table = _table(read, say)
    info_dir = Path(read("VALIDATION_INFO_DIR")) if read("VALIDATION_INFO_DIR") else None
    save = _flag(read, "SAVE_VALIDATION_INFO_OUTPUTS")
    if save and info_dir is None:
        raise BadInput(
            "outputs are to be saved, but no folder is named",
            hint="set FMS_TEST_SHAPES_VALIDATION_INFO_DIR, or give --validation_info_dir",
        )
    asks: list[ValidateAsk] = []
    for known in models:
        model = known.model_id
        trained = _trained(model, read("MICRO_MODELS_HOME")) if micro else ""
        drawn = bool(micro) and not trained and _drawn(read)
        limits = _limits(read, known, table, micro=bool(micro), drawn=drawn)
        asks += [
            ValidateAsk(
                model=model,
                source=trained or model,
                prompts=_prompts(read),
                batch_size=batch,
                length=length,
                new_tokens=new,
                tokens_per_sequence=_numbers(read, "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE")[0],
                reference=targets[0],
                candidate=targets[1],
                limits=limits,
                failure_threshold=_share(read),
                skip=_skip(read),
                force_level_1=_flag(read, "FORCE_VALIDATION_LEVEL_1"),
                micro_layers=micro,
                random_weights=drawn,
                trained=bool(trained),
                info_dir=info_dir,
                save=save,
                tokenizer=read("TOKENIZER"),
                library=library,
                distributed=_flag(read, "DISTRIBUTED"),
                timing=_timing(read),
            )
            for batch in _numbers(read, "COMMON_BATCH_SIZES")
            for length in _numbers(read, "COMMON_SEQ_LENGTHS")
            for new in _numbers(read, "COMMON_MAX_NEW_TOKENS")
        ]
    for ask in asks if info_dir is not None else ():
        out_files.fits(out_files.out_name(ask.prefix, "aiu", ask.rounds))
    return asks


def called(name: str) -> str:
    """How messages name a word."""
    return f"FMS_TEST_SHAPES_{name} (--{name.lower().removeprefix('common_')})"


def _models(read: Read, say: Say) -> list[Known]:
    if read("FROM_MODEL_CONFIGURATION"):
        often = _numbers(read, "FROM_MODEL_CONFIGURATION_FREQUENCY", least=0)[0]
        listed = read_list(Path(read("FROM_MODEL_CONFIGURATION")), often)
        for complaint in listed.complaints:
            say(complaint)
        return list(listed.models)
    names = dict.fromkeys(_words(read("COMMON_MODEL_PATHS")))
    return [Known(name, False, math.nan, math.nan) for name in names]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(read: Read, name: str, *, least: int = 1) -> list[int]:
    words = _words(read(name))
    if not words or not all(word.isdigit() and int(word) >= least for word in words):
        raise BadInput(
            f"{called(name)} takes whole numbers from {least} with commas between them, not "
            f"'{read(name)}'"
        )
    return list(dict.fromkeys(int(word) for word in words))


def _flag(read: Read, name: str) -> bool:
    word = read(name).lower()
    if word not in ("", "0", "1", "true", "false"):
        raise BadInput(f"{called(name)} takes 1 or 0, not '{read(name)}'")
    return word in ("1", "true")


def _share(read: Read) -> float:
    name = "FAILURE_THRESHOLD"
    try:
        share = float(read(name))
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise BadInput(f"{called(name)} takes a share from 0 to 1, not '{read(name)}'")
    return share


def _skip(read: Read) -> frozenset[str]:
    words = _words(read("SKIP_ASSERTIONS"))
    for word in words:
        if word not in METRICS:
            raise BadInput(
                f"{called('SKIP_ASSERTIONS')} takes ce and mean_diff, not '{word}'",
                hint=did_you_mean(word, METRICS),
            )
    return frozenset(words)


def _timing(read: Read) -> str:
    word = read("TIMING") or settings.shapes_timing()
    if word not in ("", "e2e", "per-token"):
        raise BadInput(f"TIMING (--timing) takes e2e or per-token, not '{word}'")
    return word


def _prompts(read: Read) -> Path:
    said = read("SHAREGPT_PATH") or settings.layer_variable("sharegpt_path")
    return Path(said or settings.home_prompts())


def _targets(read: Read) -> tuple[Target, Target]:
    dtype = read("DTYPE")
    attention = read("ATTN_TYPE")
    if attention not in ATTENTION:
        raise BadInput(
            f"{called('ATTN_TYPE')} can be {', '.join(ATTENTION)}, not '{attention}'",
            hint=did_you_mean(attention, ATTENTION),
        )
    if read("CANDIDATE"):
        candidate = parse_target(read("CANDIDATE"), dtype=dtype)
    else:
        _, candidate = default_targets(dtype)
        if find_spec(AIU_PACKAGE) is not None:
            candidate = Target("aiu", candidate.dtype, AIU_BACKEND)
    reference = parse_target(read("REFERENCE"))
    if ATTENTION[attention] and not candidate.attention:
        candidate = candidate._replace(attention=ATTENTION[attention])
    if attention in FP8 and not reference.attention:
        # What fp8 itself costs is not what the device does wrong: both sides round alike.
        reference = reference._replace(attention=attention)
    return reference, candidate


def _library(read: Read, targets: Sequence[Target]) -> str:
    """Who loads the models: ibm-fms, unless somebody says another, where attention is its own."""
    said = read("LIBRARY")
    needed = [target.attention for target in targets if target.attention in OF_FMS]
    if needed and said not in ("", "fms"):
        raise BadInput(
            f"{needed[0]} is an attention of ibm-fms, and {called('LIBRARY')} says {said}",
            hint="say fms, or nothing",
        )
    return "fms" if needed else said


def _trained(model: str, home: str) -> str:
    """The folder of a trained micro model, under the model's name in one of its spellings."""
    if not home:
        return ""
    name = model.rstrip("/")
    for spelt in (name, out_files.flat(name), name.rpartition("/")[2]):
        folder = Path(home) / spelt
        if spelt and not Path(spelt).is_absolute() and (folder / "config.json").is_file():
            return str(folder)
    return ""


def _drawn(read: Read) -> bool:
    """Whether a micro model's weights are drawn; else they are the model's own first layers."""
    word = read("MICRO_WEIGHTS")
    if word not in ("random", "local"):
        raise BadInput(f"{called('MICRO_WEIGHTS')} takes random or local, not '{word}'")
    return word == "random"


def _table(read: Read, say: Say) -> tuple[Known, ...]:
    """The user's table if one is named, made with the documented values if it is not there yet."""
    if not read("THRESHOLD_TABLE"):
        return DOCUMENTED
    path = Path(read("THRESHOLD_TABLE"))
    if seed_table(path):
        say(f"made {path} with the documented limits; it is yours to edit")
    return read_table(path)


def _limits(
    read: Read, known: Known, table: Sequence[Known], *, micro: bool, drawn: bool
) -> Limits:
    """Of METRICS_THRESHOLD, a thresholds file, the list of models, the table: who speaks first."""
    said = read("METRICS_THRESHOLD")
    if said:
        return Limits(*_two_numbers(said), "METRICS_THRESHOLD")
    if read("THRESHOLDS"):
        from driftline.comparison.tolerance.thresholds import load_thresholds

        found = load_thresholds(read("THRESHOLDS"), model=known.model_id)
        return Limits(
            _limit(found.limit("ce")), _limit(found.limit("diff_mean")), read("THRESHOLDS")
        )
    if not math.isnan(known.ce):
        return Limits(known.ce, known.mean_diff, "the list of models")
    listed = None if drawn else look_up(tuple(table), known.model_id, micro=micro)
    if listed is not None:
        which = "table of limits" if read("THRESHOLD_TABLE") else "documented limits"
        return Limits(listed.ce, listed.mean_diff, which)
    why = "weights are drawn" if drawn else "nobody names this model"
    return Limits(*DEFAULT, f"default: {why}")


def _limit(value: float | None) -> float:
    assert value is not None  # only layers may lack one
    return value


def _two_numbers(text: str) -> tuple[float, float]:
    try:
        numbers = [float(word) for word in _words(text)]
    except ValueError:
        numbers = []
    if len(numbers) != 2 or not all(math.isfinite(number) for number in numbers):
        raise BadInput(
            f"{called('METRICS_THRESHOLD')} takes two numbers, ce and mean diff, not '{text}'",
            hint="as in 2.8364005851745624,0.0007839603102183846",
        )
    return numbers[0], numbers[1]
