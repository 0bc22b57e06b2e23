"""``solrl completion``: shell completion of commands, options, configurations, keys and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from solrl_ray.config import named
from solrl_ray.config.problems import keys

SHELLS = ("bash", "zsh")
_BASH = """_solrl_names_or_files() {{
  compgen -W "{names}" -- "$1"
  compgen -f -- "$1"
}}
_solrl_keys() {{
  compgen -W "{keys}" -- "$1"
}}
"""
_ZSH = """_solrl_names_or_files() {{
  compadd -- {names}
  _files
}}
_solrl_keys() {{
  compadd -S = -- {keys}
}}
"""


def complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print the completion script for the commands of `parser`."""
    print(script(parser, arguments.shell), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Shell code with the present configurations and keys."""
    for action in _actions(parser):
        if action.dest in ("config", "rewards"):
            _by(action, "_solrl_names_or_files")
        elif action.dest == "set":
            _by(action, "_solrl_keys")
        elif action.type is Path or action.dest in ("run", "resume", "init", "source"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    filled = {
        "names": " ".join(sorted(path.stem for path in named.folder().glob("**/*.yaml"))),
        "keys": " ".join(dict.fromkeys(keys())),
    }
    functions = {"bash": _BASH, "zsh": _ZSH}[shell].format(**filled)
    return str(shtab.complete(parser, shell, preamble=functions)).rstrip() + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


def _by(action: argparse.Action, function: str) -> None:
    action.complete = dict.fromkeys(SHELLS, function)  # type: ignore[attr-defined]
