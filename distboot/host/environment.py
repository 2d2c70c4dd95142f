"""What the environment of this node's processes has, for a comparison with other nodes.

Only names and digests leave the node, and of what may be a secret the name alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from itertools import islice

from ..base.patterns import pattern
from ..base.text import SECRET_PARAMETERS
from .accelerators import VISIBILITY

Digests = tuple[tuple[str, str], ...]

_MOST = 300  # variables
_LONGEST = 100  # characters of a name
_DIGITS = 12  # of a digest
# What differs between healthy nodes: of launchers and platforms, of a login, of this very process
_OF_EACH_NODE = pattern(
    r"""
    (OMPI|PMIX|PMI|PRTE|PALS|MPI|MPIR|I_MPI|HYDRA|HYDI|MV2|FLUX|JSM|LSB|LSF|PBS|SGE|SLURM|SLURMD
     |SRUN|TORCHELASTIC|PET|DISTBOOT|AZ_BATCH|AZUREML|AML|AWS_BATCH|SM|VC|SKYPILOT|RUNPOD|RAY
     |KUBERNETES|POD|NODE|JOB_COMPLETION|TPU|CLOUD_ML|HOROVOD|MASTER|GROUP|ROLE|LOCAL|NVIDIA
     |CROSS|MPISPAWN|BEAKER|BT|DSTACK|LEPTON|LWS|MF|MLP|NGC|NSML|_CONDOR)_.*
    |(JAX_)?(PROCESS_ID|NUM_PROCESSES)|CLUSTER_SPEC
    |(NCCL|GLOO|FI)_.*                                   # compared when the ranks join, with values
    |.*_(SERVICE_HOST|SERVICE_PORT.*|PORT|PORT_\d+_(TCP|UDP).*)      # links to services
    |OMP_NUM_THREADS|RANK|WORLD_SIZE|TF_CONFIG|NUM_NODES|NNODES
    |(SSH|SUDO|XDG|DBUS|LESS|LC|GIT|BASH|HIST|VSCODE|TMUX|CONDA|PYENV|NVM|MODULE|LMOD|_LM).*
    |HOST|HOSTNAME|HOSTTYPE|PWD|OLDPWD|SHLVL|_|TERM.*|COLORTERM|COLUMNS|LINES|LS_COLORS|PS[1-4]
    |USER|LOGNAME|MAIL|SHELL|HOME|LANG.*|EDITOR|VISUAL|PAGER|MANPATH|INFOPATH|DISPLAY|WINDOWID|STY
    # mpirun sets these on the hosts that it reaches over ssh
    |LD_LIBRARY_PATH|DYLD_LIBRARY_PATH
    |TMPDIR|TMP|TEMP|PATH|VIRTUAL_ENV.*|INVOCATION_ID|JOURNAL_STREAM|PYTEST_.*
    """,
    re.VERBOSE,
)
_NAMES_SECRET = pattern(
    r"""
    SECRET|TOKEN|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|KEY|AUTH|BEARER|COOKIE|PRIVATE|SIGNATURE
    |CONNECTION_?STRING
    |(^|_)(PWD|PASS|PW|CREDS?|PATS?|JWT|DSN|SAS)(_|$)
    """,
    re.VERBOSE | re.IGNORECASE,
)
# user:password@host, or a token in place of both; a signed URL; a connection string
_HAS_LOGIN = pattern(
    rf"://[^/\s]+@|(^|[?&;])\s*({SECRET_PARAMETERS})=",
    re.IGNORECASE,
)


def digests(environ: Mapping[str, str], secret: str) -> Digests:
    """Name and digest of each variable that should be the same on all nodes, sorted.

    The digest of what may be a secret is empty. `secret` is that of the job: whoever does not know
    it cannot try out values.
    """
    found = []
    key = secret.encode(errors="surrogateescape")
    for name in islice(filter(is_compared, sorted(environ)), _MOST):
        digest = ""
        value = environ[name]
        if not may_be_secret(name, value):
            data = value.encode(errors="surrogateescape")
            digest = hmac.new(key, data, hashlib.sha256).hexdigest()[:_DIGITS]
        found.append((name, digest))
    return tuple(found)


def may_be_secret(name: str, value: str) -> bool:
    """Whether the value of a variable stays on its node, by its name or as it has a login in it."""
    matches = (_NAMES_SECRET.search(name), _HAS_LOGIN.search(value))
    return any(matches)


def is_compared(name: str) -> bool:
    """Whether healthy nodes have the same value of it."""
    if len(name) > _LONGEST or not name.isprintable():
        return False
    is_of_each_node = name in VISIBILITY or _OF_EACH_NODE.fullmatch(name)
    return not is_of_each_node
