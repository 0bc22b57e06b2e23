"""The report page and its arithmetic of time, from known numbers."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from solrl_ray.common.checked_json import with_checksum
from solrl_ray.errors import UserError
from solrl_ray.metrics.records import Event
from solrl_ray.models.stock_call import StockCall
from solrl_ray.report.data import read_run, stored_progress
from solrl_ray.report.page import build
from solrl_ray.report.rendering import rendered
from solrl_ray.report.tables import REST, SEGMENTS, wall_segments
from solrl_ray.storage.run_folder import RunFolder
from tests.support.made_runs import attestations, config, evaluation, evaluations, iteration, write_metrics, write_run
from tests.support.processes import python


class Page(HTMLParser):
    """A parsed page: its text, its tags and the links that would leave it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page(folder: Path) -> Page:
    return Page(build(folder).read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(write_run(tmp_path_factory.mktemp("runs") / "finished"))


@pytest.fixture(scope="module")
def finished(report: Path) -> Page:
    return Page(report.read_text())


@pytest.mark.parametrize(
    "words",
    [
        "0.333 → 0.483",
        "+0.150 ± 0.029, paired over 3 prompts",
        "26.5 %",  # of the gap to real images
        "real images score 0.900",
        "36.5 s",
        "3 iterations, 10.0 s per iteration",
        "explorer-0 explorer-1 nvfp4-emulated emulation: NVFP4 numerics, not its speed",
        "known-answer vectors: 17 of 17",
        "30 of 42",
        "candidates previewed 864 864 as expected",
        "samples regenerated and trained on 288 288 as expected",
        "units given to another worker 1",
        "duplicate results of a unit (discarded) 0",
        # Three iterations of 10 s and three evaluations of 1.5 s of 36.5 s leave 2 s.
        "learn 6.0 20.0 %",
        "all iterations 30.0 100.0 % held-out evaluations between iterations 4.5",
        "gaps between iterations, and the end of the run 2.0 whole run, after its workers had started 36.5",
        # Three iterations of 10 s: two explorers had 60 s and computed 18 s.
        "explorers 2 18.0 60.0 30.0% 70.0% 5.0%",
        "regenerators 1 13.5 30.0 45.0%",
        "learner 1 4.5 30.0 15.0%",
        "a red circle <above> a blue square",
        "mean reward: base 0.200 · final 0.400 · real 0.800",
        "builtin:testbed/pipeline",
        "pool: 24",
        "LoRA digest lora-2",
    ],
)
def test_numbers_are_those_of_the_run(finished: Page, words: str) -> None:
    assert words in finished.text


def test_the_page_is_whole_and_needs_nothing_from_outside(finished: Page) -> None:
    assert finished.open == []
    plots = 5  # held out, by prompt, training reward, loss, rank fidelity
    assert finished.tags.count("img") == 2 * 3 * 2 + plots
    assert sum(source.startswith("data:image/svg+xml") for source in finished.sources) == plots
    assert {"script", "link"}.isdisjoint(finished.tags)
    assert "a large yellow star" not in finished.text  # has no pictures
    assert "Low rank fidelity" not in finished.text
    assert finished.sources
    assert all(source.startswith(("data:image/", "#")) for source in finished.sources)


def test_a_fall_a_rollback_and_the_best_policy_are_told(tmp_path: Path) -> None:
    top = evaluation(1, "ema", {"aa": (0.6, 0.6), "bb": (0.5, 0.7), "cc": (0.9, 0.9)})
    last = replace(evaluations()[2], fall={"by": 0.2, "allowed": 0.1, "best": 1.0})
    run = write_run(tmp_path / "run", evaluated=[*evaluations()[:2], top, last])
    records = [iteration(0), replace(iteration(1), rollback=0), iteration(2)]
    write_metrics(run, [*evaluations()[:2], *records, top, last])
    (run / "lora").mkdir()
    (run / "lora_best").mkdir()
    text = Page(build(run).read_text()).text
    assert "is 0.2000 lower than after 1" in text
    assert "after iteration 2 to the state after 0 updates" in text
    assert "The folder lora_best has the best evaluated policy, after 1 update: held-out reward 0.700" in text


def test_constant_rewards_stand_above_the_results(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "Constant reward" not in build(folder).read_text()
    write_metrics(folder, [*evaluations(), *(replace(iteration(n), constant_pools=12) for n in range(3))])
    text = build(folder).read_text()
    assert "all finished previews of a prompt in 36 of 36 cases" in text[: text.index("Held-out reward")]


def test_it_says_when_where_and_how_it_was_made_and_how_its_lora_is_loaded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    RunFolder(folder).note_start(["/usr/bin/solrl", "train", "demo", "--set", "run.name=a b"])
    RunFolder(folder).note_start(["solrl", "train", "--resume", "runs/a b"])
    (folder / "lora").mkdir()
    RunFolder(folder).note_start(["/venv/solrl_ray/__main__.py", "train", "--resume"])
    assert RunFolder(folder).starts()[2].command == "python -m solrl_ray train --resume"
    text = html.unescape(build(folder).read_text())
    first, second, _ = RunFolder(folder).starts()
    assert f"started {first.when} on {os.uname().nodename} (CPU, 1 thread):" in text
    assert "<code>solrl train demo --set 'run.name=a b'</code>" in text
    assert f"resumed {second.when} on {os.uname().nodename}: <code>solrl train --resume 'runs/a b'</code>" in text
    shown = text.partition("<h2>Use it</h2>")[2].partition("<pre>")[2].partition("</pre>")[0]
    assert f'pipe.load_lora_weights("{folder}/lora")' in shown
    assert shown.strip().startswith("import torch, diffusers\npipe = diffusers.DiffusionPipeline.from_pretrained(")
    assert shown.rstrip().endswith(html.unescape(rendered("call.txt", drawing=StockCall.of(config()))).rstrip())
    assert "torch_dtype=torch.float32)\n" in shown  # as it was trained, on a machine without GPUs
    assert "    guidance_scale=1.0,\n).images[0]\n" in text
    (folder / "starts.json").write_text("[{}]")
    with pytest.raises(UserError, match=r"starts\.json"):
        build(folder)


def test_events_are_counted_by_kind_and_the_newest_are_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "<h2>Events</h2>" not in build(folder).read_text()
    lost = [Event.now(1, "lost", f"explorer-{number} was lost <a>") for number in range(120)]
    RunFolder(folder).append_events(*lost, Event.now(2, "strike", "an answer was NaN"))
    shown = page(folder)
    assert "lost: 120 · strike: 1." in shown.text
    assert [n for n in range(120) if f"explorer-{n} was lost <a>" in shown.text] == [*range(21, 120)]
    assert "an answer was NaN" in shown.text
    assert [event.what for event in stored_progress(folder).events][-2:] == [lost[-1].what, "an answer was NaN"]


def test_names_are_escaped_and_gpus_and_the_rule_of_selection_are_said(tmp_path: Path) -> None:
    fleet = {"explorers": {"num_gpus": 0.5}, "learners": {"num_gpus": 1}}
    folder = write_run(tmp_path / "run", run={"name": "<b> & co"}, rollout={"selection": "random"}, fleet=fleet)
    RunFolder(folder).note_start(["solrl", "train", "demo"])
    shown = page(folder)
    assert "b" not in shown.tags
    assert "<b> & co: report" in shown.text
    assert "(CPU, 1 thread, 2 GPUs):" in shown.text
    assert "8 of 24 seeds per prompt (8 by an addressed draw)" in shown.text


def test_guidance_is_said_of_samples_and_of_evaluations_if_theirs_is_another(tmp_path: Path) -> None:
    cfg = {"scale": 4.5, "negative_prompt": "<dull>"}
    trained = write_run(tmp_path / "trained", model={"cfg": cfg, "guidance": 3.5})
    assert 'guidance embedded 3.5, scale 4.5 against "<dull>" · run seed' in page(trained).text
    evaluated = write_run(tmp_path / "evaluated", evaluation={"cfg": cfg})
    assert 'guidance none (evaluations: scale 4.5 against "<dull>") · run seed' in page(evaluated).text


def test_a_report_that_is_built_again_has_the_same_bytes(report: Path) -> None:
    text = report.read_text()
    assert build(report.parent).read_text() == text


def test_previews_that_ranked_badly_for_too_long_stand_above_the_results(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "low", finished=False, fidelity={"floor": 0.5, "patience": 2})
    write_metrics(folder, [replace(iteration(n), spearman=value) for n, value in enumerate((0.4, 0.6, 0.4))])
    assert "Low rank fidelity" not in page(folder).text
    write_metrics(folder, [replace(iteration(n), spearman=value) for n, value in enumerate((0.4, 0.3, 0.6))])
    assert "Low rank fidelity: Spearman was below fidelity.floor, 0.5, in 2 of 3 iterations." in page(folder).text


def test_a_run_with_pruned_previews_says_what_was_dropped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "pruned", rollout={"preview": {"prune": {"after": 2, "keep": 12}}})
    write_metrics(folder, [replace(iteration(n), dropped=144 - n, expected_dropped=144) for n in range(3)])
    text = page(folder).text
    assert "previews: 6 steps in nvfp4-emulated, 12 of 24 continued after step 2 · samples:" in text
    assert "candidates whose preview was stopped early 432 429" in text


@pytest.mark.parametrize(
    ("strategy", "keep", "said"),
    [
        ("direct", 24, "all 24 seeds per prompt"),
        ("scaled", 8, "8 of 24 seeds per prompt (4 best and 4 worst)"),
        ("quantized", 8, "as sampled in low precision"),
    ],
)
def test_every_strategy_of_one_stage_has_a_report(tmp_path: Path, strategy: str, keep: int, said: str) -> None:
    folder = write_run(tmp_path / "run", rollout={"strategy": strategy, "keep": keep})
    without = {"spearman": None, "kendall": None, "side_agreement": None}
    write_metrics(folder, [replace(iteration(number), **without) for number in range(3)])
    shown = page(folder)
    assert said in shown.text
    assert f"Not measured: rollout strategy {strategy} has no previews." in shown.text
    assert "candidates sampled and scored 864 864 as expected" in shown.text
    assert shown.open == []


def test_missing_candidates_and_a_tier_that_nobody_attests_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_metrics(folder, [iteration(0), replace(iteration(1), candidates=276), iteration(2)])
    attested = [asdict(replace(record, tier="fp8")) for record in attestations()]
    (folder / "attestations.json").write_text(json.dumps(attested))
    text = page(folder).text
    assert "864 852 differs" in text
    assert "Iterations with unexpected counts: 1." in text
    assert "no worker attests nvfp4-emulated" in text
    assert "FP8, which is not NVFP4" in text


@pytest.mark.parametrize(
    ("done", "evaluated", "words"),
    [
        (
            2,
            2,
            ["not finished: 2 of 5 iterations", "5 2 not finished", "Time in iterations 20.0 s", "not evaluated yet"],
        ),
        (3, 0, ["Not evaluated on held-out prompts yet."]),
        (0, 1, ["no iteration has finished yet", "0.333"]),
    ],
)
def test_a_run_that_has_not_ended_has_a_report(tmp_path: Path, done: int, evaluated: int, words: list[str]) -> None:
    folder = write_run(tmp_path / "run", done=done, of=5, evaluated=evaluations()[:evaluated], finished=False)
    text = page(folder).text
    assert [each for each in words if each not in text] == []
    assert ("Before and after" in text) == (evaluated > 0)


def test_clipped_velocities_are_told_where_there_are_no_ratios(tmp_path: Path) -> None:
    folder, said = write_run(tmp_path / "run"), "mean share of samples outside the clip range"
    plain = [replace(iteration(n), first_ratio_deviation=None, clip_fraction=None) for n in range(3)]
    write_metrics(folder, plain)
    assert said not in build(folder).read_text()
    write_metrics(folder, [replace(record, clip_fraction=0.125) for record in plain])
    [row] = [line for line in build(folder).read_text().split("<tr>") if said in line]
    assert "0.1250" in row


def test_a_repeated_iteration_counts_as_done_last_and_one_that_was_cut_short_does_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    again = replace(iteration(1), reward_mean=0.9)
    write_metrics(folder, [iteration(0), iteration(1), again])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "event": "iter')
    assert [record.reward_mean for record in read_run(folder).iterations] == [0.3, 0.9]


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (None, "there is no such folder"),
        ([], r"no config\.yaml and no metrics\.jsonl"),
        (["config.yaml"], r"it has no metrics\.jsonl"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, present: list[str] | None, message: str) -> None:
    folder = tmp_path / "run"
    if present is not None:
        folder.mkdir()
        for name in present:
            (folder / name).write_text("")
    with pytest.raises(UserError, match=message):
        build(folder)


def checked(record: dict[str, object]) -> str:
    return json.dumps(with_checksum(record)) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "{broken\n", r"metrics\.jsonl, line 1, is damaged: Expecting property name"),
        (
            "metrics.jsonl",
            '{"event": "iteration", "iteration": 1}\n',
            r"line 1, is damaged: it has no checksum \(crc32\)",
        ),
        ("metrics.jsonl", checked({"event": "other"}), "has the event 'other'"),
        ("metrics.jsonl", checked({"event": "iteration", "iteration": 1}), r"IterationMetrics\.revision"),
        ("config.yaml", "run: {colour: blue}", r"Unknown key run\.colour in .*config\.yaml; the nearest"),
        ("attestations.json", "{}", "attestations.json"),
        ("evaluations/updates-000000-base/aa-0.png", "x", r"image .*base/aa-0\.png cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        build(folder)


def test_wall_segments_split_the_overlap_and_add_up() -> None:
    # Beside learn 2 and publish .5 the total of 10 leaves 7.5: 4 and 5 overlap by 1.5, and so does the checkpoint.
    parts = wall_segments(iteration(0))
    assert list(parts) == list(SEGMENTS)
    assert list(parts.values()) == pytest.approx([2.5, 1.5, 3.5, 2.0, 0.5, 0.0])
    slow = wall_segments(replace(iteration(0), seconds={**iteration(0).seconds, "total": 15.0}))
    assert slow[REST] == pytest.approx(15.0 - 11.5)
    assert sum(slow.values()) == pytest.approx(15.0)


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "qtagg", "nonsense"])
def test_a_report_is_drawn_whatever_backend_a_notebook_names(backend: str, tmp_path: Path) -> None:
    """In another process: matplotlib reads the variable when it is imported."""
    run = write_run(tmp_path / "run")
    code = "import sys; from solrl_ray.cli import main; sys.exit(main(['report', sys.argv[1]]))"
    python("-c", code, run, MPLBACKEND=backend)
    assert (run / "report.html").read_text().count("data:image/svg+xml") > 1
