"""What the text of an unmodified script shows before it starts: its options and its framework."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..detection.launchers.tf_config import has_servers
from ..detection.local_rank_option import without_local_rank
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement
from .target import Target

_LOCAL_RANKS = {"--local_rank", "--local-rank"}
_MENTIONS_LOCAL_RANK = pattern(r"""["'](--local[-_]rank)["']""")


class Framework(NamedTuple):
    """A framework with variables of its own, which the wrapper sets only with `--framework`."""

    word: str  # in the text of each script that starts it
    signs: set[str]  # what such a script imports, or calls
    variable: str  # any other environment with it tells the framework its rank


_FRAMEWORKS = {
    "horovod": Framework(
        "horovod",
        {"horovod"},
        "HOROVOD_RANK",
    ),
    "tensorflow": Framework(
        "Strategy",
        {"MultiWorkerMirroredStrategy", "ParameterServerStrategy"},
        "TF_CONFIG",
    ),
    "jax": Framework(
        "jax.distributed",
        {"jax.distributed.initialize()"},
        "JAX_COORDINATOR_ADDRESS",
    ),
}
# Beginnings of variables of whatever starts MPI: Slurm and Flux may not
_OFFERS_OF_MPI = ("PMI_", "PMIX_", "PALS_", "I_MPI_PMI_LIBRARY")
_MPI = "mpi4py"
_MPI_REMEDY = "mpirun python -m distboot, or srun --mpi=… (see srun --mpi=list)"


def fit_to_script(options: SimpleNamespace, target: Target, environ: Mapping[str, str]) -> None:
    """Fit the options to the text of the script."""
    if options.framework == "deepspeed":
        _pass_local_rank(options, _mentioned_local_rank(target.text))
    elif _is_given_local_rank(target):
        _pass_local_rank(options, _added_local_rank(target.text))
    elif options.framework == "tensorflow" and has_servers(environ):
        _refuse_workers_only(target.text)


def _is_given_local_rank(target: Target) -> bool:
    """Whether the launcher has put the local rank before our arguments, for a script.

    torch.distributed.launch and DeepSpeed's launcher do.
    """
    first = sys.argv[1:2]
    is_given = first != without_local_rank(first)
    return all((is_given, not target.is_command))


def _pass_local_rank(options: SimpleNamespace, option: str | None) -> None:
    """Pass the local rank to a script that has an option for it, in its spelling.

    The default of the option may be 0, which is the wrong device, and deepspeed.initialize compares
    it with LOCAL_RANK (0.19, _do_args_sanity_check). A script without the name in it may not know
    the option, and would end with a usage error.
    """
    is_given = options.pass_local_rank is not None
    if option is not None and not is_given:
        options.pass_local_rank = option


def _mentioned_local_rank(text: str) -> str | None:
    found = _MENTIONS_LOCAL_RANK.findall(text)
    return next(iter(found), None)


def _added_local_rank(text: str) -> str | None:
    """As the script adds it to its parser."""
    from .script_tree import script_of  # here, as only some launchers give it

    found = filter(_LOCAL_RANKS.__contains__, script_of(text).options)
    return next(found, None)


def _refuse_workers_only(text: str) -> None:
    """In a job with parameter servers, TensorFlow does not run a script that uses only workers."""
    uses_servers = "ParameterServerStrategy" in text
    uses_workers = "MultiWorkerMirroredStrategy(" in text
    if uses_servers or not uses_workers:
        return
    raise DistbootError(
        "usage",
        "TF_CONFIG has parameter servers, "
        "but the script's MultiWorkerMirroredStrategy does not use them",
        "start the job without them (on Azure ML parameter_server_count: 0), "
        "or use ParameterServerStrategy",
    )


def missing_framework_option(
    target: Target,
    framework: str,
    placement: Placement,
    environ: Mapping[str, str],
    per_node: str | None,
) -> str | None:
    """A warning if a script starts a framework whose variables only `--framework` sets, or None.

    Without these variables each process is a world of its own, and trains a model of its own.
    """
    text = target.text
    if framework != "torch":
        return None
    name = _framework_without_variables(text, placement, environ)
    if name is None:
        return None
    starts = _starts(name, text)
    script = target.as_given
    command = script
    if target.is_command:
        command = f"-- python {script}"
    if per_node:
        command = f"--nproc-per-node {per_node} {command}"
    return (
        f"warning: {script} {starts} {name}, which reads variables of its own, and without "
        "them each rank trains separately: "
        f"python -m distboot run --framework {name} {command}"
    )


def missing_mpi(
    target: Target, framework: str, placement: Placement, environ: Mapping[str, str]
) -> str | None:
    """A warning if a script uses MPI, and each rank would be a world of its own, or None.

    With `--framework mpi` that is an error.
    """
    if not _is_without_mpi(placement, environ):
        return None
    what = f"launcher {placement.launcher!r} has not started MPI: each rank"
    if framework == "mpi":
        raise DistbootError(
            "mpi-mismatch",
            f"--framework mpi, but {what} would be a world of its own",
            f"start the job with {_MPI_REMEDY}; or leave --framework out",
        )
    text = target.text
    if not _uses_mpi(text):
        return None
    return (
        f"warning: {target.as_given} imports mpi4py, and {what} is a world of its own, and may "
        f"train separately; start the job with {_MPI_REMEDY}"
    )


def _uses_mpi(text: str) -> bool:
    """Whether a script imports mpi4py; one that can do without it, only where it is there."""
    if _MPI not in text:
        return False
    from .module_lookup import missing_part  # here, as few scripts do
    from .script_tree import script_of

    script = script_of(text)
    packages = set(script.needed)
    if missing_part(_MPI) is None:
        packages |= script.tried
    return _MPI in packages and not script.calls_init


def _is_without_mpi(placement: Placement, environ: Mapping[str, str]) -> bool:
    starts = LAUNCHERS[placement.launcher].mpi
    if starts in ("yes", "no"):
        return starts == "no"
    return not any(name.startswith(_OFFERS_OF_MPI) for name in environ)


def _framework_without_variables(
    text: str, placement: Placement, environ: Mapping[str, str]
) -> str | None:
    read_by = LAUNCHERS[placement.launcher].read_by
    for name, framework in _FRAMEWORKS.items():
        is_read_from_launcher = name in read_by
        has_variables = is_read_from_launcher or framework.variable in environ
        is_mentioned = framework.word in text
        is_to_be_told = is_mentioned and not has_variables
        if is_to_be_told and _starts(name, text):
            return name
    return None


def _starts(name: str, text: str) -> str:
    """`"starts"` or `"may start"` of a script that does not call `init`; empty: it does neither.

    One that can do without the framework may start it only where it is installed.
    """
    from .module_lookup import missing_part  # here, as most scripts have no such word
    from .script_tree import script_of

    framework = _FRAMEWORKS[name]
    script = script_of(text)
    if script.calls_init:
        return ""
    if framework.signs & script.needed:
        return "starts"
    is_possible = framework.signs & (script.tried | script.later)
    if is_possible and missing_part(name) is None:
        return "may start"
    return ""
