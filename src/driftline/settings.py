"""The only reader of the environment: every variable that Driftline uses is named here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LAUNCH = "DRIFTLINE_LAUNCH"
"""Set by `driftline dump` for the program it starts: path of the capture plan (JSON)."""
KERNEL = "DRIFTLINE_KERNEL"
"""`avx512`, `avx2`, `generic` or `numpy`: use that path, not the best one. For tests and doubt."""
DEBUG = "DRIFTLINE_DEBUG"
"""Anything but empty or 0: show the traceback of an unexpected exception instead of one line."""
LABELS = "DRIFTLINE_LABELS"
"""Folder where labels are kept; a process that labels passes it on to those it starts."""
LABELS_AWAITED = "DRIFTLINE_LABELS_AWAITED"
"""Set by `driftline labels` for its program: the command compares, processes only label."""
TASK_ID = "AIT_CMP_TASK_ID"
"""Round that labels belong to, and sub-folder of an Ascend dump; `set_task_id` sets it."""
ACL_HOME = "ACLTRANSFORMER_HOME_PATH"
"""Root of the oldest Ascend dumps: `tensors/{pid}/{task id}` is below it."""
ACL_LOGS = "ASDOPS_LOG_TO_FILE_DIR"
"""Root of the next ones: `tensors/thread_{pid}/{token}` is below it."""
ATB_HOME = "ATB_HOME_PATH"
"""Folder of the Ascend Transformer Boost library; set, it means that programs may use it."""
ASCEND_TOOLKIT = "ASCEND_TOOLKIT_HOME"
"""Folder of the Ascend toolkit, which holds the library's probes."""
OPCHECK_LIBRARY = "AIT_OPCHECK_LIB_PATH"
"""The ATB library's own checker of operators, `libopchecker.so`, or the folder that holds it."""
ASCEND_TOOLKIT_DEFAULT = "/usr/local/Ascend/ascend-toolkit/latest"
"""Where the toolkit installs itself."""
PROFILER_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""How much the library behind torch's profiler logs; set for programs that `dump` profiles."""
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""Set by GitHub Actions: the file that the summary of a step is appended to."""
RAY_ADDRESS = "RAY_ADDRESS"
"""Set by whoever runs a Ray cluster: where `--executor ray` finds it."""
RAY_TOKENS = "RAY_AUTH_MODE"
"""`token` or `disabled`: whether Ray shows a token to its clusters; Ray's own variable."""
TRITON_INTERPRET = "TRITON_INTERPRET"
"""`1`: Triton carries kernels out on the CPU, slowly; tests of them without a device do so."""
NO_COLOR = "NO_COLOR"
"""Anything but empty: no colours, whatever the terminal can do (https://no-color.org)."""

FORCE_COLOR = "FORCE_COLOR"
"""Anything but empty: colours, also into a pipe or a file (https://force-color.org)."""


def environment() -> Mapping[str, str]:
    """The process environment; all packages ask here, so that a test can see who reads what."""
    return os.environ


def kernel_choice() -> str:
    return environment().get(KERNEL, "")


def triton_interprets() -> bool:
    return environment().get(TRITON_INTERPRET, "") == "1"


def ray_address() -> str:
    return environment().get(RAY_ADDRESS, "").strip()


def ray_uses_tls() -> bool:
    return environment().get("RAY_USE_TLS", "0").lower() in ("1", "true")


def ray_token_mode() -> str:
    return environment().get(RAY_TOKENS, "").strip().lower()


def ray_has_token() -> bool:
    """Whether there is a token where Ray looks for one."""
    named = environment().get("RAY_AUTH_TOKEN_PATH", "")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return bool(environment().get("RAY_AUTH_TOKEN")) or file.is_file()


def ray_uses_token() -> None:
    """Make a Ray that is imported from now on send its token."""
    os.environ[RAY_TOKENS] = "token"


def disable_ray_usage_reports() -> None:
    """Keep a Ray that we start from reporting its use over the network, unless it is wanted."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def worker_environment(home: str, kernel: str) -> dict[str, str]:
    """The environment of a worker process: that of this one, with this package on its path.

    Args:
        home: Folder that holds the package.
        kernel: Path of the kernel that it must use; empty: the worker chooses.
    """
    env = dict(environment())
    # A worker is not a part of the captured program and must not capture itself.
    env.pop(LAUNCH, None)
    # A small process gives memory back to the system after each array, and gets it anew, page by
    # page: kl of 800 pairs of 256 kB took 2.7 s of processor time without these, 1.0 s with them.
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str(128 << 20))
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, env.get("PYTHONPATH", ""))))
    return {**env, KERNEL: kernel} if kernel else env


def set_kernel_choice(path: str) -> None:
    """Set the kernel path of this process; only before the kernel is first used."""
    os.environ[KERNEL] = path


def one_blas_thread() -> None:
    """Keep numpy from starting a pool of BLAS threads, unless the user asked for one.

    They spin while numpy is imported: 7 ms on a quiet machine, 50 on a busy one.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def debug() -> bool:
    return environment().get(DEBUG, "") not in ("", "0")


def columns() -> int:
    """Width of the terminal as the shell or the user sets it; 0 when it is not set."""
    width = os.environ.get("COLUMNS", "")
    return int(width) if width.isascii() and width.isdigit() else 0


def colours_refused() -> bool:
    """By the user, or by a terminal that calls itself dumb."""
    return bool(environment().get(NO_COLOR)) or environment().get("TERM") == "dumb"


def colours_forced() -> bool:
    """By the user, for a pager or the log of a CI job; a refusal weighs more."""
    return bool(environment().get(FORCE_COLOR)) and not environment().get(NO_COLOR)


def step_summary() -> str:
    return environment().get(STEP_SUMMARY, "")


def atb_home() -> str:
    return environment().get(ATB_HOME, "")


def opcheck_library() -> str:
    return environment().get(OPCHECK_LIBRARY, "")


def label_store() -> str:
    return environment().get(LABELS, "")


def set_label_store(folder: str) -> None:
    """Tell the processes that this one will start where labels are kept."""
    os.environ[LABELS] = folder


def labels_awaited() -> bool:
    return environment().get(LABELS_AWAITED, "") not in ("", "0")


def label_task() -> str:
    return environment().get(TASK_ID, "")


def set_label_task(task: str) -> None:
    """For this process, its children, and the C library in it: Python hands it to `putenv`."""
    os.environ[TASK_ID] = task
    # Read by the Ascend library, which looks for a variable with its own process id.
    os.environ.setdefault(f"{os.getpid()}_DUMP_PATH", str(os.getpid()))


def old_dump_roots() -> Mapping[str, str]:
    """The folders under which the two oldest Ascend libraries dump, as far as they are set."""
    return {name: environment()[name] for name in (ACL_HOME, ACL_LOGS) if environment().get(name)}


class JobPlace(NamedTuple):
    """Rank of this process in a distributed job, and the number of ranks."""

    rank: int
    world_size: int


def job_place() -> JobPlace:
    """Rank and size as the job's launcher sets them; rank 0 of 1 without a launcher.

    Reads the variables of torchrun, Paddle, Open MPI and Slurm, in this order.
    """
    env = environment()
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        # Both or neither: a rank without a size comes from a shell that inherited half of a
        # job.
        if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
            return JobPlace(int(env[rank]), int(env[size]))
    return JobPlace(0, 1)


def job_id() -> str:
    """A name that the ranks of one job share and those of another do not; empty for one process.

    Made of the id of a torchrun or Slurm job and of the address where its ranks meet, which is all
    that Paddle sets.
    """
    # One process needs no agreement with others.
    if job_place().world_size < 2:
        return ""
    env = environment()
    names = (
        *("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"),
        "PADDLE_TRAINER_ENDPOINTS",
    )
    # Joined by a byte that no variable can contain, and hashed below because the name only has
    # to be equal for equal jobs.
    identity = "\0".join(env.get(name, "") for name in names)
    return (
        hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        if identity.strip("\0")
        else ""
    )


def place_on_machine() -> JobPlace:
    """Rank among the processes of a torchrun job on this machine; 0 of 1 without torchrun."""
    env = environment()
    rank, size = env.get("LOCAL_RANK", ""), env.get("LOCAL_WORLD_SIZE", "")
    local_rank = int(rank) if rank.isdigit() else 0
    # The size may be missing; it is at least one more than the rank.
    return JobPlace(local_rank, max(int(size) if size.isdigit() else 1, local_rank + 1))


METRICS_VARIABLES = {
    "model_path": "MODEL_PATH",
    "max_new_tokens": "MAX_NEW_TOKENS",
    "batch_size": "BATCH_SIZES",
    "min_pad_length": "SEQ_LENS",
    "default_dtype": "DEFAULT_TYPES",
    "sharegpt_path": "DS_PATH",
}
"""Variable that gives the default of each option of `driftline metrics`; commas separate."""


def metrics_variable(option: str) -> str:
    return environment().get(METRICS_VARIABLES[option], "").strip()


LAYER_VARIABLES = {
    "model_paths": "MODEL_PATHS",
    "batch_sizes": "BATCH_SIZES",
    "seq_lengths": "SEQ_LENGTHS",
    "max_new_tokens": "MAX_NEW_TOKENS",
    "output_path": "OUTPUT_PATH",
    "sharegpt_path": "SHARE_GPT_DATASET_PATH",
}
"""Variable that gives the default of each option of `driftline layer-metrics`; commas separate."""
SHARE_GPT = "share_gpt.json"
"""Name of the prompt file in the user's home, where no other is named."""


def layer_variable(option: str) -> str:
    return environment().get(LAYER_VARIABLES[option], "").strip()


def home_prompts() -> str:
    # `Path.home` raises for a user without a home; here the name is only tried.
    return os.path.expanduser(f"~/{SHARE_GPT}")  # noqa: PTH111


TEST_SHAPES = "TEST_SHAPES_"
"""Variables of the decoder tests: `FMS_TEST_SHAPES_…` as documented, or `DRIFTLINE_TEST_SHAPES_…`,
which wins."""


def shapes_variable(name: str) -> str:
    """Value of a variable of the decoder tests; empty if it is not set.

    Args:
        name: Without the common beginning: `COMMON_MODEL_PATHS`.
    """
    env = environment()
    own = env.get(f"DRIFTLINE_{TEST_SHAPES}{name}", "").strip()
    return own or env.get(f"FMS_{TEST_SHAPES}{name}", "").strip()


def shapes_timing() -> str:
    """`e2e` or `per-token`: what is timed in decoder tests."""
    return environment().get("DRIFTLINE_TIMING", environment().get("TIMING", "")).strip()


def cores() -> int:
    """Cores this process may use; a container is often given fewer than the machine has."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
