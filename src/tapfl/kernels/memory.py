"""What a program may hold: consumer GPUs have less shared memory than those of data centres."""

from __future__ import annotations

import functools
from typing import Any

import torch

PLENTY = 160 * 1024  # an A100's program may have 163 KiB, an H100's 227, an RTX card's 99


@functools.cache
def plenty(device: torch.device) -> bool:
    """Return whether a device has the shared memory that the kernels were made for."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return bool(properties.shared_memory_per_block_optin >= PLENTY)


def stages(device: torch.device) -> dict[str, int]:
    """Return a kernel's argument that keeps it from loading ahead, where there is no room."""
    return {} if plenty(device) else {"num_stages": 1}
