"""The table of what distboot changes in the process of the user's script, and why.

`make docs` writes docs/reference/your-process.md from it. tests/ranks/test_patches.py compares it
with real processes and with the source, and fails on a patch without a row and on a row without a
patch. No process loads this file.
"""

from __future__ import annotations

from typing import NamedTuple


class Patch(NamedTuple):
    """One change, with what turns it off."""

    what: str
    why: str
    when: str
    off: str
    file: str  # of the package: where the change is made
    # What the test finds: in a process a replaced name, a signal with a handler or a thread (for
    # `sys.excepthook` with the file of the function); in `file` a call
    names: tuple[str, ...]


class Group(NamedTuple):
    """Patches for one purpose."""

    title: str
    about: str
    patches: tuple[Patch, ...]


# When
_BOTH = "job of several ranks: `init()`, and the start of Python below the wrapper"
_INIT = "job of several ranks: `init()`, not below the wrapper"
_BELOW_WRAPPER = "start of Python below the wrapper"
_FIRST_READ = "first read of `ctx.preempted`; `init()`, if the script names it there"
_WITH_SHIELD = "first read of `ctx.preempted`; from the start with `DISTBOOT_SHIELD_WORKERS=1`"
_IN_WORKER = "in a shielded worker"

# What turns it off
_DETECTION = "`DISTBOOT_FAILURE_DETECTION=0`"
_SHIELD = "`DISTBOOT_SHIELD_WORKERS=0`"
_NO_READ = "a script that does not read `ctx.preempted`"
_NO_HOOKS = "`python -E`, `-I` or `-S`; `--exec` of the wrapper"
_NOTHING = "nothing"

_HOOKS = "script/crash_hooks.py"
_WORKERS = "script/workers.py"

GROUPS = (
    Group(
        "How the script ends",
        "The agent has to know how a rank ends before its launcher ends the others.",
        (
            Patch(
                "`sys.excepthook`",
                "reports an uncaught exception, then calls the hook that was there",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("sys.excepthook of script/crash_hooks.py",),
            ),
            Patch(
                "handler of SIGINT, while these run",
                "leaves out the same Ctrl-C for half a second: a launcher may signal each process",
                "at a `KeyboardInterrupt` that ends the script, and at its end",
                "a handler of the script",
                _HOOKS,
                ("signal.signal",),
            ),
            Patch(
                "`sys.excepthook`, once more",
                "prints a hint after the traceback, where there is one",
                "`init()`, and the start of Python below the wrapper",
                _NOTHING,
                "script/hints.py",
                ("sys.excepthook of script/hints.py",),
            ),
            Patch(
                "`sys.excepthook`, where `init()` has failed",
                "ends the script with the exit code of an uncaught `DistbootError`: 78 for a broken"
                " environment",
                "`init()` that raises an error",
                "catching the error",
                "startup/exit_report.py",
                ("sys.excepthook of startup/exit_report.py",),
            ),
            Patch(
                "`sys.stderr.write`",
                'reports the text of `sys.exit("text")`, and keeps the last 4096 characters in'
                " memory",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("sys.stderr.write",),
            ),
            Patch(
                "`faulthandler`: SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL",
                "sends the stack of a crash to the agent; not if the script has enabled"
                " `faulthandler`",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("faulthandler.enable", "SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL"),
            ),
            Patch(
                "`faulthandler`: SIGURG",
                "sends the stack of the main thread when others wait for this rank, or for"
                " `distboot stacks`; not if the script handles SIGURG",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("faulthandler.register", "SIGURG"),
            ),
            Patch(
                "`faulthandler`: SIGTERM",
                "reports the signal, then lets it have the effect that it had before",
                _INIT,
                _DETECTION,
                _HOOKS,
                ("faulthandler.register", "SIGTERM"),
            ),
            Patch(
                "`signal.signal`",
                "keeps that report in front of a handler that the script sets later",
                _INIT,
                _DETECTION,
                _HOOKS,
                ("signal.signal",),
            ),
            Patch(
                "`atexit`",
                "reports an exception that another `sys.excepthook` has shown, and the last line on"
                " stderr, before the frameworks end their groups",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("atexit.register",),
            ),
            Patch(
                "`atexit`, `on_exit(3)`",
                "the C library reports the exit code; if another rank failed first, it ends this"
                " process with the exit code of the job",
                _INIT + ", on Linux",
                _DETECTION,
                "agent/sidecar_start.py",
                ("atexit.register", "on_exit"),
            ),
            Patch(
                "signal 64, as process 1 of a container",
                "ends the process in place of SIGKILL, which the kernel keeps away from it",
                _INIT + ", on Linux",
                _DETECTION,
                "agent/sidecar_start.py",
                ("libc.signal",),
            ),
            Patch(
                "SIGTERM is ignored",
                "while a rank ends that failed only because another one had",
                "end of the script",
                _DETECTION,
                "agent/sidecar_start.py",
                ("signal.signal",),
            ),
            Patch(
                "handlers of SIGTERM, SIGINT, SIGHUP and SIGQUIT, where the script has none",
                "write the report of a job that is stopped while its ranks meet, and end the"
                " process by the signal",
                _INIT + ", on rank 0, until the ranks have met",
                "no `DISTBOOT_REPORT`",
                "startup/start_report.py",
                ("signal.signal",),
            ),
            Patch(
                "`sys.exit`",
                "keeps the exit code, which Python does not give to functions of `atexit`",
                "`init()` of one process; with DeepSpeed, Horovod, JAX, MPI or TensorFlow",
                _NOTHING,
                "script/sys_exit.py",
                ("sys.exit",),
            ),
            Patch(
                "`atexit`, once more",
                "ends the framework; in one process writes an uncaught exception where the platform"
                " shows it",
                "`init()` of one process; with DeepSpeed, Horovod, JAX, MPI or TensorFlow",
                _NOTHING,
                "script/sys_exit.py",
                ("atexit.register",),
            ),
            Patch(
                "`os.register_at_fork`",
                "a forked process, such as a worker of a data loader, is not the rank: it reports"
                " nothing, and shows its stack if it is asked",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("os.register_at_fork",),
            ),
            Patch(
                "`os.register_at_fork`, once more",
                "the exit of a forked process is not that of the rank",
                _INIT + ", on Linux",
                _DETECTION,
                "agent/sidecar_start.py",
                ("os.register_at_fork",),
            ),
        ),
    ),
    Group(
        "How far the script is",
        "Rank 0 names the rank for which others wait.",
        (
            Patch(
                "`sys.meta_path`",
                "notices that the script imports `torch.distributed`, and finds nothing itself",
                _BOTH,
                _DETECTION,
                _HOOKS,
                ("sys.meta_path for torch.distributed.distributed_c10d",),
            ),
            Patch(
                "`sys.meta_path`, two more entries",
                "notices that the script imports TensorFlow or JAX, and finds nothing itself",
                _BELOW_WRAPPER,
                _DETECTION,
                _HOOKS,
                ("sys.meta_path for tensorflow", "sys.meta_path for jax"),
            ),
            Patch(
                "thread `distboot-progress`",
                "reports every other second how many collective operations torch has counted, and"
                " whether the script trains a model that nothing connects with those of other"
                " ranks: it reads the stacks of all threads",
                "import of `torch.distributed`; below the wrapper also of TensorFlow or JAX",
                _DETECTION,
                "script/progress.py",
                ("threading.Thread", "distboot-progress"),
            ),
        ),
    ),
    Group(
        "Stopping at the same step",
        "See [Stopping and checkpoints](../how-to/stopping.md).",
        (
            Patch(
                "handler of SIGTERM",
                "until `close()`: `ctx.preempted` becomes true, instead of the end of the process;"
                " a handler of the script runs as well",
                _FIRST_READ,
                _NO_READ,
                "script/preemption.py",
                ("signal.signal", "SIGTERM"),
            ),
            Patch(
                "handlers of the signals in `DISTBOOT_STOP_SIGNALS`",
                "the same; those of USR1, USR2 and XCPU stay after `close()`, for the next context",
                "`init()`",
                "`DISTBOOT_STOP_SIGNALS` unset",
                "script/preemption.py",
                ("signal.signal", "SIGUSR1"),
            ),
            Patch(
                "`faulthandler` and a thread for each of these signals, `distboot-SIGTERM`",
                "Python sets handlers only in its main thread",
                "in place of a handler, if another thread than the main one calls",
                "as the handler",
                "script/stop_signals.py",
                (
                    "faulthandler.register",
                    "start_without_signals",
                    "distboot-SIGTERM",
                    "distboot-SIGUSR1",
                ),
            ),
            Patch(
                "`os.register_at_fork`",
                "a forked process reads `ctx.preempted` without the other ranks",
                "`init()`",
                _NOTHING,
                "script/preemption.py",
                ("os.register_at_fork",),
            ),
            Patch(
                "a thread, `distboot-end`",
                "ends the process by SIGTERM where another rank has failed and the main thread"
                " waits in C, so that no handler of Python's runs",
                _FIRST_READ,
                _NO_READ,
                "script/stop_signals.py",
                ("start_without_signals", "distboot-end"),
            ),
            Patch(
                "`os.register_at_fork`, once more",
                "signals have the effect on a forked process that they had before",
                "with `distboot-SIGTERM`",
                "as the handler",
                "script/stop_signals.py",
                ("os.register_at_fork",),
            ),
            Patch(
                "timer",
                "asks for the stop that `DISTBOOT_STOP_BEFORE_END` sets, where no agent does",
                "`init()` of one process",
                "`DISTBOOT_STOP_BEFORE_END` unset",
                "script/preemption.py",
                ("threading.Timer",),
            ),
            Patch(
                "thread `distboot-notices`",
                "asks the metadata service of the machine, where no agent does",
                "`init()` of one process",
                "`DISTBOOT_STOP_NOTICE` unset",
                "script/stop_notices.py",
                ("start_without_signals",),
            ),
        ),
    ),
    Group(
        "Workers",
        "[Workers](../how-to/stopping.md#data-loader-workers) outlive the SIGTERM that a launcher"
        " sends to all processes, so that the script can save. On Linux.",
        (
            Patch(
                "`sys.meta_path`",
                "notices that the script imports `multiprocessing`, and finds nothing itself",
                _WITH_SHIELD,
                _SHIELD,
                _HOOKS,
                ("sys.meta_path for multiprocessing.reduction",),
            ),
            Patch(
                "`multiprocessing.Process.start`",
                "blocks SIGTERM while the worker is created, which inherits that",
                _WITH_SHIELD,
                _SHIELD,
                _WORKERS,
                ("multiprocessing.process.BaseProcess.start",),
            ),
            Patch(
                "`multiprocessing.Process._bootstrap`",
                "starts the thread in the worker",
                _WITH_SHIELD,
                _SHIELD,
                _WORKERS,
                ("multiprocessing.process.BaseProcess._bootstrap",),
            ),
            Patch(
                "`multiprocessing.popen_fork.Popen.terminate`",
                "`terminate()` also sends signal 57, which the kernel queues",
                "first start of a shielded worker",
                _SHIELD,
                _WORKERS,
                ("multiprocessing.popen_fork.Popen.terminate",),
            ),
            Patch(
                "`multiprocessing.spawn.get_preparation_data`",
                "a worker that is a new program loads the shield before it imports the script",
                "first start of a shielded worker",
                _SHIELD,
                _WORKERS,
                ("multiprocessing.spawn.get_preparation_data",),
            ),
            Patch(
                "thread `distboot-shield`",
                "receives SIGTERM: obeys the process that started the worker, and drops it from"
                " others; ends the worker after that process",
                _IN_WORKER,
                _SHIELD,
                _WORKERS,
                ("threading.Thread", "distboot-shield"),
            ),
            Patch(
                "handlers of signals 56 and 57; those of the script for SIGTERM are reset",
                "57 is a second SIGTERM; 56 wakes the main thread, where Python runs handlers",
                _IN_WORKER,
                _SHIELD,
                _WORKERS,
                ("signal.signal", "signal 56", "signal 57"),
            ),
            Patch(
                "`subprocess.Popen._execute_child`, `os.execv`, `os.execve`, `os.posix_spawn`,"
                " `os.posix_spawnp`, `os.system`",
                "programs that the worker starts have no signal blocked",
                _IN_WORKER,
                _SHIELD,
                _WORKERS,
                (
                    "subprocess.Popen._execute_child",
                    "os.execv",
                    "os.execve",
                    "os.posix_spawn",
                    "os.posix_spawnp",
                    "os.system",
                ),
            ),
            Patch(
                "`os.register_at_fork`",
                "a process that the worker forks is not shielded",
                _IN_WORKER,
                _SHIELD,
                _WORKERS,
                ("os.register_at_fork",),
            ),
        ),
    ),
    Group(
        "An unmodified script below the wrapper",
        "",
        (
            Patch(
                "`PYTHONPATH` and `sitecustomize`",
                "distboot's `sitecustomize` installs the hooks, restores `sys.path` and"
                " `PYTHONPATH`, and runs yours",
                _BELOW_WRAPPER,
                _NO_HOOKS,
                "script/injected/sitecustomize.py",
                ("sitecustomize",),
            ),
            Patch(
                "`sys.modules`: `_distboot`",
                "the hooks, under a name that cannot clash with a distboot that the script has",
                _BELOW_WRAPPER,
                _NO_HOOKS,
                "script/injected/sitecustomize.py",
                ("_distboot",),
            ),
            Patch(
                "`sys.meta_path`, `atexit`, `torch.cuda.set_device`,"
                " `torch.distributed.init_process_group`",
                "report what each rank does with its device and group",
                "[`try`](../how-to/try.md)",
                "any other command",
                "script/injected/trial_hook.py",
                ("atexit.register",),
            ),
        ),
    ),
    Group(
        "Frameworks",
        "",
        (
            Patch(
                "`sys.argv`",
                "adds or removes `--local_rank`",
                "`init(pass_local_rank=…)`",
                "`pass_local_rank` not given",
                "initialize.py",
                (),
            ),
            Patch(
                "timer",
                "ends the process if the framework does not start within the join timeout",
                "while `init()` starts the framework",
                _NOTHING,
                "frameworks/_base.py",
                ("threading.Timer",),
            ),
            Patch(
                "thread `distboot-store`",
                "a store of torch that does not answer must not hold the script",
                "while `init()` connects to a store",
                _NOTHING,
                "base/threads.py",
                ("start_without_signals",),
            ),
            Patch(
                "a forked process",
                "ends the rank if MPI or TensorFlow does not start in time",
                "while `init()` starts MPI or TensorFlow",
                _NOTHING,
                "base/deadline.py",
                ("os.fork",),
            ),
            Patch(
                "`jax.distributed.shutdown`; thread `distboot-jax`",
                "rank 0 waits for the others, which JAX would end with it",
                '`init("jax")`, until the context is closed',
                _NOTHING,
                "frameworks/jax.py",
                ("threading.Thread",),
            ),
            Patch(
                "`mpi4py.rc.initialize`, `mpi4py.rc.finalize`",
                "MPI starts when all ranks have met, not at the import; and ends with the process",
                '`init("mpi")`, Horovod on MPI',
                _NOTHING,
                "frameworks/mpi.py",
                (),
            ),
            Patch(
                "thread `distboot-horovod`; `os.register_at_fork`",
                "serves Horovod's rendezvous on rank 0; a forked process closes its port",
                "Horovod on Gloo, on rank 0",
                _NOTHING,
                "frameworks/_horovod_gloo.py",
                ("start_without_signals", "threading.Thread", "os.register_at_fork"),
            ),
        ),
    ),
)
