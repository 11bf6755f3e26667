"""`python -m driftline` is `driftline`."""

import sys

from driftline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
