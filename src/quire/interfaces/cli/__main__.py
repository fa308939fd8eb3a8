"""`python -m quire.interfaces.cli`: the same as `python -m quire`."""

import sys

from quire.interfaces.cli import main

if __name__ == "__main__":
    sys.exit(main())
