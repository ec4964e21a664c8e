"""A run stopped mid-epoch and resumed in a new process sees the samples of one that was never stopped."""

import json
import subprocess
from itertools import islice

import pytest
from torch.utils.data import Dataset

from trilithon.data import Loader
from warm_python import python


class Forty(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def loaders(num_workers: int) -> list[Loader]:
    return [Loader(Forty(), 3, rank=rank, world_size=2, seed=11, num_workers=num_workers) for rank in range(2)]


def take(loader: Loader, batches: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader.endless(), batches)]


RESUME = """
import json, os, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
import test_c054_exact_next_batch_after_a_stop as case
request = json.loads(sys.argv[2])
rest = []
for loader, state in zip(case.loaders(request["num_workers"]), request["states"]):
    loader.load_state_dict(state)
    rest.append(case.take(loader, 9))
print(json.dumps(rest))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_sequence_of_samples_equals_the_uninterrupted_one(num_workers):
    whole = [take(loader, 13) for loader in loaders(0)]  # 40 items, 6 a step: past the end of the first epoch
    stopped = loaders(num_workers)
    begun = [take(loader, 4) for loader in stopped]
    request = json.dumps({"num_workers": num_workers, "states": [loader.state_dict() for loader in stopped]})
    folder = __file__.rpartition("/")[0]
    answer = subprocess.run(
        [python(), "-c", RESUME, folder, request], capture_output=True, text=True, timeout=120, check=True
    )
    rest = json.loads(answer.stdout)
    assert [first + second for first, second in zip(begun, rest)] == whole
