"""`python -m hetero`: the command `hetero` where it is not on PATH."""

import sys

from hetero.cli import main

if __name__ == "__main__":
    sys.exit(main())
