"""Set-up that all tests share."""

from __future__ import annotations

import torch

# ranks are forked from this process, and a pool of OpenMP threads does not survive a fork
torch.set_num_threads(1)
