"""Which attributes a function reads, by its bytecode."""

from __future__ import annotations

from types import CodeType

_READS = ("load_attr", "load_method")


def reads_attribute(code: CodeType, name: str) -> bool:
    """Whether a function reads an attribute of this name; it may also have such a variable."""
    import dis  # here, as few scripts have the name

    for instruction in dis.get_instructions(code):
        is_read = instruction.opname.lower() in _READS
        if is_read and instruction.argval == name:
            return True
    return False
