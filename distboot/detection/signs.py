"""Which variables show other processes of the job, where no launcher numbers this one. Pure, as `detect` is.

A process is alone if nothing speaks against it. Four kinds of variables do, whatever their prefix:
- an index beside a count above 1 (`ACME_NODE_RANK=1`, `ACME_NUM_NODES=2`), and a rank above 0 without
  its count;
- a number of processes or nodes above 1 (`NNODES=2`, `ACME_WORLD_SIZE=8`), or one without a prefix that
  is not a number;
- a list of several hosts (`ACME_WORKER_HOSTNAMES=10.0.0.4,10.0.0.5`);
- the address of another host as that of rank 0 (`MASTER_ADDR=10.0.0.4`). Only this host can tell whether
  the address is its own: `addresses` lists those to ask about, and `here` asks.
CI systems and job arrays number independent jobs in the same way. So an index counts only if it is one
of a node, a worker, a task, a process or their like (not of a job, a shard, a step), or is called a
rank; and the families of variables in `_INDEPENDENT` never count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.text import digits, short_repr
from .parse import is_loopback, parse_address
from .placement import Placement

# Independent jobs, or an allocation in which a launcher starts the ranks: CI systems, batch systems, clusters of data
# processing, databases. A launcher has a record of its own; an allocation has a warning (`allocation`).
_INDEPENDENT = re.compile(
    r"(\w+_)??("
    # CI systems and tests
    r"CI|CIRCLE|BUILDKITE|SEMAPHORE|KNAPSACK|HARNESS|TRAVIS|GITHUB|BITRISE|DRONE|JENKINS|"
    r"PYTEST|JEST|"
    # batch systems and workflows
    r"CLOUD_RUN|BATCH_TASK|BATCH_COMPUTE|SLURMD?|SBATCH|SALLOC|PBS|LSB|LSF|SGE|OAR|FLUX|CONDOR|"
    r"NOMAD|AIRFLOW|NXF|SNAKEMAKE|"
    # settings of the launchers
    r"OMPI_MCA|PMIX_MCA|PRTE_MCA|LOCAL|"
    # clusters of data processing, brokers and databases
    r"RAY|DASK|SPARK|FLINK|HADOOP|CELERY|KAFKA|ES|ELASTIC\w*|OPENSEARCH|CASSANDRA|REDIS|"
    r"MONGO\w*|ETCD|ZOO\w*|RABBITMQ|POSTGRES\w*|MYSQL|MARIADB|CLICKHOUSE|CONSUL|NATS|MINIO"
    r")_"
)

_NOUNS = (
    *("NODE", "WORKER", "TASK", "HOST", "MACHINE", "POD", "REPLICA", "INSTANCE", "PROCESS", "PROC"),
    *("MEMBER", "PEER", "TRAINER", "ROLE", "RANK", "VM"),
)
_PLURAL_NOUNS = tuple(f"{noun}ES" if noun == "PROCESS" else f"{noun}S" for noun in _NOUNS)
_SINGULARS = {"PROCESSES": "PROCESS"}  # those that do not just lose their S
# Plurals that count without a further word (`UPC_NODES`). Not WORKERS and TASKS, which one process may have.
_COUNTING_PLURALS = (
    *("NODES", "HOSTS", "MACHINES", "PROCESSES", "PROCS", "TRAINERS"),
    *("PODS", "REPLICAS", "INSTANCES", "VMS"),
)
_KINDS = (
    *("RANK", "INDEX", "IDX", "ID", "NUMBER", "ORDINAL", "NODEID", "NODENUM", "PROCNO", "PROCID"),
    *("RANKID", "NO"),
)
_PROCESSES = f"(?:{'|'.join(_NOUNS)})"
_PLURALS = f"(?:{'|'.join(_PLURAL_NOUNS)})"
_INDEX = re.compile(
    rf"(?P<prefix>\w*?)(?P<noun>{_PROCESSES}_)?"
    rf"(?P<kind>{'|'.join(_KINDS)})"
)
_COUNT_NOUNS = (
    rf"NUM_{_PLURALS}",
    rf"N_?{_PLURALS}",
    rf"TOTAL_{_PLURALS}",
    rf"NUMBER_OF_{_PLURALS}",
    rf"{_PLURALS}_(?:NUM|COUNT|CNT|TOTAL)",
    rf"NUM_{_PROCESSES}",
    rf"{_PROCESSES}_(?:NUM|COUNT|CNT)",
    r"WORLD(?:_?SIZE)?",
    r"(?<=_)GROUP_SIZE",  # without a prefix it is a setting of quantization
    r"RANKS",
)
_COUNT = re.compile(
    rf"(?P<prefix>\w*?)(?:(?P<noun>{'|'.join(_COUNT_NOUNS)})|"
    rf"(?P<plural>{'|'.join(_COUNTING_PLURALS)})|SIZE|COUNT|CNT|TOTAL)"
)
# A number of these above 1 needs no index beside it. Not NUM_WORKERS, which data loaders have, nor NPROCS, of make.
_SIZE = re.compile(
    r"(\w+_)?(WORLD_?SIZE|NUM_NODES|N_?NODES|NODES_NUM)|"
    r"(AZUREML_)?NODE_COUNT|TOTAL_NODES|NUM_GPU_NODES|"
    r"NUM_RANKS|N_?RANKS|RANK_SIZE|NUM_PROCESSES|NUM_HOSTS|NUM_MACHINES|"
    r"DET_KUBERNETES_JOB_PARALLELISM"
)
# Those of them that count something, also where their value is no number. Not NUM_PROCESSES, which may be "auto".
_PLAIN_SIZE = re.compile(
    r"WORLD_?SIZE|NUM_NODES|N_?NODES|NODES_NUM|NODE_COUNT|TOTAL_NODES|NUM_GPU_NODES|"
    r"NUM_RANKS|N_?RANKS|RANK_SIZE|NUM_HOSTS|NUM_MACHINES"
)
# Which of several processes this is, by a rank alone. Not any rank: LORA_RANK is that of a matrix.
_RANK = re.compile(rf"(\w+_)?({_PROCESSES}|GLOBAL|WORLD|GROUP|CLUSTER|JOB|DIST|DISTRIBUTED)_RANK")
_HOSTS = re.compile(
    r"(\w+_)?((WORKER|NODE|NODES|HOST|POD|PEER|TRAINER)_"
    r"(IPS|IP_LIST|HOSTNAMES|ADDRS|ADDRESSES|ENDPOINTS)|"
    r"WORKER_HOSTS|PROCESS_ADDRESSES)"
)
_ADDRESS = re.compile(
    r"(\w+_)?(MASTER_ADDR|COORDINATOR_ADDR(ESS)?|LEADER_ADDR(ESS)?|MASTER_NODE_IP|INIT_METHOD|"
    r"BATCH_MASTER_NODE|CHIEF_ADDR(ESS)?|RANK_?0_(IP|HOST|ADDR|ADDRESS))|"
    r"(PET_)?RDZV_ENDPOINT|PRIMARY_ADDR|MAIN_PROCESS_IP|CHIEF_IP|DIST_URL|NCCL_COMM_ID|"
    r"NEURON_RT_ROOT_COMM_ID|DMLC_PS_ROOT_URI|DMLC_TRACKER_URI|MS_SCHED_HOST|PADDLE_MASTER|"
    r"DET_CHIEF_IP|BEAKER_LEADER_REPLICA_HOSTNAME"
)
_URLS = ("INIT_METHOD", "DIST_URL")  # the ends of names of addresses that are URLs
# AWS Neuron, "Multi-node training with JAX": "32,32" are the devices of two processes, "32" those of one.
_DEVICES = re.compile(r"NEURON_PJRT_PROCESSES_NUM_DEVICES")
_AZUREML_TASK = re.compile(r"AZ_BATCHAI_TASK_INDEX")
# With one of these words a name of any of these kinds ends; most names of an environment do not.
_LAST_WORDS_UPPER = (
    *_NOUNS,
    *_KINDS,
    *_PLURAL_NOUNS,
    *(f"N{plural}" for plural in _PLURAL_NOUNS),
    *("SIZE", "WORLDSIZE", "WORLD", "COUNT", "CNT", "TOTAL", "NUM", "PARALLELISM", "DEVICES"),
    *("ADDR", "ADDRS", "ADDRESS", "ADDRESSES", "IP", "IPS", "HOSTNAME", "HOSTNAMES", "LIST"),
    *("METHOD", "MASTER", "URI", "URL", "ENDPOINT", "ENDPOINTS"),
)
_LAST_WORDS = frozenset((*_LAST_WORDS_UPPER, *map(str.lower, _LAST_WORDS_UPPER)))
# Words before an index (ACME_JOB_INDEX) with which it is that of a job of its own
_JOBS = re.compile(
    r"(^|_)(ARRAY|SHARD|JOB|STEP|TESTS?|SPLIT|CHUNK|PARTITION|MATRIX|BUILD|STAGE|TRIAL|"
    r"COMPLETION)_$"
)
MALFORMED = "not a valid number of processes or nodes"
_LONGEST = 100_000  # characters of a list of hosts that are read


class Sign(NamedTuple):
    """Variables that say that this process has others beside it."""

    variables: tuple[str, ...]  # the index before the count
    values: tuple[str, ...]
    meaning: str  # that reads well after the variables
    host: str = ""  # the one that they say is rank 0's, if any

    def __str__(self) -> str:
        pairs = zip(self.variables, self.values, strict=True)
        texts = [f"{name}={short_repr(value)}" for name, value in pairs]
        return f"{', '.join(texts)}: {self.meaning}"


def names(environ: Iterable[str]) -> list[str]:
    """The variables that may be a sign by their names, which scripts also write in small letters."""
    return [name for name in environ if name.rpartition("_")[2] in _LAST_WORDS]


def signs(environ: Mapping[str, str]) -> list[Sign]:
    """Everything in an environment that shows other processes, but for addresses."""
    present = _named(environ)
    found = list(_pairs(environ, present))
    used = {name for sign in found for name in sign.variables}
    for name in present:
        if name not in used:
            found += _signs_of_one(name, environ[name])
    return found


def _named(environ: Mapping[str, str]) -> list[str]:
    """The variables that may be a sign, without those of independent jobs."""
    return [name for name in names(environ) if not _INDEPENDENT.match(name.upper())]


def addresses(environ: Mapping[str, str]) -> list[Sign]:
    """The variables with an address of rank 0, each a sign if that is not this host."""
    found = []
    for name in names(environ):
        host = _host_of_rank0(name.upper(), environ[name].strip())
        if host and not is_loopback(host):
            found.append(Sign((name,), (environ[name],), "the address of rank 0", host))
    return found


def _host_of_rank0(name: str, value: str) -> str:
    """The host in a variable that names that of rank 0; empty for any other variable."""
    if not _ADDRESS.fullmatch(name) or _INDEPENDENT.match(name):
        return ""
    if name.endswith(_URLS) and not value.startswith("tcp://"):
        return ""  # a file that all processes share
    return _host_of(value)


def other_nodes(
    environ: Mapping[str, str], placement: Placement, own: Iterable[str]
) -> Sign | None:
    """An index and a count by which this is not the node that it is by its placement, or None.

    Variables that begin with a word of `own` are those of the platform itself, and those without a
    prefix are compared elsewhere.
    """
    families = {name.partition("_")[0] for name in own}
    for sign in _pairs(environ, _named(environ)):
        index = _INDEX.fullmatch(sign.variables[0].upper())
        assert index is not None
        prefix = index["prefix"]
        if not prefix or prefix.partition("_")[0] in families:
            continue
        if _contradicts(index, sign.values, placement):
            return sign
    return None


def _contradicts(index: re.Match[str], values: Sequence[str], placement: Placement) -> bool:
    """Whether an index and a count are not those of this node, nor of a process on it."""
    number = digits(values[0])
    count = digits(values[1])
    nodes = placement.world_size
    if number is None or count is None:
        return False
    if not index["noun"]:  # ACME_RANK may be that of a process
        return count % nodes != 0
    if index["kind"] == "RANK":
        return (number, count) != (placement.rank, nodes)
    # An index may count from 1
    return count != nodes or number not in (placement.rank, placement.rank + 1)


def _pairs(environ: Mapping[str, str], present: Sequence[str]) -> Iterator[Sign]:
    """An index and a count of one prefix: ACME_WORKER_INDEX and ACME_GROUP_SIZE."""
    counts = _counts(present)
    if not counts:
        return
    for name in present:
        index = _INDEX.fullmatch(name.upper())
        if index is None:
            continue
        count = _count_beside(index, counts)
        if count is not None and _shows_several(index["kind"], environ[name], environ[count]):
            values = (environ[name], environ[count])
            yield Sign((name, count), values, f"one of several, by {name} and {count}")


def _counts(present: Iterable[str]) -> dict[str, dict[bool, str]]:
    """Prefix -> the count of that prefix; True: its name has what it counts."""
    counts: dict[str, dict[bool, str]] = {}
    for name in present:
        count = _COUNT.fullmatch(name.upper())
        if count is None:
            continue
        prefix = count["prefix"]
        plural = count["plural"]
        if plural is not None:
            singular = _SINGULARS.get(plural) or plural.removesuffix("S")
            prefix = f"{prefix}{singular}_"
        counts.setdefault(prefix, {}).setdefault(count["noun"] is not None, name)
    return counts


def _count_beside(index: re.Match[str], counts: Mapping[str, Mapping[bool, str]]) -> str | None:
    """The count that belongs to an index; None: there is none, or it is that of independent jobs."""
    prefix = index["prefix"]
    noun = index["noun"] or ""
    if not noun and _JOBS.search(prefix):
        return None
    for each in (prefix, prefix + noun):
        beside = counts.get(each, {})
        if True in beside:
            return beside[True]
        if False in beside:
            return _count_without_noun(index, beside[False])
    return None


def _count_without_noun(index: re.Match[str], count: str) -> str | None:
    """Such a count, if the index has a noun or is a rank; not the size of what an id names.

    TASK_SIZE beside TASK_ID is the size of the task, and RANK_SIZE beside RANK_ID is the count of ranks.
    """
    if not index["noun"] and index["kind"] != "RANK":
        return None
    if index["kind"] == "ID" and index["noun"] != "RANK_" and count.upper().endswith("SIZE"):
        return None
    return count


def _shows_several(kind: str, index: str, count: str) -> bool:
    """Whether an index and a count are not those of one process: 0 of 1, or 1 of 1 counted from 1."""
    if kind == "ID" and _is_name(index, count):
        return False
    if _significant(count) == "1":
        return index.isdigit() and index not in ("0", "1")
    return "" not in (count, index)


def _is_name(text: str, count: str) -> bool:
    """Whether an id is a name and not an index: `web.1`, or `12345` of `3`."""
    number = digits(text)
    if number is None:
        return True
    most = digits(count)
    if not most:
        return False
    return number > 10 * most


def _is_above_0(text: str) -> bool:
    return _significant(text) != ""


def _is_above_1(text: str) -> bool:
    return _significant(text) not in ("", "1")


def _is_malformed(text: str) -> bool:
    """Whether a number of processes or nodes is not a number; an empty one is as good as none."""
    return text.strip() != "" and _significant(text) == ""


def _significant(text: str) -> str:
    """A number without the zeros before it, also of 02, 2.0, 0x2 or the range 1:3; empty for a word."""
    text = text.strip().lstrip("+")
    if not text[:1].isdecimal():
        return ""
    low, _, high = text.partition(":")
    return (high or low).removesuffix(".0").lstrip("0")


def _has_several_hosts(text: str) -> bool:
    words = re.split(r"[\s,;]+", text[:_LONGEST])
    hosts = {_host_of(word) for word in words if word}
    others = [host for host in hosts if not is_loopback(host)]
    return len(others) > 1


def _has_comma(text: str) -> bool:
    return "," in text


class _Kind(NamedTuple):
    """A variable that shows other processes by itself."""

    name: re.Pattern[str]
    shows: Callable[[str], bool]  # with which values
    meaning: str


_KINDS_OF_ONE = (
    _Kind(_SIZE, _is_above_1, "a number of processes or nodes above 1"),
    _Kind(_PLAIN_SIZE, _is_malformed, MALFORMED),
    _Kind(_RANK, _is_above_0, "a rank above 0"),
    _Kind(_AZUREML_TASK, _is_above_0, "one of several tasks of a job of Azure ML"),
    _Kind(_DEVICES, _has_comma, "the devices of several processes"),
    _Kind(_HOSTS, _has_several_hosts, "several hosts"),
)


def _signs_of_one(name: str, value: str) -> list[Sign]:
    """The sign that a variable is by itself, if it is one."""
    upper = name.upper()
    for kind in _KINDS_OF_ONE:
        if kind.name.fullmatch(upper) and kind.shows(value):
            return [Sign((name,), (value,), kind.meaning)]
    return []


def _host_of(text: str) -> str:
    """The host in an address, which may have a port or be a URL; the text itself if it is not one."""
    text = text.rpartition("://")[2]
    try:
        return parse_address(text)[0]
    except ValueError:
        return text
