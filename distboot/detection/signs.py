"""Which variables show other processes of the job, where no launcher numbers this one. Pure.

A process is alone if nothing speaks against it. Four kinds of variables do, whatever their prefix:
- an index beside a count above 1 (`ACME_NODE_RANK=1`, `ACME_NUM_NODES=2`), and a rank above 0
  without its count;
- a number of processes or nodes above 1 (`NNODES=2`, `ACME_WORLD_SIZE=8`), or one without a prefix
  that is not a number;
- a list of several hosts (`ACME_WORKER_HOSTNAMES=10.0.0.4,10.0.0.5`);
- the address of another host as that of rank 0 (`MASTER_ADDR=10.0.0.4`). Only this host can tell
  whether the address is its own: `addresses` lists those to ask about, and `here` asks.
CI systems and job arrays number independent jobs in the same way. So an index counts only if it is
one of a node, a worker, a task, a process or their like (not of a job, a shard, a step), or is
called a rank; and the families of variables in `_INDEPENDENT` never count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ..base.patterns import pattern
from ..base.text import digits, short_repr
from .parse import is_loopback, parse_address
from .placement import Placement

# Independent jobs, or an allocation in which a launcher starts the ranks: CI systems, batch
# systems, clusters of data processing, databases. A launcher has a record of its own; an allocation
# has a warning (`allocation`).
_INDEPENDENT = pattern(
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
_PLURALS_IN_ES = {"PROCESS": "PROCESSES"}
_PLURAL_NOUNS = tuple(_PLURALS_IN_ES.get(noun, f"{noun}S") for noun in _NOUNS)
_SINGULARS = {plural: noun for noun, plural in _PLURALS_IN_ES.items()}
# Plurals that count without a further word (`UPC_NODES`). Not WORKERS and TASKS, which one process
# may have.
_COUNTING_PLURALS = (
    *("NODES", "HOSTS", "MACHINES", "PROCESSES", "PROCS", "TRAINERS"),
    *("PODS", "REPLICAS", "INSTANCES", "VMS"),
)
_KINDS = (
    *("RANK", "INDEX", "IDX", "ID", "NUMBER", "ORDINAL", "NODEID", "NODENUM", "PROCNO", "PROCID"),
    *("RANKID", "NO"),
)
_NODES = ("NODE", "HOST", "MACHINE", "POD", "VM", "INSTANCE")  # each may have several ranks
_OF_PROCESSES = pattern(r"WORLD|RANK|PROC")
_PROCESSES = f"(?:{'|'.join(_NOUNS)})"
_PLURALS = f"(?:{'|'.join(_PLURAL_NOUNS)})"
_INDEX = pattern(
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
_COUNT = pattern(
    rf"(?P<prefix>\w*?)(?:(?P<noun>{'|'.join(_COUNT_NOUNS)})|"
    rf"(?P<plural>{'|'.join(_COUNTING_PLURALS)})|SIZE|COUNT|CNT|TOTAL)"
)
# A number of these above 1 needs no index beside it. Not NUM_WORKERS, which data loaders have, nor
# NPROCS, of make.
_SIZE = pattern(
    r"(\w+_)?(WORLD_?SIZE|NUM_NODES|N_?NODES|NODES_NUM)|"
    r"(AZUREML_)?NODE_COUNT|TOTAL_NODES|NUM_GPU_NODES|"
    r"NUM_RANKS|N_?RANKS|RANK_SIZE|NUM_PROCESSES|NUM_HOSTS|NUM_MACHINES|"
    r"DET_KUBERNETES_JOB_PARALLELISM"
)
# Those of them that count something, also where their value is no number. Not NUM_PROCESSES, which
# may be "auto".
_PLAIN_SIZE = pattern(
    r"WORLD_?SIZE|NUM_NODES|N_?NODES|NODES_NUM|NODE_COUNT|TOTAL_NODES|NUM_GPU_NODES|"
    r"NUM_RANKS|N_?RANKS|RANK_SIZE|NUM_HOSTS|NUM_MACHINES"
)
# Which of several processes this is, by a rank alone. Not any rank: LORA_RANK is that of a matrix.
_RANK = pattern(rf"(\w+_)?({_PROCESSES}|GLOBAL|WORLD|GROUP|CLUSTER|JOB|DIST|DISTRIBUTED)_RANK")
_HOSTS = pattern(
    r"(\w+_)?((WORKER|NODE|NODES|HOST|POD|PEER|TRAINER)_"
    r"(IPS|IP_LIST|HOSTNAMES|ADDRS|ADDRESSES|ENDPOINTS)|"
    r"WORKER_HOSTS|PROCESS_ADDRESSES)"
)
_ADDRESS = pattern(
    r"(\w+_)?(MASTER_ADDR|COORDINATOR_ADDR(ESS)?|LEADER_ADDR(ESS)?|MASTER_NODE_IP|INIT_METHOD|"
    r"BATCH_MASTER_NODE|CHIEF_ADDR(ESS)?|RANK_?0_(IP|HOST|ADDR|ADDRESS))|"
    r"(PET_)?RDZV_ENDPOINT|PRIMARY_ADDR|MAIN_PROCESS_IP|CHIEF_IP|DIST_URL|NCCL_COMM_ID|"
    r"NEURON_RT_ROOT_COMM_ID|DMLC_PS_ROOT_URI|DMLC_TRACKER_URI|MS_SCHED_HOST|PADDLE_MASTER|"
    r"DET_CHIEF_IP|BEAKER_LEADER_REPLICA_HOSTNAME"
)
_URLS = ("INIT_METHOD", "DIST_URL")  # the ends of names of addresses that are URLs
# AWS Neuron, "Multi-node training with JAX": "32,32" are the devices of two processes, "32" those
# of one.
_DEVICES = pattern(r"NEURON_PJRT_PROCESSES_NUM_DEVICES")
_AZUREML_TASK = pattern(r"AZ_BATCHAI_TASK_INDEX")
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
_JOBS = pattern(
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
        texts = []
        for name, value in zip(self.variables, self.values, strict=True):
            shown = short_repr(value)
            texts.append(f"{name}={shown}")
        listed = ", ".join(texts)
        return f"{listed}: {self.meaning}"


def names(environ: Iterable[str]) -> list[str]:
    """The variables that may be a sign by their names, in capital or small letters."""
    found = []
    for name in environ:
        last_word = name.rpartition("_")[2]
        if last_word in _LAST_WORDS:
            found.append(name)
    return found


def signs(environ: Mapping[str, str]) -> list[Sign]:
    """Everything in an environment that shows other processes, but for addresses."""
    present = _named(environ)
    found = list(_pairs(environ, present))
    used: set[str] = set()
    for sign in found:
        variables = sign.variables
        used.update(variables)
    for name in present:
        if name in used:
            continue
        value = environ[name]
        own = _signs_of_one(name, value)
        found.extend(own)
    return found


def _named(environ: Mapping[str, str]) -> list[str]:
    """The variables that may be a sign, without those of independent jobs."""
    found = []
    for name in names(environ):
        upper = name.upper()
        if _INDEPENDENT.match(upper) is None:
            found.append(name)
    return found


def addresses(environ: Mapping[str, str]) -> list[Sign]:
    """The variables with an address of rank 0, each a sign if that is not this host."""
    found = []
    meaning = "the address of rank 0"
    for name in _named(environ):
        value = environ[name]
        stripped = value.strip()
        host = _host_of_rank0(name.upper(), stripped)
        is_here = host == "" or is_loopback(host)
        if is_here:
            continue
        sign = Sign((name,), (value,), meaning, host)
        found.append(sign)
    return found


def _host_of_rank0(name: str, value: str) -> str:
    """The host in a variable that names that of rank 0; empty for any other variable."""
    is_address = _ADDRESS.fullmatch(name) is not None
    if not is_address:
        return ""
    is_url = name.endswith(_URLS)
    is_tcp = value.startswith("tcp://")
    is_file = is_url and not is_tcp  # which all processes share
    if is_file:
        return ""
    return _host_of(value)


def other_nodes(
    environ: Mapping[str, str], placement: Placement, own: Iterable[str]
) -> Sign | None:
    """An index and a count by which this is not the node that it is by its placement, or None.

    Variables that begin with a word of `own` are those of the platform itself, and those without a
    prefix are compared elsewhere.
    """
    families = {name.partition("_")[0] for name in own}
    present = _named(environ)
    for sign in _pairs(environ, present):
        variable, count = sign.variables
        index = _INDEX.fullmatch(variable.upper())
        assert index is not None
        prefix = index["prefix"]
        family, _, _ = prefix.partition("_")
        is_compared = prefix != "" and family not in families
        if not is_compared:
            continue
        is_of_node = _is_of_node(index)
        of_processes = is_of_node and counts_processes(count)
        contradicts = _contradicts(index, sign.values, of_processes, placement)
        if contradicts:
            return sign
    return None


def _contradicts(
    index: re.Match[str], values: Sequence[str], of_processes: bool, placement: Placement
) -> bool:
    """Whether an index and a count are not those of this node, nor of a process on it."""
    number, count = map(digits, values)
    own = placement.rank
    nodes = placement.world_size
    if number is None or count is None:
        return False
    if not index["noun"]:  # ACME_RANK may be that of a process
        rest = count % nodes
        return rest != 0
    possible = [own, own + 1]  # an index may count from 1
    is_rank = index["kind"] == "RANK"
    if is_rank:
        possible = [own]
    same_index = number in possible
    same_count = count == nodes
    if of_processes:
        same_count = count % nodes == 0
    is_same = same_index and same_count
    return not is_same


def _pairs(environ: Mapping[str, str], present: Sequence[str]) -> Iterator[Sign]:
    """An index and a count of one prefix: ACME_WORKER_INDEX and ACME_GROUP_SIZE."""
    counts = _counts(present)
    for name in present:
        index = _INDEX.fullmatch(name.upper())
        if index is None:
            continue
        count = _count_beside(index, counts)
        if count is None:
            continue
        own = environ[name]
        total = environ[count]
        kind = index["kind"]
        if _shows_several(kind, own, total):
            meaning = f"one of several, by {name} and {count}"
            yield Sign((name, count), (own, total), meaning)


class _Counts(NamedTuple):
    """The counts of one prefix."""

    with_noun: list[str]  # the names that have what they count
    others: list[str]


def _counts(present: Iterable[str]) -> dict[str, _Counts]:
    """By prefix."""
    counts: dict[str, _Counts] = {}
    for name in present:
        count = _COUNT.fullmatch(name.upper())
        if count is None:
            continue
        prefix = count["prefix"]
        plural = count["plural"]
        if plural is not None:
            singular = _SINGULARS.get(plural, plural.removesuffix("S"))
            prefix = f"{prefix}{singular}_"
        of_prefix = counts.setdefault(prefix, _Counts([], []))
        if count["noun"] is None:
            of_prefix.others.append(name)
        else:
            of_prefix.with_noun.append(name)
    return counts


def _count_beside(index: re.Match[str], counts: Mapping[str, _Counts]) -> str | None:
    """The count that belongs to an index; None: there is none, or jobs are independent."""
    prefix = index["prefix"]
    noun = index["noun"] or ""
    is_of_jobs = _JOBS.search(prefix) is not None
    if is_of_jobs and not noun:
        return None
    none = _Counts([], [])
    with_noun = counts.get(prefix + noun, none)
    beside = counts.get(prefix, with_noun)
    others = [name for name in beside.others[:1] if _may_count(index, name)]
    # That of the same things before any other, wherever it is in the environment
    mismatch = partial(_mismatch, index)
    found = [*sorted(beside.with_noun, key=mismatch), *others, None]
    return found[0]


def _mismatch(index: re.Match[str], count: str) -> tuple[bool, bool]:
    """How badly a count fits an index, as a key to sort by: the lowest one fits best.

    First, whether it counts other things than the index numbers. Then, whether it counts processes
    where the index is one of nodes, or the other way round.
    """
    counts_others = _numbered(index) not in _counted(count)
    return counts_others, counts_processes(count) == _is_of_node(index)


def _is_of_node(index: re.Match[str]) -> bool:
    """Whether an index is one of nodes, each of which may have several ranks."""
    return _numbered(index) in _NODES


def _numbered(index: re.Match[str]) -> str:
    """What an index numbers: `NODE` for `ACME_NODE_RANK`."""
    return str(index["noun"]).removesuffix("_")


def counts_processes(name: str) -> bool:
    """Whether a count is one of processes, of which a node may have several."""
    return _OF_PROCESSES.search(_counted(name)) is not None


def _counted(name: str) -> str:
    """What a count counts: `NUM_NODES` of `ACME_NUM_NODES`; empty if it does not say that."""
    count = _COUNT.fullmatch(name.upper())
    assert count is not None
    named = count.group("noun", "plural")
    return "".join(filter(None, named))


def _may_count(index: re.Match[str], count: str) -> bool:
    """Whether a count without a noun belongs to an index: to one of nodes or processes, or a rank.

    TASK_SIZE beside TASK_ID is the size of the task, while RANK_SIZE beside RANK_ID is the number
    of ranks.
    """
    noun = index["noun"]
    kind = index["kind"]
    if not noun:
        return kind == "RANK"
    upper = count.upper()
    is_size = upper.endswith("SIZE")
    is_id = kind == "ID"
    of_thing = is_id and is_size
    of_ranks = noun == "RANK_"
    return of_ranks or not of_thing


def _shows_several(kind: str, index: str, count: str) -> bool:
    """Whether an index and a count show several processes: not 0 of 1, nor 1 of 1."""
    is_id = kind == "ID"
    if is_id and _is_name(index, count):
        return False
    significant = _significant(count)
    if significant == "1":
        is_number = index.isdigit()
        is_one = index in ("0", "1")
        return is_number and not is_one
    both = (count, index)
    is_empty = "" in both
    return not is_empty


def _is_name(text: str, count: str) -> bool:
    """Whether an id is a name and not an index: `web.1`, or `12345` of `3`."""
    number = digits(text)
    most = digits(count)
    if number is None:
        return True
    if not most:
        return False
    highest = 10 * most
    return number > highest


def _significant(text: str) -> str:
    """A number without leading zeros, also of 02, 2.0, 0x2 or the range 1:3; empty for a word."""
    text = text.strip().lstrip("+")
    first = text[:1]
    if not first.isdecimal():
        return ""
    low, _, high = text.partition(":")
    last = high or low
    return last.removesuffix(".0").lstrip("0")


def _has_several_hosts(text: str) -> bool:
    names = set()
    of_ipv6 = set()  # beside those of IPv4: a pod of Kubernetes has one of each in its POD_IPS
    beginning = text[:_LONGEST]
    words = re.split(r"[\s,;]+", beginning)
    for word in filter(None, words):
        host = _host_of(word)
        if is_loopback(host):
            continue
        if ":" in host:
            of_ipv6.add(host)
        else:
            names.add(host)
    count = max(len(names), len(of_ipv6))
    return count > 1


class _Kind(NamedTuple):
    """A variable that shows other processes by itself."""

    name: re.Pattern[str]
    shows: Callable[[str], bool]  # with which values
    meaning: str


_KINDS_OF_ONE = (
    _Kind(
        _SIZE,
        lambda text: _significant(text) not in ("", "1"),
        "a number of processes or nodes above 1",
    ),
    # An empty one is as good as none.
    _Kind(_PLAIN_SIZE, lambda text: text.strip() != "" and _significant(text) == "", MALFORMED),
    _Kind(_RANK, lambda text: _significant(text) != "", "a rank above 0"),
    _Kind(
        _AZUREML_TASK,
        lambda text: _significant(text) != "",
        "one of several tasks of a job of Azure ML",
    ),
    _Kind(_DEVICES, lambda text: "," in text, "the devices of several processes"),
    _Kind(_HOSTS, _has_several_hosts, "several hosts"),
    # TPU_PROCESS_ADDRESSES=localhost:8476,localhost:8477: a process for each chip of a host
    _Kind(pattern(r"(\w+_)?PROCESS_ADDRESSES"), lambda text: "," in text, "several processes"),
)


def _signs_of_one(name: str, value: str) -> list[Sign]:
    """The sign that a variable is by itself, if it is one."""
    upper = name.upper()
    found: list[Sign] = []
    for kind in _KINDS_OF_ONE:
        fits = kind.name.fullmatch(upper) is not None
        if fits and kind.shows(value):
            sign = Sign((name,), (value,), kind.meaning)
            found.append(sign)
    return found[:1]


def _host_of(text: str) -> str:
    """The host in an address or URL, without a user's name; the text itself if it is neither."""
    text = text.rpartition("://")[2].rpartition("@")[2]
    try:
        host, _ = parse_address(text)
    except ValueError:
        return text
    return host
