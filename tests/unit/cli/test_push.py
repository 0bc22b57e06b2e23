"""``solrl push``: what is published of a run, and the sentences if it cannot be."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, close_session, constants

from solrl_ray.config.schema import Lora
from solrl_ray.policy.saving import save_lora
from solrl_ray.report.summary import summarize, write_summary
from tests.support import hub_server, made_runs
from tests.support.command_line import printed, refusal, solrl
from tests.support.hub_server import Hub, Repository
from tests.support.made_configs import changed
from tests.support.processes import python

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The hub that this process knows, whose token it has."""
    with hub_server.serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)  # read from HF_ENDPOINT when it was imported
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        yield served


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with a LoRA file."""
    return finished(tmp_path / "run")


def finished(folder: Path, model: str | None = None, **changes: dict[str, Any]) -> Path:
    changes |= {"model": {"path": model}} if model else {}
    made_runs.write_run(folder, **changes)
    config = changed(made_runs.config(), **changes)
    factors = {"a.lora_A": torch.ones(32, 4), "a.lora_B": torch.zeros(4, 32)}
    save_lora(folder / "lora", factors, Lora(targets=["a"]))
    records = [made_runs.iteration(number) for number in range(3)]
    write_summary(folder, summarize(config, records, made_runs.evaluations(), seconds=36.5))
    return folder


def card_data(card: str) -> Any:
    """What a model card says to the hub, by attribute."""
    return ModelCard(card).data


def test_lora_card_and_pictures_are_published(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"pushed:  {hub.url}/me/small/commit/" in printed(capsys, "push", run, "me/small")
    repository = hub.repositories["me/small"]
    files = repository.branches["main"]
    assert not repository.private
    assert files[LORA] == (run / "lora" / LORA).read_bytes()
    assert sorted(files) == [
        "README.md",
        *(f"images/updates-{name}-{prompt}-0.png" for name in ("000000-base", "000003-ema") for prompt in ("aa", "bb")),
        LORA,
    ]
    assert all(files[name].startswith(b"\x89PNG") for name in files if name.startswith("images/"))
    assert {path.name for path in (run / "hub").iterdir()} == {"README.md", "images", LORA}


def test_the_card_says_what_was_gained_and_how_to_load_it(run: Path) -> None:
    assert solrl("push", run, "me/small", "--dry-run", "--revision", "v2") == 0
    card = (run / "hub" / "README.md").read_text()
    for line in (
        "| base | 0.333 ± 0.133 |",  # made_runs: means .2, .2, .6 before
        "| trained | 0.483 ± 0.136 |",  # .4, .3, .75 after
        "| gain | +0.150 ± 0.029 |",  # .2, .1, .15: deviation .05, over the root of 3
        "| real images | 0.900 ± 0.058 |",
        "<tr><td>a red circle &#60;above&#62; a blue square</td>",
        'pipe = DiffusionPipeline.from_pretrained("path/to/pipeline", torch_dtype=torch.float32).to("cuda")',
        'pipe.load_lora_weights("me/small", revision="v2")',
        "    guidance_scale=1.0,",
        'image.save("image.png")',
    ):
        assert line in card.splitlines()
    assert "A LoRA for the pipeline of the testbed, trained with" in " ".join(card.split())
    assert "3 of 3" in " ".join(card.split())
    assert 'alt="base, sample 0, reward 0.100"' in card
    data = card_data(card)
    assert (data.library_name, data.pipeline_tag) == ("diffusers", "text-to-image")
    assert "lora" in data.tags


def test_the_best_policy_is_published_with_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, top = tmp_path / "run", made_runs.evaluation(2, "ema", {"aa": (0.6,) * 2, "bb": (0.6,) * 2, "cc": (0.9,) * 2})
    made_runs.write_run(run, evaluated=[*made_runs.evaluations()[:2], top, made_runs.evaluations()[2]])
    assert "no lora_best/" in refusal(capsys, "push", run, "me/small", "--dry-run", "--best")
    save_lora(run / "lora_best", {"a.lora_A": torch.ones(32, 4), "a.lora_B": torch.ones(4, 32)}, Lora(targets=["a"]))
    assert solrl("push", run, "me/small", "--dry-run", "--best") == 0
    assert (run / "hub" / LORA).read_bytes() == (run / "lora_best" / LORA).read_bytes()
    card = (run / "hub" / "README.md").read_text()
    assert "| trained | 0.700 ± 0.100 |" in card
    assert "2 iterations of" in card
    assert "LoRA digest: lora-1. Trained with " in card


def test_the_card_has_the_configuration_without_addresses_and_folders(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", str(tmp_path / "a ``` b"), evaluation={"guidance": 3.5, "cfg": {"scale": 4.5}})
    assert solrl("push", run, "me/small", "--dry-run") == 0
    card = (run / "hub" / "README.md").read_text()
    (block,) = re.findall(r"^```json$(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    settings = json.loads(block)
    assert settings["evaluation"]["guidance"] == 3.5
    assert settings["evaluation"]["cfg"]["scale"] == 4.5
    assert settings["model"]["path"] == "a ``` b"
    assert str(tmp_path) not in card


def test_nothing_that_a_user_wrote_is_markdown_in_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "two\n\n# dogs | `x` <script>\t**and** [a](b) $c$ &amp; _d_"
    monkeypatch.setitem(made_runs.CAPTIONS, "aa", hostile)
    other = changed(made_runs.config(), rewards=[{"kind": "my_|_rewards.py:red_ness"}, {"kind": "clipscore"}])
    monkeypatch.setattr(made_runs, "config", lambda *_: other)
    run = finished(tmp_path / "run", str(tmp_path / "a [b](c) `d`"))
    assert solrl("push", run, "me/small", "--dry-run") == 0
    card = (run / "hub" / "README.md").read_text()
    text = card.partition("## Use")[0]
    assert f"<tr><td>{' '.join(hostile.split())}</td>" in html.unescape(text).splitlines()
    assert re.findall(r"^#.*", text, re.MULTILINE) == ["# small", "## Results"]
    assert not re.search(r"\n\n(?!</?t)", text.partition("<table>")[2].partition("</table>")[0])
    assert "A LoRA for a &#91;b&#93;(c) &#96;d&#96;, trained" in card
    assert "my&#95;&#124;&#95;rewards.py:red&#95;ness + clipscore" in " ".join(text.split())


def test_a_dry_run_needs_no_token_and_asks_nobody(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert printed(capsys, "push", run, "me/small", "--dry-run") == f"written: {run / 'hub'}\n"
    assert not hub.tokens
    assert refusal(capsys, "push", run, "me/small") == (
        "The hub requires a token: set HF_TOKEN, or log in with `hf auth login`."
    )
    assert not hub.tokens


def test_a_private_repository_and_a_branch_are_made(run: Path, hub: Hub) -> None:
    assert solrl("push", run, "me/small", "--private", "--revision", "v2") == 0
    repository = hub.repositories["me/small"]
    assert repository.private
    assert repository.branches["main"] == {}
    assert LORA in repository.branches["v2"]
    assert solrl("push", run, "me/small", "--private", "--revision", "v2") == 0  # again: both are there


def test_what_is_to_be_private_is_not_put_where_everybody_reads(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/small"] = Repository()
    assert solrl("push", run, "me/small", "--private") == 2
    assert "me/small exists and is public; make it private on the hub" in capsys.readouterr().err
    assert hub.repositories["me/small"].branches == {"main": {}}


def test_the_licence_is_that_of_the_base_model_which_the_card_links(tmp_path: Path) -> None:
    assert solrl("push", finished(tmp_path / "run", "them/base"), "me/small", "--dry-run") == 0
    written = (tmp_path / "run" / "hub" / "README.md").read_text()
    data = card_data(written)
    assert (data.base_model, data["base_model_relation"]) == ("them/base", "adapter")
    assert "The licence of the base model, [them/base](https://huggingface.co/them/base), applies." in written


@pytest.mark.parametrize(
    ("name", "said"),
    [("small", "OWNER/small"), ("me/small/er", "me/small/er"), ("them/small", "403"), ("them/base", "403")],
)
def test_names_that_cannot_be_pushed_to(
    name: str, said: str, run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["them/base"] = Repository()
    assert solrl("push", run, name) == 2
    told = capsys.readouterr().err
    assert name in told
    assert said in told


def test_a_wrong_token_is_told_and_not_shown(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert solrl("push", run, "me/small") == 2
    captured = capsys.readouterr()
    assert "401" in captured.err
    assert "HF_TOKEN" in captured.err
    assert hub.tokens == {"hf_wrong"}
    assert "hf_wrong" not in captured.out + captured.err + "".join(p.read_text() for p in (run / "hub").glob("*.md"))


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "carrier://127.0.0.1:1"])
def test_a_proxy_or_a_token_that_the_hub_cannot_be_asked_with_is_told(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proxy: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "“hf_quoted”")
    assert "HF_TOKEN" in (said := refusal(capsys, "push", run, "me/small"))
    assert "quoted" not in said
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    monkeypatch.setenv("ALL_PROXY", proxy)
    close_session()
    assert solrl("push", run, "me/small") == 2
    close_session()
    assert "through the proxy of HTTPS_PROXY or ALL_PROXY: " in (said := capsys.readouterr().err)
    assert "Traceback" not in said
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such.pem")
    assert refusal(capsys, "push", run, "me/small").startswith("SSL_CERT_FILE is '/no/such.pem', but ")


def test_a_hub_that_does_not_answer_is_told(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert solrl("push", run, "me/small") == 1
    assert "the hub at http://127.0.0.1:1 cannot be reached: " in capsys.readouterr().err


def test_runs_that_have_nothing_to_publish(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(folder: Path) -> str:
        return refusal(capsys, "push", folder, "me/small", "--dry-run")

    assert said(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'} is not a run folder: it has no config.yaml."
    open_run = made_runs.write_run(tmp_path / "open", done=2, finished=False)
    assert said(open_run).startswith(
        f"{open_run} has not ended: it has finished 2 of 3 iterations. Continue it with solrl train --resume"
    )
    with (run / "lora" / LORA).open("ab") as file:
        file.write(b"x")
    assert said(run).startswith(f"{run / 'lora' / LORA} has changed since summary.json was written")
    (run / "lora" / LORA).unlink()
    assert said(run) == f"{run} has no lora/{LORA}; solrl train --resume {run} writes it again."
    assert not (run / "hub").exists()


def test_the_endpoint_and_the_token_are_taken_from_the_environment(run: Path, hub: Hub) -> None:
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub_server.TOKEN, "HF_HUB_DISABLE_XET": "1"}
    python("-m", "solrl_ray", "push", run, "me/small", **variables)
    assert LORA in hub.repositories["me/small"].branches["main"]
