"""Registers the accelerator of `host_npu.cpp` as torch's `hostnpu`, as a vendor's package does.

A program imports it. HOSTNPU_LIBRARY is the compiled library, HOSTNPU_FAULT its wrong kernel.
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch


def _no_cuda(*_: Any, **__: Any) -> Any:
    raise AssertionError("CUDA was called in a program that runs on hostnpu")


torch.ops.load_library(os.environ["HOSTNPU_LIBRARY"])
torch.utils.rename_privateuse1_backend("hostnpu")
_states = {0: torch.zeros(8, dtype=torch.uint8)}
_module: Any = types.ModuleType("torch.hostnpu")
_module.is_available = lambda: True
_module.is_initialized = lambda: True
_module.device_count = lambda: 1
_module.current_device = lambda: 0
_module.get_device_name = lambda device=0: "Host NPU 1"
_module.get_rng_state = lambda device=0: _states[0].clone()
_module.set_rng_state = lambda state, device=0: _states.update({0: state.clone()})
_module.manual_seed_all = lambda seed: _states[0].fill_(seed % 251)
_module._is_in_bad_fork = lambda: False
_module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
torch._register_device_module("hostnpu", _module)
torch.utils.generate_methods_for_privateuse1_backend()
# A driver's calls, which a machine without CUDA answers or refuses; here each of them is a fault.
for _name in ("current_stream", "Event", "Stream", "synchronize", "mem_get_info", "empty_cache"):
    setattr(torch.cuda, _name, _no_cuda)
