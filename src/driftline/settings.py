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
"""`avx512`, `avx2`, `generic` or `numpy`: use this path instead of the fastest one, for tests."""
DEBUG = "DRIFTLINE_DEBUG"
"""Unless empty or 0, show the traceback of an unexpected exception instead of one line."""
LABELS = "DRIFTLINE_LABELS"
"""Folder for labels; a process that labels passes it on to the processes that it starts."""
LABELS_AWAITED = "DRIFTLINE_LABELS_AWAITED"
"""Set by `driftline labels` for its program: the command compares, and processes only label."""
TASK_ID = "AIT_CMP_TASK_ID"
"""The round of labels, and a subfolder of an Ascend dump; `set_task_id` sets it."""
ACL_HOME = "ACLTRANSFORMER_HOME_PATH"
"""Root of the oldest Ascend dumps: `tensors/{pid}/{task id}` is below it."""
ACL_LOGS = "ASDOPS_LOG_TO_FILE_DIR"
"""Root of the next ones: `tensors/thread_{pid}/{token}` is below it."""
ATB_HOME = "ATB_HOME_PATH"
"""Folder of the Ascend Transformer Boost library. If it is set, programs may use the library."""
ASCEND_TOOLKIT = "ASCEND_TOOLKIT_HOME"
"""Folder of the Ascend toolkit, which holds the library's probes."""
OPCHECK_LIBRARY = "AIT_OPCHECK_LIB_PATH"
"""The ATB library's own checker of operators, `libopchecker.so`, or its folder."""
ASCEND_TOOLKIT_DEFAULT = "/usr/local/Ascend/ascend-toolkit/latest"
"""The default folder of the toolkit."""
PROFILER_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""How much the library behind torch's profiler logs; set for programs that `dump` profiles."""
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""Set by GitHub Actions: the file that the summary of a step is appended to."""
RAY_ADDRESS = "RAY_ADDRESS"
"""Address of a Ray cluster, for `--executor ray`; set by the person who runs the cluster."""
RAY_TOKENS = "RAY_AUTH_MODE"
"""`token` or `disabled`: whether Ray shows a token to its clusters; Ray's own variable."""
TRITON_INTERPRET = "TRITON_INTERPRET"
"""`1`: Triton executes kernels on the CPU, slowly, for tests without a device."""
NO_COLOR = "NO_COLOR"
"""Unless empty, no colours, whatever the terminal can do (https://no-color.org)."""

FORCE_COLOR = "FORCE_COLOR"
"""Unless empty, colours, even in a pipe or a file (https://force-color.org)."""


def environment() -> Mapping[str, str]:
    """The process environment; all packages read it here, so that a test can check who reads it."""
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
    """Whether there is a token in one of the places that Ray reads."""
    named = environment().get("RAY_AUTH_TOKEN_PATH", "")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return bool(environment().get("RAY_AUTH_TOKEN")) or file.is_file()


def ray_uses_token() -> None:
    """Make Ray send its token; only before Ray is imported."""
    os.environ[RAY_TOKENS] = "token"


def disable_ray_usage_reports() -> None:
    """Keep a Ray that Driftline starts from reporting its use, unless the user chose otherwise."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def worker_environment(home: str, kernel: str) -> dict[str, str]:
    """The environment of a worker process: that of this one, with this package on its path.

    Args:
        home: The folder that contains the package.
        kernel: Path of the kernel that it must use; empty to let the worker choose.
    """
    env = dict(environment())
    # A worker is not part of the captured program and must not capture itself.
    env.pop(LAUNCH, None)
    # By default, a small process returns memory to the system after each array and gets it again
    # page by page. `kl` of 800 pairs of 256 kB took 2.7 s of processor time without these two, and
    # 1.0 s with them.
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
    """Width of the terminal as the shell or the user sets it; 0 if it is not set."""
    width = os.environ.get("COLUMNS", "")
    return int(width) if width.isascii() and width.isdigit() else 0


def colours_refused() -> bool:
    """Whether the user, or a terminal of type `dumb`, refuses colours."""
    return bool(environment().get(NO_COLOR)) or environment().get("TERM") == "dumb"


def colours_forced() -> bool:
    """Whether the user forces colours, as for a pager or a CI log; `NO_COLOR` has precedence."""
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
    """Set the folder for labels of the processes that this one will start."""
    os.environ[LABELS] = folder


def labels_awaited() -> bool:
    return environment().get(LABELS_AWAITED, "") not in ("", "0")


def label_task() -> str:
    return environment().get(TASK_ID, "")


def set_label_task(task: str) -> None:
    """Set the round for this process, its children, and C libraries in it, which see `putenv`."""
    os.environ[TASK_ID] = task
    # Read by the Ascend library, which looks for a variable with its own process id.
    os.environ.setdefault(f"{os.getpid()}_DUMP_PATH", str(os.getpid()))


def old_dump_roots() -> Mapping[str, str]:
    """The folders into which the two oldest Ascend libraries dump, as far as they are set."""
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
        # A rank without a size may have been inherited from a job's shell, so both are needed.
        if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
            return JobPlace(int(env[rank]), int(env[size]))
    return JobPlace(0, 1)


def job_id() -> str:
    """A name that the ranks of one job share and those of another do not; empty for one process.

    It is made from the id of a torchrun or Slurm job and from the address where its ranks meet,
    which is all that Paddle sets.
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
"""Variables with the defaults of options of `driftline metrics`; lists are separated by commas."""


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
"""Variables with the defaults of options of `driftline layer-metrics`; lists are separated by
commas."""
SHARE_GPT = "share_gpt.json"
"""Name of the prompt file in the user's home folder, which is used if no other is given."""


def layer_variable(option: str) -> str:
    return environment().get(LAYER_VARIABLES[option], "").strip()


def home_prompts() -> str:
    # `Path.home` raises for a user without a home; here the name is only tried.
    return os.path.expanduser(f"~/{SHARE_GPT}")  # noqa: PTH111


TEST_SHAPES = "TEST_SHAPES_"
"""Prefix of the variables of the decoder tests: `FMS_TEST_SHAPES_…` as documented, or
`DRIFTLINE_TEST_SHAPES_…`, which has precedence."""


def shapes_variable(name: str) -> str:
    """Value of a variable of the decoder tests; empty if it is not set.

    Args:
        name: The name without the common prefix, such as `COMMON_MODEL_PATHS`.
    """
    env = environment()
    own = env.get(f"DRIFTLINE_{TEST_SHAPES}{name}", "").strip()
    return own or env.get(f"FMS_{TEST_SHAPES}{name}", "").strip()


def shapes_timing() -> str:
    """What decoder tests time: `e2e` or `per-token`."""
    return environment().get("DRIFTLINE_TIMING", environment().get("TIMING", "")).strip()


def cores() -> int:
    """The number of cores that this process may use; a container may have only some of them."""
    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
