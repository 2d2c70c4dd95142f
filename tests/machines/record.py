"""Prints this machine as one of these JSON files: what the checks of `doctor` read, and nothing else.

python -m distboot is not needed, any Python 3.8 will do: docker run … python3 - < record.py > name.json
Of the environment only the variables below are taken. Read the result before it is committed.
"""

import glob
import json
import os
import re
import socket

FILES = (
    "proc/self/cgroup",
    "proc/self/limits",
    "proc/self/status",
    "proc/self/uid_map",
    "proc/net/tcp",
    "proc/net/tcp6",
    "proc/sys/net/ipv4/ip_local_port_range",
    "proc/driver/nvidia/version",
    "proc/driver/nvidia/gpus/*/information",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/*/cpu.max",
    "sys/fs/cgroup/cpu*/cpu.cfs_*_us",
    "sys/fs/cgroup/cpu*/*/cpu.cfs_*_us",
    "sys/class/dmi/id/sys_vendor",
    "sys/bus/pci/devices/*/vendor",
    "sys/bus/pci/devices/*/class",
    "sys/class/kfd/kfd/topology/nodes/*/properties",
    "sys/class/infiniband/*/device/vendor",
    "sys/class/infiniband/*/device/uevent",
    "sys/class/infiniband/*/ports/*/link_layer",
    "sys/class/infiniband/*/ports/*/state",
    "sys/class/infiniband/*/ports/*/gids/[0-7]",
    "sys/class/infiniband/*/ports/*/gid_attrs/types/[0-7]",
    "sys/class/infiniband_verbs/uverbs*/ibdev",
    "etc/nccl.conf",
    "etc/libibverbs.d/*",
    ".dockerenv",
    "run/.containerenv",
)
PRESENT = (
    "sys/class/net/*",
    "dev/infiniband/*",
    "dev/nvidia*",
    "dev/kfd",
    "dev/dri/renderD*",
    "dev/accel/*",
)
STATUS = ("Cpus_allowed_list", "CapEff")
VARIABLES = re.compile(
    r"(NCCL|CUDA|HIP|ROCR|HABANA|GLOO|OMP)_.*|container|KUBERNETES_SERVICE_HOST|LD_LIBRARY_PATH"
)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return ""
    if path.endswith("/status"):
        return "\n".join(line for line in text.splitlines() if line.startswith(STATUS))
    if path.endswith("/cgroup"):
        return "\n".join(
            line for line in text.splitlines() if re.match("[0-9]+:(|(.*,)?cpu(,.*)?):", line)
        )
    if "/proc/net/" in path:  # those that listen
        return "\n".join(
            line for index, line in enumerate(text.splitlines()) if not index or " 0A " in line
        )
    return text


files = {
    path[1:]: _text(path)
    for pattern in FILES
    for path in sorted(glob.glob("/" + pattern))
    if os.path.isfile(path)
}
files.update({path[1:]: "" for pattern in PRESENT for path in sorted(glob.glob("/" + pattern))})
try:
    shm = os.statvfs("/dev/shm")
    size = [shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize]
except OSError:
    size = []
host = socket.gethostname()
try:
    names = {host: sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})}
except OSError:
    names = {}
machine = {
    "about": "",
    "environ": {
        name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)
    },
    "files": files,
    "host": host,
    "shared_memory": size,
    "addresses": [],
    "names": names,
}
print(json.dumps(machine, indent=2))
