"""Faults to plant: 37 kinds, six architectures, seven number formats, and one trial of each.

Public, so that other tools of this kind can be measured with the same faults; `benchmarks/faults`
measures ours.
"""

from driftline.testing.faults.architectures import ARCHITECTURES, Specimen, specimen
from driftline.testing.faults.faults import COMPUTING_FAULTS, PARAMETER_FAULTS, Fault
from driftline.testing.faults.trials import Setting, candidate_of, place_of, reference_of
from driftline.testing.faults.variants import FORMATS, IMPLEMENTATIONS

FAULTS = {fault.name: fault for fault in (*PARAMETER_FAULTS, *COMPUTING_FAULTS)}
"""All kinds by name."""

__all__ = [
    "ARCHITECTURES",
    "FAULTS",
    "FORMATS",
    "IMPLEMENTATIONS",
    "Fault",
    "Setting",
    "Specimen",
    "candidate_of",
    "place_of",
    "reference_of",
    "specimen",
]
