"""`python -m stageline`, the same as the command `stageline`."""

import sys

from stageline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
