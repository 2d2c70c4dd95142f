"""What AMD's driver says of the accelerators of this host, in files below /sys.

From the kernel's Documentation/gpu/amdgpu: `product_name` (of a card for servers),
`mem_info_vram_total`, `mem_info_vram_used`, `ras/umc_err_count`. Which processes use a device is
below /sys/class/kfd/kfd/proc, but by their ids outside of this container: so nothing is said of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..base.text import digits
from .accelerators import amd_addresses, text_of
from .device import MOST_DIGITS, Device, memory_errors


def devices(root: Path = Path("/")) -> list[Device]:
    """All accelerators, in the order of their topology."""
    found = []
    for number, (uuid, address) in enumerate(amd_addresses(root).items()):
        folder = root / "sys/bus/pci/devices" / address
        name = text_of(folder / "product_name") or f"AMD {text_of(folder / 'device')}"
        device = Device(
            str(number),
            uuid,
            name,
            memory=_number(folder / "mem_info_vram_total"),
            used=_number(folder / "mem_info_vram_used"),
            faults=memory_errors(_uncorrected(folder)),
        )
        found.append(device)
    return found


def _uncorrected(folder: Path) -> int:
    # ue: 0
    # ce: 12
    text = text_of(folder / "ras/umc_err_count")
    found = re.search(r"^ue: *(\d+)", text, re.MULTILINE)
    if found is None:
        return 0
    return int(found[1])


def _number(path: Path) -> int:
    return digits(text_of(path), MOST_DIGITS) or 0
