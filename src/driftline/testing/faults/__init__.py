"""Faults to plant: 37 kinds, six architectures, five number formats, and one trial of each.

Public: whoever builds a tool of this kind can measure it with the same plants. `benchmarks/faults`
does so with ours.
"""

from driftline.testing.faults.architectures import ARCHITECTURES, Specimen, specimen
from driftline.testing.faults.computing import COMPUTING_FAULTS
from driftline.testing.faults.parameters import PARAMETER_FAULTS
from driftline.testing.faults.planting import Fault

FAULTS = {fault.name: fault for fault in (*PARAMETER_FAULTS, *COMPUTING_FAULTS)}
"""All kinds by name."""

__all__ = ["ARCHITECTURES", "FAULTS", "Fault", "Specimen", "specimen"]
