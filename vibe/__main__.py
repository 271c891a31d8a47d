"""`python -m vibe`, for machines where another tool owns the name."""

import sys

from vibe.cli import main

if __name__ == "__main__":
    sys.exit(main())
