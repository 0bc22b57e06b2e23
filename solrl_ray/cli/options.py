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
    """A parser that reports bad arguments like any bad input: one sentence, exit status 2."""

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
        """Parse like argparse, but also accept configurations after options."""
        parsed, left = self.parse_known_args(args, namespace)
        unknown = [word for word in left if word.startswith("-") or "=" in word or not hasattr(parsed, "config")]
        if gone := [word for word in unknown if word.partition("=")[0] in removed.OPTIONS]:
            option = gone[0].partition("=")[0]
            raise UserError(f"The option {option} was removed: {removed.OPTIONS[option]}.")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if left:
            parsed.config = [*parsed.config, *map(_path, left)]
        return parsed

    def inside(self, kind: str) -> Any:
        """The subparsers object for this parser's commands or actions; `kind` is its metavar."""
        return self.add_subparsers(dest=kind.lower(), required=True, metavar=kind, parser_class=_Parser)


def _path(text: str) -> Path:
    """A path with ``~`` expanded, because shells do not expand it in ``--out=~/x``."""
    return located(text, "a path")


def _shared(*names: str, **settings: Any) -> _Parser:
    """A parent parser with an option that several commands share."""
    option = _Parser(add_help=False)
    option.add_argument(*names, **settings)
    return option


CONFIG = _shared(
    "config", nargs="*", type=_path, metavar="CONFIG", help="preset names (`solrl list`) and YAML files; files win"
)
SET = _shared("--set", action="append", default=[], metavar="KEY=VALUE", help="set one key, such as rollout.pool=64")
CLUSTER = _shared("--address", metavar="ADDRESS", help="running Ray cluster to use; default: start a local one")
ITS_CLUSTER = _shared("--address", metavar="ADDRESS", help="Ray cluster of the run; auto: the cluster on this machine")
PLAIN = _shared("--no-live", action="store_true", help="plain lines instead of the live view")
VERBOSE = _shared("-v", "--verbose", action="store_true", help="print the whole plan")
RUN = _shared("run", type=_path, metavar="RUN", help="run folder, such as runs/demo")
RUNS = _shared("runs", nargs="+", type=_path, metavar="RUN", help="run folders; several are compared")
LIVE_RUN = _shared("run", nargs="?", type=_path, metavar="RUN", help="run folder; default: the live run of the cluster")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. Parsed arguments have the command's function from `verbs` as `run_verb`."""
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
        "start from the policy of a run, a checkpoint of a run or a LoRA file; without CONFIG also use the "
        "configuration of that run: --from runs/demo --set run.name=fork"
    )
    command.add_argument("--from", dest="init", default="", metavar="RUN|LORA", help=words)
    words = "start the run, or resume it if its run folder already contains a run"
    command.add_argument("--continue", dest="go_on", action="store_true", help=words)
    command.add_argument("--dry-run", action="store_true", help="check everything and print the plan, without starting")


def _plan(commands: Any) -> None:
    command = _add(
        commands, "plan", verbs.plan, "say whether a run fits, and what it does and takes", CONFIG, SET, VERBOSE
    )
    command.add_argument("--address", metavar="ADDRESS", help="a Ray cluster: print what it lacks for this run")
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help="GPU model (h200, h100-80, l40s, …) or a file: print whether the run fits in its memory, and the time; "
        "overrides the gpu of --cluster",
    )
    command.add_argument(
        "--cluster", dest="machines", type=_path, metavar="FILE", help="YAML file with gpu, gpus_per_node, …"
    )


def _list(commands: Any) -> None:
    words = "list the presets and the checkpoints they need"
    command = _add(commands, "list", verbs.list_parts, words)
    command.add_argument("--json", action="store_true", help="as JSON: kind → name, title, checkpoints, downloads")
    words = "print a complete configuration to start from, with every key explained"
    _add(commands, "config", verbs.show_config, words, CONFIG, SET)


def _live(commands: Any) -> None:
    _add(commands, "status", verbs.status, "print the progress of a run", LIVE_RUN, ITS_CLUSTER)
    actions = commands.add_parser("pool", help="change the workers of a live run").inside("ACTION")
    words = "change the number of workers; results do not change"
    scale = _add(actions, "scale", verbs.scale, words, LIVE_RUN, ITS_CLUSTER)
    for role in ("explorers", "regenerators"):
        scale.add_argument(f"--{role}", type=int, metavar="N", help=f"number of {role}, at least 1")


def _stored(commands: Any) -> None:
    _add(commands, "report", verbs.report, "rebuild the report of a run, or compare several runs", RUNS)
    words = "export a run's policy for other tools, as a LoRA file or merged into its base checkpoint"
    action = _add(commands, "export", export.export, words, RUN)
    words = (
        "a LoRA file for diffusers, comfyui or kohya's scripts, or a full diffusers checkpoint with the policy merged"
    )
    action.add_argument("--format", required=True, choices=export.FORMATS, help=words)
    words = (
        "ema (moving average of the trained policy, as in the run's lora folder) or default (as trained); default: ema"
    )
    action.add_argument("--policy", choices=export.POLICIES, default="ema", help=words)
    which = action.add_mutually_exclusive_group()
    which.add_argument(
        "--updates", type=int, metavar="N", help="export the checkpoint after N updates; default: newest"
    )
    which.add_argument("--best", action="store_true", help="export the checkpoint of the best evaluation")
    words = "folder or Hugging Face id of the base checkpoint, if it has moved; not needed for diffusers"
    action.add_argument("--base", metavar="PATH", help=words)
    words = "output folder, or LoRA file FILE.safetensors; default: export/FORMAT in the run folder"
    action.add_argument("--out", type=_path, metavar="PATH", help=words)
    action.add_argument("--force", action="store_true", help="overwrite a file with other content")
    words = "publish a run's LoRA on the Hugging Face hub, with a model card"
    action = _add(commands, "push", push.push, words, RUN)
    action.add_argument("repository", metavar="OWNER/NAME", help="repository on the hub; created if missing")
    action.add_argument("--best", action="store_true", help="publish the best evaluated policy instead of the last one")
    action.add_argument("--private", action="store_true", help="create it private; default: the owner's setting")
    action.add_argument("--revision", metavar="BRANCH", help="branch; created if missing; default: main")
    action.add_argument("--dry-run", action="store_true", help="only write the folder hub/ in the run folder")


def _prompts(commands: Any) -> None:
    actions = commands.add_parser("prompts", help="prompt sets").inside("ACTION")
    words = "convert a published prompt set or a table to prompt files of a run"
    action = _add(actions, "import", verbs.import_prompts, words)
    action.add_argument(
        "source", metavar="SOURCE", help="file, pipe, folder with train and test files, or Hugging Face data set id"
    )
    action.add_argument("--out", required=True, type=_path, metavar="DIR", help="folder for train and heldout .jsonl")
    action.add_argument("--heldout", metavar="N|all|FILE", help="hold out N prompts, all prompts, or those in FILE")
    action.add_argument("--column", default="", metavar="NAME", help="name of the prompt column")
    action.add_argument("--force", action="store_true", help="overwrite files with other prompts")


def _doctor(commands: Any) -> None:
    words = "test this machine: devices, precision tiers, storage"
    command = _add(commands, "doctor", verbs.doctor, words)
    command.add_argument("--root", type=_path, default=Path("runs"), metavar="FOLDER", help="parent folder of the runs")


def _validate(commands: Any) -> None:
    words = "compare a model on this machine with the stock diffusers pipeline: text encoding, a forward, an image"
    command = _add(commands, "validate", verbs.validate, words, SET)
    words = "model preset from `solrl list`, or a YAML file"
    command.add_argument("config", nargs="+", type=_path, metavar="CONFIG", help=words)
    command.add_argument("--steps", type=int, default=4, metavar="N", help="solver steps per image; default: 4")
    words = "time limit of each validation step, seconds; default: 1800"
    command.add_argument("--deadline", type=float, default=1800.0, metavar="SECONDS", help=words)
    command.add_argument("--out", type=_path, metavar="FOLDER", help="report folder; default: validation/MODEL")


def _eval(commands: Any) -> None:
    words = "score a run's policies on held-out prompts with any rewards"
    command = _add(commands, "eval", verbs.evaluate, words, RUN, SET, CLUSTER, PLAIN)
    command.add_argument(
        "--policies",
        default="base,ema",
        metavar="LIST",
        help="comma-separated: base (no LoRA), default (as trained), ema (moving average, as in the lora folder); "
        "default: base,ema",
    )
    words = "reward presets (`solrl list`) or YAML files; default: the run's rewards"
    command.add_argument("--rewards", nargs="+", type=_path, default=[], metavar="NAME|FILE", help=words)
    command.add_argument("--prompts", metavar="FILE", help="held-out prompts; default: the run's")
    command.add_argument(
        "--samples", type=int, metavar="N", help="images per prompt, with fixed seeds; default: the run's"
    )
    command.add_argument("--steps", type=int, metavar="N", help="solver steps; default: the run's evaluation.steps")
    command.add_argument("--solver", metavar="NAME", help="euler or dpm2; default: the run's")
    command.add_argument(
        "--updates", type=int, metavar="N", help="evaluate the checkpoint after N updates; default: newest"
    )
    command.add_argument(
        "--out", type=_path, metavar="DIR", help="output folder; default: eval/updates-N in the run folder"
    )
