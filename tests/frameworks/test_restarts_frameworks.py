"""Restarts with each framework's own checkpoints, as docs/how-to/restarts.md has it: rank 1 is killed in step 25."""

import json
import re

import pytest
from conftest import ROOT
from launched import needs
from supervised import Start
from test_stopping_frameworks import ENV, LIMIT, PYTORCH, SHOWN, STEPS, WAYS, Way

PAGE = (ROOT / "docs/how-to/restarts.md").read_text()
_PACE = f"""
import json
steps, seen, loss = {STEPS}, [], None
def pace(step):
    seen.append(step)
    if step == 25 and rank == 1 and os.environ["DISTBOOT_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
_SAY = '\nPath(f"seen-{rank}").write_text(json.dumps([seen[0], seen[-1]]))\n'
_INIT = "import distboot\nctx = distboot.init({!r}, join_timeout=60)\n"
# Instead of what the loops do that are the script's own.
_WITH = {
    "lightning": {
        "callbacks=[SaveAndStop()]": (
            "callbacks=[ModelCheckpoint('saved', every_n_train_steps=10, save_last=True)]"
        ),
        '"enable_checkpointing", ': "",
        "from lightning import LightningModule, Trainer": "from lightning import LightningModule, Trainer\n"
        "from lightning.pytorch.callbacks import ModelCheckpoint",
        "ckpt_path=saved if Path(saved).exists() else None": 'ckpt_path="last"',
        'raise AssertionError("one more validation, while it is to end")': "pass",
    },
    "transformers": {'save_strategy="no"': 'save_strategy="steps", save_steps=10'},
}
_SHOWN = {
    "lightning": ("ModelCheckpoint(every_n_train_steps=500, save_last=True)", 'ckpt_path="last"'),
    "transformers": ('save_strategy="steps", save_steps=500', "resume_from_checkpoint=any("),
}
_ALL_WAYS = {"pytorch": PYTORCH, **WAYS}


def _script(name: str, way: Way) -> str:
    block = SHOWN[way.page, way.section]
    if name not in _WITH:
        block = block.replace("if ctx.preempted:", "if ctx.preempted or step % 10 == 0:")
        block = re.sub(
            r"^( +)break$", r"\1if ctx.preempted:\n\1    break", block, flags=re.MULTILINE
        )
        assert "if ctx.preempted or step % 500 == 0:" in PAGE
    text = "".join([_PACE, _INIT.format(way.framework), way.before, block, way.behind, _SAY])
    for old, new in _WITH.get(name, {}).items():
        assert old in text
        text = text.replace(old, new)
    assert all(piece in PAGE for piece in _SHOWN.get(name, ()))
    return text


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, id=name, marks=way.marks or (pytest.mark.all, needs("torch")))
        for name, way in _ALL_WAYS.items()
    ],
)
def test_training_goes_on_from_the_last_checkpoint(start: Start, name: str, way: Way) -> None:
    job = start(_script(name, way), 2, **ENV, DISTBOOT_MAX_RESTARTS="1")
    assert job.codes(LIMIT) == [0, 0], job.output(0) + job.output(1)
    assert "restart 1 of 1: " in job.output(0)
    seen = [json.loads((job.folder / f"seen-{rank}").read_text()) for rank in (0, 1)]
    assert seen == [[21, STEPS]] * 2
