"""torchrun's options for `run`: a command line for torchrun works with this command in its place.

Those that number the nodes become the variables that anybody may set by hand (`launchers/nodes`):

| option                      | variable                 |
|-----------------------------|--------------------------|
| --nnodes                    | NUM_NODES                |
| --node-rank                 | NODE_RANK                |
| --master-addr               | MASTER_ADDR              |
| --master-port               | MASTER_PORT              |
| --rdzv-endpoint             | MASTER_ADDR, MASTER_PORT |
| --rdzv-id                   | PET_RDZV_ID, the job id  |

Without --node-rank the nodes are numbered by what has started this process on each of them: srun,
mpirun, an operator. Facts about torchrun are from the `torch.distributed.run` of torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.text import short_repr
from ..detection.parse import parse_address, parse_number, parse_port
from ..detection.placement import Placement

TITLE = "as torchrun has them, also with _ in place of -"
OPTIONS = (
    "--nnodes N  number of nodes; on each of them this command is started once",
    "--node-rank N  number of this node, from 0; without it, the launcher numbers the nodes",
    "--master-addr HOST  host of node 0",
    "--master-port PORT  a port there",
    "--rdzv-endpoint HOST[:PORT]  both in one",
    "--rdzv-id ID  the job's id",
    "--rdzv-backend NAME  c10d or static: in either case the ranks meet at rank 0",
    "--standalone  this node alone",
    "--no-python  run a command, as after --",
    "-t,--tee N  begin each line of the output with its rank and host, as --log-prefix does",
)
_BACKENDS = (None, "", "c10d", "static")
_NAMES = (
    *("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id", "rdzv_backend", "standalone"),
    *("nproc_per_node", "master_addr", "master_port", "tee"),
)
_COUNT = pattern(r"([1-9]\d{0,6})(?::(\d+))?", re.ASCII)
# torch.distributed.elastic: 0 to 3 for all ranks, or by rank
_STREAMS = pattern(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", re.ASCII)
_STREAMS_KEPT = "leave it out; --log-dir DIR keeps the output, which also stays on the console"
_RANKS = "here it is --nproc-per-node N, the ranks of each node"
_ON_EACH_HOST = (
    "start this command on each host, with --nnodes N --node-rank K --master-addr HOST; "
    "or let mpirun or srun start it there"
)
_WITHOUT = "leave it out: it has no counterpart here"
_FILTER = "leave it out, and search in the files of --log-dir"
# What to do about an option that is not one of `run`
HINTS = {
    # torchrun
    "--rdzv-conf": "leave it out; --join-timeout SECONDS is how long to wait for all ranks",
    "--monitor-interval": "leave it out: a failure is noticed when it happens",
    "--start-method": "leave it out: each rank is a process of its own, as with spawn",
    "--event-log-handler": "leave it out; --report FILE keeps the events of the job",
    "--role": _WITHOUT,
    "--run-path": "leave it out: a script is run in a process of its own",
    "--nprocs": "use --nproc-per-node N",
    "--redirects": _STREAMS_KEPT,
    "-r": _STREAMS_KEPT,
    "--local-ranks-filter": _FILTER,
    "--duplicate-stdout-filters": _FILTER,
    "--duplicate-stderr-filters": _FILTER,
    "--local-addr": "leave it out; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the interface",
    "--logs-specs": "see --log-dir and --log-prefix",
    "--numa-binding": "see --bind",
    "--signals-to-handle": "leave it out: each signal that a launcher sends is forwarded",
    "--shutdown-timeout": "see --grace SECONDS",
    "--virtual-local-rank": "leave it out; CUDA_VISIBLE_DEVICES can show each rank one device",
    # torch.distributed.launch
    "--use-env": "leave it out: the local rank is in LOCAL_RANK",
    # mpirun and srun
    "-n": "use --nproc-per-node N, the number on each node",
    "-np": "use --nproc-per-node N, the number on each node",
    "--np": "use --nproc-per-node N, the number on each node",
    "-x": "export the variable before this command: ranks of this node have it; see --share-env",
    "-H": _ON_EACH_HOST,
    "--host": _ON_EACH_HOST,
    # deepspeed, and mpirun
    "--hostfile": _ON_EACH_HOST,
    "--num-gpus": f"an option of deepspeed; {_RANKS}",
    "--num-nodes": "an option of deepspeed; here it is --nnodes N",
    "--include": f"an option of deepspeed: {_ON_EACH_HOST}",
    "--exclude": f"an option of deepspeed: {_ON_EACH_HOST}",
    # accelerate launch
    "--num-processes": f"an option of accelerate; {_RANKS}",
    "--num-machines": "an option of accelerate; here it is --nnodes N",
    "--machine-rank": "an option of accelerate; here it is --node-rank N",
    "--main-process-ip": "an option of accelerate; here it is --master-addr HOST",
    "--main-process-port": "an option of accelerate; here it is --master-port PORT",
    "--multi-gpu": "an option of accelerate; here it is --nproc-per-node gpu",
    "--mixed-precision": (
        "an option of accelerate: export ACCELERATE_MIXED_PRECISION, or Accelerator(…)"
    ),
    "--config-file": "an option of accelerate: give its values as options of this command",
    "--use-deepspeed": "an option of accelerate: export ACCELERATE_USE_DEEPSPEED=true",
    "--use-fsdp": "an option of accelerate: export ACCELERATE_USE_FSDP=true",
}


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The type of an option for argparse: text that `parse` accepts."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            from argparse import ArgumentTypeError  # here, as most starts have no options

            raise ArgumentTypeError(f"{short_repr(text)} {error}") from None
        return text

    return check


# Further arguments of `add_argument`
MORE = {
    "--node-rank": {"type": _checked(parse_number)},
    "--master-addr": {"type": _checked(parse_address)},
    "--master-port": {"type": _checked(parse_port)},
}
# As `launchers/nodes` reads them
_INDICES = ("NODE_RANK", "JOB_COMPLETION_INDEX")
_COUNTS = ("NUM_NODES", "NNODES", "NODE_COUNT")
# Of one process, or of another number of nodes: what is given with options counts
_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NODE_COUNT")
_PORT = "29500"  # torchrun's, where none is given
_NODES = "nodes"  # the launcher that reads these variables


def has_any(options: SimpleNamespace) -> bool:
    """Whether one of torchrun's options is there."""
    values = [getattr(options, name) for name in _NAMES]
    return any(values)


def without_separator(target: list[str]) -> list[str]:
    """The target without the first `--` after its script or module, which torchrun drops, too."""
    before = 1
    if target[0] == "-m":
        before = 2
    words = target[:before]
    rest = target[before:]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    return [*words, *rest]


def as_command(options: SimpleNamespace, target: list[str]) -> list[str]:
    """The target behind `--`, if --no-python says that it is a command."""
    if not options.no_python or target[0] == "--":
        return target
    if target[0] == "-m":
        raise DistbootError(
            "usage",
            "--no-python is for a command, and -m for a module of Python",
            "leave one of them out",
        )
    return ["--", *target]


def apply(options: SimpleNamespace, environ: MutableMapping[str, str]) -> None:
    """Let the options count: as variables, and as options of this package.

    Raises `usage`: they contradict each other, or ask for what is not there.
    """
    if options.tee not in (None, "", "0"):
        _refuse_streams(options.tee)
        options.log_prefix = True
    _refuse_backend(options.rdzv_backend)
    nnodes = _count(options)
    options.one_per_node_by = ""  # the option that implies one rank on each node, as of torchrun
    if nnodes is not None and options.nproc_per_node is None:
        options.one_per_node_by = _counting(options)[0]
        options.nproc_per_node = "1"
    variables = {
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "PET_RDZV_ID": options.rdzv_id,
    }
    if nnodes != 1:
        endpoint = _endpoint(options.rdzv_endpoint)
        for name, value in endpoint.items():
            _refuse_two(options.rdzv_endpoint, variables[name], value)
        variables.update(endpoint)
    if nnodes is not None:
        variables.update(_apply_numbers(options, nnodes, environ))
    elif options.node_rank is not None:
        raise DistbootError(
            "usage",
            f"--node-rank {options.node_rank} without --nnodes",
            "say with --nnodes how many nodes there are",
        )
    for name, value in variables.items():
        if value is not None:
            environ[name] = value


def refuse_different(options: SimpleNamespace, placement: Placement) -> None:
    """Refuse a number of nodes that is not the one of what has numbered them."""
    wanted = _count(options)
    if wanted in (None, placement.world_size):
        return
    if placement.world_size == 1:
        raise _unnumbered_error(wanted)
    nodes = f"--nnodes {wanted}"
    if options.standalone:
        nodes = "--standalone is for one node"
    raise DistbootError(
        "usage",
        f"{nodes}, but {_numbered(placement)}",
        _other_count(options, placement),
    )


def _numbered(placement: Placement) -> str:
    """`"slurm started 2 processes"`, or `"2 nodes are numbered (NUM_NODES)"`."""
    from ..detection.address_remedy import is_by_hand  # here, as most give the right number

    count = placement.world_size
    if placement.launcher == _NODES:  # variables that a person or a platform has set
        source = placement.sources["world_size"]
        return f"{count} nodes are numbered ({source})"
    if is_by_hand(placement.launcher, placement.platform):
        return f"WORLD_SIZE={count}"
    return f"{placement.launcher} started {count} processes"


def _other_count(options: SimpleNamespace, placement: Placement) -> str:
    """The remedy where another number of nodes was given than that of the placement."""
    from ..detection.address_remedy import or_unset  # here, as most give the right number

    is_node = placement.num_nodes == placement.world_size
    if not is_node:
        remedy = without_counts(options, placement)
        unset = or_unset(placement.launcher, placement.platform, placement.sources)
        return f"{remedy}; or start the command once on each node{unset}"
    leave_out = " and ".join(_counting(options))
    remedy = f"leave {leave_out} out"
    if options.standalone:
        return remedy
    return f"{remedy}, or give --nnodes {placement.world_size}"


def without_counts(options: SimpleNamespace, placement: Placement) -> str:
    """The remedy where each process that the launcher has started is to be a rank."""
    from ..detection.address_remedy import is_by_hand  # here, as most give the right number

    given = _counting(options)
    if not options.one_per_node_by:
        given.append("--nproc-per-node (or DISTBOOT_NPROC_PER_NODE)")
    leave_out = " and ".join(given)
    whose = f"of {placement.launcher}"
    if is_by_hand(placement.launcher, placement.platform):
        whose = "with a RANK"
    return f"leave {leave_out} out: each process {whose} is a rank"


def _counting(options: SimpleNamespace) -> list[str]:
    """The options that count the nodes."""
    given = []
    if options.standalone:
        given.append("--standalone")
    if options.nnodes is not None:
        given.append("--nnodes")
    return given


def refuse_unnumbered(options: SimpleNamespace, error: DistbootError) -> None:
    """Explain an error of detection where the nodes were counted, and not numbered."""
    wanted = _count(options)
    if wanted not in (None, 1) and error.code == "not-alone":
        raise _unnumbered_error(wanted) from None


def explained(options: SimpleNamespace, error: DistbootError) -> DistbootError:
    """An error of detection, with the user's own options in its remedy."""
    if error.code != "not-alone":
        return error
    from ..detection.not_alone import PER_NODE  # here, as most processes are numbered, or alone

    if _count(options) == 1:
        hint = _how_to_be_alone(options, error)
    else:
        hint = _how_to_number(options)
    if not hint:
        hint = error.hint.replace(PER_NODE, _per_node(options) or PER_NODE)
        # The shell has no such variable where an option has set it
        hint = hint.replace("$MASTER_ADDR", options.master_addr or "$MASTER_ADDR")
    return DistbootError(error.code, error.message, hint).of(error.who)


def _how_to_be_alone(options: SimpleNamespace, error: DistbootError) -> str:
    """What to do on the only node, where MASTER_ADDR alone names another host; else empty."""
    _, *found = error.message.split("\n  ")
    is_by_address = len(found) == 1 and found[0].startswith("MASTER_ADDR=")
    if not is_by_address:
        return ""
    if options.master_addr is not None:
        return "leave --master-addr out"
    return "unset MASTER_ADDR"


def _per_node(options: SimpleNamespace) -> str:
    """`"--nproc-per-node 2"`, if the user has given it; else empty."""
    if options.nproc_per_node is None or options.one_per_node_by:
        return ""
    return f"--nproc-per-node {options.nproc_per_node}"


def _how_to_number(options: SimpleNamespace) -> str:
    """The options for each node, where an option has named node 0; else empty."""
    of_node_0 = {
        "--master-addr": options.master_addr,
        "--rdzv-endpoint": options.rdzv_endpoint,
    }
    named_by = list(filter(of_node_0.get, of_node_0))
    if not named_by:
        return ""
    leave_out = " and ".join(named_by)
    given = [f"{option} {of_node_0[option]}" for option in named_by]
    if options.master_port is not None:
        given.append(f"--master-port {options.master_port}")
    given.append(_per_node(options))
    all_given = " ".join(filter(None, given))
    return (
        "add the number of nodes and that of each node, from 0 on: python -m distboot "
        f"--nnodes <nodes> --node-rank <number of this node> {all_given} …; "
        f"or leave {leave_out} out if this is the only node"
    )


def _unnumbered_error(nodes: int | None) -> DistbootError:
    return DistbootError(
        "usage",
        f"--nnodes {nodes}, but --node-rank is missing, and no launcher numbers the nodes",
        "add --node-rank N, from 0 on, and --master-addr; or let a launcher start this command "
        f"once on each node (srun --ntasks={nodes} --ntasks-per-node=1)",
    )


def _apply_numbers(
    options: SimpleNamespace, nnodes: int, environ: MutableMapping[str, str]
) -> dict[str, str | None]:
    """The variables that number the nodes; empty where something else numbers them.

    With `--node-rank` they take the place of other numbers in `environ`.
    """
    node = options.node_rank
    count = {"NUM_NODES": str(nnodes)}
    if nnodes == 1 and node in (None, "0"):
        return {}
    if node is None:
        # The environment may number the nodes without counting them
        is_numbered = not environ.keys().isdisjoint(_INDICES)
        is_counted = not environ.keys().isdisjoint(_COUNTS)
        if is_numbered and not is_counted:
            return dict(count)
        return {}
    named = options.launcher or environ.get("DISTBOOT_LAUNCHER")
    if named not in (None, "", _NODES):
        raise DistbootError(
            "usage",
            f"--node-rank {node} numbers the nodes, and so does the launcher {short_repr(named)}",
            "leave one of them out",
        )
    _refuse_outside(node, nnodes)
    options.launcher = _NODES
    for name in _OTHERS:
        environ.pop(name, None)
    if options.rdzv_id is None:  # else the port follows from that
        environ.setdefault("MASTER_PORT", _PORT)
    return {"NODE_RANK": node, **count}


def _refuse_outside(node: str, nnodes: int) -> None:
    if parse_number(node) >= nnodes:
        raise DistbootError(
            "usage",
            f"--node-rank {node} is not below --nnodes {nnodes}",
            "number the nodes from 0 on",
        )


def _count(options: SimpleNamespace) -> int | None:
    """The number of nodes; None: it was not given."""
    if options.standalone:
        return _one_node(options.nnodes)
    text = options.nnodes
    if text is None:
        return None
    found = _COUNT.fullmatch(text)
    if found is None:
        raise DistbootError(
            "usage",
            f"--nnodes: {short_repr(text)} is not a number of nodes",
            "use 1 or more",
        )
    least, most = found.groups()
    if most not in (None, least):
        raise DistbootError(
            "usage",
            f"--nnodes {text}: the number of nodes does not change while a job runs",
            f"give --nnodes {most}; with --max-restarts the job goes on after a failure, with as "
            "many nodes",
        )
    return int(least)


def _one_node(nnodes: str | None) -> int:
    """The number of nodes with `--standalone`."""
    if nnodes not in (None, "1", "1:1"):
        raise DistbootError(
            "usage",
            f"--standalone is for one node, and --nnodes is {short_repr(nnodes)}",
            "leave --standalone out where there are more nodes",
        )
    return 1


def _endpoint(text: str | None) -> dict[str, str]:
    """The variables for `--rdzv-endpoint`; the port may be missing."""
    if not text:  # empty, as of a shell's variable that is not set
        return {}
    try:
        host, port = parse_address(text.removesuffix(":0"))  # any free port of torchrun's agent
    except ValueError as error:
        raise DistbootError(
            "usage",
            f"--rdzv-endpoint: {short_repr(text)} {error}",
            "give the host of node 0 and a port there: node-0:29500",
        ) from None
    found = {"MASTER_ADDR": host}
    if port is not None:
        found["MASTER_PORT"] = str(port)
    return found


def _refuse_two(endpoint: str, given: str | None, value: str) -> None:
    """Refuse a host or port of rank 0 that is not the one of `--rdzv-endpoint`."""
    if given in (None, value):
        return
    raise DistbootError(
        "usage",
        f"--rdzv-endpoint {short_repr(endpoint)}, and {short_repr(given)} with --master-addr or "
        "--master-port: both say where rank 0 is",
        "leave one of them out",
    )


def _refuse_streams(given: str) -> None:
    if not _STREAMS.fullmatch(given):
        raise DistbootError(
            "usage",
            f"--tee={short_repr(given)} is not a number of streams",
            "--tee 3 is for standard output and error; --log-prefix does the same",
        )


def _refuse_backend(name: str | None) -> None:
    if name not in _BACKENDS:
        raise DistbootError(
            "usage",
            f"--rdzv-backend {short_repr(name)}: the ranks meet at rank 0, and need nothing else",
            "leave it out; with several nodes --rdzv-endpoint is the host of node 0",
        )
