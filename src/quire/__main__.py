"""`python -m quire`, where the script `quire` is not installed."""

import sys

from quire.interfaces.cli import main

if __name__ == "__main__":
    sys.exit(main())
