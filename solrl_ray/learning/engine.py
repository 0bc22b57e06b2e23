"""DeepSpeed for one rank: the process group, the engine around the LoRA factors, its optimiser state.

DeepSpeed touches little. The engine's module holds only the trained factors, so the base weights are neither cast,
moved nor broadcast. Its mixed precision stays off: the factors are float32, and the model decides the arithmetic of its
forward. The engine (ZeRO-1) reduces gradients once an update, clips them by their
global norm, and runs AdamW on this rank's slice of one flat float32 vector of all factors, in the given order.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config.schema import LearnerConfig
from solrl_ray.errors import RunError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter, under torch's names: running means of the gradient and of its square."""


def free_port() -> int:
    """A TCP port that is free now; rank 0 sends it to the others."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def process_group(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    *,
    device: torch.device,
    timeout: float,
    one_host: bool,
    network: str = "",
) -> None:
    """Join the learner group, which may have one rank. Returns when all ranks have joined.

    Args:
        address: host name or IP of rank 0.
        port: free TCP port on rank 0 (`free_port`).
        device: ``cpu`` (gloo) or ``cuda`` (NCCL); on CUDA each rank sees exactly one device.
        timeout: limit of joining, and of each later collective, seconds.
        one_host: every rank is on this machine; gloo then uses only the loopback interface.
        network: interface of both back-ends; empty: they choose.

    Raises RunError: DeepSpeed was already set up for another kind of device in this process.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size if one_host else 1),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        DS_ACCELERATOR=device.type,
    )
    # Otherwise PyTorch ends this process when NCCL reports that a rank is gone. `Collectives` aborts the group instead.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if network:
        os.environ.update(NCCL_SOCKET_IFNAME=network, GLOO_SOCKET_IFNAME=network)
    elif one_host and device.type == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    deepspeed = import_large("deepspeed")  # late: it reads the environment and takes seconds
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise RunError(f"DeepSpeed is set up for {found} in this process but the learner is on {device.type}")
    if device.type == "cpu":
        # Not public. Otherwise set-up compiles a shared-memory operator (half a minute, needs a C++ compiler) that
        # leaves 66 MiB in /dev/shm per rank and run. Gloo replaces it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo" if device.type == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout),
        rank=rank,
        world_size=world_size,
    )


def abort_process_group(device: torch.device) -> None:
    """End collectives that wait for a rank that is gone: NCCL's kernels may do so for ever. What they and later ones
    return is of no use, until later ones raise (`Collectives.watched`). Any thread may call it, also before the group
    exists: nothing is to be ended then.
    """
    if device.type == "cuda" and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()  # not public; there is no other way for all groups


def leave_process_group() -> None:
    """Leave the learner group, also after `abort_process_group`, so that the process can end or join another one."""
    import deepspeed

    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:  # aborted; not public: DeepSpeed keeps the groups that it made
        deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None  # not public: else the next group is taken for the one that is gone


class _Policy(torch.nn.Module):
    """The module that DeepSpeed wraps: it owns the trained factors and borrows the forward."""

    def __init__(self, factors: Sequence[torch.nn.Parameter], velocity: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.factors = torch.nn.ParameterList(factors)
        self._velocity = velocity

    def forward(self, *args: Any) -> torch.Tensor:
        return self._velocity(*args)


@dataclass
class Engine:
    """One rank's DeepSpeed engine over `factors`, all of them trained and float32.

    Life cycle of an update: ``velocity → backward(last=False)`` any number of times, the last one with ``last=True``,
    then ``step``. Every rank makes the same calls.
    """

    factors: list[torch.nn.Parameter]
    deepspeed: Any

    @classmethod
    def build(
        cls, config: LearnerConfig, factors: Sequence[torch.nn.Parameter], velocity: Callable[..., torch.Tensor]
    ) -> Engine:
        """`velocity` is the trained forward. `factors` move into one flat vector: their ``.data`` changes."""
        import deepspeed

        adamw = config.optimizer
        optimizer = torch.optim.AdamW(
            factors,
            lr=adamw.lr,
            betas=adamw.betas,
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
            foreach=False,
            fused=False,
        )
        # DeepSpeed imports every optimiser that it knows. One is decorated with `torch.compile`, which would import the
        # compiler: two seconds of each start.
        with _environment(TORCHDYNAMO_DISABLE="1"):
            engine, *_ = deepspeed.initialize(
                model=_Policy(factors, velocity),
                model_parameters=list(factors),
                optimizer=optimizer,
                config=deepspeed_config(config, numel=sum(f.numel() for f in factors)),
            )
        built = cls(list(factors), engine)
        flat, states = built._internals()
        # As AdamW would at its first step, so that a state can be saved and restored before it.
        states[flat] = {"step": torch.tensor(0.0), **{key: torch.zeros_like(flat.detach()) for key in MOMENTS}}
        return built

    def velocity(self, *args: Any) -> torch.Tensor:
        """The forward with gradients, through the engine."""
        output: torch.Tensor = self.deepspeed(*args)
        return output

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the scalar `loss`, averaged over ranks. `last` ends the update."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss)

    def step(self, lr: float) -> float:
        """Clip, run AdamW with learning rate `lr`, gather the new factors on every rank; returns the global gradient
        norm before clipping.

        Raises RunError: the gradient is not finite; factors and moments are unchanged.
        """
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        self.deepspeed.step()
        if not self.deepspeed.was_step_applied():
            raise RunError("the gradient of the update is not finite: nothing was changed")
        return float(self.deepspeed.get_global_grad_norm())

    def moments(self) -> dict[str, list[torch.Tensor]]:
        """AdamW's moments per factor, float32 on the device, gathered from all ranks. Collective."""
        flat, states = self._internals()
        return {key: self._gather(states[flat][key]) for key in MOMENTS}

    def restore(self, moments: dict[str, list[torch.Tensor]], steps: int) -> None:
        """Take over moments made at any world size, the step count, and the present factors."""
        flat, states = self._internals()
        size, ranks, rank = flat.numel(), torch.distributed.get_world_size(), torch.distributed.get_rank()
        for key in MOMENTS:
            whole = torch.cat([moment.reshape(-1) for moment in moments[key]])
            padded = torch.nn.functional.pad(whole, (0, size * ranks - whole.numel()))
            states[flat][key].copy_(padded.split(size)[rank])
        states[flat]["step"].fill_(float(steps))
        self.deepspeed.optimizer.refresh_fp32_params()

    def close(self) -> None:
        """Remove the engine's hooks from the factors."""
        # After `abort_process_group` DeepSpeed misses its rank, which it asks for when all hooks are gone.
        with nullcontext() if torch.distributed.is_initialized() else suppress(AssertionError):
            self.deepspeed.destroy()

    def _internals(self) -> tuple[torch.Tensor, dict[torch.Tensor, dict[str, torch.Tensor]]]:
        """This rank's slice of the flat vector that AdamW works on, and AdamW's state of it.

        Not of DeepSpeed's public interface: that knows no state before the first step, and reduces each factor's alone.
        """
        zero = self.deepspeed.optimizer
        return zero.single_partition_of_fp32_groups[0], zero.optimizer.state

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        world_size = torch.distributed.get_world_size()
        whole = part.new_empty(world_size * part.numel())
        torch.distributed.all_gather_into_tensor(whole, part.contiguous())
        sizes = [f.numel() for f in self.factors]
        pieces = whole[: sum(sizes)].split(sizes)
        return [piece.view(f.shape) for piece, f in zip(pieces, self.factors, strict=True)]


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """A block with these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def deepspeed_config(config: LearnerConfig, *, numel: int) -> dict[str, Any]:
    """DeepSpeed's own configuration; a bucket of `numel` trained elements makes one reduction of all."""
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        # The number of passes varies between updates; the learner marks the last one itself.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": numel,
            "allgather_bucket_size": 2 * math.ceil(numel / 2),
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
