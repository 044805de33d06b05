"""Measure configurations on this GPU and keep those that are faster: `python -m dmattn_ops.tune`."""

import sys

from dmattn_ops.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
