"""What trackers get of a configuration: how a run was trained, and nothing of where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solrl_ray.config.schema import Config
from solrl_ray.report.trackers import redacted
from tests.support import made_runs

QUESTION = "Is {prompt} to be seen/read? See https://scale.example. Answer yes/no."


def with_places(folder: Path) -> Config:
    """A configuration with the word "secret" in all that is nobody's business."""
    place = folder / "secret"
    whole: dict[str, Any] = made_runs.config().model_dump(mode="json")
    whole["run"] |= {"root": str(place / "runs"), "init": "secret/runs/other"}
    whole["model"] |= {"path": str(place / "flux"), "preview_decoder": "madebyollin/taef1"}
    whole["prompts"] = {"train": "secret/train.jsonl", "heldout": "~/secret/held out.txt"}
    judge = {
        "url": "http://secret:8000/v1",
        "model": "/secret/qwen",
        "question": {"text": QUESTION, "pattern": r"(\d+)/10"},
        "request": {"user": "secret"},
    }
    whole["rewards"] = [
        {"kind": "pickscore", "path": "yuvalkirstain/PickScore_v1", "base": str(place / "clip")},
        {"kind": "judge", "judge": judge},
        {"kind": "remote", "remote": {"url": "secret:8000/score"}},
        {"kind": f"{place}/mine.py:score"},
    ]
    whole["compile"]["cache"] = str(place / "compiled")
    whole["checkpoints"]["upload"] = "s3://secret/runs"
    whole["evaluation"]["reference"] = "secret/real.py:picture"
    whole["fleet"]["network"] = "secret0"
    whole["fleet"]["explorers"]["labels"] = {"kubernetes.io/hostname": "secret"}
    return Config.model_validate(whole)


def test_of_places_the_last_part_is_told_and_of_addresses_nothing(tmp_path: Path) -> None:
    found = redacted(with_places(tmp_path))
    assert "secret" not in json.dumps(found)
    assert str(tmp_path) not in json.dumps(found)
    assert (found["run"]["root"], found["run"]["init"]) == ("runs", "other")
    assert (found["model"]["path"], found["model"]["preview_decoder"]) == ("flux", "madebyollin/taef1")
    assert found["prompts"] == {"train": "train.jsonl", "heldout": "held out.txt"}
    pickscore, judge, remote, own = found["rewards"]
    assert (pickscore["path"], pickscore["base"]) == ("yuvalkirstain/PickScore_v1", "clip")
    assert judge["judge"]["model"] == "qwen"
    assert (judge["judge"]["question"]["text"], judge["judge"]["question"]["pattern"]) == (QUESTION, r"(\d+)/10")
    assert remote["remote"] == {"references": False, "retries": 3, "timeout": 60.0, "token_variable": ""}
    assert own["kind"] == "mine.py:score"


def test_all_else_stays_as_it_is() -> None:
    config = made_runs.config()
    whole, found = config.model_dump(mode="json"), redacted(config)
    for section in ("model", "prompts", "rollout", "objective", "learner", "publish", "tracking"):
        assert found[section] == whole[section]
