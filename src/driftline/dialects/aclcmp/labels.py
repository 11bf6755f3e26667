"""Labels of the aclcmp dialect: `set_label`, `gen_id` and `set_task_id`, called in a model's code.

    data_id = gen_id()
    set_label("pta", data_id, data_val=hidden_states)
    set_label("acl", data_id, tensor_path="0_Model/3_SelfAttentionRunner/after/outTensor0.bin")

A label is one line and one tensor file (`label_store`), whichever process sets it. Labels are
compared later (`report`): by `driftline labels`, or by each process as it exits.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from driftline import settings
from driftline.dialects.aclcmp.label_store import STORE, LabelWriter, Value
from driftline.errors import BadConfig
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.owned_file import print_to_stderr

# PyTorch with the Ascend adapter, and the acceleration library: the original's own names.
SOURCES = ("pta", "acl")


def gen_id() -> str:
    """A new id for two labels that belong together; unique among all processes."""
    # Time, process and random digits: labels of several processes meet in one store.
    return f"data_{time.time_ns()}_{os.getpid()}_{secrets.token_hex(4)}"


def set_task_id() -> None:
    """Begin a new round, such as a turn of a dialogue: later labels belong to it.

    Sets `AIT_CMP_TASK_ID` to `{pid}_{round}`, rounds counted from 1. The Ascend library in this
    process dumps into a folder of that name; processes started from now on inherit it.
    """
    settings.set_label_task(f"{os.getpid()}_{_PROCESS.next_round()}")


def set_label(
    data_src: str,
    data_id: str,
    data_val: Any = None,
    tensor_path: str | os.PathLike[str] | None = None,
) -> None:
    """Label one tensor; `pta` and `acl` labels of one id are compared.

    Args:
        data_src: `pta` for the reference, `acl` for the candidate.
        data_id: From `gen_id()`, or any text that both sides know. Used again, the nth `pta` label
            belongs to the nth `acl` label.
        data_val: A torch tensor on any device, or a numpy array; copied now.
        tensor_path: For `acl` instead of a value: a file that the Ascend library dumps, relative to
            its dump folder. It is looked for when labels are compared.

    Raises:
        BadConfig: The arguments are invalid, such as a `pta` label without a value. It is a
            ValueError, as callers of the original expect.
    """
    if data_src not in SOURCES:
        raise BadConfig(f"data_src is 'pta' or 'acl', not {data_src!r}")
    # Types are checked at run time because callers are scripts without annotations.
    if not isinstance(cast(object, data_id), str) or not data_id:
        raise BadConfig(
            f"data_id is a text that is not empty, not {data_id!r}", hint="use gen_id()"
        )
    if data_val is not None and tensor_path is not None:
        raise BadConfig("a label has data_val or tensor_path, not both")
    if data_src == "pta" and data_val is None:
        raise BadConfig(
            "a 'pta' label needs data_val: the reference is a value",
            hint='set_label("pta", data_id, data_val=tensor)',
        )
    if data_val is None and tensor_path is None:
        raise BadConfig("an 'acl' label needs data_val or tensor_path")
    value = None if data_val is None else _value(data_val)
    place = "" if tensor_path is None else os.fspath(tensor_path)
    _PROCESS.keep(data_src, data_id, value, place)


def _value(data: Any) -> Value:
    # A tensor can only come from a torch that is loaded already; importing it here would take
    # seconds.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_torch(data, torch)
    if isinstance(data, np.ndarray | np.generic):
        return _of_numpy(np.asarray(cast("Any", data)))
    raise BadConfig(f"data_val is a torch tensor or a numpy array, not {type(data).__name__}")


def _of_torch(tensor: Any, torch: Any) -> Value:
    with torch.no_grad():
        plain = tensor.detach()
        # A sharded tensor is labelled by the shard of this process.
        plain = plain.to_local() if hasattr(plain, "to_local") else plain
        dtype = str(plain.dtype).removeprefix("torch.")
        if dtype not in DTYPES or plain.is_quantized or plain.layout is not torch.strided:
            raise BadConfig(f"a {plain.layout} tensor of {plain.dtype} cannot be compared")
        if plain.is_meta:
            raise BadConfig("a tensor on the meta device has no values")
        shape = tuple(int(size) for size in plain.shape)
        if DTYPES[dtype].bits == 4 and shape:
            shape = (*shape[:-1], shape[-1] * 2)  # torch counts the bytes of packed pairs
        # torch keeps conjugation and negation as flags, which raw bytes would lose.
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return Value(dtype, shape, flat.view(torch.uint8).numpy())


def _of_numpy(array: np.ndarray[Any, np.dtype[Any]]) -> Value:
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in DTYPES or DTYPES[dtype].bits != array.dtype.itemsize * 8:
        raise BadConfig(f"an array of {array.dtype} cannot be compared")
    # A foreign byte order becomes this machine's own, in which the bytes are stored.
    flat = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    return Value(dtype, array.shape, flat.reshape(-1).view(np.uint8))


class _ProcessLabels:
    """What this process has labelled. A forked child begins anew."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rounds = 0
        self.forget()

    def forget(self) -> None:
        self.writer: LabelWriter | None = None
        self.tasks: dict[str, None] = {}
        self.broken = False

    def next_round(self) -> int:
        with self.lock:
            self.rounds += 1
            return self.rounds

    def keep(self, source: str, data_id: str, value: Value | None, place: str) -> None:
        with self.lock:
            if self.broken:
                return
            task = settings.label_task()
            try:
                if self.writer is None:
                    self.writer = self._begin()
                self.writer.add(task, source, data_id, value, place)
            except OSError as trouble:
                # The model's run matters more than its labels: report the problem once, and stop.
                self.broken = True
                print_to_stderr(f"labels stop at '{data_id}': {trouble.strerror or trouble}")
            else:
                self.tasks[task] = None

    def _begin(self) -> LabelWriter:
        folder = Path(settings.label_store() or Path.cwd() / STORE)
        writer = LabelWriter(folder)
        # `driftline labels` compares at its end; otherwise this process does.
        if not settings.labels_awaited():
            # Child processes must write into the same store to find their partners.
            settings.set_label_store(str(folder))
            atexit.register(self.report)
            _finalize_with_multiprocessing(self.report)
        return writer

    def report(self) -> None:
        """Write the csv of every round of this process at exit, unless `driftline labels` does."""
        with self.lock:
            # Taken out under the lock: a thread may still set labels while the program
            # ends.
            writer, tasks = self.writer, list(self.tasks)
            self.forget()
        if writer is None or not tasks:
            return
        writer.close()
        try:
            # Imported here: labelling must not load the comparison.
            from driftline.dialects.aclcmp.report import report_tasks

            for outcome in report_tasks(writer.folder, writer.folder.parent, tasks, threads=1):
                print_to_stderr(str(outcome))
        except Exception as trouble:  # the program's own exit must not fail for this
            print_to_stderr(f"the labels could not be compared: {trouble}")
            print_to_stderr(f"they are kept; try: driftline labels --from {writer.folder}")


def _finalize_with_multiprocessing(act: Any) -> None:
    """Children of multiprocessing end without atexit; they run these finalizers instead."""
    process, util = (
        sys.modules.get("multiprocessing.process"),
        sys.modules.get("multiprocessing.util"),
    )
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, act, exitpriority=0)


_PROCESS = _ProcessLabels()


def _after_fork() -> None:
    _PROCESS.lock = threading.Lock()  # its holder, if there was one, is not in this process
    _PROCESS.forget()


# A child that wrote through its parent's file would mix lines.
os.register_at_fork(after_in_child=_after_fork)
