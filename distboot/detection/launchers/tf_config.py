"""`TF_CONFIG`: TensorFlow's cluster description, set by TFJob, by Azure ML, or by hand.

Ranks follow TensorFlow's order of tasks: chief, workers, parameter servers. Tasks of one host name
are one node. An evaluator is not part of the cluster and is a job of its own. `corrected` changes
what TensorFlow 2 cannot take as Azure ML sets it; no number of any task changes by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.text import counted, short_repr
from ..env_reader import EnvReader
from ..parse import is_loopback, parse_address
from . import Launcher

_TASK_TYPES = ("chief", "worker", "ps")
_NO_RANK = "evaluator"
_KNOWN = (*_TASK_TYPES, _NO_RANK)
_NAME = "TF_CONFIG"
_LONGEST = 4_000_000  # bytes; a cluster of 100,000 tasks has about 3 MB


class _Task(NamedTuple):
    kind: str
    number: int
    address: str
    host: str
    port: int


def has_servers(environ: Mapping[str, str]) -> bool:
    """Whether there are parameter servers: all tasks but the chief then run servers."""
    text = environ.get(_NAME)
    if text is None:
        return False
    config = _json_object(text, [])
    servers = _cluster(config).get("ps")
    return bool(servers)


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
    rest = dict(cluster)
    empty = [kind for kind in _KNOWN if cluster.get(kind) == []]
    for kind in empty:
        del rest[kind]
    if empty:
        listed = ", ".join(empty)
        what = f"the empty list of {listed}"
        notes.append(f"TF_CONFIG: {what} is left out, as TensorFlow crashes with it")
    return rest


def _lacks_chief(cluster: dict[str, Any]) -> bool:
    """Whether there is no chief, where TensorFlow's ParameterServerStrategy runs the script.

    Azure ML has none.
    """
    leaders = {"chief", "master"}
    kinds = cluster.keys()
    has_leader = not kinds.isdisjoint(leaders)
    if has_leader or "ps" not in kinds:
        return False
    workers = cluster.get("worker")
    if not isinstance(workers, list):
        return False
    return len(workers) > 1


def _with_chief(config: dict[str, Any], workers: list[Any]) -> dict[str, Any]:
    """The same with worker 0 as the chief."""
    chief, *others = workers
    cluster = {"chief": [chief], **config["cluster"], "worker": others}
    fixed = {**config, "cluster": cluster}
    task = config.get("task")
    if not isinstance(task, dict):
        return fixed
    kind = task.get("type")
    index: Any = task.get("index")
    if kind != "worker" or index not in range(len(workers)):
        return fixed
    changed = {"index": index - 1}
    if index == 0:
        changed = {"type": "chief"}
    fixed["task"] = {**task, **changed}
    return fixed


def _claim(environ: Mapping[str, str]) -> bool:
    """Not with an empty object, which TensorFlow takes for none, too."""
    return environ[_NAME].strip() != "{}"


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
        reader.record("TF_CONFIG: an evaluator runs alone", rank=0, world_size=1)
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
        length = counted(len(text), "character")
        problems.append(f"TF_CONFIG, {length}, is not JSON: {error}")
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
    """The tasks with valid addresses, in the order of the text; records all other problems."""
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
    shown = short_repr(kind)
    if kind == "master":
        return "TF_CONFIG has a 'master' task, which TensorFlow 2 calls 'chief'; rename it"
    if kind not in _KNOWN:
        return f"TF_CONFIG has tasks of the unknown type {shown}"
    if not isinstance(addresses, list):
        return f"TF_CONFIG's {shown} tasks are not a list of 'host:port'"
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
        place = (task.host, task.port)
        first = seen.setdefault(place, task)
        if first is not task:
            address = short_repr(task.address)
            one = f"{first.kind} {first.number}"
            other = f"{task.kind} {task.number}"
            problems.append(f"TF_CONFIG gives the address {address} to both {one} and {other}")
    hosts = {task.host for task in tasks}
    here = sorted(filter(is_loopback, hosts))
    others = len(hosts) - len(here)
    if here and others:
        shown = short_repr(here[0])
        problems.append(
            f"TF_CONFIG mixes the loopback address {shown} with the addresses of other hosts"
        )


def _own(config: dict[str, Any], problems: list[str]) -> tuple[str, int]:
    """Type and index of this process's own task."""
    task = config.get("task")
    if not isinstance(task, dict):
        problems.append("TF_CONFIG has no 'task' object")
        return "", 0
    kind = str(task.get("type"))
    index: Any = task.get("index")
    is_evaluator = kind == _NO_RANK
    if is_evaluator and index is None:
        index = 0
    shown = short_repr(index)
    is_index = type(index) is int and index >= 0
    if not is_index:
        problems.append(f"TF_CONFIG's task index {shown} is not a whole number of 0 or more")
        return kind, 0
    if is_evaluator:
        return kind, index
    addresses = _cluster(config).get(kind)
    places = _places(addresses)
    if index not in places:
        problems.append(f"TF_CONFIG's task {short_repr(kind)} {shown} is not in its cluster")
    return kind, index


def _places(addresses: object) -> range:
    """The indexes of the tasks of a type."""
    count = 0
    if isinstance(addresses, list):
        count = len(addresses)
    return range(count)


def _place(reader: EnvReader, tasks: list[_Task], kind: str, index: int) -> None:
    """Record the numbers of this task, and where rank 0 is."""
    ranks = [task for task in tasks if task.kind != _NO_RANK]
    ranks.sort(key=lambda task: _TASK_TYPES.index(task.kind))
    names = [(task.kind, task.number) for task in ranks]
    hosts = [task.host for task in ranks]
    rank = names.index((kind, index))
    own_host = hosts[rank]
    nodes = list(dict.fromkeys(hosts))
    node_rank = nodes.index(own_host)
    here = hosts.count(own_host)
    before = hosts[:rank].count(own_host)
    reader.record(f"task {kind} {index} of TF_CONFIG", rank=rank)
    reader.record("tasks of TF_CONFIG", world_size=len(ranks))
    on_its_host = "tasks of TF_CONFIG on this task's host"
    reader.record(on_its_host, local_rank=before, local_world_size=here)
    reader.record("hosts of TF_CONFIG", node_rank=node_rank, num_nodes=len(nodes))
    # Every task has the same cluster and hence the same first address, whose port belongs to
    # TensorFlow's server.
    first = ranks[0]
    source = "first task of TF_CONFIG"
    reader.own_address = (first.host, source)
    reader.port_seed = (first.address, source)


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
    claim=_claim,
    needs_claim=True,
    read=_read,
    read_by=("tensorflow",),
    generic_names=True,
)
