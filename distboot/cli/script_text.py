"""What the text of an unmodified script shows before it starts: its options and its framework."""

from __future__ import annotations

import itertools
import re
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

# Options of the wrapper that no script has for itself; many scripts have --report or --log-dir.
_WRAPPERS_ALONE = (
    "--nproc-per-node",
    "--max-restarts",
    "--restart-delay",
    "--restart-window",
    "--join-timeout",
    "--pass-local-rank",
    "--log-prefix",
    "--log-format",
)
_LOCAL_RANK = r"""["'](--local[-_]rank)["']"""
_LOCAL_RANK_OPTION = pattern(_LOCAL_RANK)
# The same where a parser gets it: of argparse, click or typer, after other names, in no comment
_ADDS_LOCAL_RANK = pattern(
    r"""^[^#\n]*\b(?:add_argument|option|Option)\(\s*"""
    rf"""(?:["'][\w-]*["']\s*,\s*)*{_LOCAL_RANK}""",
    re.MULTILINE,
)


class Framework(NamedTuple):
    """A framework with variables of its own, which the wrapper sets only with `--framework`."""

    starts: re.Pattern[str]  # in a script that starts it
    variable: str  # any other environment with it tells the framework its rank


# `import horovod`, `from horovod`, `import torch as t, horovod`
_IMPORT_OF = r"(?:from|import(?:[ \t]+[\w.]+(?:[ \t]+as[ \t]+\w+)?[ \t]*,)*)[ \t]+{}\b"
# Also after `try:`, `if x:` and `import os;`, but in no comment, string or prose
_IN_A_LINE = rf"""^[ \t]*(?:(?:try|else|if\b[^#"'\n]*)[ \t]*:|[^#"'\n]*;)?[ \t]*{_IMPORT_OF}"""
_FRAMEWORKS = {
    "horovod": Framework(
        pattern(_IN_A_LINE.format("horovod"), re.MULTILINE),
        "HOROVOD_RANK",
    ),
    "tensorflow": Framework(
        pattern(r"\b(?:MultiWorkerMirroredStrategy|ParameterServerStrategy)\("),
        "TF_CONFIG",
    ),
    "jax": Framework(
        pattern(r"\bjax\.distributed\.initialize\(\s*\)"),
        "JAX_COORDINATOR_ADDRESS",
    ),
}
# Not within a function, where libraries that can do without it import it
_IMPORTS_MPI = pattern(rf"^{_IMPORT_OF}".format("mpi4py"), re.MULTILINE)
# As what may be missing
_TRIES_MPI = pattern(
    rf"^try:(?:[ \t]*(?:#.*)?\n)?[ \t]+{_IMPORT_OF}".format("mpi4py"), re.MULTILINE
)
# Beginnings of variables of whatever starts MPI: Slurm and Flux may not
_OFFERS_OF_MPI = ("PMI_", "PMIX_", "PALS_", "I_MPI_PMI_LIBRARY")
_MPI_REMEDY = "mpirun python -m distboot, or srun --mpi=… (see srun --mpi=list)"
_IMPORTS_DISTBOOT = pattern(_IN_A_LINE.format("distboot"), re.MULTILINE)


def misplaced_options(target: Target) -> list[str]:
    """Options of the wrapper among the script's arguments, which the script does not mention."""
    if target.is_command:
        return []
    found = []
    text = target.text.replace("_", "-")  # of a name, `args.max_restarts`
    arguments = target.words[target.start :]
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        given = word.partition("=")[0]
        option = given.replace("_", "-")
        name = option.removeprefix("--")
        is_mentioned = name in text
        if option in _WRAPPERS_ALONE and not is_mentioned:
            found.append(given)
    return found


def fit_to_script(options: SimpleNamespace, target: Target, environ: Mapping[str, str]) -> None:
    """Fit the options to the text of the script."""
    if options.framework == "deepspeed":
        _pass_local_rank(options, target.text, _LOCAL_RANK_OPTION)
    elif _is_given_local_rank(target):
        _pass_local_rank(options, target.text, _ADDS_LOCAL_RANK)
    elif options.framework == "tensorflow" and has_servers(environ):
        _refuse_workers_only(target.text)


def _is_given_local_rank(target: Target) -> bool:
    """Whether the launcher has put the local rank before our arguments, for a script.

    torch.distributed.launch and DeepSpeed's launcher do.
    """
    first = sys.argv[1:2]
    is_given = first != without_local_rank(first)
    return all((is_given, not target.is_command))


def _pass_local_rank(options: SimpleNamespace, text: str, option: re.Pattern[str]) -> None:
    """Pass the local rank to a script that has an option for it, in its spelling.

    The default of the option may be 0, which is the wrong device, and deepspeed.initialize compares
    it with LOCAL_RANK (0.19, _do_args_sanity_check). A script without the name in it may not know
    the option, and would end with a usage error.
    """
    if options.pass_local_rank is not None:
        return
    found = option.search(text)
    if found is not None:
        options.pass_local_rank = found[1]


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
    per_node: str | None = None,
) -> str | None:
    """A warning if a script starts a framework whose variables only `--framework` sets, or None.

    Without these variables each process is a world of its own, and trains a model of its own.
    """
    text = target.text
    if framework != "torch":
        return None
    calls_init = _IMPORTS_DISTBOOT.search(text) is not None
    if calls_init:
        return None
    name = _framework_without_variables(text, placement, environ)
    if name is None:
        return None
    script = target.as_given
    command = script
    if target.is_command:
        command = f"-- python {script}"
    if per_node:
        command = f"--nproc-per-node {per_node} {command}"
    return (
        f"warning: {script} starts {name}, which reads variables of its own, and without "
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
    is_used = _uses_mpi(text)
    calls_init = _IMPORTS_DISTBOOT.search(text) is not None
    if calls_init or not is_used:
        return None
    return (
        f"warning: {target.as_given} imports mpi4py, and {what} is a world of its own, and may "
        f"train separately; start the job with {_MPI_REMEDY}"
    )


def _uses_mpi(text: str) -> bool:
    """Whether a script imports mpi4py; one that can do without it, only where it is there."""
    if _TRIES_MPI.search(text) is None:
        return _IMPORTS_MPI.search(text) is not None
    from importlib.util import find_spec  # here, as few scripts do

    return find_spec("mpi4py") is not None


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
        is_started = framework.starts.search(text) is not None
        is_read_from_launcher = name in read_by
        has_variables = is_read_from_launcher or framework.variable in environ
        if is_started and not has_variables:
            return name
    return None
