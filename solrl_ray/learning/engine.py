"""DeepSpeed for one rank: the process group, the engine around the LoRA factors, its optimiser state.

The engine's module holds only the trained factors, so DeepSpeed neither casts, moves nor broadcasts the base weights.
Its mixed precision is off: the factors are float32, and the model chooses the arithmetic of its forward.

The engine (ZeRO-1) reduces gradients once per update and clips them by their global norm. AdamW then works on this
rank's slice of one flat float32 vector, which holds all factors in the given order.
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
"""PyTorch's names of AdamW's state per parameter: running means of the gradient and of its square."""


def free_port() -> int:
    """A TCP port that is free now; rank 0 sends it to the other ranks."""
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
        timeout: time limit for joining and for each later collective, seconds.
        one_host: all ranks are on this machine; gloo then uses only the loopback interface.
        network: network interface of both back-ends; empty: they choose one.

    Raises RunError if DeepSpeed was already set up for another kind of device in this process.
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
    # Otherwise PyTorch ends this process when NCCL reports a lost rank. `Collectives` aborts the group instead.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if network:
        os.environ.update(NCCL_SOCKET_IFNAME=network, GLOO_SOCKET_IFNAME=network)
    elif one_host and device.type == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    deepspeed = import_large("deepspeed")  # late: it reads the environment and takes seconds
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    if accelerator != device.type:
        raise RunError(f"DeepSpeed is set up for {accelerator} in this process but the learner is on {device.type}")
    if device.type == "cpu":
        # Not public API. Otherwise the set-up compiles a shared-memory operator (half a minute, needs a C++ compiler),
        # which leaves 66 MiB in /dev/shm per rank and run. We use gloo instead.
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
    """End collectives that wait for a lost rank, as NCCL kernels may do forever.

    Their results are invalid, and so are those of later collectives until these raise (`Collectives.watched`). Any
    thread may call it. Before the group exists it does nothing.
    """
    if device.type == "cuda" and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()  # not public API; nothing public aborts all groups


def leave_process_group() -> None:
    """Leave the learner group, also after `abort_process_group`. The process can then end or join another group."""
    import deepspeed

    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:  # aborted. Not public API: DeepSpeed keeps references to the groups it made.
        deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None  # not public API: otherwise DeepSpeed would keep using the old group


class _Policy(torch.nn.Module):
    """The module that DeepSpeed wraps: it owns the trained factors and calls the given forward."""

    def __init__(self, factors: Sequence[torch.nn.Parameter], velocity: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.factors = torch.nn.ParameterList(factors)
        self._velocity = velocity

    def forward(self, *args: Any) -> torch.Tensor:
        return self._velocity(*args)


@dataclass
class Engine:
    """The DeepSpeed engine of one rank; all `factors` are trained and float32.

    Life cycle of an update: ``velocity → backward(last=False)`` any number of times, the last time with ``last=True``,
    then ``step``. Every rank makes the same calls.
    """

    factors: list[torch.nn.Parameter]
    deepspeed: Any

    @classmethod
    def build(
        cls, config: LearnerConfig, factors: Sequence[torch.nn.Parameter], velocity: Callable[..., torch.Tensor]
    ) -> Engine:
        """Build the engine. DeepSpeed moves `factors` into one flat vector, so their ``.data`` changes.

        `velocity`: the forward that is trained.
        """
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
        # DeepSpeed imports all its optimisers. One is decorated with `torch.compile`, which would import the compiler:
        # two seconds per start.
        with _environment(TORCHDYNAMO_DISABLE="1"):
            engine, *_ = deepspeed.initialize(
                model=_Policy(factors, velocity),
                model_parameters=list(factors),
                optimizer=optimizer,
                config=deepspeed_config(config, numel=sum(f.numel() for f in factors)),
            )
        built = cls(list(factors), engine)
        flat, states = built._internals()
        # The state that AdamW creates at its first step, created now so that it can be saved and restored earlier.
        states[flat] = {"step": torch.tensor(0.0), **{key: torch.zeros_like(flat.detach()) for key in MOMENTS}}
        return built

    def velocity(self, *args: Any) -> torch.Tensor:
        """The forward with gradients, through the engine."""
        output: torch.Tensor = self.deepspeed(*args)
        return output

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the scalar `loss`, averaged over ranks. `last`: the last one of the update."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss)

    def step(self, lr: float) -> float:
        """Clip the gradient, run AdamW with learning rate `lr`, and gather the new factors on every rank.

        Returns the global gradient norm before clipping. Raises RunError if the gradient is not finite; factors and
        moments are then unchanged.
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
        """Load moments, saved at any world size, and the step count; also pick up the current factors."""
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
        # After `abort_process_group` DeepSpeed fails to look up its rank, once all hooks are removed.
        with nullcontext() if torch.distributed.is_initialized() else suppress(AssertionError):
            self.deepspeed.destroy()

    def _internals(self) -> tuple[torch.Tensor, dict[torch.Tensor, dict[str, torch.Tensor]]]:
        """This rank's slice of AdamW's flat vector, and AdamW's state.

        Not DeepSpeed's public API, which has no state before the first step and gathers each factor's state separately.
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
    """Set environment variables for a block; restores the previous ones at its end."""
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
    """DeepSpeed's configuration. A bucket holds all `numel` trained elements, so there is one reduction for all."""
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        # Not used: the number of passes varies between updates, and the learner marks the last one.
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
