"""What pruned previews choose, beside previews that are all finished and beside the truth: for `rank_fidelity.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from solrl_ray.rollout.audit import AuditedPool, audit, student_quantile

FEW = 8
"""Beside the seeds chosen as configured: a choice that is far into the tails."""


def figures(
    proxies: np.ndarray, finished: np.ndarray, whole: np.ndarray, full: np.ndarray, keep: int
) -> dict[str, float]:
    """All arrays are [prompts, seeds].

    Args:
        proxies: rewards of the previews; of those that are not `finished` early scores, which choose nothing.
        whole: rewards of previews that are all finished.
        full: full-precision rewards.

    Returns:
        ``contrast``: mean full reward of the chosen best less that of the chosen worst, as a share of what full rewards
        would choose, and ``contrast_8`` for a choice of 8; ``kept``: the same as a share of what `whole` would choose,
        with the half width of its 95 % interval over prompts, ``kept_half``, and ``kept_8``; ``spearman`` and
        ``contrast_lost`` of an audit that knows every seed.
    """
    pools = []
    for x, there, y in zip(proxies, finished, full, strict=True):
        chosen = _chosen(x, there, keep)
        others = tuple(sorted(set(range(len(x))) - set(chosen)))
        pools.append(
            AuditedPool(
                proxies=tuple(x.tolist()),
                chosen=chosen,
                chosen_rewards=tuple(y[list(chosen)].tolist()),
                audited=others,
                audited_rewards=tuple(y[list(others)].tolist()),
                dropped=tuple(np.flatnonzero(~there).tolist()),
            )
        )
    audited, everybody = audit(pools), np.ones_like(finished)
    found = {"spearman": audited["spearman"], "contrast_lost": audited.get("contrast_lost", 0.0)}
    for count, suffix in ((keep, ""), (FEW, f"_{FEW}")):
        mine, theirs, best = (
            contrasts(x, there, full, count)
            for x, there in ((proxies, finished), (whole, everybody), (full, everybody))
        )
        ratio = float(mine.mean() / theirs.mean())
        # Of a ratio of means, by the delta method.
        spread = (mine - ratio * theirs).std(ddof=1) / math.sqrt(len(mine)) / theirs.mean()
        found |= {f"contrast{suffix}": float(mine.mean() / best.mean()), f"kept{suffix}": ratio}
        found[f"kept{suffix}_half"] = float(student_quantile(len(mine) - 1) * spread)
    return found


def contrasts(proxies: np.ndarray, finished: np.ndarray, full: np.ndarray, keep: int) -> np.ndarray:
    """[prompts]: mean full reward of the best half that is chosen, less that of the worst."""
    values = []
    for x, there, y in zip(proxies, finished, full, strict=True):
        chosen = list(_chosen(x, there, keep))
        values.append(y[chosen[: keep // 2]].mean() - y[chosen[keep // 2 :]].mean())
    return np.array(values)


def _chosen(proxies: np.ndarray, finished: np.ndarray, keep: int) -> tuple[int, ...]:
    """Best, then worst, among those that are finished."""
    order = [index for index in np.argsort(-proxies, kind="stable").tolist() if finished[index]]
    return (*order[: keep // 2], *order[-(keep // 2) :])


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| tier | preview | unit | steps | decoded | Spearman | contrast | of all finished | K = 8 | may be lost |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['tier']} | {row['preview']} | {row['unit']} | {row['steps']:.2f} | {row['decoded']:.2f} "
            f"| {row['spearman']:.3f} | {row['contrast']:.3f} | {row['kept']:.3f} ± {row['kept_half']:.3f} "
            f"| {row['kept_8']:.3f} | {row['contrast_lost']:.4f} |"
        )
