"""Interactive sessions as ranks: an exception that one shows is no failure, and its end is that of the rank."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launched import all_with, needs
from supervised import until
from wrappers import alive

_OTHER = """
import distboot
with distboot.init("none", join_timeout=60) as ctx:
    ctx.barrier()
    ctx.barrier()
print("went on", flush=True)
"""
_CELLS = (
    "import distboot",
    "ctx = distboot.init('none', join_timeout=60); ctx.barrier()",
    "1 / 0",
    "ctx.barrier(); print('rank', ctx.rank, 'of', ctx.world_size, flush=True)",
)
_INTERACTIVE = {
    "python -i": ["-i", "-q"],
    "a script and then a prompt": ["-i", "script.py"],
    "ipython": ["-m", "IPython", "--simple-prompt", "--colors=NoColor"],
}


@pytest.fixture
def environ(clean_env: dict[str, str], port: int) -> dict[str, str]:
    return {
        **clean_env,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
    }


@pytest.fixture
def other(environ: Mapping[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 1, which is an ordinary script."""
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER],
        env={**environ, "RANK": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "how",
    [
        "python -i",
        "a script and then a prompt",
        pytest.param("ipython", marks=[pytest.mark.all, needs("IPython")]),
    ],
)
def test_exception_at_a_prompt_is_no_failure(
    environ: dict[str, str], other: subprocess.Popen[str], tmp_path: Path, how: str
) -> None:
    cells = list(_CELLS)
    if how == "a script and then a prompt":
        (tmp_path / "script.py").write_text("\n".join(cells[:3]))
        cells = cells[3:]
    session = subprocess.run(
        [sys.executable, *_INTERACTIVE[how]],
        env={**environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
        timeout=60,
        input="\n".join([*cells, ""]),
        capture_output=True,
        text=True,
        check=False,
    )
    said = other.communicate(timeout=60)[0]
    assert (session.returncode, other.returncode) == (0, 0), session.stderr + said
    assert "ZeroDivisionError" in session.stdout + session.stderr
    assert "rank 0 of 2" in session.stdout
    assert "went on" in said
    assert "failed first" not in session.stderr + said


@all_with("ipykernel")
def test_kernel_of_a_notebook_is_a_rank(
    environ: dict[str, str], other: subprocess.Popen[str], tmp_path: Path
) -> None:
    from jupyter_client.manager import KernelManager

    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(env={**environ, "HOME": str(tmp_path)}, cwd=str(tmp_path))
    try:
        client = kernel.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        states = [
            client.execute_interactive(cell, timeout=60)["content"]["status"] for cell in _CELLS
        ]
        client.stop_channels()
        assert states == ["ok", "ok", "error", "ok"]
        said = other.communicate(timeout=60)[0]
        assert (other.returncode, "went on" in said, "failed first" in said) == (0, True, False), (
            said
        )
    finally:
        kernel.shutdown_kernel(now=True)


_WAITS = """
import os, time
from pathlib import Path
Path(os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@all_with("ipykernel")
def test_interrupted_cell_ends_the_ranks_it_started(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    """A kernel with a context of its own starts a job of two, as docs/how-to/interactive.md says."""
    from jupyter_client.manager import KernelManager

    (tmp_path / "train.py").write_text(_WAITS)
    kernel = KernelManager(kernel_name="python3")
    environ = {**clean_env, "HOME": str(tmp_path), "DISTBOOT_GRACE": "5"}
    kernel.start_kernel(env=environ, cwd=str(tmp_path))
    try:
        client = kernel.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        client.execute_interactive("import distboot; ctx = distboot.init('none')", timeout=60)
        client.execute(f"!{sys.executable} -m distboot --nproc-per-node 2 train.py")
        files = [tmp_path / rank for rank in ("0", "1")]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        kernel.interrupt_kernel()
        until(lambda: not any(map(alive, pids)))
        states = client.execute_interactive("ctx.barrier()", timeout=60)
        assert states["content"]["status"] == "ok"
        client.stop_channels()
    finally:
        kernel.shutdown_kernel(now=True)
