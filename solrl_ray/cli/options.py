"""The commands and their options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

import solrl_ray
from solrl_ray.cli import verbs
from solrl_ray.errors import UserError

_Commands = Any
"""What argparse's `add_subparsers` returns; its class has no public name."""


class _Parser(argparse.ArgumentParser):
    """Wrong arguments end like other bad input: one sentence, status 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help.")


def parser() -> argparse.ArgumentParser:
    """The whole command line; the chosen command's function of `verbs` is its `run_verb`."""
    top = _Parser(prog="solrl", description="Reinforcement learning for text-to-image diffusion models on Ray.")
    top.add_argument("--version", action="version", version=f"solrl {solrl_ray.__version__}")
    commands = top.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)

    configured = _Parser(add_help=False)
    configured.add_argument("config", nargs="*", type=Path, metavar="CONFIG", help="YAML files; later ones win")
    configured.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set one key, such as rollout.pool=64"
    )
    _train(commands, configured)
    _plan(commands, configured)
    _list(commands)
    _submit(commands, configured)
    _live(commands)
    _stored(commands)
    _prompts(commands)
    _doctor(commands)
    _eval(commands)
    return top


def _train(commands: _Commands, configured: _Parser) -> None:
    command = commands.add_parser("train", parents=[configured], help="train a policy")
    command.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue the run in this folder, or the run that CONFIG names",
    )
    command.add_argument(
        "--from",
        dest="init",
        default="",
        metavar="RUN|LORA",
        help="begin with the policy of a run, one of its checkpoints or a LoRA file; without CONFIG, with the "
        "configuration of that run: --from runs/demo --set run.name=fork",
    )
    command.add_argument(
        "--continue", dest="go_on", action="store_true", help="begin the run, or resume it if its folder holds one"
    )
    command.add_argument("--dry-run", action="store_true", help="check everything, print the arithmetic, stop")
    command.add_argument("--address", metavar="ADDRESS", help="a running Ray cluster; default: start a local one")
    command.add_argument("--no-live", action="store_true", help="plain lines instead of the live view")
    command.set_defaults(run_verb=verbs.train)


def _plan(commands: _Commands, configured: _Parser) -> None:
    command = commands.add_parser("plan", parents=[configured], help="print the arithmetic of a run")
    command.add_argument("--address", metavar="ADDRESS", help="a Ray cluster: say what it lacks for this run")
    command.add_argument("--gpu", metavar="NAME", help="say how long it takes: on h200, b200, or by a file of costs")
    command.add_argument("--cluster", dest="machines", type=Path, metavar="FILE", help="YAML: gpu, nodes, network, …")
    for role in ("explorers", "regenerators", "learners"):
        command.add_argument(f"--{role}", type=int, metavar="N", help=f"instead of the configuration's {role}")
    command.set_defaults(run_verb=verbs.plan)


def _list(commands: _Commands) -> None:
    command = commands.add_parser("list", help="the parts that a run is put together from, and what is here of them")
    command.add_argument("--configs", type=Path, default=Path("configs"), metavar="FOLDER", help="default: ./configs")
    command.set_defaults(run_verb=verbs.list_parts)


def _submit(commands: _Commands, configured: _Parser) -> None:
    command = commands.add_parser("submit", parents=[configured], help="train on a cluster, as a Ray job")
    command.add_argument("--address", metavar="URL", help="the cluster's dashboard, such as http://head:8265")
    command.add_argument("--resume", nargs="?", const="", metavar="RUN", help="continue a run, as for train")
    command.add_argument("--no-wait", action="store_true", help="return once the job is submitted")
    command.set_defaults(run_verb=verbs.submit)


def _live(commands: _Commands) -> None:
    """What is asked of a run that goes on."""
    command = commands.add_parser("status", help="how a run is")
    command.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder; default: the cluster's live run")
    command.add_argument("--address", metavar="ADDRESS", help="the Ray cluster that it runs on; auto: this machine's")
    command.set_defaults(run_verb=verbs.status)

    command = commands.add_parser("pool", help="the workers of a live run")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    action = actions.add_parser("scale", help="have more or fewer of them; the results stay the same")
    action.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder; default: the cluster's live run")
    for role in ("explorers", "regenerators"):
        action.add_argument(f"--{role}", type=int, metavar="N", help=f"how many {role} there are to be, at least 1")
    action.add_argument(
        "--explorers-of",
        action="append",
        default=[],
        metavar="NAME=N",
        help="how many of those that fleet.other_explorers names so; may be repeated",
    )
    action.add_argument("--address", metavar="ADDRESS", help="the Ray cluster that it runs on; auto: this machine's")
    action.set_defaults(run_verb=verbs.scale)


def _stored(commands: _Commands) -> None:
    """What is made from a run folder."""
    command = commands.add_parser("trace", help="write a run's timeline for Perfetto")
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    command.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json in the run folder")
    command.set_defaults(run_verb=verbs.trace)

    command = commands.add_parser("report", help="build the report of a run folder again")
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    command.set_defaults(run_verb=verbs.report)


def _prompts(commands: _Commands) -> None:
    command = commands.add_parser("prompts", help="prompt sets")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    action = actions.add_parser("import", help="make the prompt files of a run from a published set or a table")
    action.add_argument("source", metavar="SOURCE", help="file, folder with train and test files, or a data set's id")
    action.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for train and heldout .jsonl")
    action.add_argument("--name", default="", choices=("pickscore", "drawbench"), help="which published set it is")
    action.add_argument("--heldout", metavar="N|FILE", help="split off N prompts, or hold out those of FILE")
    action.add_argument("--column", default="", metavar="NAME", help="the column that holds the prompts")
    action.set_defaults(run_verb=verbs.import_prompts)


def _doctor(commands: _Commands) -> None:
    command = commands.add_parser("doctor", help="test what this machine can do: devices, precision tiers, storage")
    command.add_argument("--root", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are kept")
    command.set_defaults(run_verb=verbs.doctor)


def _eval(commands: _Commands) -> None:
    command = commands.add_parser("eval", help="score a run's policies on held-out prompts with any rewards")
    command.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/demo")
    command.add_argument("--policies", default="base,ema", metavar="LIST", help="of base, lora, ema; default: base,ema")
    command.add_argument("--rewards", nargs="+", type=Path, default=[], metavar="FILE", help="YAML files with rewards")
    command.add_argument("--prompts", metavar="FILE", help="held-out prompts; default: the run's")
    command.add_argument("--samples", type=int, metavar="N", help="images a prompt, at fixed addresses")
    command.add_argument("--steps", type=int, metavar="N", help="solver steps")
    command.add_argument("--solver", metavar="NAME", help="euler or dpm2; default: the run's")
    command.add_argument("--updates", type=int, metavar="N", help="the checkpoint after N updates; default: the newest")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set one key, as for train")
    command.add_argument("--out", type=Path, metavar="DIR", help="default: eval/updates-N in the run folder")
    command.add_argument("--alone", action="store_true", help="ask nothing of the run, even if it is live")
    command.add_argument("--address", metavar="ADDRESS", help="a running Ray cluster; default: start a local one")
    command.add_argument("--no-live", action="store_true", help="plain lines instead of the live view")
    command.set_defaults(run_verb=verbs.evaluate)
