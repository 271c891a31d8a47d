"""`python -m a3r`, where another tool owns the command's name."""

import sys

from swarm_engine.child import forget_current_folder

forget_current_folder(__file__)

from a3r.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
