"""Bodies for the tests of `run_ranks`: each fails, hangs or ends in a way of its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch
import torch.distributed as dist

from trilithon.testing import run_ranks


def sum_of_ranks(start: int) -> float:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def surroundings() -> dict[str, object]:
    return {
        "rank": dist.get_rank(),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "draws": (random.random(), float(np.random.rand()), torch.rand(()).item()),
        "folder": os.getcwd(),
        "setting": os.environ.get("TRILITHON_TEST_SETTING"),
    }


def own_group() -> tuple[bool, int, int]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.tensor([int(os.environ["LOCAL_RANK"]) + 1])
    dist.all_reduce(value)
    return before, int(value.item()), int(os.environ["WORLD_SIZE"])


def last_rank_asserts_and_the_rest_wait(expected: int) -> None:
    print(f"rank {dist.get_rank()} says hello")
    if dist.get_rank() == dist.get_world_size() - 1:
        found = {"answer": 41}
        assert found["answer"] == expected
    dist.barrier()


def both_raise_one_later(late_rank: int) -> None:
    if dist.get_rank() == late_rank:
        time.sleep(0.15)
        raise KeyError("the second failure")
    raise ValueError("the first failure")


def one_exits(status: int) -> str:
    if dist.get_rank() == 1:
        os._exit(status)
    return "done"


def exits_politely(status: int) -> None:
    print("good bye", flush=False)
    sys.exit(status)


def one_is_killed_in_a_collective() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_never_arrives(pid_folder: str) -> None:
    leave_pid(pid_folder)
    if dist.get_rank() == 1:
        oversleep()
    dist.barrier()


def oversleep() -> None:
    time.sleep(300)


def stops_itself() -> None:
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def leaves_a_child_behind(pid_folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(os.path.join(pid_folder, str(child.pid)), "w"):
        pass


def leaves_shared_memory_behind(name: str) -> None:
    SharedMemory(name=name, create=True, size=4096)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_pid(folder: str) -> None:
    with open(os.path.join(folder, str(os.getpid())), "w"):
        pass


def gives_back_a_function() -> object:
    return lambda: None


def runs_ranks_itself() -> list[float]:
    return run_ranks(sum_of_ranks, 2, 1, timeout_s=60) if dist.get_rank() == 0 else []


def big_value(numel: int) -> torch.Tensor:
    return torch.arange(numel) + dist.get_rank()


def writes_many_lines() -> None:
    for line in range(1000):
        print(f"line {line}")
    os.write(2, b"straight to the descriptor\n")
    raise RuntimeError("after many lines")
