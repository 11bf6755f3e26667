"""Decoders on a device against a trusted one; see `driftline.decoding.pytest_suites`."""

# pytest collects what a file imports: test, fixture and hook are the suite's own.
from driftline.decoding.pytest_suites.test_decoders import *  # noqa: F403
