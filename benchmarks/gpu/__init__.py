"""What capture and comparison cost on a GPU; `python -m benchmarks gpu` prints it."""

from benchmarks.gpu.table import run as run
