"""TensorFlow's cluster: which rank has which task, where its server listens, and the `TF_CONFIG` that says so.

A `TF_CONFIG` that was given is checked and stays as it is. Else every rank offers an address when it is ready to start,
and all write the same cluster: workers only, or chief, workers and parameter servers in the order of ranks, which is
also that of the launcher `tf_config`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .. import handoff
from ..address import parse_address, socket_said
from ..errors import DistbootError
from ..launchers.tf_config import TF_CONFIG
from ..placement import Placement
from ..rollcall.meeting import Meeting
from ..roster import ranks_said
from ._grpc import past_proxies
from ._options import Options

VARIABLE = "TF_CONFIG"
PARAMETER_SERVER, EVALUATOR = "parameter_server", "evaluator"
_GIVEN = "given "  # how the offer of a rank with a TF_CONFIG of its own begins


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is in the cluster, for example worker 1."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """TensorFlow's cluster as one rank sees it.

    Attributes:
        task: of this rank.
        config: the text of TF_CONFIG; None: this process is alone, and needs none.
        is_given: whether that was there before.
    """

    task: Task
    config: str | None = None
    is_given: bool = False

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Type of task -> its addresses; without the evaluator, which is no part of the cluster."""
        cluster: dict[str, list[str]] = json.loads(self.config or "{}").get("cluster", {})
        return {kind: tasks for kind, tasks in cluster.items() if kind != EVALUATOR}

    def exports(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables for TensorFlow that are not as they should be in `environ`."""
        found = {} if self.config is None or self.is_given else {VARIABLE: self.config}
        hosts = {parse_address(address)[0]: None for tasks in self.addresses.values() for address in tasks}
        return found | past_proxies(environ, list(hosts))


class Plan:
    """The cluster, as far as this rank knows it before it has heard of the others.

    Args:
        meeting: of all ranks.
        environ: the environment as the launcher or the user gave it.
        options: of the caller of `init`.

    Attributes:
        task: of this rank.
        kinds: the type of the task of every rank.
        is_given: whether there is a TF_CONFIG that says all this.
        is_alone: whether this rank is the only one.

    Raises:
        DistbootError: the TF_CONFIG given is broken, or contradicts the launcher; or there are too few ranks.
    """

    def __init__(self, meeting: Meeting, environ: Mapping[str, str], options: Options) -> None:
        placement, (bare, _) = meeting.placement, handoff.take(environ)
        self._meeting = meeting
        self._own_address: str | None = None
        self._given = _given(bare, placement) if VARIABLE in bare else None
        self.is_given, self.is_alone = self._given is not None, placement.world_size == 1
        if self._given is not None:
            tasks, self.task = self._given.addresses, self._given.task
            self.kinds = [kind for kind in ("chief", "worker", "ps") for _ in tasks.get(kind, ())]
            return
        self._roles = roles(placement.world_size, options)
        self.task, self.kinds = self._roles[placement.rank], [task.kind for task in self._roles]
        if not self.is_alone and meeting.roster is None:
            raise DistbootError(
                "roll-call-needed",
                "DISTBOOT_ROLL_CALL=0, and there is no TF_CONFIG: the addresses of TensorFlow's tasks are exchanged in "
                "the roll call",
                "unset DISTBOOT_ROLL_CALL, or set TF_CONFIG for every process",
            )

    def hold(self) -> socket.socket | None:
        """The port of this task, which is nobody else's until its server has it; None if it has no server.

        Raises:
            DistbootError: `port-taken`.
        """
        if self.is_alone or self.task.kind == EVALUATOR:
            return None
        if self._given is None:
            port = _held(0)
            self._own_address = socket_said(self._meeting.own_address, port.getsockname()[1])
            return port
        address = self._given.addresses[self.task.kind][self.task.index]
        try:
            return _held(parse_address(address)[1] or 0)
        except OSError as error:
            raise DistbootError(
                "port-taken",
                f"TF_CONFIG has {address} for {self.task}, and this process cannot listen there: {error.strerror}",
                "look for a process of an earlier run, or give it another port",
            ) from None

    @property
    def offer(self) -> str | None:
        """What the other ranks need to know of this one."""
        if self._given is None:
            return self._own_address
        cluster = json.dumps(self._given.addresses, sort_keys=True)
        return _GIVEN + handoff.digest(cluster)

    def completed(self) -> Cluster:
        """The cluster, when all ranks have told what they offer.

        Raises:
            DistbootError: `roster-mismatch`, they were not given the same.
        """
        offers = self._meeting.offers
        _refuse_several(offers)
        if self._given is not None:
            return self._given
        if self.is_alone:
            return Cluster(self.task)
        cluster: dict[str, list[str]] = {}
        for rank, task in enumerate(self._roles):
            if task.kind != EVALUATOR:
                cluster.setdefault(task.kind, []).append(offers[rank])
        config = {"cluster": cluster, "task": {"type": self.task.kind, "index": self.task.index}}
        return Cluster(self.task, json.dumps(config))


def roles(world_size: int, options: Options) -> list[Task]:
    """The task of every rank where no TF_CONFIG says it.

    Raises:
        DistbootError: `usage`, there are too few ranks.
    """
    if options.strategy != PARAMETER_SERVER:
        return [Task("worker", index) for index in range(world_size)]
    workers = world_size - 1 - options.ps - options.evaluator
    if options.ps < 1 or workers < 1:
        evaluator = ", evaluator=True" if options.evaluator else ""
        raise DistbootError(
            "usage",
            f"strategy={PARAMETER_SERVER!r}, ps={options.ps}{evaluator} in a job of {world_size}: there must be a "
            "chief, and at least one worker and one parameter server",
            f"start at least {2 + max(options.ps, 1) + options.evaluator} ranks, with ps=1 or more",
        )
    kinds = ["chief", *["worker"] * workers, *["ps"] * options.ps, *[EVALUATOR] * options.evaluator]
    return [Task(kind, kinds[:rank].count(kind)) for rank, kind in enumerate(kinds)]


def _given(environ: Mapping[str, str], placement: Placement) -> Cluster:
    """The cluster that TF_CONFIG describes, which must be that of the launcher."""
    text = environ[VARIABLE]
    found = TF_CONFIG.read({VARIABLE: text})
    assert found is not None
    if (found.rank, found.world_size) != (placement.rank, placement.world_size):
        raise DistbootError(
            "conflicting-launchers",
            f"{placement.launcher} says rank {placement.rank} of {placement.world_size}, but TF_CONFIG says rank "
            f"{found.rank} of {found.world_size}: {found.sources['rank']}",
            "unset TF_CONFIG to have it made from the ranks, or set DISTBOOT_LAUNCHER=tf_config to go by it alone",
        )
    task = json.loads(text)["task"]
    return Cluster(Task(task["type"], int(task.get("index") or 0)), text, is_given=True)


def _refuse_several(offers: Mapping[int, str]) -> None:
    """Refuse ranks that were given different clusters, or of which only some were given one."""
    given = {rank: offer for rank, offer in sorted(offers.items()) if offer.startswith(_GIVEN)}
    without = sorted(offers.keys() - given.keys())
    if given and without:
        raise DistbootError(
            "roster-mismatch",
            f"{ranks_said(list(given))} {'have' if len(given) > 1 else 'has'} a TF_CONFIG, and {ranks_said(without)} "
            f"{'have' if len(without) > 1 else 'has'} none",
            "set it for all processes, or for none to have it made from the ranks",
        )
    odd = [rank for rank, offer in given.items() if offer != offers[min(given)]]
    if odd:
        raise DistbootError(
            "roster-mismatch",
            f"the cluster in the TF_CONFIG of {ranks_said(odd)} is another one than that of rank {min(given)}",
            "give all processes the same 'cluster'; only 'task' may differ",
        )


def _held(port: int) -> socket.socket:
    """A socket bound to a port, or to any free one (0), which only TensorFlow's server may take while it is.

    Nobody else gets the port, as it was free, and the server does, as gRPC sets SO_REUSEADDR and this socket has it,
    too, but does not listen (Linux, inet_csk_bind_conflict).

    Raises:
        OSError: somebody has it.
    """
    held = socket.socket()
    try:
        held.bind(("", port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held
