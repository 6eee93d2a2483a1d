"""How torch shows every operation that it runs, for the meters of the benchmark."""

from __future__ import annotations

import torch

# torch 2.9 to 2.15: nothing public sees the operations of backward passes. Goes when torch exports this name.
from torch.utils._python_dispatch import TorchDispatchMode


# torch 2.9 to 2.15: what `.item()`, `float(tensor)` and `if tensor:` end in. It can go when torch counts
# host reads itself.
HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}

__all__ = ["HOST_READS", "TorchDispatchMode"]
