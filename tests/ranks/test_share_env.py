"""Variables that ranks take from rank 0: which ones, by whom they are set, and what is never sent."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from conftest import Run
from inside import shared, taken

from distboot import DistbootError

_SHOW = """
import os, distboot
distboot.init("none")
print(os.environ.get("HF_HOME"), os.environ.get("HF_OTHER"), os.environ.get("HF_TOKEN"))
"""
_PATTERNS = ("HF_*", "MODEL_DIR")


@pytest.mark.parametrize("wrapper", [True, False], ids=["wrapper", "init"])
def test_rank_takes_what_it_has_not(
    tmp_path: Path, clean_env: dict[str, str], port: int, wrapper: bool
) -> None:
    report = tmp_path / "job.json"
    command = [sys.executable, "-c", _SHOW]
    names = {"DISTBOOT_SHARE_ENV": "HF_*"}
    if wrapper:
        command = [sys.executable, "-m", "distboot", "--share-env", "HF_*", "--", *command]
        names = {}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **names}
    of_ranks = (
        {
            "HF_HOME": "/zero",
            "HF_OTHER": "zero",
            "HF_TOKEN": "s3cret",
            "DISTBOOT_REPORT": str(report),
        },
        {"HF_OTHER": "own"},
    )
    ranks = []
    for rank, own in enumerate(of_ranks):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env = {**clean_env, **place, **numbers, **own}
        ranks.append(Popen(command, env=env, stdout=PIPE, stderr=PIPE, text=True, cwd=tmp_path))
    (first, said), (second, said_by_1) = (rank.communicate(timeout=60) for rank in ranks)
    assert first == "/zero zero s3cret\n", said
    assert second == "/zero own None\n", said_by_1
    assert "not shared with other ranks, as these may be secrets: HF_TOKEN" in said
    for text in (said, said_by_1, report.read_text(), report.with_suffix(".jsonl").read_text()):
        assert "s3cret" not in text
        assert "/zero" not in text


def test_rank_sets_only_what_it_wants() -> None:
    of_rank_0 = (
        ("HF_HOME", "/zero"),
        ("LD_PRELOAD", "/evil.so"),
        ("MODEL_DIR", "/m"),
        ("RANK", "3"),
    )
    assert taken(of_rank_0, {"MODEL_DIR": "/own"}, _PATTERNS) == {"HF_HOME": "/zero"}
    assert taken(of_rank_0, {}, ("L*", "R*", "P*")) == {}
    assert taken(of_rank_0, {}, ("H*",)) == {"HF_HOME": "/zero"}


def test_variables_of_one_process_are_not_shared() -> None:
    environ = {
        "RANK": "1",
        "SLURM_PROCID": "1",
        "PYTHONPATH": "/x",
        "LD_LIBRARY_PATH": "/x",
        "A": "b",
    }
    assert shared(environ, ("A*", "R*", "S*", "P*", "L*")) == ((("A", "b"),), [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("APP_TOKEN", "s"),
        ("app_token", "s"),
        ("WANDB_api_key", "s"),
        ("APP_PWD", "s"),
        ("DB_PASS", "s"),
        ("APP_PASSPHRASE", "s"),
        ("APP_PAT", "s"),
        ("APP_CREDS", "s"),
        ("APP_JWT", "s"),
        ("SESSION_COOKIE", "s"),
        ("SENTRY_DSN", "s"),
        ("APP_SAS", "s"),
        ("AZURE_STORAGE_CONNECTION_STRING", "s"),
        ("DATABASE_URL", "postgres://user:s@host/db"),
        ("PROXY_URL", "https://s@host:8080"),
        ("DATA_URL", "https://a.blob.core.windows.net/c?sv=2022&sig=s"),
        ("CKPT_URI", "https://b.s3.amazonaws.com/x?X-Amz-Signature=s"),
        ("STORAGE", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=s"),
    ],
)
def test_secret_stays_on_rank_0(name: str, value: str) -> None:
    assert shared({name: value}, (name,)) == ((), [name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODEL_DIR", "/models"),
        ("DATA_PATH", "s3://bucket/a@b"),
        ("ENDPOINT", "https://host:8080/x"),
        ("DATA_URL", "https://host/x?design=1&version=2"),
    ],
)
def test_usual_variable_is_shared(name: str, value: str) -> None:
    assert shared({name: value}, (name,)) == (((name, value),), [])


def test_too_much_is_refused() -> None:
    with pytest.raises(DistbootError, match="means 1 variables with 20001 bytes, as they"):
        shared({"A": "x" * 20_000}, ("A",))
    with pytest.raises(DistbootError, match="means 1 variables with 18001 bytes, as they"):
        shared({"A": "学" * 3_000}, ("A",))
    with pytest.raises(DistbootError, match="means 200 variables"):
        shared({f"A{number}": "" for number in range(200)}, ("A*",))


@pytest.mark.parametrize("names", ["*", "HF_*,", "HF-HOME", "HF_HOME; rm"])
def test_what_is_no_name_is_refused(distboot: Run, names: str) -> None:
    done = distboot("run", "--share-env", names, "--", "true")
    assert done.returncode == 2
    assert "is not a name of variables" in done.stderr
