"""``python -m rebind.cli``: the same as ``rebind``."""

from __future__ import annotations

import sys

from rebind.cli import main

if __name__ == "__main__":
    sys.exit(main())
