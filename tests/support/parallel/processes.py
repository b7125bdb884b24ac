"""Several processes that talk by torch.distributed, forked from one that has imported what they need."""

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60


def run_in(world: int, work: Callable[[int], Any], *, seconds: float = SECONDS, backend: str = "gloo") -> list[Any]:
    """Return what ``work(rank)`` returned in each process; where it raised the error's text, None if it just ended."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        processes = [
            context.Process(target=_child, args=(rank, world, meeting, work, answers, seconds, backend))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(3 * seconds)
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.kill()
        found = {}
        while not answers.empty():
            rank, answer = answers.get()
            found[rank] = answer
    assert not alive, f"{len(alive)} processes hang; the others said {found}"
    return [found.get(rank) for rank in range(world)]


def _child(
    rank: int, world: int, meeting: str, work: Callable[[int], Any], answers: Any, seconds: float, backend: str
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if hasattr(torch, "accelerator"):
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)
    dist.barrier()  # whoever has nothing to say to the others could end while they still connect to it
    try:
        answers.put((rank, work(rank)))
    except Exception:
        answers.put((rank, traceback.format_exc()))
    os._exit(0)  # no farewell: a process that waits for one that is gone would hang
