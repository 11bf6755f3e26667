"""`python -m driftline` is `driftline`."""

import sys

from driftline.cli.main import console

if __name__ == "__main__":
    sys.exit(console())
