"""The launchers that come with a framework: torchrun, DeepSpeed's, Lightning's, horovodrun; and plain RANK alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..env_reader import EnvReader, variable
from ..parse import is_loopback, parse_address
from ..placement import NUMBERS
from . import Launcher, has_any

# torchrun, `torch.distributed.run` and `torch.distributed.launch`, in all flags; `accelerate launch` runs on it.
# torchrun 2.13.0, two nodes of two, rank 3:
#   TORCHELASTIC_RUN_ID=job42   TORCHELASTIC_RESTART_COUNT=0
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   LOCAL_WORLD_SIZE=2   GROUP_RANK=1   GROUP_WORLD_SIZE=2
#   MASTER_ADDR=nodea.cluster.test   MASTER_PORT=44801
# GROUP_RANK is the index of the node's agent; there is no NODE_RANK. MASTER_ADDR is the host of the agent of
# rank 0, whose store listens at MASTER_PORT. torch.distributed.launch sets the same (without --use-env it also
# puts --local-rank=N into argv, which needs no reading).
# With --virtual-local-rank LOCAL_RANK is 0 for all, and each sees one device. The true one is in the name of
#   TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_2bxcjlcq/none_vf65h9kz/attempt_0/1/error.json
_ERROR_FILE = re.compile(r".*/attempt_[0-9]+/([0-9]{1,8})/error\.json", re.ASCII | re.DOTALL)


def _read_torchrun(reader: EnvReader) -> None:
    local_rank = reader.integer("LOCAL_RANK")
    if local_rank or reader.number("local_world_size") == 1:
        reader.put("LOCAL_RANK", local_rank=local_rank)
    elif match := _ERROR_FILE.fullmatch(reader.environ.get("TORCHELASTIC_ERROR_FILE", "")):
        # LOCAL_RANK is 0, which with --virtual-local-rank it is for every process.
        true_one = int(match[1])
        source = "LOCAL_RANK" if true_one == 0 else "TORCHELASTIC_ERROR_FILE: LOCAL_RANK is virtual"
        reader.put(source, local_rank=true_one)
    if reader.text("TORCHELASTIC_RUN_ID") != "none":  # its word for no --rdzv-id
        reader.job_id("TORCHELASTIC_RUN_ID")
    reader.text("MASTER_ADDR")
    reader.text("MASTER_PORT")


TORCHRUN = Launcher(
    name="torchrun",
    title="torchrun, torch.distributed.run and .launch, accelerate launch",
    markers=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    numbers=("RANK", "WORLD_SIZE", None, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    more=_read_torchrun,
    source="captures of 2.13.0; PyTorch documentation, 'torchrun (Elastic Launch): Environment Variables'",
    sets_torch_vars=True,
    own_mark="TORCHELASTIC_RESTART_COUNT",
    programs=(
        *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    ),
    owns_torch_vars=True,
    # It handles these four unless told otherwise (torch.distributed.run 2.13)
    signals_hint="start it with --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGNALS",
)


# DeepSpeed's own launcher (`deepspeed`, locally and over pdsh), which numbers the nodes as well. Its other runners
# start the processes with `mpirun`, `mpiexec` or `srun`, and those own the rank then.
# DeepSpeed 0.19.8, deepspeed --hostfile (2 + 2), rank 3:
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   LOCAL_SIZE=2   CROSS_RANK=1   CROSS_SIZE=2
#   MASTER_ADDR=10.77.0.11   MASTER_PORT=29500
# A node has consecutive ranks, and LOCAL_RANK is RANK % LOCAL_SIZE: another one for each process of the node, but not
# in the order of ranks where the nodes before have other sizes.
def _claim_deepspeed(environ: Mapping[str, str]) -> bool:
    # Names without a prefix of its own: one of them alone is of another program, or left over.
    own = sum(name in environ for name in ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"))
    return own > 1 and has_any(environ, ("RANK", "WORLD_SIZE"))


def _check_deepspeed(reader: EnvReader) -> None:
    rank, here = reader.number("rank"), reader.number("local_world_size")
    if rank is not None and here:
        reader.agree("LOCAL_RANK", rank % here, "RANK % LOCAL_SIZE")
    reader.text("MASTER_ADDR")
    reader.text("MASTER_PORT")


DEEPSPEED = Launcher(
    name="deepspeed",
    title="DeepSpeed's launcher (deepspeed: local, pdsh)",
    markers=("CROSS_RANK", "CROSS_SIZE"),
    numbers=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    in_order=("node_rank",),
    more=_check_deepspeed,
    nodes_are_hosts=True,
    source="captures of 0.19.8; DeepSpeed, deepspeed/launcher/launch.py",
    claim=_claim_deepspeed,
    sets_torch_vars=True,
    own_mark="LOCAL_SIZE",
    programs=("deepspeed.launcher.launch",),
    owns_torch_vars=True,
)


# PyTorch Lightning's own launcher: the first process starts the others of its node as copies of the script. It sets no
# RANK. And `init` cannot serve it: the first process only becomes one of several when the Trainer starts.
# Lightning 2.6, Trainer(devices=2, strategy="ddp"), the second process:
#   LOCAL_RANK=1   NODE_RANK=0   WORLD_SIZE=2   MASTER_ADDR=127.0.0.1   MASTER_PORT=45741
# Its rank is NODE_RANK * devices + LOCAL_RANK, and nothing says how many devices: only node 0 knows its ranks.
_LIGHTNING = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _read_lightning(reader: EnvReader) -> None:
    node_rank = reader.number("node_rank")
    if node_rank == 0:
        reader.put("LOCAL_RANK on the first node", rank=reader.number("local_rank"))
        if is_loopback(reader.environ["MASTER_ADDR"]):
            reader.put("MASTER_ADDR is a loopback address", num_nodes=1)
    elif node_rank is not None:
        reader.remedy = (
            "set RANK (0 to WORLD_SIZE - 1) for every process that was started by hand; or let torchrun or python -m "
            "distboot --nproc-per-node start and number them"
        )
        reader.problems.append(
            f"RANK is missing, and {variable(reader.environ, 'NODE_RANK')}: Lightning does not say how many processes "
            "the nodes before have"
        )


LIGHTNING = Launcher(
    name="lightning",
    title="PyTorch Lightning's own launcher (Trainer, Fabric)",
    markers=("LOCAL_RANK", "NODE_RANK"),
    numbers=(None, "WORLD_SIZE", "LOCAL_RANK", None, "NODE_RANK"),
    more=_read_lightning,
    claim=lambda environ: "RANK" not in environ and all(name in environ for name in _LIGHTNING),
    needs_claim=True,
    source="PyTorch Lightning 2.6, strategies/launchers/subprocess_script.py",
    generic_names=True,
    unsupported_reason="start the script with torchrun, and Lightning uses the processes that it finds",
)


# `horovodrun --gloo`, also elastic. With `--mpi` and `--js` it is mpirun or jsrun that starts the processes.
# Horovod 0.28.1, -np 4 -H nodea:3,nodeb:1, rank 1:
#   HOROVOD_RANK=1   HOROVOD_SIZE=4   HOROVOD_LOCAL_RANK=1   HOROVOD_LOCAL_SIZE=3
#   HOROVOD_CROSS_RANK=0   HOROVOD_CROSS_SIZE=1   HOROVOD_HOSTNAME=nodea
#   HOROVOD_GLOO_RENDEZVOUS_ADDR=10.77.0.11 (horovodrun's own host, not rank 0's)   HOROVOD_GLOO_RENDEZVOUS_PORT=15863
# HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count the hosts that have a process of the same local rank: all hosts for
# local rank 0 only.
_HOROVOD_PLACE = (
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
_HOROVOD_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _read_horovodrun(reader: EnvReader) -> None:
    place = [reader.integer(name) for name in _HOROVOD_PLACE]
    known = [number for number in place if number is not None]
    server, port = (
        reader.parsed(_HOROVOD_SERVER[0], _numeric_address),
        reader.text(_HOROVOD_SERVER[1]),
    )
    if server is not None and is_loopback(server):
        # Every process calls horovodrun's server there, whatever names -H gives this host.
        reader.put(f"{_HOROVOD_SERVER[0]} is a loopback address", num_nodes=1)
    elif (
        server is not None
        and known == place
        and not reader.problems
        and _is_whole_host(reader, *known)
    ):
        for name, field, number in zip(_HOROVOD_PLACE, NUMBERS[2:], place, strict=True):
            reader.put(name, **{field: number})
    elif server is not None and _HOROVOD_PLACE[0] in reader.environ:
        reader.notes.append(
            "HOROVOD_LOCAL_RANK and _LOCAL_SIZE ignored: a host that -H names twice has two of each"
        )
        if place[0] == 0:
            reader.put("HOROVOD_CROSS_SIZE", num_nodes=place[3])
    if server and port:
        reader.port_seed = (f"{server}:{port}", " and ".join(_HOROVOD_SERVER))


def _numeric_address(text: str) -> str:
    host, _ = parse_address(text)
    if ":" not in host and not host.replace(".", "").isdigit():
        raise ValueError("is not a numeric address, as horovodrun writes it")
    return host


def _is_whole_host(
    reader: EnvReader, local_rank: int, here: int, cross_rank: int, cross_size: int
) -> bool:
    """Whether -H cannot name this process's host a second time (nodea:1,nodeb:1,nodea:2).

    The local numbers would start again for each mention, and HOROVOD_CROSS_RANK be that of the last one. The first and
    the last mention of all tell by it whether there is another; and where as many hosts as can be have a process of
    the highest local rank, no other one follows.
    """
    rank, size = reader.number("rank") or 0, reader.number("world_size")
    if local_rank == 0:
        is_last = rank + here == size and cross_rank < cross_size
        return cross_rank == 0 or is_last or cross_size == size
    return here == size or (local_rank == here - 1 and here * cross_size == size)


HOROVODRUN = Launcher(
    name="horovodrun",
    title="horovodrun --gloo, static and elastic",
    markers=("HOROVOD_RANK", "HOROVOD_SIZE"),
    # The process that the user starts; it starts the ranks of its own host only
    programs=("horovodrun", "horovod.runner.launch"),
    numbers=("HOROVOD_RANK", "HOROVOD_SIZE"),
    more=_read_horovodrun,
    nodes_are_hosts=True,
    source="captures of 0.28.1; Horovod, horovod/runner/gloo_run.py and common/util/hosts.py",
    own_mark="HOROVOD_GLOO_RENDEZVOUS_PORT",  # distboot exports that of another server
    uses_daemons=True,
    local_count="HOROVOD_LOCAL_SIZE",
    env_forwarding_hint="export NAME=VALUE before horovodrun …",
)


# Plain RANK and WORLD_SIZE, set for every process by a person, by Azure ML's PyTorch jobs, or by an operator.
# Azure ML, distribution type PyTorch, two nodes of two, rank 3:
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   NODE_RANK=1   MASTER_ADDR=10.0.0.4   MASTER_PORT=6105
# Kubeflow's PyTorchJob with one process per pod: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT only.
# LOCAL_RANK without the rest is half of a launcher.
def _read_plain(reader: EnvReader) -> None:
    reader.remedy = (
        "set RANK (0 to WORLD_SIZE - 1) and WORLD_SIZE for every process that is started, or clear these if they are "
        "left over"
    )
    own = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    reader.integers("RANK", "WORLD_SIZE", *own, optional=own)


TORCH = Launcher(
    name="torch",
    title="plain RANK and WORLD_SIZE (Azure ML PyTorch jobs, Kubernetes operators, by hand)",
    markers=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    more=_read_plain,
    in_order=(),  # a user may have numbered them as they like
    source="PyTorch documentation, 'torch.distributed: environment variable initialization'; "
    "Azure Machine Learning, 'Distributed training: PyTorch'",
    generic_names=True,
)
