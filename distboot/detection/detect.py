"""`detect`: from the environment of one process to its `Placement`. Pure: it reads the mapping and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import did_you_mean, digits, short_repr
from . import inherited, signs
from .env_reader import EnvReader, container_env_hint
from .inherited import InheritedEnv
from .launchers import Launcher, of_platform
from .launchers.aws import AWSBATCH, SAGEMAKER
from .launchers.by_hand import NODES
from .launchers.frameworks import (
    DEEPSPEED,
    HOROVODRUN,
    LIGHTNING,
    TORCH,
    TORCHRUN,
)
from .launchers.google import TPU, VERTEX
from .launchers.jax import JAX, JAXJOB
from .launchers.kubernetes import KUBEFLOW, PODS, VOLCANO
from .launchers.platforms import MODELARTS, PLAIN_PLATFORMS
from .launchers.records import (
    DISTBOOT,
    FLUX,
    INTELMPI,
    LSF,
    MPICH,
    MVAPICH,
    OPENMPI,
    PALS,
    PMI,
)
from .launchers.slurm import SINGLE, SLURM
from .launchers.tf_config import TF_CONFIG
from .placement import (
    NUMBERS,
    PLATFORMS,
    VARIABLES,
    Placement,
)

# The innermost launcher, the one that started this very process, owns its rank: what an outer launcher
# has set is inherited by all processes alike and wrong for most of them.
INNERMOST_FIRST: tuple[Launcher, ...] = (
    # srun, mpirun and operators all start torchrun's agents. No torchrun worker starts mpirun.
    TORCHRUN,
    # Its launcher runs once a node, under pdsh, and starts the processes itself.
    DEEPSPEED,
    # horovodrun and the MPI launchers start their daemons with srun inside an allocation, and the processes
    # inherit the step of the daemon, in which every node has "one task". So all of them come before slurm.
    HOROVODRUN,
    # jsrun sets Open MPI's variables too, for Spectrum MPI, but not all of them.
    LSF,
    OPENMPI,
    # Intel MPI and MVAPICH come from MPICH, set its variables too, and know more than it does.
    INTELMPI,
    MVAPICH,
    MPICH,
    # Flux is often started by Slurm. Both set PALS_* for Cray's MPI library, so PALS itself is asked after them.
    FLUX,
    SLURM,
    PALS,
    # What all of these set, and nothing that says which: they come before, as they know more.
    PMI,
    # The agent of a node clears what has started it. What a rank starts is one of those above.
    DISTBOOT,
    # They number processes, and platforms that number nodes start one on each.
    JAX,
    JAXJOB,
    # An operator's RANK counts pods. It must not be taken for that of a process, as TORCH would. ModelArts is
    # built on Volcano, and knows more.
    of_platform(KUBEFLOW),
    of_platform(MODELARTS),
    of_platform(VOLCANO),
    of_platform(PODS),
    # Platforms with names of their own; where RANK or LOCAL_RANK is set, something has numbered processes.
    *map(of_platform, PLAIN_PLATFORMS),
    of_platform(TPU),
    of_platform(VERTEX),
    # The same with plain names, which a person may have set from those.
    of_platform(NODES),
    # NODE_RANK and LOCAL_RANK without RANK: for TORCH that is half a launcher.
    LIGHTNING,
    # RANK and WORLD_SIZE are plain names that any shell, image or operator may set; a launcher with names of
    # its own knows better. When both speak and disagree, `detect` refuses.
    TORCH,
    # An operator sets TF_CONFIG once a pod; where RANK is there as well (Vertex AI) it is the more exact one.
    TF_CONFIG,
    # Platforms that start one container per node: whatever was started inside knows better.
    of_platform(SAGEMAKER),
    of_platform(AWSBATCH),
    # No launcher claims the process, and no half of one is left over.
    SINGLE,
)

LAUNCHERS = {one.name: one for one in INNERMOST_FIRST}

# The platforms that number nodes, in the same order.
NODE_PLATFORMS = (
    *(
        KUBEFLOW,
        MODELARTS,
        VOLCANO,
        PODS,
        *PLAIN_PLATFORMS,
        TPU,
        VERTEX,
        NODES,
        SAGEMAKER,
        AWSBATCH,
    ),
)

# Variable -> the places in the order of those that may claim a process by it.
_PLACES_BY_VARIABLE: dict[str, list[int]] = {}
for _place, _launcher in enumerate(INNERMOST_FIRST):
    for _name in (*_launcher.markers, *_launcher.triggers):
        _PLACES_BY_VARIABLE.setdefault(_name, []).append(_place)

# Those that number processes and may be wrong about a whole job: a shell or an image may have left their numbers over.
_OF_PROCESSES = (JAX, JAXJOB, TORCH)
# Those that may say that this process is alone, and be wrong.
_OF_ONE = ("single", "torch", "nodes")

# DISTBOOT_LAUNCHER=none: look for no launcher at all.
OFF = "none"
# What names the job of a whole platform, whichever launcher has started a process in it.
_JOB_IDS_OF_PLATFORMS = {name for platform in PLATFORMS for name in platform.job_id_variables}
_ONE_A_NODE = "one process was started on each node; if it is to start several ranks there, see --nproc-per-node"
NODE_LEVEL_HINT = (
    "let the wrapper start the ranks: python -m distboot --nproc-per-node N script.py …, with N processes per node, "
    "or auto for as many as the platform says (else one per accelerator, or per CPU if there are none), or 1 for a "
    "single process"
)
# How to start so many processes, where that is not the same for all launchers.
_START_SEVERAL = {
    SLURM.name: "start {0} tasks: srun --ntasks-per-node={0} … on one node, srun --ntasks={0} … on several",
}
_SCHEDULERS = (FLUX, LSF, PALS)  # with which people start the daemons of an MPI, as with Slurm


def detect(environ: Mapping[str, str] | None = None, *, launcher: str | None = None) -> Placement:
    """Find out from the environment which process of the job this is.

    Args:
        environ: the environment to read; default: that of this process.
        launcher: name of the launcher to believe, for example "openmpi", or "none" for a process that is alone
            whatever its environment says; default: DISTBOOT_LAUNCHER, or else the innermost launcher that claims
            the environment.

    Returns:
        This process's place in the job. What its environment cannot prove is None in it, never a guess.

    Raises:
        DistbootError: the environment is broken or contradictory, or does not fit the launcher named.
    """
    if environ is None or environ is os.environ:
        environ = dict(os.environ)  # each look at os.environ itself encodes a name
    without_ours, outer = inherited.strip(environ)
    name = environ.get("DISTBOOT_LAUNCHER") or None if launcher is None else launcher
    if name is None:
        placement = _innermost(environ, without_ours, outer)
        if (
            placement.launcher == SINGLE.name
            and not outer.launches
            and outer.fields.get("world_size", 1) != 1
        ):
            placement = _as_exported(environ, outer)
        _refuse_signs(placement, without_ours)
    else:
        option = "DISTBOOT_LAUNCHER" if launcher is None else "launcher"
        placement = _named(environ, without_ours, name, f"{option}={short_repr(name)}")
    return outer.merge(placement) if outer.is_about(placement) else placement


def refuse_unless_rank(placement: Placement) -> None:
    """Refuse a process that stands for a whole node."""
    if placement.node_level is not None:
        raise DistbootError(
            "node-level-launch",
            f"{placement.node_level}; this process stands for node {placement.rank} of {placement.world_size}, "
            "and is not a rank",
            NODE_LEVEL_HINT,
        )


def traces(environ: Mapping[str, str]) -> dict[str, str]:
    """Every launcher that has variables of its own in an environment, with what stands for what they say.

    That is a digest of one process, and one of the job, where the launcher names it.
    """
    without_ours, _ = inherited.strip(environ)
    return _traces(_placements(environ, without_ours, _present(environ)))


def _traces(placements: Mapping[str, Placement]) -> dict[str, str]:
    """What stands for what each of these launchers says."""
    found = {}
    for name, placement in placements.items():
        one = inherited.digest(f"{placement.launcher}:{placement.rank}:{placement.world_size}")
        of_launcher = placement.sources.get("job_id") not in _JOB_IDS_OF_PLATFORMS
        found[name] = one + (inherited.digest(placement.job_id) if of_launcher else "")
    return found


def _placements(
    environ: Mapping[str, str], without_ours: Mapping[str, str], present: Sequence[Launcher]
) -> dict[str, Placement]:
    """The placement of each launcher that has variables of its own, and all that it needs."""
    found = {}
    for each in present:
        if each.generic_names or each is SINGLE:
            continue
        placement = _found_whole(each, _view(each, environ, without_ours))
        if placement is not None:
            found[each.name] = placement
    return found


def read_placement(launcher: Launcher, environ: Mapping[str, str]) -> Placement:
    """The placement of a process that a launcher started, by its claim or because the user says so; or an error."""
    return _read(launcher, environ).placement()


def _read(launcher: Launcher, environ: Mapping[str, str]) -> EnvReader:
    """What a launcher says, unchecked."""
    reader = EnvReader(
        environ, launcher.name, launcher.in_order, nodes_are_hosts=launcher.nodes_are_hosts
    )
    names: Iterable[str | None] = launcher.numbers
    if launcher.instead:
        names = [name and reader.first(name, launcher.instead.get(name, name)) for name in names]
    reader.integers(*names, optional=launcher.optional)
    launcher.more(reader)
    for name, own in launcher.same.items():
        if name not in environ:
            continue
        number = reader.number(NUMBERS[launcher.numbers.index(own)])
        reader.agree(name, number, reader.first(own, launcher.instead.get(own, own)))
    reader.job_id(*launcher.job_id)
    return reader


def _found(launcher: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The placement of a process that a launcher started; None if it did not."""
    return read_placement(launcher, environ) if launcher.claims(environ) else None


def _found_whole(launcher: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The placement of a process that a launcher started; None also where there is only half of the launcher."""
    try:
        return _found(launcher, environ)
    except DistbootError:
        return None


def _view(
    candidate: Launcher, environ: Mapping[str, str], without_ours: Mapping[str, str]
) -> Mapping[str, str]:
    """What a launcher is to read; `without_ours` is the environment without what an outer distboot exported.

    A launcher that has started processes below that distboot may have set the very values again: all is then its own.
    """
    if candidate.own_mark not in without_ours:
        return without_ours
    if candidate.sets_torch_vars:
        return environ
    of_ours = VARIABLES.values()
    return {
        name: text for name, text in environ.items() if name in without_ours or name not in of_ours
    }


def _candidates(
    present: Sequence[Launcher], outer: InheritedEnv, found: Mapping[str, Placement]
) -> Sequence[Launcher]:
    """Those that may have started this process: below a distboot not those that are further out than it.

    `found` has the placements of those that have variables of their own.
    """
    own = outer.fields["launcher"]
    new = set()
    for name, identity in _traces(found).items():
        if outer.is_new(name, identity):
            new.add(name)
    if new:
        return [one for one in present if one.name in new]
    return [one for one in present if one.name not in found or one.name == own]


def _present(environ: Mapping[str, str]) -> list[Launcher]:
    """The launchers of which a variable is there, the innermost first; and `single`."""
    places = {len(INNERMOST_FIRST) - 1}
    for name in environ.keys() & _PLACES_BY_VARIABLE.keys():
        places.update(_PLACES_BY_VARIABLE[name])
    return [INNERMOST_FIRST[place] for place in sorted(places)]


def _innermost(
    environ: Mapping[str, str], without_ours: Mapping[str, str], outer: InheritedEnv
) -> Placement:
    present = _present(environ)
    candidates: Sequence[Launcher] = present
    known: Mapping[str, Placement] = {}
    if outer.fields:
        known = _placements(environ, without_ours, present)
        candidates = _candidates(present, outer, known)
    notes: list[str] = []
    for candidate in candidates:
        placement = known.get(candidate.name)
        if placement is None:
            placement = _found(candidate, _view(candidate, environ, without_ours))
        if placement is not None:
            further_out = present[present.index(candidate) + 1 :]
            if candidate.uses_daemons:
                _refuse_other_daemons(candidate, placement, without_ours, further_out, candidates)
            if candidate.numbers_nodes or candidate in _OF_PROCESSES:
                _refuse_other_nodes(candidate, placement, without_ours, present)
            notes += _notes_on_others(candidate, further_out, without_ours)
            notes += _notes_on_generic(candidate, placement, without_ours, further_out, outer)
            return placement._replace(notes=(*placement.notes, *notes)) if notes else placement
        names = _markers_present(without_ours, candidate)
        if names and not _is_one_node(candidate, without_ours):
            notes.append(f"{names} ignored: they are not about this very process")
    raise AssertionError("the last launcher, single, claims every environment")


def _is_one_node(candidate: Launcher, environ: Mapping[str, str]) -> bool:
    """Whether a platform has one node, so that it has nothing to say."""
    if not candidate.numbers_nodes:
        return False
    return not any(environ.get(name, "1") not in ("0", "1") for name in candidate.markers)


def _refuse_other_daemons(
    candidate: Launcher,
    placement: Placement,
    environ: Mapping[str, str],
    further_out: Sequence[Launcher],
    candidates: Sequence[Launcher],
) -> None:
    # Of those that read the same variables for rank and size, none can disagree
    others = [
        each
        for each in further_out
        if each.uses_daemons and each in candidates and each.numbers[:2] != candidate.numbers[:2]
    ]
    _refuse_conflict(environ, placement, others)
    if SLURM in candidates:
        _refuse_slurm_step(environ, placement)


def _refuse_other_nodes(
    candidate: Launcher,
    placement: Placement,
    environ: Mapping[str, str],
    present: Sequence[Launcher],
) -> None:
    """Refuse fewer ranks than a platform has nodes, and two platforms that number nodes differently."""
    for other in present:
        if not other.numbers_nodes or other is candidate:
            continue
        theirs = _nodes_by(other, environ, is_claimed=candidate.numbers_nodes)
        if theirs is None:
            continue
        if candidate.numbers_nodes:
            agree = (theirs.rank, theirs.world_size) == (placement.rank, placement.world_size)
        else:
            agree = theirs.world_size <= placement.world_size
        if not agree:
            names = ", ".join(name for name in other.markers if name in environ)
            raise _conflict(placement, other.name, theirs.rank, theirs.world_size, names)


def _nodes_by(
    platform: Launcher, environ: Mapping[str, str], *, is_claimed: bool
) -> Placement | None:
    """The nodes as a platform numbers them, also where RANK has made a process of this one; None: it does not."""
    if is_claimed:
        return _found_whole(platform, environ)
    if not platform.owns_torch_vars:
        # Those of the processes, which the platform does not set
        generic = VARIABLES.values()
        environ = {name: value for name, value in environ.items() if name not in generic}
    with suppress(DistbootError):
        return read_placement(platform, environ)
    return None


def _refuse_signs(placement: Placement, environ: Mapping[str, str]) -> None:
    """Refuse a process that is alone by its placement, or another node, and not by what else its environment says."""
    launcher = LAUNCHERS[placement.launcher]
    if placement.world_size == 1 and placement.node_level is None:
        if placement.launcher not in _OF_ONE:
            return
        found = signs.signs(environ)
        if found:
            raise signs.not_alone([*found, *signs.addresses(environ)], placement)
    elif launcher.numbers_nodes:
        other = signs.other_nodes(environ, placement, launcher.markers)
        if other is not None:
            raise _other_node(placement, other)


def _other_node(placement: Placement, sign: signs.Sign) -> DistbootError:
    index, count = sign.variables
    says = f"{placement.launcher} says node {placement.rank} of {placement.world_size}"
    theirs = f"{index}={short_repr(sign.values[0])} and {count}={short_repr(sign.values[1])}"
    return DistbootError(
        "conflicting-launchers",
        f"{says} ({placement.sources['rank']}), but {theirs} disagree",
        f"DISTBOOT_LAUNCHER={placement.launcher} if {index} and {count} are about something else; "
        f"if they are right, set NODE_RANK=${index} NUM_NODES=${count} DISTBOOT_LAUNCHER=nodes, "
        "and MASTER_ADDR to the host of node 0",
    ).of(UNKNOWN_RANK)


def _notes_on_others(
    candidate: Launcher, further_out: Sequence[Launcher], environ: Mapping[str, str]
) -> list[str]:
    """Which variables of launchers further out are ignored."""
    if candidate is SINGLE:
        return []
    notes = []
    for other in further_out:
        names = _markers_present(environ, other)
        if not names:
            continue
        # Of two with daemons that are there and agree, one has inherited the variables of the other.
        is_inherited = candidate.uses_daemons and other.uses_daemons
        is_one_node = other.numbers_nodes and not other.claims(environ)
        if not is_inherited and not is_one_node:
            owner = f"{candidate.name} owns the rank, {other.name} is further out"
            notes.append(f"{names} ignored: {owner}")
    return notes


def _notes_on_generic(
    candidate: Launcher,
    placement: Placement,
    environ: Mapping[str, str],
    further_out: Sequence[Launcher],
    outer: InheritedEnv,
) -> list[str]:
    """Which variables with generic names are ignored, and whether there is one process a node."""
    if candidate.owns_torch_vars:
        return []
    if candidate is SLURM or candidate.uses_daemons:
        _refuse_larger_world(environ, placement)
    generic = [each for each in further_out if each.generic_names]
    notes = _check_generic_vars(environ, placement, generic, outer)
    if placement.node_level is None and placement.num_nodes == placement.world_size > 1:
        notes.append(_ONE_A_NODE)
    return notes


def _as_exported(environ: Mapping[str, str], outer: InheritedEnv) -> Placement:
    """The rank that an outer distboot has exported, in a container that has not got the variables of its launcher."""
    exported = {name: value for name, value in environ.items() if name != inherited.VARIABLE}
    placement = _innermost(exported, exported, InheritedEnv())
    if placement.launcher == SINGLE.name:
        rank, world_size = outer.fields["rank"], outer.fields["world_size"]
        raise DistbootError(
            "broken-environment",
            f"{inherited.VARIABLE} says rank {rank} of {world_size}, and RANK and WORLD_SIZE are missing",
            f"to pass them to a container: {container_env_hint('RANK', 'WORLD_SIZE')}; else unset {inherited.VARIABLE}",
        ).of(UNKNOWN_RANK)
    return placement


def _named(
    environ: Mapping[str, str], without_ours: Mapping[str, str], name: str, option: str
) -> Placement:
    """What the launcher says that the user names, with the `option` that names it for messages."""
    if name in (SINGLE.name, OFF):
        return read_placement(SINGLE, without_ours)  # whatever else the environment says
    candidate = LAUNCHERS.get(str(name))
    if candidate is None:
        raise _unknown(str(name), option)
    environ = _view(candidate, environ, without_ours)
    is_claimed = candidate.claims(environ)
    problem = "its variables are not as it sets them"
    if is_claimed or not candidate.needs_claim:
        try:
            # Also one that it does not claim: the user says that it is so
            return read_placement(candidate, environ)
        except DistbootError as error:
            if is_claimed:
                raise
            problem = error.message.removeprefix(f"launcher {name!r}: ")
    raise DistbootError(
        "launcher-mismatch",
        f"{option}: {problem}",
        "remove the setting to let distboot find the launcher, or start the job with that launcher; to containers, "
        "pass its rank and size",
    ).of(UNKNOWN_RANK)


def _unknown(word: str, option: str) -> DistbootError:
    titled = []
    for one in INNERMOST_FIRST:
        if word.lower() in re.findall(r"[\w.]+", one.title.lower()):
            titled.append(one.name)
    return DistbootError(
        "unknown-launcher",
        f"{option} is not a valid launcher",
        f"{did_you_mean(word, LAUNCHERS, titled)}the launchers are {', '.join(LAUNCHERS)}, "
        f"and {OFF} for a process that is alone (python -m distboot launchers)",
    ).of(UNKNOWN_RANK)


def _refuse_conflict(
    environ: Mapping[str, str], placement: Placement, others: list[Launcher]
) -> None:
    """Refuse when another launcher with daemons has other numbers: nothing says which is the inner one."""
    for other in others:
        markers = _markers_present(environ, other)
        theirs = _found_whole(other, environ) if markers else None
        if theirs is None:
            continue
        pairs = [(getattr(placement, field), getattr(theirs, field)) for field in NUMBERS]
        # The same, as far as both know
        if all(mine == its or None in (mine, its) for mine, its in pairs):
            continue
        if other not in _SCHEDULERS or not _may_be_daemons(
            placement, theirs.world_size, theirs.num_nodes
        ):
            raise _conflict(placement, theirs.launcher, theirs.rank, theirs.world_size, markers)


def _refuse_slurm_step(environ: Mapping[str, str], placement: Placement) -> None:
    """Refuse when this is also a task of a Slurm step that is not that of the daemons of `placement`."""
    rank, tasks = (
        digits(environ.get(name, "")) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    )
    # 0: not known, and so not one task per node
    nodes = digits(environ.get("SLURM_STEP_NUM_NODES", "0"))
    # In an interactive shell, which has a terminal, anything may have been typed.
    if rank is None or tasks is None or nodes is None or "SLURM_PTY_PORT" in environ:
        return
    if (rank, tasks) == (placement.rank, placement.world_size):
        local = environ.get("SLURM_LOCALID", "")
        differs = placement.local_rank is not None and local not in ("", str(placement.local_rank))
    else:
        differs = not _may_be_daemons(placement, tasks, nodes)
    if differs:
        raise _conflict(placement, SLURM.name, rank, tasks, _markers_present(environ, SLURM))


def _check_generic_vars(
    environ: Mapping[str, str], placement: Placement, others: list[Launcher], outer: InheritedEnv
) -> list[str]:
    """Refuse when variables with generic names describe another world: one is stale, and nothing says which."""
    notes: list[str] = []
    read = placement.sources.values()
    for other in others:
        ignored = [name for name in other.markers if name in environ and name not in read]
        if ignored and other.claims(environ):
            theirs = _read(other, environ)
            notes += _compare_generic(placement, theirs, other.name, ", ".join(ignored), outer)
    return notes


def _compare_generic(
    placement: Placement, theirs: EnvReader, name: str, ignored: str, outer: InheritedEnv
) -> list[str]:
    """The note on the variables of one launcher with generic names; an error for those of another world."""
    rank = theirs.number("rank")
    world_size = theirs.number("world_size")
    if rank is None or world_size is None or theirs.problems or rank >= world_size:
        # Half of a launcher, or broken: clearly a left-over
        return [f"{ignored} ignored: {placement.launcher} owns the rank"]
    if outer.fields and _is_of_outer(theirs, outer):
        return []
    if world_size != placement.world_size:
        raise _conflict(placement, name, rank, world_size, ignored)
    # An inner launcher with exactly one process for each outer one makes no sense: RANK was exported once, in a
    # batch script for example, or it is the user's own order of the same processes.
    if rank == placement.rank:
        return []
    note = (
        f"{ignored} ignored: {placement.launcher} owns the rank, and says {placement.rank} "
        f"where {theirs.source('rank')} says {rank}"
    )
    return [note]


def _is_of_outer(reader: EnvReader, outer: InheritedEnv) -> bool:
    """Whether this is the process that the outer distboot was about, or for which it was a launcher."""
    with suppress(DistbootError):
        return outer._replace(launches=False).is_about(reader.placement())
    return False


def _refuse_larger_world(environ: Mapping[str, str], placement: Placement) -> None:
    """Refuse a WORLD_SIZE above 1 where a launcher has started one process, which would train alone."""
    size = digits(environ.get("WORLD_SIZE", ""))
    # With RANK it is the whole claim of `torch`, which is compared with this one.
    if placement.world_size > 1 or size is None or size < 2 or "RANK" in environ:
        return
    launcher, source = placement.launcher, placement.sources["world_size"]
    started = "srun" if launcher == SLURM.name else launcher
    start = _START_SEVERAL.get(launcher, "start {} processes").format(size)
    raise DistbootError(
        "conflicting-launchers",
        f"{started} started 1 process ({source}=1), but WORLD_SIZE={size}",
        f"{start}; or unset WORLD_SIZE if it is left over; or set DISTBOOT_LAUNCHER={launcher} if this process is "
        "meant to be alone",
    ).of(UNKNOWN_RANK)


def _markers_present(environ: Mapping[str, str], launcher: Launcher) -> str:
    """The launcher's markers that are there, for a note; empty for generic names, see `_check_generic_vars`."""
    if launcher.generic_names:
        return ""
    return ", ".join([name for name in launcher.markers if name in environ])


def _may_be_daemons(placement: Placement, tasks: int, nodes: int | None) -> bool:
    """Whether so many tasks can be the daemons of a launcher: one a node, on nodes without ranks too."""
    if placement.world_size == 1 and tasks > 1:
        return False  # srun was more likely told to start these tasks
    return tasks == nodes


def _conflict(
    placement: Placement, name: str, rank: int, world_size: int, variables: str
) -> DistbootError:
    return DistbootError(
        "conflicting-launchers",
        f"{placement.launcher} says rank {placement.rank} of {placement.world_size} ({placement.sources['rank']}), but "
        f"{name} says rank {rank} of {world_size}",
        f"name the one that started this very process, the last one typed: DISTBOOT_LAUNCHER={placement.launcher} or "
        f"DISTBOOT_LAUNCHER={name}; or clear {variables} if left over from a shell or an image",
    ).of(UNKNOWN_RANK)
