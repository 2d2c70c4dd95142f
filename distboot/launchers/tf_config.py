"""`TF_CONFIG`: TensorFlow's cluster description, set by TFJob, by Azure ML's TensorFlow jobs, or by a person.

Ranks follow TensorFlow's order of tasks: chief, workers, parameter servers. Tasks of one host name are one node.
An evaluator is no part of the cluster and is a job of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..address import is_loopback, parse_address
from ..errors import quoted
from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# TF_CONFIG={"cluster": {"chief": ["10.0.0.4:2222"], "worker": ["10.0.0.5:2222", "10.0.0.6:2222"]},
#            "task": {"type": "worker", "index": 0}}
_TASK_TYPES = ("chief", "worker", "ps")
_NO_RANK = "evaluator"
_LONGEST = 4_000_000  # bytes; a cluster of 100,000 tasks has about 3 MB


class _Task:
    """One task of the cluster."""

    __slots__ = ("address", "host", "index", "kind", "port")

    def __init__(self, kind: str, index: int, address: str, host: str, port: int) -> None:
        self.kind, self.index, self.address, self.host, self.port = kind, index, address, host.lower(), port


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, ("TF_CONFIG",)):
        return None
    reading = Reading(environ, "tf_config")
    reading.remedy = (
        'TF_CONFIG is to be {"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}, '
        "the same cluster for all, and another index for each task of a type"
    )
    config = _json_object(reading)
    tasks = _tasks(config, reading.problems)
    kind, index = _own(config, reading.problems)
    if kind == _NO_RANK:
        reading.put("rank", 0, "TF_CONFIG: an evaluator runs alone")
        reading.put("world_size", 1, "TF_CONFIG: an evaluator runs alone")
        reading.notes.append("this task is an evaluator: it is no part of the training cluster")
    elif not reading.problems:
        ranks = sorted((task for task in tasks if task.kind != _NO_RANK), key=lambda task: _TASK_TYPES.index(task.kind))
        _place(reading, ranks, kind, index)
        # Every task has the same cluster and hence the same first address. Its port belongs to TensorFlow's server.
        source = "first task of TF_CONFIG"
        return reading.placement(own_address=(ranks[0].host, source), port_seed=(ranks[0].address, source))
    return reading.placement()


def _json_object(reading: Reading) -> dict[str, object]:
    import json  # only here, so that other launchers do not pay for it

    text = reading.environ["TF_CONFIG"]
    if len(text) > _LONGEST:
        reading.problems.append(f"TF_CONFIG has {len(text)} characters; the longest that is read has {_LONGEST}")
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Without its text, in which a job may have more than the cluster.
        reading.problems.append(f"TF_CONFIG, {len(text)} characters, is not JSON: {error}")
        return {}
    if not isinstance(config, dict) or not config:
        reading.problems.append("TF_CONFIG is not a JSON object with 'cluster' and 'task'")
        return {}
    return config


def _tasks(config: dict[str, object], problems: list[str]) -> list[_Task]:
    """The tasks whose addresses can be used, in the order of the text; every problem of the others is recorded."""
    cluster = config.get("cluster")
    if config and not isinstance(cluster, dict):
        problems.append("TF_CONFIG has no 'cluster' object")
        if "sparseCluster" in config:
            problems.append("TF_CONFIG has a 'sparseCluster' (TFJob's enableDynamicWorker), which has no fixed ranks")
    tasks: list[_Task] = []
    for kind, addresses in cluster.items() if isinstance(cluster, dict) else ():
        if kind == "master":
            problems.append("TF_CONFIG has a 'master' task, which TensorFlow 2 calls 'chief'; rename it")
        elif kind not in (*_TASK_TYPES, _NO_RANK):
            problems.append(f"TF_CONFIG has tasks of the unknown type {quoted(kind)}")
        elif not isinstance(addresses, list) or not addresses:
            problems.append(f"TF_CONFIG's {quoted(kind)} tasks are not a list of 'host:port'")
        else:
            tasks += filter(None, (_task(kind, index, address, problems) for index, address in enumerate(addresses)))
    _check_together(tasks, problems)
    return tasks


def _task(kind: str, index: int, address: object, problems: list[str]) -> _Task | None:
    try:
        host, port = parse_address(address) if isinstance(address, str) else ("", None)
    except ValueError as cause:
        problems.append(f"TF_CONFIG's address {quoted(address)} of {kind} {index} {cause}")
        return None
    if port is None or not isinstance(address, str):
        problems.append(f"TF_CONFIG's address {quoted(address)} of {kind} {index} is not 'host:port'")
        return None
    return _Task(kind, index, address, host, port)


def _check_together(tasks: list[_Task], problems: list[str]) -> None:
    if sum(task.kind == "chief" for task in tasks) > 1:
        problems.append("TF_CONFIG has more than one chief")
    seen: dict[tuple[str, int], _Task] = {}
    for task in tasks:
        first = seen.setdefault((task.host, task.port), task)
        if first is not task:
            both = f"{first.kind} {first.index} and {task.kind} {task.index}"
            problems.append(f"TF_CONFIG gives the address {quoted(task.address)} to both {both}")
    hosts = {task.host for task in tasks}
    here = sorted(host for host in hosts if is_loopback(host))
    if here and len(here) < len(hosts):
        problems.append(f"TF_CONFIG mixes the loopback address {quoted(here[0])} with the addresses of other hosts")


def _own(config: dict[str, object], problems: list[str]) -> tuple[str, int]:
    """Type and index of this process's own task."""
    task = config.get("task")
    if not isinstance(task, dict):
        if config:
            problems.append("TF_CONFIG has no 'task' object")
        return "", 0
    kind, index, cluster = str(task.get("type")), task.get("index"), config.get("cluster")
    addresses = cluster.get(kind) if isinstance(cluster, dict) else None
    if kind == _NO_RANK and index is None:
        return kind, 0
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        problems.append(f"TF_CONFIG's task index {quoted(index)} is not a whole number of 0 or more")
    elif kind != _NO_RANK and index >= len(addresses if isinstance(addresses, list) else ()):
        problems.append(f"TF_CONFIG's task {quoted(kind)} {quoted(index)} is not in its cluster")
    else:
        return kind, index
    return kind, 0


def _place(reading: Reading, ranks: list[_Task], kind: str, index: int) -> None:
    """Record the numbers of this task; `ranks` are the tasks in the order of their ranks."""
    hosts = [task.host for task in ranks]
    rank = next(rank for rank, task in enumerate(ranks) if (task.kind, task.index) == (kind, index))
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    reading.put("rank", rank, f"task {kind} {index} of TF_CONFIG")
    reading.put("world_size", len(ranks), "tasks of TF_CONFIG")
    reading.put("local_rank", here.index(rank), "tasks of TF_CONFIG on this task's host")
    reading.put("local_world_size", len(here), "tasks of TF_CONFIG on this task's host")
    reading.put("node_rank", nodes.index(hosts[rank]), "hosts of TF_CONFIG")
    reading.put("num_nodes", len(nodes), "hosts of TF_CONFIG")


TF_CONFIG = Launcher(
    name="tf_config",
    title="TF_CONFIG (TFJob, Azure ML TensorFlow jobs, by hand)",
    markers=("TF_CONFIG",),
    read=_read,
    source="TensorFlow documentation, 'Multi-worker training: TF_CONFIG'",
    plain=True,
)
