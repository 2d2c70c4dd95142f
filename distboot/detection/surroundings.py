"""What an environment says about other processes, where no launcher numbers this one. Pure, as `detect` is.

A process is alone if nothing speaks against it. Four kinds of variables do, whatever their prefix:
- an index beside a count above 1 (`ACME_NODE_RANK=1`, `ACME_NUM_NODES=2`), and a rank above 0 without its count;
- a number of processes or nodes above 1 (`NNODES=2`, `ACME_WORLD_SIZE=8`);
- a list of several hosts (`ACME_WORKER_HOSTNAMES=10.0.0.4,10.0.0.5`);
- the address of another host as that of rank 0 (`MASTER_ADDR=10.0.0.4`). Only this host can tell whether the address
  is its own: `addresses` lists those to ask about, and `here` asks.
CI systems and job arrays number independent jobs in the same way. So an index counts only if it is one of a node, a
worker, a task, a process or their like (not of a job, a shard, a step), or is called a rank; and the families of
variables in `_INDEPENDENT` never count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import UNKNOWN_RANK, DistbootError
from ..text import short_repr
from .parse import is_loopback, parse_address
from .placement import Placement

# Independent jobs, or an allocation in which a launcher starts the ranks: CI systems, batch systems, clusters of data
# processing. What says more about them has a record of its own, or a warning.
_INDEPENDENT = re.compile(
    r"(\w+_)?(CI|CIRCLE|BUILDKITE|SEMAPHORE|KNAPSACK|HARNESS|TRAVIS|GITHUB|BITRISE|DRONE|JENKINS|CLOUD_RUN|BATCH_TASK|"
    r"BATCH_COMPUTE|SLURMD?|SBATCH|SALLOC|PBS|LSB|LSF|SGE|OAR|FLUX|CONDOR|PYTEST|JEST|RAY|DASK|SPARK|NOMAD|AIRFLOW|"
    r"KAFKA|ES|OMPI_MCA|PMIX_MCA|PRTE_MCA|LOCAL)_"
)

_NOUNS = (
    *("NODE", "WORKER", "TASK", "HOST", "MACHINE", "POD", "REPLICA", "INSTANCE", "PROCESS", "PROC"),
    *("MEMBER", "PEER", "TRAINER", "ROLE"),
)
_PLURAL_NOUNS = tuple(f"{noun}ES" if noun == "PROCESS" else f"{noun}S" for noun in _NOUNS)
_KINDS = (
    *("RANK", "INDEX", "IDX", "ID", "NUMBER", "ORDINAL", "NODEID", "NODENUM", "PROCNO", "PROCID"),
    "RANKID",
)
_PROCESSES = f"(?:{'|'.join(_NOUNS)})"
_PLURALS = f"(?:{'|'.join((*_PLURAL_NOUNS, 'RANKS'))})"
_INDEX = re.compile(
    rf"(?P<prefix>\w*?)(?P<noun>{_PROCESSES}_)?"
    rf"(?P<kind>{'|'.join(_KINDS)})"
)
_COUNT = re.compile(
    rf"(?P<prefix>\w*?)(?:(?P<noun>NUM_{_PLURALS}|N{_PLURALS}|TOTAL_{_PLURALS}|{_PLURALS}_NUM|{_PLURALS}_COUNT|"
    rf"NUM_{_PROCESSES}|{_PROCESSES}_NUM|{_PROCESSES}_COUNT|WORLD_SIZE|GROUP_SIZE|{_PROCESSES}S_TOTAL)|SIZE|COUNT|TOTAL)"
)
# A number of these above 1 needs no index beside it. Not NUM_WORKERS, which data loaders have, nor NPROCS, of make.
_SIZE = re.compile(
    r"(\w+_)?(WORLD_SIZE|NUM_NODES|NNODES|NODES_NUM)|(AZUREML_)?NODE_COUNT|DET_KUBERNETES_JOB_PARALLELISM|NUM_PROCESSES|NUM_HOSTS|NUM_MACHINES"
)
_HOSTS = re.compile(
    r"\w+_((WORKER|NODE|NODES|HOST|POD|PEER)_(IPS|HOSTNAMES|ADDRS|ADDRESSES)|WORKER_HOSTS|PROCESS_ADDRESSES)"
)
_ADDRESS = re.compile(
    r"(\w+_)?(MASTER_ADDR|COORDINATOR_ADDR(ESS)?|LEADER_ADDR(ESS)?|MASTER_NODE_IP|INIT_METHOD|BATCH_MASTER_NODE)|"
    r"PADDLE_MASTER|DET_CHIEF_IP|DMLC_TRACKER_URI|BEAKER_LEADER_REPLICA_HOSTNAME"
)
# With one of these words a name of any of these kinds ends; most names of an environment do not.
_LAST_WORDS = frozenset(
    (
        *_NOUNS,
        *_KINDS,
        *_PLURAL_NOUNS,
        *(f"N{plural}" for plural in _PLURAL_NOUNS),
        *("RANKS", "NRANKS"),
        *("SIZE", "COUNT", "TOTAL", "NUM", "PARALLELISM"),
        *("ADDR", "ADDRS", "ADDRESS", "ADDRESSES", "IP", "IPS", "HOSTNAME", "HOSTNAMES"),
        *("METHOD", "MASTER", "URI"),
    )
)
_LONGEST = 100_000  # characters of a list of hosts that are read
_MOST = 20  # signs in one message


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
    """The variables that may be a sign by their names."""
    return [name for name in environ if name.rpartition("_")[2] in _LAST_WORDS]


def signs(environ: Mapping[str, str]) -> list[Sign]:
    """Everything in an environment that says that there are others, but for addresses."""
    present = [name for name in names(environ) if not _INDEPENDENT.match(name)]
    pairs = list(_pairs(environ, present))
    used = {name for sign in pairs for name in sign.variables}
    rest = [name for name in present if name not in used]
    alone = (_alone(name, environ[name]) for name in rest)
    return [*pairs, *filter(None, alone)]


def addresses(environ: Mapping[str, str]) -> list[Sign]:
    """The variables that say where rank 0 is, each a sign if that is another host than this one."""
    found = []
    for name in names(environ):
        value = environ[name].strip()
        if not value or not _ADDRESS.fullmatch(name) or _INDEPENDENT.match(name):
            continue
        if name.endswith("INIT_METHOD") and not value.startswith("tcp://"):
            continue  # a file that all processes share
        host = _host_of(value)
        if not is_loopback(host):
            found.append(Sign((name,), (environ[name],), "the address of rank 0", host))
    return found


def not_alone(found: Sequence[Sign], placement: Placement) -> DistbootError:
    """The error for a process that is alone by its placement, and has others beside it by these signs."""
    if placement.launcher == "single":
        claim = "no launcher numbers this process, and"
    else:
        claim = (
            f"launcher {placement.launcher!r} says rank 0 of 1 ({placement.sources['rank']}), but"
        )
    listed = [str(sign) for sign in found[:_MOST]]
    if len(found) > _MOST:
        listed.append(f"and {len(found) - _MOST} more")
    return DistbootError(
        "not-alone",
        "\n  ".join([f"{claim} its environment says that there are others:", *listed]),
        _remedy(found),
    ).of(UNKNOWN_RANK)


def _remedy(found: Sequence[Sign]) -> str:
    pair = next((sign for sign in found if len(sign.variables) == 2), None)
    index, count = ("<number of this node>", "<nodes>")
    if pair is not None:
        index, count = (f"${name}" for name in pair.variables)
    address = next((f"${sign.variables[0]}" for sign in found if sign.host), "<host of node 0>")
    of_nodes = f"NODE_RANK={index} NUM_NODES={count} MASTER_ADDR={address} MASTER_PORT=29500"
    return (
        f"with one process per node: {of_nodes} python -m distboot run --nproc-per-node auto -- python train.py; "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process; "
        "or DISTBOOT_LAUNCHER=none if this process is alone"
    )


def _pairs(environ: Mapping[str, str], present: Sequence[str]) -> Iterator[Sign]:
    """An index and a count of one prefix: ACME_WORKER_INDEX and ACME_GROUP_SIZE."""
    counts = _counts(present)
    if not counts:
        return
    for name in present:
        index = _INDEX.fullmatch(name)
        if index is None or _is_of_independent_jobs(index):
            continue
        count = _count_beside(index, counts)
        if count is not None and _says_several(index["kind"], environ[name], environ[count]):
            values = (environ[name], environ[count])
            yield Sign((name, count), values, f"one of several, by {name} and {count}")


def _counts(present: Iterable[str]) -> dict[str, dict[bool, str]]:
    """Prefix -> the count of that prefix; True: it says what it counts."""
    counts: dict[str, dict[bool, str]] = {}
    for name in present:
        count = _COUNT.fullmatch(name)
        if count is not None:
            counts.setdefault(count["prefix"], {}).setdefault(count["noun"] is not None, name)
    return counts


def _count_beside(index: re.Match[str], counts: Mapping[str, Mapping[bool, str]]) -> str | None:
    """The count that belongs to an index; of one without a noun (ACME_INDEX) only one that says what it counts."""
    for prefix in (index["prefix"], index["prefix"] + (index["noun"] or "")):
        beside = counts.get(prefix, {})
        if True in beside:
            return beside[True]
        if False in beside and (index["noun"] or index["kind"] == "RANK"):
            return beside[False]
    return None


def _is_of_independent_jobs(index: re.Match[str]) -> bool:
    return (
        re.search(
            r"(^|_)(ARRAY|SHARD|JOB|STEP|TESTS?|SPLIT|CHUNK|PARTITION|MATRIX|BUILD|STAGE|TRIAL|COMPLETION)_$",
            index["prefix"],
        )
        is not None
        and not index["noun"]
    )


def _says_several(kind: str, index: str, count: str) -> bool:
    """Whether an index and a count are not those of one process: `0` of `1`, or `1` of `1` where one counts from 1."""
    if kind == "ID" and not index.isdigit():
        return False  # a name
    if count == "1":
        return index.isdigit() and index not in ("0", "1")
    return bool(count) and bool(index)


def _alone(name: str, value: str) -> Sign | None:
    """The sign that a variable is without another one beside it, or None."""
    number = _number(value)
    if _SIZE.fullmatch(name) and number is not None and number > 1:
        return Sign((name,), (value,), "a number of processes or nodes above 1")
    if name.endswith("_RANK") and number is not None and number > 0:
        return Sign((name,), (value,), "a rank above 0")
    if name == "AZ_BATCHAI_TASK_INDEX" and number is not None and number > 0:
        return Sign((name,), (value,), "one of several tasks of a job of Azure ML")
    if _HOSTS.fullmatch(name):
        hosts = set(filter(None, re.split(r"[\s,;]+", value[:_LONGEST])))
        if len({host for host in hosts if not is_loopback(_host_of(host))}) > 1:
            return Sign((name,), (value,), "several hosts")
    return None


def _number(text: str) -> int | None:
    """The number that a text may mean, also with blanks or in another base."""
    if len(text) > _MOST:
        return None
    try:
        return int(text, 0)
    except ValueError:
        return None


def _host_of(text: str) -> str:
    """The host in an address, which may have a port or be a URL; the text itself if it is none."""
    text = text.rpartition("://")[2]
    try:
        return parse_address(text)[0]
    except ValueError:
        return text
