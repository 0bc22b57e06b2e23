"""A vision-language model as judge, against a server of the same interface on loopback."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from solrl_ray import rewards
from solrl_ray.config.loading import read_file
from solrl_ray.config.rewards import JudgeConfig, Question, RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.records import SampleShape
from solrl_ray.rewards import endpoint
from solrl_ray.rewards.judge import NoScore, probability_of_yes, score
from tests.support.chat_server import Asked, Model, serving

CONFIGS = Path(__file__).parents[3] / "configs" / "rewards"
SHIPPED = {
    "judge_aesthetics": "9",
    "judge_alignment": "",
    "judge_edit": "9",
    "judge_objects": "a dog: right\n2 cats: wrong\nSHARE: 90",
    "judge_text_rendering": "OPEN 24.\nSCORE: 9",
}
"""With an answer that stands for 0.9."""
PROMPTS = ["a red square", "two {prompt} circles"]


def images() -> torch.Tensor:
    """One is redder than the other."""
    pictures = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    pictures[0, 0] = 1.0
    pictures[1, 0] = 0.2
    return pictures


def config(url: str, *, question: dict[str, Any] | None = None, **settings: Any) -> RewardConfig:
    asked = Question(**({"text": 'How red is "{prompt}", from 0 to 10?'} | (question or {})))
    return RewardConfig(kind="judge", judge=JudgeConfig(url=url, model="eyes", question=asked, **settings))


def judge(url: str, **settings: Any) -> rewards.RewardMixture:
    return rewards.load([config(url, **settings)], "cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE", 0.01)


def redness(asked: Asked) -> str:
    return f"{10 * asked.picture[..., 0].mean() / 255:.1f} of 10? Score: {10 * asked.picture[..., 0].mean() / 255:.1f}"


def test_a_number_is_a_score_between_its_bounds() -> None:
    with serving(redness) as server:
        scores = judge(server.url).score(images(), PROMPTS)
    assert scores.tolist() == pytest.approx([1.0, 0.2])


def test_each_picture_is_asked_about_with_its_own_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "s3cret")
    request = {"seed": 3, "temperature": 0.5, "max_tokens": None}  # null: not sent
    with serving(lambda asked: "5") as server:
        judge(server.url, request=request, token_variable="KEY").score(images(), PROMPTS)
    by_text = {asked.text: asked for asked in server.asked}
    assert by_text.keys() == {f'How red is "{prompt}", from 0 to 10?' for prompt in PROMPTS}
    expected = (images() * 255).round().byte().permute(0, 2, 3, 1)
    for text, picture in zip(by_text, expected if "a red" in next(iter(by_text)) else expected.flip(0), strict=True):
        assert (by_text[text].picture == picture.numpy()).all()
    body = server.asked[0].body
    assert (body["model"], body["temperature"], body["seed"]) == ("eyes", 0.5, 3)
    assert {"logprobs", "max_tokens"}.isdisjoint(body)
    assert server.asked[0].headers["Authorization"] == "Bearer s3cret"


def test_the_probability_of_yes_is_a_score() -> None:
    likely = {"Yes": 0.5, " yes": 0.1, "No": 0.2, "Maybe": 0.1}
    with serving(lambda asked: likely) as server:
        scores = judge(server.url, question={"answer": "yes"}).score(images(), PROMPTS)
    assert scores.tolist() == pytest.approx([0.75, 0.75])
    body = server.asked[0].body
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        ({}, "7", 0.7),
        ({}, "7.5/10", 0.75),
        ({}, "3/10", 0.3),
        ({}, "9 out of 10", 0.9),
        ({}, "4 of 5.", 0.8),
        ({}, "85 %", 0.85),
        ({}, "7,5", 0.75),
        ({}, "1e1", 1.0),
        ({}, ".5", 0.05),
        ({}, '{"score": 8}', 0.8),
        ({}, "**8**, so 8/10", 0.8),
        ({}, "SD3.5 drew it: 6", 0.6),
        ({}, "<think>2 dogs of 3, so 4?</think>\n7", 0.7),
        ({}, "2 dogs of 3, so 4?</think>7", 0.7),
        ({"low": 1, "high": 5}, "4/5", 0.75),
        ({"pattern": r"SCORE: *(\d+)"}, "OPEN 24 hours\nSCORE: 8,5/10", 0.85),
        ({"pattern": r"S(\d)"}, "S8", 0.8),
        ({"low": 0, "high": 100, "pattern": r"SHARE: *(\d+)"}, "1 of 4 lines is right. SHARE: 25%", 0.25),
        ({"pattern": r"SCORE: *(\d+)"}, "OPEN 24 hours\nSCORE: 8", 0.8),
        ({"low": -1, "high": 1}, "-0.5", 0.25),
    ],
)
def test_a_number_is_read_as_it_is_written(question: dict[str, Any], answer: str, expected: float) -> None:
    assert score(Question(text="?", **question), {"message": {"content": answer}}) == pytest.approx(expected)


def test_no_more_pictures_than_allowed_are_asked_about_at_a_time() -> None:
    both = threading.Barrier(2)  # each waits for another one, so that two are there

    def slowly(asked: Asked) -> str:
        both.wait(10)
        return "5"

    with serving(slowly) as server:
        pictures = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
        judge(server.url, concurrency=2).score(pictures, ["a"] * 6)
    assert server.most_at_once == 2


def answering(*answers: str | tuple[int, bytes]) -> Model:
    """These in turn, the last one again and again."""
    left = list(answers)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


def test_an_answer_without_a_score_is_asked_for_again_and_counted() -> None:
    cut = chat("First, 7 of", finish_reason="length")
    with serving(answering("I cannot say.", "11", (503, b"loading"), (200, b"{}"), cut, "6")) as server:
        one = judge(server.url, retries=5)
        assert one.score(images()[:1], ["a"]).tolist() == pytest.approx([0.6])
    assert len({asked.headers["X-Request-Id"] for asked in server.asked}) == 1
    costs = one.take_costs()
    assert costs == {"requests": 6, "retries": 5, "prompt_tokens": 300, "completion_tokens": 9}
    assert one.take_costs() == {}


def chat(content: str | None, **choice: Any) -> tuple[int, bytes]:
    """A chat completion with further fields of its choice."""
    return 200, json.dumps({"choices": [{"message": {"content": content}, **choice}]}).encode()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ({}, "7 or 8"),
        ({}, "Between 6-8."),
        ({}, "I see 2 dogs, so 4."),
        ({}, "11/10"),
        ({}, "-3"),
        ({}, "7,500"),
        ({}, "9" * 6000),
        ({}, "1/" + "9" * 6000),
        ({}, "1e999"),
        ({}, "<think>It is a 7"),
        ({}, "SD3"),
        ({"low": 1, "high": 5}, "8/10"),
        ({"pattern": r"SCORE: *(\d+)"}, "SCORE: 3. No, wait, SCORE: 8"),
    ],
)
def test_what_is_no_number_of_the_scale_is_no_score(question: dict[str, Any], answer: str) -> None:
    with pytest.raises(NoScore):
        score(Question(text="?", **question), {"message": {"content": answer}})


def test_a_number_alone_is_asked_for_as_json_until_an_endpoint_refuses_that() -> None:
    def model(asked: Asked) -> str | tuple[int, bytes]:
        return (400, b"unknown field response_format") if "response_format" in asked.body else "5"

    with serving(lambda asked: '{"score": 5}') as server:
        assert judge(server.url).score(images()[:1], ["a"]).tolist() == [0.5]
    schema = server.asked[0].body["response_format"]["json_schema"]["schema"]["properties"]["score"]
    assert schema == {"type": "number", "minimum": 0.0, "maximum": 10.0}
    with serving(model) as server:
        one = judge(server.url)
        assert one.score(images()[:1], ["a"]).tolist() == one.score(images()[1:], ["a"]).tolist() == [0.5]
        assert ["response_format" in asked.body for asked in server.asked] == [True, False, False]
        server.asked.clear()
        judge(server.url, question={"pattern": r"(\d+)"}).score(images()[:1], ["a"])
        assert "response_format" not in server.asked[0].body


@pytest.mark.parametrize("status", [404, 422, 500, 501])
def test_a_server_that_fails_at_the_form_of_an_answer_is_asked_without(status: int) -> None:
    with serving(lambda asked: (status, b"what?") if "response_format" in asked.body else "5") as server:
        one = judge(server.url, retries=1)
        assert one.score(images()[:1], ["a"]).tolist() == one.score(images()[1:], ["a"]).tolist() == [0.5]
    forms = ["response_format" in asked.body for asked in server.asked]
    assert forms == [*[True] * (2 if status >= 500 else 1), False, False]  # a failing server is asked again


@pytest.mark.parametrize("given", [None, {"type": "json_object"}])
def test_a_form_of_the_users_own_is_the_only_one(given: Any) -> None:
    with serving(lambda asked: '{"score": 5}') as server:
        assert judge(server.url, request={"response_format": given}).score(images()[:1], ["a"]).tolist() == [0.5]
    assert [asked.body.get("response_format") for asked in server.asked] == [given]
    assert ("response_format" in server.asked[0].body) == (given is not None)


NESTED = b'{"choices": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "answer",
    [
        NESTED,
        b'{"usage": {"prompt_tokens": Infinity}, "choices": []}',
        b'{"usage": {"prompt_tokens": "many"}, "choices": []}',
        b'{"usage": [1], "choices": []}',
        b'{"usage": {"prompt_tokens": ' + b"9" * 6000 + b"}}",
        b'{"choices": {"0": 1}}',
        b'{"choices": [7]}',
        b"[]",
        b" " * (endpoint.MAX_ANSWER + 1),
    ],
    ids=range(9),
)
def test_an_answer_of_any_shape_is_the_rewards_own_error(answer: bytes) -> None:
    with serving(lambda asked: (200, answer)) as server, pytest.raises(RewardError, match="in 1 attempts"):
        judge(server.url, retries=0).score(images()[:1], ["a"])


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), -3.0, 10**400])
def test_a_probability_that_is_none_is_no_score(logprob: float) -> None:
    found = [{"token": "Yes", "logprob": logprob}, {"token": "No", "logprob": logprob}]
    if logprob == 10**400:
        assert probability_of_yes(found) == 0.5
    else:
        with pytest.raises(NoScore):
            probability_of_yes(found)


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        ({}, "I cannot say.", r"'I cannot say\.'"),
        ({}, "11", r"11 .* judge\.question\.low, 0, .* judge\.question\.high, 10\.$"),
        ({}, chat(None, finish_reason="length"), r"judge\.question\.max_tokens, 16"),
        ({}, "7 or 8", r"7 and 8; .* judge\.question\.pattern"),
        ({"pattern": r"Score(\d+)?"}, "Score", r"judge\.question\.pattern, 'Score"),
        ({"answer": "yes"}, chat("Yes", logprobs=None), r"judge\.question\.answer 'yes'"),
        ({"answer": "yes"}, {"Maybe": 0.9}, r"judge\.question\.text"),
        ({}, (200, b"<html>"), r"'<html>'"),
    ],
)
def test_an_answer_without_a_score_is_shown_with_the_setting_that_would_help(
    question: dict[str, Any], answer: str | dict[str, float] | tuple[int, bytes], message: str
) -> None:
    with serving(lambda asked: answer) as server, pytest.raises(RewardError, match=message):
        judge(server.url, question=question, retries=0).score(images()[:1], ["a"])


def test_the_end_of_a_long_answer_is_shown() -> None:
    with serving(lambda asked: "word " * 1000 + "and so on") as server, pytest.raises(RewardError) as raised:
        judge(server.url, retries=0).score(images()[:1], ["a"])
    assert "and so on' has no score" in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "localhost:8000"}, r"judge\.url is 'localhost:8000'"),
        ({"question": {"low": 3, "high": 3}}, r"judge\.question\.high is 3; .*low, 3\.$"),
        ({"question": {"text": "How red, from 0 to 100?"}}, r"judge\.question\.text .* 10"),
        ({"question": {"pattern": "("}}, r"judge\.question\.pattern is '\('"),
        ({"question": {"pattern": "(a)(b)"}}, r"judge\.question\.pattern is '\(a\)\(b\)'.* 2 groups"),
    ],
)
def test_what_cannot_be_right_is_refused_before_the_run(changes: dict[str, Any], message: str) -> None:
    settings = {"url": "http://127.0.0.1:9/v1"} | changes
    with pytest.raises(UserError, match=rf"^rewards\.0\.{message}"):
        rewards.check([config(**settings)], [SampleShape(5, 5)], str)


def test_an_endpoint_that_is_not_there_is_missed_before_the_run() -> None:
    with pytest.raises(UserError, match=r"^rewards\.0\.judge\.url is 'http://127\.0\.0\.1:9/v1'"):
        rewards.check([config("http://127.0.0.1:9/v1")], [SampleShape(5, 5)], str)


@pytest.mark.parametrize(
    ("path", "status", "remedy"),
    [("/v1", 401, r"judge\.token_variable"), ("/v1", 400, r"judge\.request"), ("", 404, r"judge\.url or judge\.model")],
)
def test_an_endpoint_that_refuses_a_question_is_missed_before_the_run(path: str, status: int, remedy: str) -> None:
    with serving(answering((status, b"not so"))) as server:
        url = server.url.removesuffix("/v1") + path
        with pytest.raises(
            UserError, match=rf"^rewards\.0\.judge\.url is .* 'eyes': {status} .*; set {remedy} to a value"
        ):
            rewards.check([config(url)], [SampleShape(5, 5)], str)
        assert len(server.asked) == (1 if status == 401 else 2)  # once without asking for JSON


def test_an_endpoint_that_is_busy_before_the_run_may_answer_later() -> None:
    with serving(answering((503, b"loading"))) as server:
        rewards.check([config(server.url)], [SampleShape(5, 5)], str)
        assert len(server.asked) == 1


def test_a_run_with_several_shapes_asks_once_before_it_starts_with_a_picture_of_the_largest() -> None:
    with serving(lambda asked: "5") as server:
        rewards.check([config(server.url)], [SampleShape(5, 5), SampleShape(4, 9), SampleShape(7, 2)], str)
        assert [asked.picture.shape for asked in server.asked] == [(4, 9, 3)]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_questions_are_answered(name: str) -> None:
    (entry,) = read_file(CONFIGS / f"{name}.yaml")["rewards"]
    asks = Question(**entry["judge"]["question"])

    def model(asked: Asked) -> str | dict[str, float]:
        return {"Yes": 0.9, "No": 0.1} if asks.answer == "yes" else SHIPPED[name]

    with serving(model) as server:
        entry["judge"]["url"] = server.url
        shipped = RewardConfig.model_validate(entry)
        scores = rewards.load([shipped], "cpu").score(images(), PROMPTS, images()[:, None])
        assert scores.tolist() == pytest.approx([0.9, 0.9])
    assert {len(asked.pictures) for asked in server.asked} == {2 if name == "judge_edit" else 1}
    assert all((PROMPTS[0] in a.text or PROMPTS[1] in a.text) == ("{prompt}" in asks.text) for a in server.asked)
