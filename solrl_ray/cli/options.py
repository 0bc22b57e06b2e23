"""The commands of `solrl` and their options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import solrl_ray
from solrl_ray.cli import export, push, verbs
from solrl_ray.common.files import located
from solrl_ray.config import removed
from solrl_ray.config.problems import nearest
from solrl_ray.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments as other bad input: one sentence, status 2."""

    def error(self, message: str) -> NoReturn:
        for command, instead in removed.COMMANDS.items():
            if f"invalid choice: '{command}'" in message:
                raise UserError(f"The command {command} was removed: {instead}.")
        choice = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        near = nearest(choice[1], re.findall(r"[\w-]+", choice[2]), cutoff=0.5) if choice else None
        then = f"did you mean {near}?" if near else f"see {self.prog} --help."
        raise UserError(f"{message[:1].upper()}{message[1:]}; {then}")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse, but configurations may also come after options."""
        found, left = self.parse_known_args(args, namespace)
        unknown = [word for word in left if word.startswith("-") or "=" in word or not hasattr(found, "config")]
        if gone := [word for word in unknown if word.partition("=")[0] in removed.OPTIONS]:
            option = gone[0].partition("=")[0]
            raise UserError(f"The option {option} was removed: {removed.OPTIONS[option]}.")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if left:
            found.config = [*found.config, *map(_path, left)]
        return found

    def inside(self, kind: str) -> Any:
        """The object to which its commands or actions are added."""
        return self.add_subparsers(dest=kind.lower(), required=True, metavar=kind, parser_class=_Parser)


def _path(text: str) -> Path:
    """A path; a shell expands no ``~`` in ``--out=~/x``."""
    return located(text, "a path")


def _shared(*names: str, **settings: Any) -> _Parser:
    """An option of several commands."""
    option = _Parser(add_help=False)
    option.add_argument(*names, **settings)
    return option


CONFIG = _shared("config", nargs="*", type=_path, metavar="CONFIG", help="names from `solrl list`; YAML files win")
SET = _shared("--set", action="append", default=[], metavar="KEY=VALUE", help="set one key, such as rollout.pool=64")
CLUSTER = _shared("--address", metavar="ADDRESS", help="a running Ray cluster; default: start a local one")
ITS_CLUSTER = _shared("--address", metavar="ADDRESS", help="the run's Ray cluster; auto: this machine's")
PLAIN = _shared("--no-live", action="store_true", help="plain lines instead of the live view")
VERBOSE = _shared("-v", "--verbose", action="store_true", help="print the whole plan")
RUN = _shared("run", type=_path, metavar="RUN", help="run folder, such as runs/demo")
RUNS = _shared("runs", nargs="+", type=_path, metavar="RUN", help="run folders; several are compared")
LIVE_RUN = _shared("run", nargs="?", type=_path, metavar="RUN", help="run folder; default: the cluster's live run")


def parser() -> argparse.ArgumentParser:
    """The whole command line; the chosen command's function of `verbs` is its `run_verb`."""
    top = _Parser(prog="solrl", description="Reinforcement learning for image and video diffusion models on Ray.")
    top.add_argument("--version", action="version", version=f"solrl {solrl_ray.__version__}")
    commands = top.inside("COMMAND")
    for add in (_train, _plan, _list, _live, _stored, _prompts, _doctor, _validate, _eval):
        add(commands)
    return top


def _add(
    commands: Any, name: str, verb: Callable[[argparse.Namespace], int], words: str, *options: _Parser
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, parents=options, help=words)
    command.set_defaults(run_verb=verb)
    return command


def _train(commands: Any) -> None:
    command = _add(commands, "train", verbs.train, "train a policy", CONFIG, SET, CLUSTER, PLAIN, VERBOSE)
    words = "continue the run in this folder, or the run that CONFIG names"
    command.add_argument("--resume", nargs="?", const="", metavar="RUN", help=words)
    words = (
        "begin with the policy of a run, one of its checkpoints or a LoRA file; without CONFIG, with the "
        "configuration of that run: --from runs/demo --set run.name=fork"
    )
    command.add_argument("--from", dest="init", default="", metavar="RUN|LORA", help=words)
    words = "begin the run, or resume it if its folder holds one"
    command.add_argument("--continue", dest="go_on", action="store_true", help=words)
    command.add_argument("--dry-run", action="store_true", help="check everything, print the plan, stop")


def _plan(commands: Any) -> None:
    command = _add(
        commands, "plan", verbs.plan, "say whether a run fits, and what it does and takes", CONFIG, SET, VERBOSE
    )
    command.add_argument("--address", metavar="ADDRESS", help="a Ray cluster: print what it lacks for this run")
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help="a card: print whether the run fits and its time; h200, h100-80, l40s, … or a file; "
        "replaces the gpu of --cluster",
    )
    command.add_argument("--cluster", dest="machines", type=_path, metavar="FILE", help="YAML: gpu, gpus_per_node, …")


def _list(commands: Any) -> None:
    words = "list the parts of a run, and the checkpoints they need"
    command = _add(commands, "list", verbs.list_parts, words)
    command.add_argument("--json", action="store_true", help="as JSON: kind → name, title, checkpoints, downloads")
    words = "print a whole configuration to start from, every key with its meaning"
    _add(commands, "config", verbs.show_config, words, CONFIG, SET)


def _live(commands: Any) -> None:
    _add(commands, "status", verbs.status, "print the progress of a run", LIVE_RUN, ITS_CLUSTER)
    actions = commands.add_parser("pool", help="change the workers of a live run").inside("ACTION")
    words = "change their number; the results stay the same"
    scale = _add(actions, "scale", verbs.scale, words, LIVE_RUN, ITS_CLUSTER)
    for role in ("explorers", "regenerators"):
        scale.add_argument(f"--{role}", type=int, metavar="N", help=f"number of {role}, at least 1")


def _stored(commands: Any) -> None:
    _add(commands, "report", verbs.report, "build the report of a run folder again, or compare runs", RUNS)
    words = "write a run's policy as other tools read it, or merged into its checkpoint"
    action = _add(commands, "export", export.export, words, RUN)
    words = (
        "a LoRA file for diffusers, comfyui or kohya's scripts, or a whole diffusers checkpoint with the policy in it"
    )
    action.add_argument("--format", required=True, choices=export.FORMATS, help=words)
    words = "the policy: ema (its moving average, as in the run's folder lora; default) or default (as trained)"
    action.add_argument("--policy", choices=export.POLICIES, default="ema", help=words)
    which = action.add_mutually_exclusive_group()
    which.add_argument("--updates", type=int, metavar="N", help="the checkpoint after N updates; default: the newest")
    which.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    words = "folder or Hugging Face id of the base, if it is not where the run had it; diffusers needs none"
    action.add_argument("--base", metavar="PATH", help=words)
    words = "folder, or the LoRA file, FILE.safetensors; default: export/FORMAT in the run folder"
    action.add_argument("--out", type=_path, metavar="PATH", help=words)
    action.add_argument("--force", action="store_true", help="overwrite a file that has other content")
    words = "publish a run's LoRA on the Hugging Face hub, with a model card"
    action = _add(commands, "push", push.push, words, RUN)
    action.add_argument("repository", metavar="OWNER/NAME", help="the hub's repository; made if missing")
    action.add_argument("--best", action="store_true", help="the best evaluated policy, not the last one")
    action.add_argument("--private", action="store_true", help="make it private; default: the owner's setting")
    action.add_argument("--revision", metavar="BRANCH", help="the branch; made if missing; default: main")
    action.add_argument("--dry-run", action="store_true", help="write the folder hub/ in the run folder, stop")


def _prompts(commands: Any) -> None:
    actions = commands.add_parser("prompts", help="prompt sets").inside("ACTION")
    words = "convert a published set or a table to a run's prompt files"
    action = _add(actions, "import", verbs.import_prompts, words)
    action.add_argument(
        "source", metavar="SOURCE", help="file, pipe, folder with train and test files, or a data set's id"
    )
    action.add_argument("--out", required=True, type=_path, metavar="DIR", help="folder for train and heldout .jsonl")
    action.add_argument("--heldout", metavar="N|all|FILE", help="hold out N prompts, all, or those of FILE")
    action.add_argument("--column", default="", metavar="NAME", help="the column that holds the prompts")
    action.add_argument("--force", action="store_true", help="overwrite files that hold other prompts")


def _doctor(commands: Any) -> None:
    words = "test this machine: devices, precision tiers, storage"
    command = _add(commands, "doctor", verbs.doctor, words)
    command.add_argument("--root", type=_path, default=Path("runs"), metavar="FOLDER", help="the folder of runs")


def _validate(commands: Any) -> None:
    words = "compare a model on this machine with the stock diffusers pipeline: text, a forward, a picture"
    command = _add(commands, "validate", verbs.validate, words, SET)
    words = "a model's name from `solrl list`, or a file"
    command.add_argument("config", nargs="+", type=_path, metavar="CONFIG", help=words)
    command.add_argument("--steps", type=int, default=4, metavar="N", help="solver steps of pictures; default: 4")
    words = "deadline of each step, seconds; default: 1800"
    command.add_argument("--deadline", type=float, default=1800.0, metavar="SECONDS", help=words)
    command.add_argument("--out", type=_path, metavar="FOLDER", help="folder of the report; default: validation/MODEL")


def _eval(commands: Any) -> None:
    words = "score a run's policies on held-out prompts with any rewards"
    command = _add(commands, "eval", verbs.evaluate, words, RUN, SET, CLUSTER, PLAIN)
    command.add_argument(
        "--policies",
        default="base,ema",
        metavar="LIST",
        help="of base (no LoRA), default (as trained), ema (its moving average, which the run's folder lora holds); "
        "base,ema if not given",
    )
    words = "rewards by name from `solrl list` or by YAML file; default: the run's"
    command.add_argument("--rewards", nargs="+", type=_path, default=[], metavar="NAME|FILE", help=words)
    command.add_argument("--prompts", metavar="FILE", help="held-out prompts; default: the run's")
    command.add_argument("--samples", type=int, metavar="N", help="images a prompt, at fixed addresses")
    command.add_argument("--steps", type=int, metavar="N", help="solver steps")
    command.add_argument("--solver", metavar="NAME", help="solver: euler or dpm2; default: the run's")
    command.add_argument("--updates", type=int, metavar="N", help="the checkpoint after N updates; default: the newest")
    command.add_argument("--out", type=_path, metavar="DIR", help="default: eval/updates-N in the run folder")
