"""TensorFlow's cluster: the task of each rank, the address of its server, and the `TF_CONFIG`.

A given `TF_CONFIG` is checked, and used as its launcher `corrected` it. Without one, every rank
offers an address when it is ready to start, and all ranks write the same cluster of workers, in
the order of ranks.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError
from ..base.text import format_address, ranks_said
from ..detection import inherited
from ..detection.launchers.tf_config import TF_CONFIG, corrected
from ..detection.parse import parse_address
from ..detection.placement import Placement
from ..detection.readings import read_placement
from ._base import past_proxies

VARIABLE = "TF_CONFIG"
CHIEF = "chief"
WORKER = "worker"
PS = "ps"
EVALUATOR = "evaluator"
_IN_ORDER_OF_RANKS = (CHIEF, WORKER, PS)
_GIVEN = "given "  # begins the offer of a rank that has a TF_CONFIG of its own


class Cluster:
    """TensorFlow's cluster as one rank sees it. It has all addresses once it is `completed`."""

    def __init__(self, session: Session, environ: Mapping[str, str]) -> None:
        bare, _ = inherited.restored(environ)
        self._session = session
        self.is_given = VARIABLE in bare
        self.is_alone = session.placement.world_size == 1
        # The task types of all ranks; then type and index of this rank's task
        self.kinds: list[str] = []
        self.kind = WORKER
        self.index = 0
        # By type of task. The evaluator is not part of the cluster
        self.addresses: dict[str, list[str]] = {}
        self.offer: str | None = None  # what the other ranks need to know of this one
        if self.is_given:
            self._use(_given(bare, session.placement))
        else:
            self._make_workers()

    def _use(self, config: dict[str, Any]) -> None:
        task = config["task"]
        self.kind = str(task["type"])
        self.index = int(task.get("index") or 0)
        self.addresses = dict(config["cluster"])
        self.addresses.pop(EVALUATOR, None)
        for kind in _IN_ORDER_OF_RANKS:
            self.kinds += [kind] * len(self.addresses.get(kind, ()))
        self.offer = _GIVEN + inherited.digest(json.dumps(self.addresses, sort_keys=True))

    def _make_workers(self) -> None:
        placement = self._session.placement
        self.kinds = [WORKER] * placement.world_size
        self.index = placement.rank
        if not self.is_alone and self._session.membership is None:
            raise DistbootError(
                "rendezvous-needed",
                "DISTBOOT_RENDEZVOUS=0, and there is no TF_CONFIG: the addresses of TensorFlow's "
                "tasks are exchanged in the rendezvous",
                "unset DISTBOOT_RENDEZVOUS, or set TF_CONFIG for every process",
            )

    @property
    def has_servers(self) -> bool:
        """Whether the cluster has parameter servers: then only the chief runs the script."""
        return PS in self.kinds

    def hold_port(self) -> socket.socket | None:
        """Reserve this task's port until its server has it; None if the task has no server."""
        if self.is_alone or self.kind == EVALUATOR:
            return None
        if not self.is_given:
            port = _held(0)
            self.offer = format_address(self._session.own_address, port.getsockname()[1])
            return port
        address = self.addresses[self.kind][self.index]
        try:
            return _held(parse_address(address)[1] or 0)
        except OSError as error:
            raise DistbootError(
                "port-taken",
                f"TF_CONFIG has {address} for {self.kind} {self.index}, but this process cannot "
                f"listen there: {error.strerror}",
                "look for a process of an earlier run, or give the task another port",
            ) from None

    def completed(self) -> Cluster:
        """This cluster with the addresses that all ranks have offered."""
        offers = self._session.offers
        _refuse_several(offers)
        if not self.is_given and not self.is_alone:
            ranks = range(len(self.kinds))
            self.addresses = {WORKER: [offers[rank] for rank in ranks]}
        return self

    def exports(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables for TensorFlow that `environ` lacks or has wrong."""
        found = {}
        if not self.is_given and not self.is_alone:
            task = {"type": self.kind, "index": self.index}
            found[VARIABLE] = json.dumps({"cluster": self.addresses, "task": task})
        hosts = [parse_address(address)[0] for address in chain(*self.addresses.values())]
        return found | past_proxies(environ, list(dict.fromkeys(hosts)))


def _given(environ: Mapping[str, str], placement: Placement) -> dict[str, Any]:
    """TF_CONFIG as its launcher corrects it. It must have this rank."""
    text = corrected(environ).get(VARIABLE, environ[VARIABLE])
    found = read_placement(TF_CONFIG, {VARIABLE: text})
    if (found.rank, found.world_size) != (placement.rank, placement.world_size):
        raise DistbootError(
            "conflicting-launchers",
            f"{placement.launcher} says rank {placement.rank} of {placement.world_size}, but "
            f"TF_CONFIG says rank {found.rank} of {found.world_size}: {found.sources['rank']}",
            "unset TF_CONFIG to have it made from the ranks, or set DISTBOOT_LAUNCHER=tf_config "
            "to use only TF_CONFIG",
        )
    config: dict[str, Any] = json.loads(text)
    return config


def _refuse_several(offers: Mapping[int, str]) -> None:
    """Refuse ranks that have different clusters, and a TF_CONFIG on some ranks only."""
    given = {rank: offer for rank, offer in sorted(offers.items()) if offer.startswith(_GIVEN)}
    without = sorted(offers.keys() - given.keys())
    if not given:
        return
    if without:
        raise DistbootError(
            "membership-mismatch",
            f"{_ranks_have(list(given))} a TF_CONFIG, but {_ranks_have(without)} none",
            "set it for all processes, or for none to have it made from the ranks",
        )
    first = min(given)
    different = [rank for rank, offer in given.items() if offer != offers[first]]
    if different:
        raise DistbootError(
            "membership-mismatch",
            f"the cluster in TF_CONFIG of {ranks_said(different)} is different from that of "
            f"rank {first}",
            "give all processes the same 'cluster'; only 'task' may differ",
        )


def _ranks_have(ranks: list[int]) -> str:
    """`"rank 1 has"`, `"ranks 2-3 have"`."""
    if len(ranks) == 1:
        return f"{ranks_said(ranks)} has"
    return f"{ranks_said(ranks)} have"


def _held(port: int) -> socket.socket:
    """Bind a socket to a port, or to any free one (0), that only TensorFlow's server can take.

    Another process cannot bind the port. TensorFlow's server can, because gRPC sets SO_REUSEADDR
    and this socket has it, too, but does not listen (Linux, inet_csk_bind_conflict).
    """
    held = socket.socket()
    try:
        held.bind(("", port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held
