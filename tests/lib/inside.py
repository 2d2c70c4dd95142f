"""The door of the tests to parts of distboot that are not its public surface.

A test whose subject is one of these parts imports that itself. Any other test takes what it needs
from here, so that moving or renaming a part changes one file.
"""

from distboot import frameworks
from distboot.agent.claims import Claims
from distboot.agent.launcher_process import find
from distboot.agent.orphans import end_orphans
from distboot.agent.session import Session, alone
from distboot.agent.stop_pages import StopPages
from distboot.base import dataclass
from distboot.base.commands import command_error
from distboot.base.dataclass import replace
from distboot.base.errors import CODES
from distboot.base.internal_variables import INTERNAL, RANK
from distboot.base.process import MPI_LIBRARY, Process, ends_at, proc_stat
from distboot.cli.nested_launcher import nested_launcher
from distboot.cli.nproc_per_node import count_of
from distboot.cli.run_options import parse, run_parser
from distboot.cli.script_text import missing_framework_option
from distboot.cli.target import Target
from distboot.detection import signs, surroundings
from distboot.detection.detect import refuse_unless_rank
from distboot.detection.export import for_launcher, variables
from distboot.detection.here import detect_here
from distboot.detection.inherited import merged
from distboot.detection.launchers import sample_of
from distboot.detection.launchers.tf_config import corrected
from distboot.detection.local_rank_option import (
    with_local_rank,
    without_local_rank,
    wrong_local_rank,
)
from distboot.detection.node_platform import NodePlatform, ranks_per_node
from distboot.detection.order import INNERMOST_FIRST, LAUNCHERS, node_platforms
from distboot.detection.placement import FIELDS, NUMBERS
from distboot.frameworks import Options, jax, preload
from distboot.frameworks._base import imported
from distboot.frameworks._torch import refuse_idle_accelerators
from distboot.host import DERIVED_PORTS, cpus, free_port
from distboot.host.binding import cpus_of_ranks
from distboot.host.cpus import of_all
from distboot.host.shared_variables import shared, taken
from distboot.job.exit_status import ExitStatus
from distboot.job.messages import Exited, SeparateModel
from distboot.rendezvous.foreign import CLOSES
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership, build_membership
from distboot.rendezvous.messages import Detach, Go, Members, Ready, Refused, WorkerInfo
from distboot.rendezvous.protocol import Frames, ProtocolError, decode, encode
from distboot.rendezvous.shared_cpus import shared_cpus
from distboot.script import separate_model
from distboot.startup import bound_cpus
from distboot.tools import trial
from distboot.tools.doctor.command import examine, text
from distboot.tools.env import docker_options

__all__ = [
    "CLOSES",
    "CODES",
    "DERIVED_PORTS",
    "FIELDS",
    "INNERMOST_FIRST",
    "INTERNAL",
    "LAUNCHERS",
    "MPI_LIBRARY",
    "NUMBERS",
    "RANK",
    "Claims",
    "Detach",
    "ExitStatus",
    "Exited",
    "Frames",
    "Go",
    "JoinTable",
    "Members",
    "Membership",
    "NodePlatform",
    "Options",
    "Process",
    "ProtocolError",
    "Ready",
    "Refused",
    "SeparateModel",
    "Session",
    "StopPages",
    "Target",
    "WorkerInfo",
    "alone",
    "bound_cpus",
    "build_membership",
    "command_error",
    "corrected",
    "count_of",
    "cpus",
    "cpus_of_ranks",
    "dataclass",
    "decode",
    "detect_here",
    "docker_options",
    "encode",
    "end_orphans",
    "ends_at",
    "examine",
    "find",
    "for_launcher",
    "frameworks",
    "free_port",
    "imported",
    "jax",
    "merged",
    "missing_framework_option",
    "nested_launcher",
    "node_platforms",
    "of_all",
    "parse",
    "preload",
    "proc_stat",
    "ranks_per_node",
    "refuse_idle_accelerators",
    "refuse_unless_rank",
    "replace",
    "run_parser",
    "sample_of",
    "separate_model",
    "shared",
    "shared_cpus",
    "signs",
    "surroundings",
    "taken",
    "text",
    "trial",
    "variables",
    "with_local_rank",
    "without_local_rank",
    "wrong_local_rank",
]
