"""Every piece of Python that a page shows is run, as a job of one process. One with a title is a file of its page's
sessions, and is run with them (test_docs_console.py)."""

import ast
import builtins
import importlib.util
import sys
from pathlib import Path

import pytest
from conftest import Run
from launched import needs_torch
from pages import Block, blocks
from tensorflows import QUIET

# Those that are not run, by page: only their names are looked at.
NOT_RUN = {
    "docs/how-to/azure-ml-python.md": "test_docs_azure.py does, with Azure's own package",
    "docs/how-to/ray-train.md": "test_inside_platforms.py does, with two workers",
    "docs/how-to/databricks.md": "the same, with two ranks",
    "docs/how-to/sagemaker.md": "SageMaker's SDK starts machines: no account here",
}
# What the text around a piece presupposes.
_MODEL = """
import torch
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Linear(2, 2)
"""
GIVEN = {
    "README.md": _MODEL,
    "docs/index.md": _MODEL,
    "docs/how-to/frameworks/pytorch.md": _MODEL,
    "docs/how-to/frameworks/deepspeed.md": _MODEL + "config = {'train_batch_size': 1, 'optimizer': "
    "{'type': 'Adam', 'params': {'lr': 0.1, 'torch_adam': True}}}\n",
    "docs/how-to/frameworks/horovod.md": _MODEL
    + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "docs/how-to/frameworks/mpi.md": "value = 1\n",
    "docs/how-to/script.md": "load = list\n",
    "docs/how-to/stopping.md": (
        "import distboot\nctx = distboot.init('none')\nbatches = [1, 2]\ntrain = save = id\n"
    ),
    "docs/how-to/sagemaker.md": "role = ''\n",
}
# What is other in a job of one process.
REPLACED = {
    "docs/how-to/frameworks/lightning.md": {"devices=4, num_nodes=2": "devices=1, num_nodes=1"}
}
# Modules that a piece needs, and does not import itself.
NEEDS = {
    "docs/how-to/frameworks/mpi.md": "mpi4py",
    "docs/how-to/frameworks/tensorflow.md": "tensorflow",
}


def _is_signature(block: Block) -> bool:
    """Whether test_reference.py compares it with the code: it is written from there."""
    return block.page == "docs/reference/api.md" and block.first.startswith("def ")


# How a training ends before its time is run by test_stopping_frameworks.py, as jobs of several ranks.
PIECES = [
    block
    for block in blocks("python")
    if not block.title
    and not block.section.startswith("Save and stop")
    and not _is_signature(block)
]
RUN = [block for block in PIECES if block.page not in NOT_RUN]


def _code(block: Block) -> str:
    text = block.text
    for old, new in REPLACED.get(block.page, {}).items():
        assert old in text, f"{block}: {old} is no longer there"
        text = text.replace(old, new)
    return GIVEN.get(block.page, "") + text


def _modules(block: Block) -> set[str]:
    """What it imports, and what the framework that it asks for does."""
    tree = ast.parse(_code(block))
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= (
        {"horovod"}
        if "horovod" in block.text
        else {"deepspeed"}
        if '"deepspeed"' in block.text
        else set()
    )
    return {name.partition(".")[0] for name in found} | {NEEDS.get(block.page, "distboot")}


def _param(block: Block) -> object:
    """A piece; those of the README are for `make test`, too."""
    return pytest.param(
        block, id=str(block), marks=() if block.page == "README.md" else pytest.mark.all
    )


@needs_torch
@pytest.mark.parametrize("block", [_param(block) for block in RUN])
def test_piece_runs(run: Run, tmp_path: Path, block: Block) -> None:
    if absent := sorted(name for name in _modules(block) if importlib.util.find_spec(name) is None):
        pytest.skip(f"not installed: {', '.join(absent)}")
    (tmp_path / "piece.py").write_text(_code(block))
    env = {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mtl": "^ofi",
    }
    done = run(sys.executable, "piece.py", env={**QUIET, **env})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", PIECES, ids=str)
def test_every_name_is_defined(block: Block) -> None:
    tree = ast.parse(_code(block))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    defined |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert {node.id for node in names} - defined == set()


def test_tables_name_only_what_is_there() -> None:
    assert {*NOT_RUN, *GIVEN, *REPLACED, *NEEDS} <= {block.page for block in PIECES}
