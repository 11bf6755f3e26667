"""Named models still give what they gave; see `driftline.decoding.pytest_suites`."""

# pytest collects what a file imports: both classes are the suite's own.
from driftline.decoding.pytest_suites.test_model_expectations import *  # noqa: F403
