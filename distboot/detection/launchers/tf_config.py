"""`TF_CONFIG`: TensorFlow's cluster description, set by TFJob, by Azure ML's TensorFlow jobs, or by hand.

Ranks follow TensorFlow's order of tasks: chief, workers, parameter servers. Tasks of one host name are
one node. An evaluator is not part of the cluster and is a job of its own. `corrected` changes what
TensorFlow 2 cannot take as Azure ML sets it; no number of any task changes by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.text import short_repr
from ..env_reader import EnvReader
from ..parse import is_loopback, parse_address
from . import Launcher

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
    """Whether there are parameter servers: all tasks but the chief then run servers that never end."""
    if _NAME not in environ:
        return False
    return bool(_cluster(_json_object(environ[_NAME], [])).get("ps"))


def corrected(environ: Mapping[str, str]) -> dict[str, str]:
    """The TF_CONFIG that TensorFlow 2 can take, if the given one has to be changed for that."""
    if _NAME not in environ:
        return {}
    config, notes = _corrected(_json_object(environ[_NAME], []))
    if not notes:
        return {}
    import json  # here and below, so that other launchers do not pay for it

    return {_NAME: json.dumps(config)}


def _corrected(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A TF_CONFIG that TensorFlow 2 can take, and notes on what was changed for that."""
    notes: list[str] = []
    cluster = _without_empty(_cluster(config), notes)
    fixed = {**config, "cluster": cluster}
    if _lacks_chief(cluster):
        fixed = _with_chief(fixed, cluster["worker"])
        notes.append(
            "TF_CONFIG: parameter servers need a chief, which worker 0 becomes; "
            "worker 1 becomes worker 0, …"
        )
    return fixed, notes


def _without_empty(cluster: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The cluster without empty lists.

    Azure ML's number of parameter servers is 0 by default, and TensorFlow 2.21 is ended by SIGSEGV.
    """
    empty = [kind for kind in (*_TASK_TYPES, _NO_RANK) if cluster.get(kind) == []]
    if not empty:
        return cluster
    what = f"the empty list of {', '.join(empty)}"
    notes.append(f"TF_CONFIG: {what} is left out, as TensorFlow crashes with it")
    return {kind: tasks for kind, tasks in cluster.items() if kind not in empty}


def _lacks_chief(cluster: dict[str, Any]) -> bool:
    """Whether there is no chief, which is where TensorFlow 2's ParameterServerStrategy runs the script.

    Azure ML has none.
    """
    if "ps" not in cluster or "chief" in cluster or "master" in cluster:
        return False
    workers = cluster.get("worker")
    return isinstance(workers, list) and len(workers) > 1


def _with_chief(config: dict[str, Any], workers: list[Any]) -> dict[str, Any]:
    """The same with worker 0 as the chief."""
    cluster = {"chief": workers[:1], **config["cluster"], "worker": workers[1:]}
    fixed = {**config, "cluster": cluster}
    task = config.get("task")
    if not isinstance(task, dict) or task.get("type") != "worker":
        return fixed
    index: Any = task.get("index")
    if index == 0:
        fixed["task"] = {**task, "type": "chief"}
    elif index in range(len(workers)):
        fixed["task"] = {**task, "index": index - 1}
    return fixed


def _read(reader: EnvReader) -> None:
    reader.remedy = (
        'TF_CONFIG must be {"cluster": {"worker": ["host:port", …]}, '
        '"task": {"type": "worker", "index": 0}}, '
        "the same cluster for all, and another index for each task of a type"
    )
    problems = reader.problems
    config = _json_object(reader.environ[_NAME], problems)
    if not config:
        return
    reader.notes += _corrected(config)[1]
    tasks = _tasks(config, problems)
    kind, index = _own(config, problems)
    if kind == _NO_RANK:
        reader.put("TF_CONFIG: an evaluator runs alone", rank=0, world_size=1)
        reader.notes.append("this task is an evaluator: it is not part of the training cluster")
    elif not problems:
        _place(reader, tasks, kind, index)


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
    if isinstance(cluster, dict):
        return cluster
    return {}


def _tasks(config: dict[str, Any], problems: list[str]) -> list[_Task]:
    """The tasks with valid addresses, in the order of the text; records every problem of the others."""
    if not isinstance(config.get("cluster"), dict):
        problems.append("TF_CONFIG has no 'cluster' object")
        if "sparseCluster" in config:
            problems.append(
                "TF_CONFIG has a 'sparseCluster' (TFJob's enableDynamicWorker), "
                "which has no fixed ranks"
            )
    tasks: list[_Task] = []
    for kind, addresses in _cluster(config).items():
        wrong = _wrong_tasks(kind, addresses)
        if wrong:
            problems.append(wrong)
            continue
        for index, address in enumerate(addresses):
            try:
                tasks.append(_task(kind, index, address))
            except ValueError as cause:  # noqa: PERF203 - each has its own
                what = f"TF_CONFIG's address {short_repr(address)} of {kind} {index}"
                problems.append(f"{what} {cause}")
    _check_together(tasks, problems)
    return tasks


def _wrong_tasks(kind: str, addresses: object) -> str:
    """What is wrong with all tasks of a type; empty if nothing is."""
    if kind == "master":
        return "TF_CONFIG has a 'master' task, which TensorFlow 2 calls 'chief'; rename it"
    if kind not in (*_TASK_TYPES, _NO_RANK):
        return f"TF_CONFIG has tasks of the unknown type {short_repr(kind)}"
    if not isinstance(addresses, list):
        return f"TF_CONFIG's {short_repr(kind)} tasks are not a list of 'host:port'"
    return ""


def _task(kind: str, index: int, address: object) -> _Task:
    if not isinstance(address, str):
        raise ValueError("is not 'host:port'")  # noqa: TRY004 - of a text
    host, port = parse_address(address)
    if port is None:
        raise ValueError("is not 'host:port'")
    return _Task(kind, index, address, host.lower(), port)


def _check_together(tasks: list[_Task], problems: list[str]) -> None:
    chiefs = [task for task in tasks if task.kind == "chief"]
    if len(chiefs) > 1:
        problems.append("TF_CONFIG has more than one chief")
    seen: dict[tuple[str, int], _Task] = {}
    for task in tasks:
        first = seen.setdefault((task.host, task.port), task)
        if first is not task:
            both = f"{first.kind} {first.number} and {task.kind} {task.number}"
            address = short_repr(task.address)
            problems.append(f"TF_CONFIG gives the address {address} to both {both}")
    hosts = {task.host for task in tasks}
    here = sorted(filter(is_loopback, hosts))
    if 0 < len(here) < len(hosts):
        problems.append(
            f"TF_CONFIG mixes the loopback address {short_repr(here[0])} "
            "with the addresses of other hosts"
        )


def _own(config: dict[str, Any], problems: list[str]) -> tuple[str, int]:
    """Type and index of this process's own task."""
    task = config.get("task")
    if not isinstance(task, dict):
        problems.append("TF_CONFIG has no 'task' object")
        return "", 0
    kind = str(task.get("type"))
    index: Any = task.get("index")
    if kind == _NO_RANK and index is None:
        index = 0
    if type(index) is not int or index < 0:
        shown = short_repr(index)
        problems.append(f"TF_CONFIG's task index {shown} is not a whole number of 0 or more")
    elif kind != _NO_RANK and not _has_task(config, kind, index):
        shown = f"{short_repr(kind)} {short_repr(index)}"
        problems.append(f"TF_CONFIG's task {shown} is not in its cluster")
    return kind, index


def _has_task(config: dict[str, Any], kind: str, index: int) -> bool:
    addresses = _cluster(config).get(kind)
    return isinstance(addresses, list) and index < len(addresses)


def _place(reader: EnvReader, tasks: list[_Task], kind: str, index: int) -> None:
    """Record the numbers of this task, and where rank 0 is."""
    ranks = [task for task in tasks if task.kind != _NO_RANK]
    ranks.sort(key=lambda task: _TASK_TYPES.index(task.kind))
    hosts = [task.host for task in ranks]
    rank = [(task.kind, task.number) for task in ranks].index((kind, index))
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    nodes = list(dict.fromkeys(hosts))
    reader.put(f"task {kind} {index} of TF_CONFIG", rank=rank)
    reader.put("tasks of TF_CONFIG", world_size=len(ranks))
    on_its_host = "tasks of TF_CONFIG on this task's host"
    reader.put(on_its_host, local_rank=here.index(rank), local_world_size=len(here))
    reader.put("hosts of TF_CONFIG", node_rank=nodes.index(hosts[rank]), num_nodes=len(nodes))
    # Every task has the same cluster and hence the same first address, whose port belongs to
    # TensorFlow's server.
    source = "first task of TF_CONFIG"
    reader.own_address = (ranks[0].host, source)
    reader.port_seed = (ranks[0].address, source)


TF_CONFIG = Launcher(
    name="tf_config",
    title="TF_CONFIG (TFJob, Azure ML TensorFlow jobs, by hand)",
    source="TensorFlow documentation, 'Multi-worker training: TF_CONFIG'",
    # Of two hosts with two tasks each
    sample=(
        'TF_CONFIG={{"cluster":{{"worker":["node-0:2222","node-0:2223","node-1:2222","node-1:2223"]'
        '}},"task":{{"type":"worker","index":{rank}}}}}'
    ),
    markers=("TF_CONFIG",),
    needs_claim=True,
    more=_read,
    generic_names=True,
)
