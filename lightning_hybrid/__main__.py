"""``python -m lightning_hybrid`` is the command ``lightning-hybrid``."""

from __future__ import annotations

import sys

from lightning_hybrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
