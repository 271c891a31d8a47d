"""`python -m a3r`, where another tool owns the command's name."""

import sys

from a3r.cli import main

if __name__ == "__main__":
    sys.exit(main())
