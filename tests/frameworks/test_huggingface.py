"""Hugging Face's Accelerate and the Trainer of Transformers: unmodified under the wrapper, and after `init()`."""

import pytest
from launched import needs
from ranks import WRAPPER, RunRanks

pytestmark = pytest.mark.all


@needs("accelerate")
def test_accelerate_unmodified_on_uneven_nodes(run_ranks: RunRanks) -> None:
    script = """
import json, os, sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
numbers = accelerator.process_index, accelerator.local_process_index, accelerator.num_processes
total = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
line = {"numbers": numbers, "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]), "total": total}
sys.stdout.write(json.dumps(line) + "\\n")
sys.stdout.flush()
accelerator.end_training()
"""
    # As a launcher has it that goes round the nodes; nobody says how many ranks are on each.
    places = [{"LOCAL_RANK": "0", "NODE_RANK": "0"}, {"LOCAL_RANK": "0", "NODE_RANK": "1"}]
    places += [{"LOCAL_RANK": "1", "NODE_RANK": "0"}]
    ended = run_ranks(script, before=WRAPPER, places=places)
    assert [rank.line() for rank in ended] == [
        {"numbers": [0, 0, 3], "local_world_size": 2, "total": [0, 1, 2]},
        {"numbers": [1, 0, 3], "local_world_size": 1, "total": [0, 1, 2]},
        {"numbers": [2, 1, 3], "local_world_size": 2, "total": [0, 1, 2]},
    ]
