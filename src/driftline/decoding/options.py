"""Options of the decoder commands: one model, one shape, two targets, and extras of each command.

`DecoderOptions` is what `metrics`, `layer-metrics` and `validate` have in common; three small
classes add what each needs. `option_reader` builds them from flags and environment variables.
Nothing is loaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from driftline.decoding.files import names
from driftline.decoding.models.loading import HF_ARCHITECTURE, ModelSource, model_name
from driftline.decoding.models.targets import DTYPES, Target
from driftline.errors import BadInput

if TYPE_CHECKING:
    from driftline.decoding.layerwise.walk import Mode
    from driftline.decoding.models.compilation import Unit
    from driftline.decoding.prompts import Order

KeptLogits = Literal["full", "topk"]
Report = Callable[[str], None]
"""Takes one line for the user."""
MICRO_FOLDER = "tiny_models"
"""Folder below the saved outputs that holds those of micro models."""
_REFERENCE = Target("cpu", "fp32")
_CANDIDATE = Target("cpu", "fp16")


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """One model, one shape, two targets.

    Attributes:
        model_path: Folder or id of the model; may be empty if `variant` is an id.
        variant: Id that names the model in file names.
        tokenizer: Folder or id; the model's own if empty.
        prompts: ShareGPT JSON, or one prompt per line.
        batch_size: Prompts of one round.
        length: Sequence length. Prompts of half this length up to this length are padded to it.
        new_tokens: Tokens generated per prompt and round.
        reference: The trusted target.
        candidate: The target to test.
        architecture: `hf_pretrained`, or one that ibm-fms knows by name.
        library: The library that loads the model; empty: `models.loading` decides.
        unfuse_weights: Separate projections in models of ibm-fms.
        compiled: What a compiled target compiles as one graph.
        order: How prompts are drawn.
        distributed: Split the candidate over the ranks of the job.
        force: Compute existing results again.
    """

    model_path: str = ""
    variant: str = ""
    tokenizer: str = ""
    prompts: Path | None = None
    batch_size: int = 1
    length: int = 64
    new_tokens: int = 128
    reference: Target = _REFERENCE
    candidate: Target = _CANDIDATE
    architecture: str = HF_ARCHITECTURE
    library: str = ""
    unfuse_weights: bool = False
    compiled: Unit = "model"
    order: Order = "head"
    distributed: bool = False
    force: bool = False

    @property
    def source(self) -> str:
        """The path or id that is loaded."""
        # A variant without a path is itself an id.
        return self.model_path or self.variant

    @property
    def model(self) -> str:
        """The name of the model in files and messages."""
        return model_name(self.model_path, self.variant)

    @property
    def model_source(self) -> ModelSource:
        """How the model is loaded, on either target."""
        return ModelSource(
            path=self.model_path,
            variant=self.variant,
            architecture=self.architecture,
            library=self.library,
            unfuse_weights=self.unfuse_weights,
        )

    @property
    def prefix(self) -> str:
        """The prefix of all file names of this model and shape."""
        return names.file_prefix(
            self.model,
            self.new_tokens,
            self.batch_size,
            self.length,
            self._dtype_in_names,
            attention=self.reference.attention,
        )

    @property
    def _dtype_in_names(self) -> str:
        return self.candidate.dtype

    @property
    def rounds(self) -> int:
        """The number of batches of prompts; each has its own seed."""
        return 1

    @property
    def same_weights(self) -> bool:
        """Whether the reference computes with the weights as the candidate has rounded them."""
        return False

    @property
    def shape(self) -> str:
        """The shape as text for messages."""
        return f"batch {self.batch_size}, length {self.length}, {self.new_tokens} tokens"

    def splits(self, ranks: int) -> bool:
        """Whether the candidate's matrices are split over so many ranks."""
        return ranks > 1

    def input_paths(self) -> list[str]:
        """Models, tokenizers and files that are read; ids are among them."""
        return [self.source, self.tokenizer, "" if self.prompts is None else str(self.prompts)]


@dataclass(frozen=True, kw_only=True)
class MetricsOptions(DecoderOptions):
    """Further options of `driftline metrics`.

    Attributes:
        output_dir: Folder of the results; created if it does not exist.
        tokens_per_sequence: Rounds are this over `new_tokens`; None: one round.
        extra: More arguments for the library's own loader.
        topk: How many of the reference's largest logits the four documented metrics look at.
        keep: Whether `.out` folders hold all logits or the largest.
        skip_computation: Only score what is saved.
        compile_dynamic: Compiled targets were asked to be compiled once for all lengths.
    """

    output_dir: Path
    length: int = 0
    new_tokens: int = 100
    tokens_per_sequence: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    topk: int = 20
    keep: KeptLogits = "full"
    skip_computation: bool = False
    compile_dynamic: bool = False

    @property
    def model_source(self) -> ModelSource:
        return super().model_source._replace(extra=dict(self.extra))

    @property
    def rounds(self) -> int:
        # Whole rounds only, as documented: a remainder is left out.
        tokens = self.new_tokens if self.tokens_per_sequence is None else self.tokens_per_sequence
        return tokens // self.new_tokens

    def out(self, side: names.Side, seed: int) -> Path:
        """The folder with one side's tokens and logits of one round."""
        return self.output_dir / names.out_name(self.prefix, side, seed)

    def csv(self, metric: str) -> Path:
        """The file with one metric of every token."""
        return self.output_dir / names.csv_name(self.prefix, metric)

    @property
    def table(self) -> Path:
        """The file with all scores of every token."""
        return self.output_dir / f"{self.prefix}{names.TOKEN_TABLE}"

    @property
    def provenance(self) -> Path:
        """The file that says how the others were made."""
        return self.output_dir / f"{self.prefix}{names.PROVENANCE}"

    def check(self) -> None:
        """Refuse invalid options, before anything is loaded.

        Raises:
            BadInput: A number is out of range, or a name too long.
        """
        if not self.source:
            raise BadInput("no model is named", hint="give --model_path, or --variant with an id")
        _require_positive(
            {
                "--batch_size": self.batch_size,
                "--min_pad_length (the sequence length)": self.length,
                "--max_new_tokens": self.new_tokens,
                "--topk_per_token": self.topk,
            }
        )
        if self.rounds < 1:
            raise BadInput(
                f"--num_test_tokens_per_sequence {self.tokens_per_sequence} is less than one round "
                f"of --max_new_tokens {self.new_tokens}",
                hint="give a multiple of --max_new_tokens; 1024 is usual",
            )
        # The candidate's last round has the longest of all names that will be written.
        names.require_short(names.out_name(self.prefix, names.CANDIDATE, self.rounds - 1))


@dataclass(frozen=True, kw_only=True)
class LayerOptions(DecoderOptions):
    """Further options of `driftline layer-metrics`.

    Attributes:
        prompts: ShareGPT JSON, or one prompt per line.
        output_path: Folder of the results; created if it does not exist.
        mode: One call on the prompts, or generation token by token; in the former `new_tokens` is
            only part of the names.
        elements: abs_diff files hold every element, not a mean per row.
    """

    prompts: Path = field()  # required: without it the default of the base would hold
    output_path: Path
    mode: Mode = "generate"
    unfuse_weights: bool = True
    compiled: Unit = "block"
    elements: bool = False

    @property
    def _dtype_in_names(self) -> str:
        # Layer files have always carried the long name of the number format.
        return DTYPES[self.candidate.dtype]

    @property
    def provenance(self) -> Path:
        """The file that says how the others were made; it is written last."""
        return self.output_path / f"{self.prefix}{names.LAYER_PROVENANCE}"

    @property
    def table(self) -> Path:
        """The folder of the comparison table."""
        return self.output_path / f"{self.prefix}{names.LAYER_TABLE}"

    def check(self) -> None:
        """Refuse invalid options, before anything is loaded.

        Raises:
            BadInput: A number is out of range, or a name too long.
        """
        if not self.source:
            raise BadInput("no model is named", hint="give --model_paths, or set MODEL_PATHS")
        if self.source.startswith(("/", ".", "~")) and not Path(self.source).is_dir():
            raise BadInput(
                f"there is no model folder {self.source}",
                hint="give the folder that holds config.json, or an id of a model",
            )
        _require_positive(
            {
                "--batch_sizes": self.batch_size,
                "--seq_lengths": self.length,
                "--max_new_tokens": self.new_tokens,
            }
        )
        names.require_short(self.provenance.name)


class Limits(NamedTuple):
    """Limits of `ce` and mean difference, and their source."""

    ce: float
    mean_diff: float
    source: str

    def __str__(self) -> str:
        return f"ce {self.ce:g}, mean diff {self.mean_diff:g} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(DecoderOptions):
    """Further options of `driftline validate`.

    Attributes:
        name: The model as the user named it; what is loaded may be a trained micro model of it.
        prompts: ShareGPT JSON, or one prompt per line.
        limits: Where tokens fail.
        tokens_per_sequence: In all rounds of level 1 together.
        failure_threshold: The share of failing tokens must stay below it.
        skip: Checks that are reported, but not judged.
        force_level_1: Run level 1 even if level 0 passes.
        micro_layers: Layers of the model that are kept; 0: all.
        random_weights: The weights are drawn.
        trained: The source is a trained micro model, of which all layers are used.
        info_dir: Folder of saved outputs; None: none are used or saved.
        save: Save both sides' outputs there.
        timing: `e2e` or `per-token`: generations are timed.
    """

    name: str
    prompts: Path = field()  # required: without it the default of the base would hold
    limits: Limits
    unfuse_weights: bool = True
    tokens_per_sequence: int = 1024
    failure_threshold: float = 0.01
    skip: frozenset[str] = frozenset()
    force_level_1: bool = False
    micro_layers: int = 0
    random_weights: bool = False
    trained: bool = False
    info_dir: Path | None = None
    save: bool = False
    timing: str = ""

    @property
    def model(self) -> str:
        return self.name

    @property
    def model_source(self) -> ModelSource:
        layers = self.micro_layers if self.micro and not self.trained else None
        return super().model_source._replace(
            micro_layers=layers, random_weights=self.random_weights
        )

    @property
    def micro(self) -> bool:
        """Whether only some layers of the model are tested."""
        return self.micro_layers > 0

    @property
    def rounds(self) -> int:
        return max(1, self.tokens_per_sequence // self.new_tokens)

    @property
    def same_weights(self) -> bool:
        # The candidate's arithmetic is in question, not what is lost when a drawn number is stored.
        return self.micro

    @property
    def id(self) -> str:
        """The documented id of the test of this model and shape."""
        return f"{self.model}-{self.batch_size}-{self.length}-{self.new_tokens}"

    def splits(self, ranks: int) -> bool:
        # Drawn weights are the same on every rank only if every rank draws all of them.
        return ranks > 1 and not self.random_weights

    def input_paths(self) -> list[str]:
        folder = [] if self.info_dir is None else [str(self.info_dir)]
        return [*super().input_paths(), *folder]

    def out(self, side: names.Side, seed: int) -> Path | None:
        """The folder with one side's saved outputs of one round; None where none are used."""
        if self.info_dir is None:
            return None
        # Outputs of a micro model would be taken for the model's own.
        folder = self.info_dir / MICRO_FOLDER if self.micro else self.info_dir
        path = folder / names.out_name(self.prefix, side, seed)
        if path.exists() or self.save:
            return path
        # Newer versions of the documented tools name them by a digest of the shape.
        shape = (self.model, self.new_tokens, self.batch_size, self.length)
        return names.find_hashed(folder, names.hashed_prefixes(*shape), side, seed) or path


def _require_positive(numbers: Mapping[str, int]) -> None:
    for option, number in numbers.items():
        if number < 1:
            raise BadInput(f"{option} must be at least 1, not {number}")
