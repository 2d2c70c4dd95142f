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


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, ("TF_CONFIG",)):
        return None
    reading = Reading(environ, "tf_config")
    cluster, task_type, index = _parsed(reading)
    if task_type == _NO_RANK:
        reading.put("rank", 0, "TF_CONFIG: an evaluator runs alone")
        reading.put("world_size", 1, "TF_CONFIG: an evaluator runs alone")
        reading.notes.append("this task is an evaluator: it is no part of the training cluster")
    elif not reading.problems:
        first = _place(reading, cluster, task_type, index)
        # Every task has the same cluster and hence the same first address. Its port belongs to TensorFlow's server.
        source = "first task of TF_CONFIG"
        return reading.placement(own_address=(parse_address(first)[0], source), port_seed=(first, source))
    return reading.placement()


def _parsed(reading: Reading) -> tuple[dict[str, list[str]], str, int]:
    """Cluster, task type and task index; every problem is recorded in `reading`."""
    problems = reading.problems
    config = _json_object(reading)
    cluster, task = config.get("cluster"), config.get("task")
    if config and not isinstance(cluster, dict):
        problems.append("TF_CONFIG has no 'cluster' object")
    if config and not isinstance(task, dict):
        problems.append("TF_CONFIG has no 'task' object")
    cluster = _checked_cluster(cluster, problems) if isinstance(cluster, dict) else {}
    task = task if isinstance(task, dict) else {}
    task_type, index = str(task.get("type")), task.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        if task:
            problems.append(f"TF_CONFIG's task index {quoted(index)} is not a whole number of 0 or more")
        index = 0
    elif task_type != _NO_RANK and (task_type not in cluster or index >= len(cluster[task_type])):
        problems.append(f"TF_CONFIG's task {quoted(task_type)} {quoted(index)} is not in its cluster")
    return cluster, task_type, index


def _json_object(reading: Reading) -> dict[str, object]:
    import json  # only here, so that other launchers do not pay for it

    text = reading.environ["TF_CONFIG"]
    try:
        config = json.loads(text) if len(text) <= _LONGEST else None
    except (ValueError, RecursionError) as error:
        reading.problems.append(f"TF_CONFIG is not JSON: {error}")
        return {}
    if not isinstance(config, dict) or not config:
        reading.problems.append("TF_CONFIG is not a JSON object with 'cluster' and 'task'")
        return {}
    return config


def _checked_cluster(cluster: dict[str, object], problems: list[str]) -> dict[str, list[str]]:
    """The usable part of the cluster. Addresses are `host:port` strings."""
    checked: dict[str, list[str]] = {}
    seen: dict[str, str] = {}
    for task_type, addresses in cluster.items():
        if task_type == "master":
            problems.append("TF_CONFIG has a 'master' task, which TensorFlow 2 calls 'chief'; rename it")
        elif task_type not in (*_TASK_TYPES, _NO_RANK):
            problems.append(f"TF_CONFIG has tasks of the unknown type {quoted(task_type)}")
        elif not isinstance(addresses, list) or not addresses:
            problems.append(f"TF_CONFIG's {quoted(task_type)} tasks are not a list of 'host:port'")
        else:
            checked[task_type] = [str(address) for address in addresses]
            for index, address in enumerate(addresses):
                _check_address(f"{task_type} {index}", address, seen, problems)
    if len(checked.get("chief", [])) > 1:
        problems.append("TF_CONFIG has more than one chief")
    hosts = {parse_address(address)[0] for address in seen}
    if len(hosts) > 1 and any(is_loopback(host) for host in hosts):
        problems.append("TF_CONFIG mixes loopback addresses with those of other hosts")
    return checked


def _check_address(task: str, address: object, seen: dict[str, str], problems: list[str]) -> None:
    try:
        _, port = parse_address(address) if isinstance(address, str) else (None, None)
    except ValueError as cause:
        problems.append(f"TF_CONFIG's address {quoted(address)} of {task} {cause}")
        return
    if port is None or not isinstance(address, str):
        problems.append(f"TF_CONFIG's address {quoted(address)} of {task} is not 'host:port'")
    elif address in seen:
        problems.append(f"TF_CONFIG gives the address {quoted(address)} to both {seen[address]} and {task}")
    else:
        seen[address] = task


def _place(reading: Reading, cluster: dict[str, list[str]], task_type: str, index: int) -> str:
    """Record the numbers of this task; the address of the first task, which is rank 0."""
    tasks = [(kind, i) for kind in _TASK_TYPES for i in range(len(cluster.get(kind, ())))]
    hosts = [parse_address(cluster[kind][i])[0] for kind, i in tasks]
    rank = tasks.index((task_type, index))
    here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    reading.put("rank", rank, f"task {task_type} {index} of TF_CONFIG")
    reading.put("world_size", len(tasks), "tasks of TF_CONFIG")
    reading.put("local_rank", here.index(rank), "tasks of TF_CONFIG on this task's host")
    reading.put("local_world_size", len(here), "tasks of TF_CONFIG on this task's host")
    reading.put("node_rank", nodes.index(hosts[rank]), "hosts of TF_CONFIG")
    reading.put("num_nodes", len(nodes), "hosts of TF_CONFIG")
    return cluster[tasks[0][0]][tasks[0][1]]


TF_CONFIG = Launcher(
    name="tf_config",
    title="TF_CONFIG (TFJob, Azure ML TensorFlow jobs, by hand)",
    markers=("TF_CONFIG",),
    read=_read,
    source="TensorFlow documentation, 'Multi-worker training: TF_CONFIG'",
    plain=True,
)
