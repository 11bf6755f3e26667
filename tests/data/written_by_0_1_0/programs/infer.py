"""Two forward passes; `--fault` plants one in layers.1.act, `--end` kills the program."""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from network import IDS, build

options = argparse.ArgumentParser()
options.add_argument("--dtype", default="float32")
options.add_argument("--fault", action="store_true")
options.add_argument("--end", action="store_true")
chosen = options.parse_args()
network = build(chosen.dtype, fault=chosen.fault).eval()
with torch.no_grad():
    network(IDS)
    network(IDS + 0)
if chosen.end:
    time.sleep(2)  # what was captured is written by then
    os.kill(os.getpid(), signal.SIGKILL)
