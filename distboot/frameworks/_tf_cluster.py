"""TensorFlow's cluster: which rank has which task, where its server listens, and the `TF_CONFIG` that says so.

And what is refused before TensorFlow starts, as it could not, or not as it looks.

A `TF_CONFIG` that was given is checked, and used as its launcher `corrected` it. Else every rank offers an address when
it is ready to start, and all write the same cluster: workers only, or chief, workers and parameter servers in the order
of ranks, which is also that of the launcher.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError, rendezvous_needed
from ..base.text import format_address, ranks_said, short_repr
from ..detection import inherited
from ..detection.detect import read_placement
from ..detection.launchers.tf_config import TF_CONFIG, corrected
from ..detection.parse import parse_address
from ..detection.placement import Placement
from . import Options
from ._base import past_proxies

VARIABLE = "TF_CONFIG"
PARAMETER_SERVER, EVALUATOR = "parameter_server", "evaluator"
MULTI_WORKER, MIRRORED, DEFAULT = "multi_worker_mirrored", "mirrored", "default"
_STRATEGIES = (MULTI_WORKER, PARAMETER_SERVER, MIRRORED, DEFAULT)
# Tf.distribute.experimental.CommunicationImplementation
_IMPLEMENTATIONS = ("auto", "ring", "nccl")
_GIVEN = "given "  # how the offer of a rank with a TF_CONFIG of its own begins


class Cluster:
    """TensorFlow's cluster as one rank sees it: what all tasks are, and, once it is `completed`, where they are."""

    def __init__(self, job: Session, environ: Mapping[str, str], options: Options) -> None:
        placement, (bare, _) = job.placement, inherited.strip(environ)
        self._job_info = job
        self.is_given, self.is_alone = VARIABLE in bare, placement.world_size == 1
        # By type of task; without the evaluator's, which is no part of it
        self.addresses: dict[str, list[str]] = {}
        self.offer: str | None = None  # what the other ranks need to know of this one
        # `kinds` are those of the tasks of all ranks; `kind` and `index` the task of this one, for example worker 1.
        if self.is_given:
            config = _given(bare, placement)
            self.kind, self.index = (
                str(config["task"]["type"]),
                int(config["task"].get("index") or 0),
            )
            self.addresses = {
                kind: tasks for kind, tasks in config["cluster"].items() if kind != EVALUATOR
            }
            self.kinds = [
                kind for kind in ("chief", "worker", "ps") for _ in self.addresses.get(kind, ())
            ]
            self.offer = _GIVEN + inherited.digest(json.dumps(self.addresses, sort_keys=True))
            return
        self.kinds = _kinds(placement.world_size, options)
        self.kind = self.kinds[placement.rank]
        self.index = self.kinds[: placement.rank].count(self.kind)
        if not self.is_alone and job.membership is None:
            raise DistbootError(
                "rendezvous-needed",
                "DISTBOOT_RENDEZVOUS=0, and there is no TF_CONFIG: the addresses of TensorFlow's tasks are exchanged "
                "in the rendezvous",
                "unset DISTBOOT_RENDEZVOUS, or set TF_CONFIG for every process",
            )

    def hold_port(self) -> socket.socket | None:
        """The port of this task, reserved until its server has it; None if it has no server."""
        if self.is_alone or self.kind == EVALUATOR:
            return None
        if not self.is_given:
            port = _held(0)
            self.offer = format_address(self._job_info.own_address, port.getsockname()[1])
            return port
        address = self.addresses[self.kind][self.index]
        try:
            return _held(parse_address(address)[1] or 0)
        except OSError as error:
            raise DistbootError(
                "port-taken",
                f"TF_CONFIG has {address} for {self.kind} {self.index}, and this process cannot listen there: "
                f"{error.strerror}",
                "look for a process of an earlier run, or give it another port",
            ) from None

    def completed(self) -> Cluster:
        """This cluster, when all ranks have told what they offer."""
        offers = self._job_info.offers
        _refuse_several(offers)
        if not self.is_given and not self.is_alone:
            for rank, kind in enumerate(self.kinds):
                if kind != EVALUATOR:
                    self.addresses.setdefault(kind, []).append(offers[rank])
        return self

    def exports(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables for TensorFlow that are not as they should be in `environ`."""
        config = {"cluster": self.addresses, "task": {"type": self.kind, "index": self.index}}
        found = {} if self.is_given or self.is_alone else {VARIABLE: json.dumps(config)}
        hosts = {
            parse_address(address)[0]: None
            for tasks in self.addresses.values()
            for address in tasks
        }
        return found | past_proxies(environ, list(hosts))


def _kinds(world_size: int, options: Options) -> list[str]:
    """The type of the task of every rank where no TF_CONFIG says it."""
    if options.strategy != PARAMETER_SERVER:
        return ["worker"] * world_size
    workers = world_size - 1 - options.ps - options.evaluator
    if options.ps < 1 or workers < 1:
        evaluator = ", evaluator=True" if options.evaluator else ""
        raise DistbootError(
            "usage",
            f"strategy={PARAMETER_SERVER!r}, ps={options.ps}{evaluator} in a job of {world_size}: there must be a "
            "chief, and at least one worker and one parameter server",
            f"start at least {2 + max(options.ps, 1) + options.evaluator} ranks, with ps=1 or more",
        )
    return ["chief", *["worker"] * workers, *["ps"] * options.ps, *[EVALUATOR] * options.evaluator]


def _given(environ: Mapping[str, str], placement: Placement) -> dict[str, Any]:
    """TF_CONFIG, as its launcher corrects it, which must be that of this rank."""
    text = corrected(environ).get(VARIABLE, environ[VARIABLE])
    found = read_placement(TF_CONFIG, {VARIABLE: text})
    if (found.rank, found.world_size) != (placement.rank, placement.world_size):
        raise DistbootError(
            "conflicting-launchers",
            f"{placement.launcher} says rank {placement.rank} of {placement.world_size}, but TF_CONFIG says rank "
            f"{found.rank} of {found.world_size}: {found.sources['rank']}",
            "unset TF_CONFIG to have it made from the ranks, or set DISTBOOT_LAUNCHER=tf_config to go by it alone",
        )
    config: dict[str, Any] = json.loads(text)
    return config


def _refuse_several(offers: Mapping[int, str]) -> None:
    """Refuse ranks that were given different clusters, or of which only some were given one."""
    given = {rank: offer for rank, offer in sorted(offers.items()) if offer.startswith(_GIVEN)}
    without = sorted(offers.keys() - given.keys())
    if given and without:
        raise DistbootError(
            "membership-mismatch",
            f"{ranks_said(list(given))} {'have' if len(given) > 1 else 'has'} a TF_CONFIG, and {ranks_said(without)} "
            f"{'have' if len(without) > 1 else 'has'} none",
            "set it for all processes, or for none to have it made from the ranks",
        )
    odd = [rank for rank, offer in given.items() if offer != offers[min(given)]]
    if odd:
        problem = f"the cluster in the TF_CONFIG of {ranks_said(odd)} is another one than that of rank {min(given)}"
        hint = "give all processes the same 'cluster'; only 'task' may differ"
        raise DistbootError("membership-mismatch", problem, hint)


def _held(port: int) -> socket.socket:
    """A socket bound to a port, or to any free one (0), which only TensorFlow's server may take while it is.

    No other process gets the port, as it was free, and the server does, as gRPC sets SO_REUSEADDR and this socket has
    it, too, but does not listen (Linux, inet_csk_bind_conflict).
    """
    held = socket.socket()
    try:
        held.bind(("", port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held


def refuse_options(options: Options) -> None:
    """Refuse what cannot be right in any job."""
    strategy = options.strategy
    option, problem = f"strategy={short_repr(strategy)}", ""
    if strategy not in (None, *_STRATEGIES):
        problem = f"{option} is not one of {', '.join(_STRATEGIES)}"
    elif (options.backend or "auto").lower() not in _IMPLEMENTATIONS:
        problem = f"backend={short_repr(options.backend)} is not one of TensorFlow's: {', '.join(_IMPLEMENTATIONS)}"
    elif (options.ps or options.evaluator) and strategy != PARAMETER_SERVER:
        problem = f"ps= and evaluator= are for strategy={PARAMETER_SERVER!r}, and {option}"
    elif (options.backend or options.timeout) and strategy not in (None, MULTI_WORKER):
        problem = f"backend= and timeout= are for strategy={MULTI_WORKER!r}, and {option}"
    if problem:
        raise DistbootError("usage", problem, "help(distboot.init) says what each of them does")


def refuse_job(cluster: Cluster, job: Session, options: Options) -> None:
    """Refuse a strategy that this job cannot have."""
    kinds, strategy, problem = cluster.kinds, options.strategy, ""
    if strategy == PARAMETER_SERVER:
        if cluster.kind == EVALUATOR and cluster.is_given:
            return
        refuse_missing_tasks(kinds)
        servers = kinds.count("ps")
        if options.ps not in (0, servers):
            problem, hint = (
                f"ps={options.ps}, and TF_CONFIG has {servers} ps",
                "leave ps= out: TF_CONFIG says it",
            )
        elif job.membership is None:
            raise rendezvous_needed(
                f"with strategy={PARAMETER_SERVER!r} the chief tells the others when it ends"
            )
    elif strategy in (MIRRORED, DEFAULT) and not cluster.is_alone:
        problem = (
            f"strategy={strategy!r} is for one process, and the job has {len(kinds)}: "
            "each would train its own model"
        )
        hint = f"leave strategy= out to have {MULTI_WORKER!r}, or start one process"
    elif "ps" in kinds:
        problem = (
            f"TF_CONFIG has parameter servers, which strategy={short_repr(strategy)} does not use"
        )
        hint = f'init("tensorflow", strategy="{PARAMETER_SERVER}")'
    if problem:
        raise DistbootError("usage", problem, hint)


def refuse_missing_tasks(kinds: list[str]) -> None:
    """Refuse a cluster in which parameter servers have no task to serve."""
    missing = [kind for kind in ("chief", "worker", "ps") if kind not in kinds]
    if missing:
        raise DistbootError(
            "broken-environment",
            f"TF_CONFIG has no {' and no '.join(missing)}, which ParameterServerStrategy needs",
            "it takes one chief, which runs the script (worker 0, if there are more), and at least one worker and one "
            "ps, which serve it; on Azure ML worker_count: 2 and parameter_server_count: 1, or more",
        )


def refuse_used(tf: Any) -> None:
    """Refuse a TensorFlow whose runtime is up: it takes no cluster any more, or loses what was made before."""
    from tensorflow.python.eager import context as eager

    # What its own "Collective ops must be configured at program startup" goes by (TensorFlow 2.21, eager/context.py).
    if getattr(eager.context(), "_context_handle", None) is not None:
        raise DistbootError(
            "already-initialized",
            f"TensorFlow {tf.__version__} was used before init(), and takes a cluster only at the start of a process",
            "make distboot.init() the first line of the script, before any tensor, dataset, model or strategy; after "
            "close() there is no second time in the same process",
        )
