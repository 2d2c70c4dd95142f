"""A folder of which no file can be opened: a FUSE mount that says that it is there, and answers nothing else.

hangs_fuse.py FOLDER
"""

import ctypes
import os
import struct
import sys
from pathlib import Path

_HEADER = struct.Struct("<IIQ")  # fuse_in_header, fuse(4): length, operation, its number
_INIT = 26
# Fuse_init_out
_PROTOCOL = struct.pack(
    "<IIIIHHIIHHI",
    7,
    31,
    0,
    0,
    1,
    1,
    4096,
    1,
    0,
    0,
    0,
) + bytes(28)

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"stuck", os.fsencode(folder), b"fuse", 0, options):
    raise OSError(ctypes.get_errno(), "mount")
while True:
    _, operation, number = _HEADER.unpack_from(os.read(fuse, 1 << 20))
    if operation == _INIT:
        os.write(fuse, struct.pack("<IiQ", 16 + len(_PROTOCOL), 0, number) + _PROTOCOL)
