"""`python -m vibe`, for machines where another tool owns the name."""

import sys

from swarm_engine.child import forget_current_folder

forget_current_folder(__file__)

from vibe.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
