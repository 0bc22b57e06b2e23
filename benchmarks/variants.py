"""What the runs of a campaign differ in, as data: every variant once, and the tables that put some side by side.

A variant that is in several tables is trained once: its runs are found by its name.
"""

from __future__ import annotations

from typing import NamedTuple

NFT = "objective={timestep_fraction: 0.4, old_decay: {kind: copy}}"
"""As in the demo: with the published decay `old` would lag behind in a run of few updates."""
DIRECT = "rollout={strategy: direct, pool: 24, keep: 24}"
TWO_STAGE = "rollout={strategy: two_stage, pool: 96, keep: 24, preview: {prune: null}}"
NVFP4 = "rollout.explore={micro_batch: 24, precision: nvfp4-emulated}"
LEARNER_ON_CPU = (
    "fleet={placement: split, explorers: {num_gpus: 0.5}, regenerators: {num_gpus: 0.5}, learners: {num_gpus: 0}}"
)
"""Who explores ahead must not be in a learner's process."""


class Variant(NamedTuple):
    method: str
    settings: tuple[str, ...]
    charged_as: str = ""
    """Another tier by which the pool is charged: no price list has one for emulation."""
    on_gpu: tuple[str, ...] = ()
    """Further settings of a run on a GPU."""


def nvfp4(*changes: str, on_gpu: tuple[str, ...] = ()) -> Variant:
    """Sol-RL as published, 24 of 96 with emulated NVFP4 previews of 6 steps, but for `changes`."""
    return Variant("diffusion_nft", (TWO_STAGE, NVFP4, NFT, *changes), "fp8", on_gpu)


def prune(after: int, keep: int, *changes: str, pool: int = 96) -> Variant:
    preview = f"rollout.preview={{unit: {pool}, prune: {{after: {after}, keep: {keep}}}}}"
    return nvfp4("rollout.explore.micro_batch=12", preview, f"rollout.pool={pool}", *changes)


def train_on(keep: int) -> tuple[str, str]:
    """Fewer samples of a prompt are trained on than the published 24, in batches that they fill."""
    return f"rollout.keep={keep}", f"rollout.regenerate.micro_batch={keep}"


def direct_with(keep: int, *changes: str) -> Variant:
    fewer = (f"rollout.pool={keep}", f"rollout.explore.micro_batch={keep}", *train_on(keep))
    return Variant("diffusion_nft", (DIRECT, NFT, *fewer, *changes))


DIRECTS = {
    "diffusion_nft": "direct",
    "awm": "awm_direct",
    "flow_grpo": "flow_grpo_direct",
    "dance_grpo": "dance_grpo_direct",
}
"""Method → the variant whose final gain is the measure of that method's variants: its authors' own rollout."""
OWN = {"awm": (), "flow_grpo": (), "dance_grpo": ("learner.updates=3",)}
"""What another method needs in a short run. DanceGRPO is published with one optimiser step an iteration and, for 16
GPUs, with three."""
VARIANTS = {
    "direct": Variant("diffusion_nft", (DIRECT, NFT)),
    "scaled": Variant("diffusion_nft", ("rollout={strategy: scaled, pool: 96, keep: 24}", NFT)),
    "quantized": Variant(
        "diffusion_nft",
        (
            "rollout={strategy: quantized, pool: 96, keep: 24, accept_quantized_training: true}",
            "rollout.explore={precision: nvfp4-emulated}",
            NFT,
        ),
        "fp8",
    ),
    "two_stage_nvfp4": nvfp4(),
    "two_stage_fp8": nvfp4("rollout.explore.precision=fp8"),
    "two_stage_pruned": prune(after=2, keep=36),
    **{DIRECTS[method]: Variant(method, (DIRECT, *own)) for method, own in OWN.items()},
    **{f"{method}_two_stage": Variant(method, (TWO_STAGE, NVFP4, *own), "fp8") for method, own in OWN.items()},
    **{f"pool_{size}": nvfp4(f"rollout.pool={size}") for size in (48, 192, 384)},
    **{f"steps_{steps}": nvfp4(f"rollout.explore.steps={steps}") for steps in (2, 4, 8)},
    **{f"select_{rule}": nvfp4(f"rollout.selection={rule}") for rule in ("best", "random")},
    **{f"keep_{keep}": nvfp4(*train_on(keep)) for keep in (8, 12)},
    "keep_48": nvfp4("rollout.keep=48"),
    **{f"direct_{keep}": direct_with(keep) for keep in (8, 12)},
    "lean_96": prune(2, 36, *train_on(12)),
    "lean_48": prune(2, 24, *train_on(12), pool=48),
    "lean_48_keep_8": prune(2, 24, *train_on(8), pool=48),
    "direct_two_updates": Variant("diffusion_nft", (DIRECT, NFT, "learner.updates=2")),
    "two_updates": prune(2, 36, "learner.updates=2"),
    "direct_8_two_updates": direct_with(8, "learner.updates=2"),
    "lean_48_keep_8_two_updates": prune(2, 24, *train_on(8), "learner.updates=2", pool=48),
    "staleness_1": nvfp4("rollout.max_staleness=1", on_gpu=(LEARNER_ON_CPU,)),
    "prune_after_1": prune(after=1, keep=36),
    "prune_after_3": prune(after=3, keep=36),
    "prune_keep_48": prune(after=2, keep=48),
}
"""Name → what differs. `two_stage_nvfp4` is also the row of 96 seeds, 6 steps, best and worst, 24 kept, no staleness
and no pruning; `direct` is also the row of 24 seeds, all of which are trained on."""
BASELINE = ("direct", "two_stage_nvfp4")
TABLES = {
    "convergence": (
        *("direct", "scaled", "quantized", "two_stage_nvfp4", "two_stage_fp8", "two_stage_pruned"),
        *(name for method in OWN for name in (DIRECTS[method], f"{method}_two_stage")),
    ),
    "pool": ("direct", "pool_48", "two_stage_nvfp4", "pool_192", "pool_384"),
    "preview_steps": ("direct", "steps_2", "steps_4", "two_stage_nvfp4", "steps_8"),
    "selection": (*BASELINE, "select_best", "select_random"),
    "keep": ("direct", "keep_8", "keep_12", "two_stage_nvfp4", "keep_48"),
    "lean": ("direct", "direct_12", "direct_8", "two_stage_pruned", "lean_96", "lean_48", "lean_48_keep_8"),
    "updates": (
        *("direct", "direct_two_updates", "two_stage_pruned", "two_updates"),
        *("direct_8", "direct_8_two_updates", "lean_48_keep_8", "lean_48_keep_8_two_updates"),
    ),
    "staleness": (*BASELINE, "staleness_1"),
    "pruning": (*BASELINE, "prune_after_1", "two_stage_pruned", "prune_after_3", "prune_keep_48"),
}
"""Table → its rows. Each has its reference, `direct`."""
