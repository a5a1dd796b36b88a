"""One run on several processes, on one machine or many: `torchrun --nproc_per_node N run_llama.py ...`.

Every process goes through the same batches in the same order, with the same random numbers, and computes its rows of
each. Training is data-parallel: a whole model in each process (`DistributedDataParallel`, Li et al. 2020,
arXiv:2006.15704), or a model that is split over the processes (`fully_shard`, Zhao et al. 2023, arXiv:2304.11277).

Several processes compute the same as one (batches, padding, loss, gradients, predictions, the masks of every
`nn.Dropout`), except for rounding: sums are computed in another order.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from engine.processes import Batch, Distributed, LocalBatch
from engine.tasks import NO_TARGET
from llama import LlamaLayer
from utils import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

TIMEOUT = timedelta(minutes=10)  # until a lost machine is an error; the end of a process is noticed at once


class LostProcess(UserError):
    """Another process of the run has ended. The cause is in the error message of that process."""


# -------------------------------------------------------------------------------------------- meeting the others


@contextmanager
def join(device: torch.device, *, shard: bool = False) -> Iterator[TorchDistributed]:
    """Connect to the other processes that torchrun has started; only the first one prints until the block ends.

    Raises `UserError` if torchrun's environment variables are absent or wrong, if there are more processes than GPUs,
    or if the other processes cannot be reached.
    """
    _check_environment()
    _check_device(device)
    signal.signal(signal.SIGINT, _interrupt_once)
    with ExitStack() as stack:
        if os.environ["RANK"] != "0":
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            _find_the_others(device)
            yield TorchDistributed(device, shard)
        except BaseException as error:
            is_users = isinstance(error, (UserError, OSError, KeyboardInterrupt))
            atexit.register(_leave_at_once, 2 if is_users else 1)
            if isinstance(error, KeyboardInterrupt) and os.environ["RANK"] != "0":
                sys.exit(2)  # only the first process prints a message for Ctrl-C
            raise
        dist.destroy_process_group()
        atexit.register(_leave_at_once, 0)


def _check_environment() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')} announces several processes, but {', '.join(missing)} is not "
            "set; start them with torchrun, or unset WORLD_SIZE"
        )
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UserError(f"RANK={rank} and WORLD_SIZE={size} do not fit together; start the processes with torchrun")


def _check_device(device: torch.device) -> None:
    if device.type == "mps":
        raise UserError("several processes compute on CPUs or on CUDA devices, not on mps")
    if device.type == "cuda":
        index = device.index or 0  # without torchrun there is no local number, and one process
        if index >= torch.cuda.device_count():
            raise UserError(
                f"this is process {index + 1} of this machine, but it has {torch.cuda.device_count()} GPUs; "
                "use a smaller --nproc_per_node"
            )
        torch.cuda.set_device(index)


def _find_the_others(device: torch.device) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).partition("\n")[0]
        raise UserError(f"the processes of this run did not find one another at {place}: {reason}") from None


def _interrupt_once(signum: int, frame: object) -> NoReturn:
    """Handle the first Ctrl-C and ignore the second: the terminal and torchrun both send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave_at_once(status: int) -> None:
    """End the process without Python's usual clean-up.

    After an error, the clean-up would wait for unfinished collective operations; after a success, threads of the
    process group sometimes abort the process.
    """
    try:
        sys.stdout.flush()
    except OSError:
        status = status or 2
    finally:
        os._exit(status)


@contextmanager
def _meeting() -> Iterator[None]:
    """A context for all code that waits for other processes: raises `LostProcess` if one of them has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise LostProcess("another process of this run has ended, so this one cannot go on") from None
        raise


# ----------------------------------------------------------------------------------------------------- the group


class TorchDistributed(Distributed):
    """The processes of a run that torchrun has started. See `Distributed` for the methods.

    device: of this process. shard: split models over the processes instead of copying them.
    """

    def __init__(self, device: torch.device, shard: bool):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        self.device = device
        self.shard = shard
        self.rows = Rows()  # of the present batch; dropout reads them
        self.trained: nn.Module | None = None  # the module to call in training: the model, or its DDP wrapper

    def require_alike(self, facts: dict[str, Any]) -> None:
        """Raise `UserError`, in every process, if these values differ between processes (other files, other flags)."""
        everyones: list[dict[str, Any]] = [{}] * self.size
        with _meeting():
            dist.all_gather_object(everyones, facts)
        for rank, theirs in enumerate(everyones):
            differing = [name for name in facts if theirs.get(name) != everyones[0].get(name)]
            if differing:
                raise UserError(f"process {rank} of {self.size} has another {', '.join(differing)} than process 0")

    def spread(self, model: nn.Module, device: torch.device) -> None:
        _slice_dropout(model, self.rows)
        self.trained = model
        with _meeting():
            if self.shard:
                _shard(model, device, self.size)
                return
            model.to(device)
            if any(parameter.requires_grad for parameter in model.parameters()):
                device_ids = [device] if device.type == "cuda" else None
                self.trained = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def network(self, model: nn.Module) -> Callable[..., Any]:
        def call(*inputs: Any, **named: Any) -> Any:
            with _meeting():
                called = self.trained if model.training and self.trained is not None else model
                outputs = called(*inputs, **named)
            if self.shard and not model.training:
                # else parameters outside the layers stay whole until the next backward pass
                cast("FSDPModule", model).reshard()
            return outputs

        return call

    def local_batches(self, loader: Iterable[Batch]) -> Iterator[LocalBatch]:
        for batch in loader:
            total = len(batch["token_ids"])
            start, end = total * self.rank // self.size, total * (self.rank + 1) // self.size
            self.rows.start, self.rows.end, self.rows.total = start, end, total
            yield LocalBatch(_rows_of(batch, start, end), start, end, total)

    def backward(self, loss: torch.Tensor) -> None:
        with _meeting():
            (loss * self.size).backward()  # gradients are averaged over the processes

    def total(self, value: torch.Tensor) -> torch.Tensor:
        with _meeting():
            dist.all_reduce(total := value.clone())
        return total

    def merge(self, predictions: list[int]) -> list[int]:
        merged = torch.tensor(predictions)
        with _meeting():
            dist.all_reduce(merged, dist.ReduceOp.MAX)  # rows of other processes are -1
        return merged.tolist()

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Tensors are sent one by one, so that no process holds a large model in more than one copy."""
        made = make() if self.is_first else None
        tensors = iter([leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)])
        outline = [tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), made)]

        def travel(like: torch.Tensor) -> torch.Tensor:
            tensor = next(tensors).contiguous() if self.is_first else torch.empty_like(like, device="cpu")
            dist.broadcast(tensor, 0)
            return tensor

        with _meeting():
            dist.broadcast_object_list(outline, device=torch.device("cpu"))
            return tree_map_only(torch.Tensor, travel, outline[0])

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        if not self.shard:
            return model.state_dict()
        return self._gather(model.state_dict(keep_vars=True))

    def whole(self, state: Any) -> Any:
        return self._gather(state) if self.shard else state

    def _gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Gather every sharded tensor on the CPU of the first process; the others get None in its place."""
        gathered: dict[int, torch.Tensor | None] = {}  # a tied matrix is gathered and stored once

        def gather(leaf: Any) -> Any:
            if not _is_sharded(leaf):
                return leaf
            if id(leaf) not in gathered:
                whole = leaf.full_tensor().detach()
                gathered[id(leaf)] = whole.cpu() if self.is_first else None
            return gathered[id(leaf)]

        with _meeting():
            return tree_map(gather, state)

    def piece(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        whole = super().piece(whole, like)
        if not _is_sharded(like):
            return whole
        piece = cast("DTensor", torch.zeros_like(like, requires_grad=False))
        local = piece.to_local()
        most = -(-len(whole) // like.device_mesh.size())  # rows in each process; the last ones may have fewer
        start = min(like.device_mesh.get_local_rank() * most, len(whole))
        local.copy_(whole[start : start + len(local)])
        return piece


def _rows_of(batch: Batch, start: int, end: int) -> Batch:
    """Some rows of a batch; if there are none, one spare row that changes no result.

    (The other processes wait for this one's gradients or shards.) The spare row has no index, and labels without loss.
    """
    if start < end:
        return {name: column[start:end] for name, column in batch.items()}
    spare = {name: column[:1] for name, column in batch.items()}
    for name in spare.keys() & {"labels", "targets"}:
        spare[name] = torch.full_like(spare[name], NO_TARGET)
    return {**spare, "indices": []}


def _shard(model: nn.Module, device: torch.device, size: int) -> None:
    """Split the parameters of every layer, and those outside the layers, over the processes.

    A layer is whole on a device only while it computes, so a model may be larger than the memory of one device.
    """
    from torch.distributed.device_mesh import init_device_mesh  # importing these two takes most of a second
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (size,))
    for module in model.modules():
        if isinstance(module, LlamaLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether this is a `DTensor`, of which this process holds a shard."""
    return hasattr(value, "to_local")


# ------------------------------------------------------------------------------------------------------- dropout


class Rows:
    """This process's rows of the present batch: `start` to `end` of `total`."""

    start, end, total = 0, 1, 1


class SlicedDropout(nn.Module):
    """`nn.Dropout` on some rows of a batch: draws the mask of the whole batch and uses these rows of the mask.

    So the masks equal those of a single process, and the generators of all processes stay equal. The first dimension
    of the input must be the rows of the batch.
    """

    def __init__(self, p: float, rows: Rows):
        super().__init__()
        self.p, self.rows = p, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mask = F.dropout(x.new_ones(self.rows.total, *x.shape[1:]), self.p)
        return x * mask[self.rows.start : self.rows.start + len(x)]


def _slice_dropout(model: nn.Module, rows: Rows) -> None:
    """Replace every `nn.Dropout` with a probability above 0 by a `SlicedDropout`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and child.p > 0.0:
                setattr(module, name, SlicedDropout(child.p, rows))
