"""Keys and commands that earlier versions had, and what to use now."""

from __future__ import annotations

_RANK_FIDELITY = "benchmarks/rank_fidelity.py measures rank fidelity on whole pools"
_OWN_CODE = "leave it out; a resumed run continues with the copy of your files in the run folder's code/"

KEYS = {
    "evaluation.share": "`solrl eval RUN` samples on GPUs of its own, also while the run is live",
    "evaluation.reference_code": _OWN_CODE,
    "fidelity.audit_prompts": _RANK_FIDELITY,
    "fidelity.audit_seeds": _RANK_FIDELITY,
    "fidelity.fallback": (
        "set fidelity.on_low to warn or stop, and change rollout.explore.steps, rollout.explore.precision or "
        "rollout.preview.prune yourself"
    ),
    "fleet.hedge": "a unit goes to another worker when its worker misses fleet.deadlines.explore or .regenerate",
    "fleet.other_explorers": "a run has one kind of explorer; set fleet.explorers",
    "rewards.0.code": _OWN_CODE,
    "rollout.audit": _RANK_FIDELITY,
}
"""Dotted key, at the first position of a list → what to use now."""

COMMANDS = {
    "submit": "use `ray job submit --working-dir . -- solrl train …` (docs/guides/cluster.md)",
    "trace": "a run writes trace.json in its folder; open that at ui.perfetto.dev",
    "verify": "`solrl train --resume RUN` checks the same checksums before it goes on",
}
"""Command → what to use now."""

OPTIONS = {
    "--alone": "`solrl eval` always samples on GPUs of its own; leave it out",
    "--resolution": "use --set model.resolution=512, or --set 'model.resolution=[512, 768]'",
    "--explorers-of": "a run has one kind of explorer; use --explorers",
}
"""Option → what to use now."""
