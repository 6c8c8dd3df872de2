"""``python -m lockstep`` is the command ``lockstep``."""

import sys

from lockstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
