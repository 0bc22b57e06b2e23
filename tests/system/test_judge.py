"""A run whose reward is a judge that never says the same twice."""

from __future__ import annotations

import itertools
from pathlib import Path

from actors.client import launch
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.storage.run_folder import RunFolder
from tests.support.chat_server import Asked, serving
from tests.support.small import folder, small_config, summary

PRUNED = ("rollout.explore.steps=5", "rollout.preview={unit: 8, prune: {after: 2, keep: 6}}")


def test_a_judge_scores_a_run_which_says_that_it_is_not_reproducible(local_ray: None, tmp_path: Path) -> None:
    moods = itertools.count()

    def moody(asked: Asked) -> str:
        mood = next(moods)
        return "I cannot say." if mood % 50 == 7 else f"{5 + asked.picture[..., 0].mean() / 256 + mood % 10 / 10:.2f}"

    with serving(moody) as server:
        judge = f"{{url: '{server.url}', model: eyes, question: {{text: 'How red, from 0 to 10?'}}}}"
        rewards = f"rewards=[{{kind: judge, judge: {judge}}}]"
        config = small_config(tmp_path, "judged", "run.iterations=2", rewards, *PRUNED)
        launch.train(config, live=False)
    found = summary(config)
    assert any("equal runs may have different digests" in words for words in found["warnings"])
    assert "equal runs may have different digests" in (folder(config) / "report.html").read_text()
    costs = found["reward_costs"]
    assert costs["requests"] == len(server.asked)
    assert costs["retries"] == sum(mood % 50 == 7 for mood in range(len(server.asked))) > 0
    assert costs["prompt_tokens"] == 100 * len(server.asked)
    records = RunFolder(folder(config)).read_metrics()
    assert sum(record.reward_costs.get("requests", 0) for record in records) == costs["requests"]
    assert all(record.differing_results == 0 for record in records if isinstance(record, IterationMetrics))
