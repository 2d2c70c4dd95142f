"""`TF_CONFIG`: TensorFlow's cluster description, set by TFJob, by Azure ML's TensorFlow jobs, or by a person.

Ranks follow TensorFlow's order of tasks: chief, workers, parameter servers. Tasks of one host name are one node.
An evaluator is not part of the cluster and is a job of its own. What TensorFlow 2 cannot take as Azure ML sets it,
`corrected` puts right, and no number of any task changes by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.text import short_repr
from ..env_reader import EnvReader
from ..parse import is_loopback, parse_address
from . import Launcher

# TF_CONFIG={"cluster": {"chief": ["10.0.0.4:2222"], "worker": ["10.0.0.5:2222", "10.0.0.6:2222"]},
#            "task": {"type": "worker", "index": 0}}
_TASK_TYPES = ("chief", "worker", "ps")
_NO_RANK = "evaluator"
_NAME = "TF_CONFIG"
_LONGEST = 4_000_000  # bytes; a cluster of 100,000 tasks has about 3 MB


class _Task(NamedTuple):
    kind: str
    number: int
    address: str
    host: str
    port: int


def has_servers(environ: Mapping[str, str]) -> bool:
    """Whether there are parameter servers: then all tasks but the chief run servers for it, which never end."""
    return _NAME in environ and bool(_cluster(_json_object(environ[_NAME], [])).get("ps"))


def corrected(environ: Mapping[str, str]) -> dict[str, str]:
    """The TF_CONFIG that TensorFlow 2 can take, if the given one has to be changed for that."""
    import json  # here and below, so that other launchers do not pay for it

    config, notes = _corrected(_json_object(environ[_NAME], [])) if _NAME in environ else ({}, [])
    return {_NAME: json.dumps(config)} if notes else {}


def _corrected(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A TF_CONFIG that TensorFlow 2 can take, and what was changed for that, to be told to people."""
    cluster, task, notes = _cluster(config), config.get("task"), list[str]()
    # Azure ML's number of parameter servers is 0 by default, and TensorFlow 2.21 is ended by SIGSEGV.
    empty = [kind for kind in (*_TASK_TYPES, _NO_RANK) if cluster.get(kind) == []]
    if empty:
        cluster = {kind: tasks for kind, tasks in cluster.items() if kind not in empty}
        notes.append(
            f"TF_CONFIG: the empty list of {', '.join(empty)} is left out, as TensorFlow crashes with it"
        )
    workers = cluster.get("worker")
    if (
        "ps" in cluster
        and not cluster.keys() & {"chief", "master"}
        and isinstance(workers, list)
        and len(workers) > 1
    ):
        # Azure ML has no chief, which is where TensorFlow 2's ParameterServerStrategy runs the script.
        cluster = {"chief": workers[:1], **cluster, "worker": workers[1:]}
        if (
            isinstance(task, dict)
            and task.get("type") == "worker"
            and task.get("index") in range(len(workers))
        ):
            index = task["index"]
            config = {
                **config,
                "task": {**task, **({"index": index - 1} if index else {"type": "chief"})},
            }
        notes.append(
            "TF_CONFIG: parameter servers need a chief, which worker 0 becomes; worker 1 becomes worker 0, …"
        )
    return {**config, "cluster": cluster}, notes


def _read(reader: EnvReader) -> None:
    reader.remedy = (
        'TF_CONFIG must be {"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}, '
        "the same cluster for all, and another index for each task of a type"
    )
    config = _json_object(reader.environ[_NAME], reader.problems)
    reader.notes += _corrected(config)[1]
    tasks = _tasks(config, reader.problems) if config else []
    kind, index = _own(config, reader.problems) if config else ("", 0)
    if kind == _NO_RANK:
        reader.put("TF_CONFIG: an evaluator runs alone", rank=0, world_size=1)
        reader.notes.append("this task is an evaluator: it is not part of the training cluster")
    elif not reader.problems:
        ranks = sorted(
            (task for task in tasks if task.kind != _NO_RANK),
            key=lambda task: _TASK_TYPES.index(task.kind),
        )
        _place(reader, ranks, kind, index)
        # Every task has the same cluster and hence the same first address. Its port belongs to TensorFlow's server.
        source = "first task of TF_CONFIG"
        reader.own_address, reader.port_seed = (ranks[0].host, source), (ranks[0].address, source)


def _json_object(text: str, problems: list[str]) -> dict[str, Any]:
    import json

    if len(text) > _LONGEST:
        problems.append(
            f"TF_CONFIG has {len(text)} characters; the longest that is read has {_LONGEST}"
        )
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Without its text, in which a job may have more than the cluster.
        problems.append(f"TF_CONFIG, {len(text)} characters, is not JSON: {error}")
        return {}
    if isinstance(config, dict) and config:
        return config
    problems.append("TF_CONFIG is not a JSON object with 'cluster' and 'task'")
    return {}


def _cluster(config: dict[str, Any]) -> dict[str, Any]:
    cluster = config.get("cluster")
    return cluster if isinstance(cluster, dict) else {}


def _tasks(config: dict[str, Any], problems: list[str]) -> list[_Task]:
    """The tasks whose addresses can be used, in the order of the text; every problem of the others is recorded."""
    if not isinstance(config.get("cluster"), dict):
        problems.append("TF_CONFIG has no 'cluster' object")
        if "sparseCluster" in config:
            problems.append(
                "TF_CONFIG has a 'sparseCluster' (TFJob's enableDynamicWorker), which has no fixed ranks"
            )
    tasks: list[_Task] = []
    for kind, addresses in _cluster(config).items():
        if kind == "master":
            problems.append(
                "TF_CONFIG has a 'master' task, which TensorFlow 2 calls 'chief'; rename it"
            )
        elif kind not in (*_TASK_TYPES, _NO_RANK):
            problems.append(f"TF_CONFIG has tasks of the unknown type {short_repr(kind)}")
        elif not isinstance(addresses, list):
            problems.append(f"TF_CONFIG's {short_repr(kind)} tasks are not a list of 'host:port'")
        else:
            for index, address in enumerate(addresses):
                try:
                    host, port = _host_and_port(address)
                    tasks.append(_Task(kind, index, address, host, port))
                except ValueError as cause:  # noqa: PERF203 - each has its own
                    problems.append(
                        f"TF_CONFIG's address {short_repr(address)} of {kind} {index} {cause}"
                    )
    _check_together(tasks, problems)
    return tasks


def _host_and_port(address: object) -> tuple[str, int]:
    host, port = parse_address(address) if isinstance(address, str) else ("", None)
    if port is None:
        raise ValueError("is not 'host:port'")
    return host.lower(), port


def _check_together(tasks: list[_Task], problems: list[str]) -> None:
    if sum(task.kind == "chief" for task in tasks) > 1:
        problems.append("TF_CONFIG has more than one chief")
    seen: dict[tuple[str, int], _Task] = {}
    for task in tasks:
        first = seen.setdefault((task.host, task.port), task)
        if first is not task:
            both = f"{first.kind} {first.number} and {task.kind} {task.number}"
            problems.append(
                f"TF_CONFIG gives the address {short_repr(task.address)} to both {both}"
            )
    hosts = {task.host for task in tasks}
    here = sorted(filter(is_loopback, hosts))
    if here and len(here) < len(hosts):
        problems.append(
            f"TF_CONFIG mixes the loopback address {short_repr(here[0])} with the addresses of other hosts"
        )


def _own(config: dict[str, Any], problems: list[str]) -> tuple[str, int]:
    """Type and index of this process's own task."""
    task = config.get("task")
    if not isinstance(task, dict):
        problems.append("TF_CONFIG has no 'task' object")
        return "", 0
    kind = str(task.get("type"))
    addresses = _cluster(config).get(kind)
    index: Any = task.get("index")
    if kind == _NO_RANK and index is None:
        index = 0
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        problems.append(
            f"TF_CONFIG's task index {short_repr(index)} is not a whole number of 0 or more"
        )
    elif kind != _NO_RANK and index >= len(addresses if isinstance(addresses, list) else ()):
        problems.append(
            f"TF_CONFIG's task {short_repr(kind)} {short_repr(index)} is not in its cluster"
        )
    return kind, index


def _place(reader: EnvReader, ranks: list[_Task], kind: str, index: int) -> None:
    """Record the numbers of this task; `ranks` are the tasks in the order of their ranks."""
    hosts = [task.host for task in ranks]
    rank = next(
        rank for rank, task in enumerate(ranks) if (task.kind, task.number) == (kind, index)
    )
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    reader.put(f"task {kind} {index} of TF_CONFIG", rank=rank)
    reader.put("tasks of TF_CONFIG", world_size=len(ranks))
    on_its_host = "tasks of TF_CONFIG on this task's host"
    reader.put(on_its_host, local_rank=here.index(rank), local_world_size=len(here))
    reader.put("hosts of TF_CONFIG", node_rank=nodes.index(hosts[rank]), num_nodes=len(nodes))


TF_CONFIG = Launcher(
    name="tf_config",
    title="TF_CONFIG (TFJob, Azure ML TensorFlow jobs, by hand)",
    markers=("TF_CONFIG",),
    more=_read,
    needs_claim=True,
    source="TensorFlow documentation, 'Multi-worker training: TF_CONFIG'",
    generic_names=True,
)
