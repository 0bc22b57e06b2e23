"""Removed keys, commands and options, and their replacements."""

from __future__ import annotations

_RANK_FIDELITY = "benchmarks/rank_fidelity.py measures rank fidelity on whole pools"
_OWN_CODE = "leave it out; a resumed run continues with the copy of your files in the run folder's code/"

KEYS = {
    "evaluation.share": "`solrl eval RUN` samples on separate GPUs, also while the run is live",
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
"""Dotted key, for list entries that of the first entry → replacement."""

COMMANDS = {
    "submit": "use `ray job submit --working-dir . -- solrl train …` (docs/guides/cluster.md)",
    "trace": "a run writes trace.json in its folder; open that at ui.perfetto.dev",
    "verify": "`solrl train --resume RUN` checks the same checksums before it continues",
}
"""Command → replacement."""

OPTIONS = {
    "--alone": "`solrl eval` always samples on separate GPUs; leave it out",
    "--resolution": "use --set model.resolution=512, or --set 'model.resolution=[512, 768]'",
    "--explorers-of": "a run has one kind of explorer; use --explorers",
}
"""Option → replacement."""
