"""Writes docs/reference/{configuration,commands,api,files}.md from the code: `make reference`.

A test compares the pages with this script's output, so a key, an option or a docstring cannot change without its page.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from solrl_ray import cli
from solrl_ray.cli import verbs
from solrl_ray.config import checks
from solrl_ray.config.loading import load_with_sources
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
NAMES = {str: "text", bool: "`true`, `false`", int: "integer", float: "number", type(None): "`null`", Any: "any value"}
WRONG = ("rollout.kepe=12", "rollout.keep=25", "rollout.keep=many", "learner.micro_batch=0", "learner.updates=5")
"""Invalid settings for the demo; the page shows their error messages."""
CLASSES = (
    ("A reward", "solrl_ray/rewards/base.py", ("Reward", "CheckpointReward")),
    ("A model family", "solrl_ray/models/base.py", ("DiffusionModel",)),
    ("A family's checkpoints", "solrl_ray/models/family_checkpoint.py", ("FamilyCheckpoint",)),
    ("A family's sizes", "solrl_ray/models/sizes.py", ("FamilySizes",)),
    ("An objective", "solrl_ray/objectives/base.py", ("Objective", "MicroBatch", "Pass", "Velocities", "Loss")),
)
"""Heading, file and classes of each section of api.md."""
HOOKS = ("_set_up", "_set_up_shape", "_encode", "_velocity", "_unpacked", "_combined", "_denormalised", "_token_limit")
"""Methods that subclasses implement although their names begin with an underscore."""


def note(made_from: str) -> str:
    return f"*Generated from {made_from} by `make reference`.*"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def prose(text: str | None) -> str:
    """A docstring as one line of Markdown: single backticks, and shapes as code, so that a star is not emphasis."""
    line = " ".join((text or "").replace("``", "`").split())
    return re.sub(r"(?<![`\w])\[B\b[^\]]*\]", r"`\g<0>`", line)


# Configuration


def configuration() -> str:
    parts = [
        "# Configuration keys",
        note("`solrl_ray/config/`"),
        "A configuration is one or more YAML files. Later files win. Mappings merge; lists and single values are "
        "replaced. `--set KEY=VALUE` wins over files. A key without a default must be given. `solrl config NAME…` "
        "prints a whole configuration with these comments, as a start for yours.",
        "The entries of a list are numbered: `rewards.0.kind` is the kind of the first reward.",
        "## Error messages",
        "All keys are checked before anything starts. An error exits with status 2 and one sentence:",
        "```\n" + "\n".join(f"--set {wrong}\nerror: {answer(wrong)}" for wrong in WRONG) + "\n```",
    ]
    for name, info in Config.model_fields.items():
        given = info.default if isinstance(info.default, BaseModel) else None
        parts += [f"## {name}", *section(info, name, given)]
    return "\n\n".join(filter(None, parts)) + "\n"


def answer(setting: str) -> str:
    """The error message for an invalid setting of the demo."""
    try:
        loaded = load_with_sources([ROOT / "configs" / "demo.yaml"], [setting])
        checks.check(loaded.config, loaded.sources)
    except UserError as error:
        return str(error)
    raise AssertionError(f"{setting} is accepted; choose an invalid setting for WRONG")


def section(info: FieldInfo, key: str, given: BaseModel | None = None) -> Iterator[str]:
    """Yield the tables of a section's keys, one table per kind if the section has several kinds.

    `given` is the default section, if the key has one.
    """
    kinds, entry = sections(info.annotation), f"{key}.0" if get_origin(info.annotation) is list else key
    if description := prose(info.description):
        yield description
    if len(kinds) > 1 and given is not None:
        yield f"Its keys depend on `{key}.kind`; default: `{given.model_dump()['kind']}`."
    for kind in kinds:
        fields = dict(kind.model_fields)
        defaults = given if isinstance(given, kind) else None
        if len(kinds) > 1:
            yield f"### {key}, kind: {fields.pop('kind').default}"
        if (own := prose(kind.__doc__)) and own != description:
            yield own
        flat = [(name, field) for name, field in fields.items() if not sections(field.annotation)]
        if flat:
            rows = [row(f"{entry}.{name}", field, default(field, defaults, name)) for name, field in flat]
            yield table(("key", "value", "default", "meaning"), rows)
        for name, field in fields.items():
            if sections(field.annotation):
                inner, value = f"{entry}.{name}", getattr(defaults, name, field.default)
                one = len(kinds) == 1 and len(sections(field.annotation)) == 1
                yield f"### {inner}" if one else f"`{inner}`:"
                if value in (None, []):
                    yield "Not set by default."
                yield from section(field, inner, value if isinstance(value, BaseModel) else None)


def row(key: str, field: FieldInfo, standard: str) -> tuple[str, ...]:
    return f"`{key}`", allowed(field.annotation, field.metadata), standard, prose(field.description)


def default(field: FieldInfo, given: BaseModel | None, name: str) -> str:
    """Default of a key: its value in the default section `given`, else the default of the field."""
    if field.is_required() and given is None:
        return "must be given"
    value = field.default if given is None else getattr(given, name)
    return "empty" if value == "" else f"`{json.dumps(value)}`"


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections (pydantic models) in a key's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in sections(part)]


def allowed(annotation: Any, metadata: list[Any]) -> str:
    """A type and its bounds in words."""
    return f"{kind_of(annotation)} {' and '.join(filter(None, map(bound, metadata)))}".strip()


def bound(constraint: Any) -> str:
    words = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}", "min_length": "that is not empty"}
    values = {name: getattr(constraint, name, None) for name in words}
    return " and ".join(words[name].format(value) for name, value in values.items() if value is not None)


def kind_of(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        metadata = [m for each in inner[1:] for m in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return allowed(inner[0], metadata)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in inner)
    if origin in (Union, types.UnionType):
        return ", or ".join(map(kind_of, inner))
    if origin is list:
        return f"list of {kind_of(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}: {', '.join(map(kind_of, inner))}"
    if origin is dict:
        return f"mapping: {kind_of(inner[0])} → {kind_of(inner[1])}"
    return NAMES[annotation]


# Commands


def commands() -> str:
    parser = cli.parser()
    statuses = re.search(r"Exit status: (.*)", cli.__doc__ or "", re.DOTALL)
    assert statuses
    parts = [
        "# Commands",
        note("`solrl_ray/cli/options.py`"),
        "Each command prints its options with `--help`. `python -m solrl_ray` is the same program as `solrl`.",
        f"Exit status: {prose(statuses[1])}",
    ]
    for name, help_, command in subcommands(parser):
        for words, summary, own in [*actions(command, name, help_)]:
            run: Callable[..., int] | None = own.get_default("run_verb")
            listed = vars(verbs).values()
            parts += [f"## solrl {words}", prose(inspect.getdoc(run)) if run in listed else f"{capital(summary)}."]
            parts.append(f"    {synopsis(words, own)}")
            if rows := [argument(action) for action in shown(own)]:
                parts.append(table(("argument", "meaning"), rows))
    return "\n\n".join(filter(None, parts)) + "\n"


def actions(
    command: argparse.ArgumentParser, name: str, summary: str
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield words, help and parser of a command, or of each of its actions if it has actions."""
    inner = list(subcommands(command))
    if not inner:
        yield name, summary, command
    for action, help_, parser in inner:
        yield f"{name} {action}", help_, parser


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                yield name, summaries[name], inner


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Arguments before options, without ``--help``."""
    own = [action for action in parser._actions if action.dest != "help"]
    return sorted(own, key=lambda action: bool(action.option_strings))


def synopsis(words: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"solrl {words}"]
    for action in shown(parser):
        required = action.required if action.option_strings else action.nargs not in ("?", "*")
        if not action.option_strings or required:
            text = " ".join([*action.option_strings, value_of(action)])
            parts.append(text if required else f"[{text}]")
    return " ".join(
        [*parts, *(["[options]"] if any(a.option_strings and not a.required for a in shown(parser)) else [])]
    )


def value_of(action: argparse.Action) -> str:
    """Notation of an argument's value: ``CONFIG…``, ``{bash,zsh}``."""
    if action.nargs == 0:
        return ""
    names = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    several = "…" if action.nargs in ("*", "+") else ""
    written = " ".join(names) if isinstance(names, tuple) else names
    optional = action.option_strings and action.nargs == "?"
    return f"[{written}]" if optional else written + several


def argument(action: argparse.Action) -> tuple[str, str]:
    named = ", ".join(action.option_strings)
    return f"`{' '.join(filter(None, [named, value_of(action)]))}`", capital(prose(action.help))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# API


def api() -> str:
    parts = [
        "# API",
        note("the docstrings"),
        "Classes to subclass and functions to call for a new reward, model family or objective. Shapes are in "
        "brackets: `[B, 3, H, W]` is a batch of images. [CONTRIBUTING](../../CONTRIBUTING.md) has an example of each.",
        "A reward can also be a plain function, without a class. " + own_function(),
    ]
    for heading, file, names in CLASSES:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        parts += [f"## {heading}", f"`{file}`"]
        for name in names:
            parts += [f"### {name}", *documented(classes[name])]
    return "\n\n".join(filter(None, parts)) + "\n"


def own_function() -> str:
    from solrl_ray.rewards.callables import CallableReward

    return prose(CallableReward.__doc__)


def documented(node: ast.ClassDef) -> Iterator[str]:
    """Yield a class's docstring, its table of attributes, and its public methods and hooks (`HOOKS`)."""
    yield text_of(node)
    attributes = [
        (f"`{ast.unparse(line.target)}: {ast.unparse(line.annotation)}`", description)
        for line, after in zip(node.body, [*node.body[1:], None], strict=True)
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.target).startswith("_")
        for description in [docstring(after)]
    ]
    if attributes:
        yield table(("attribute", "meaning"), attributes)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and (not method.name.startswith("_") or method.name in HOOKS):
            yield f"#### {node.name}.{method.name}"
            yield f"```python\n{signature(method)}\n```"
            yield text_of(method)


def docstring(node: ast.stmt | None) -> str:
    """Docstring of an attribute: the string constant after it; empty if there is none."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value
    return prose(text) if isinstance(text, str) else ""


def signature(method: ast.FunctionDef) -> str:
    marks = [f"@{name}" for name in map(ast.unparse, method.decorator_list) if "no_grad" not in name]
    returns = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    return "\n".join([*marks, f"def {method.name}({ast.unparse(method.args)}){returns}"])


def text_of(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A docstring as Markdown: sections such as ``Args:`` become lists."""
    out = []
    for block in re.split(r"\n\s*\n", (ast.get_docstring(node) or "").replace("``", "`")):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Returns:", "Raises:"):
            entries = re.split(r"\n(?! )", inspect.cleandoc(rest))
            out.append(f"{head.replace('Args', 'Arguments')}\n\n" + "\n".join(f"- {prose(entry)}" for entry in entries))
        else:
            out.append(prose(block))
    return "\n\n".join(out)


# Files


def files() -> str:
    """files.md: packages in the order of their layers, each with its files."""
    parts = [
        "# Source files",
        note("the docstrings"),
        "Each file with the first sentence of its docstring. Packages and modules are listed from high to low: each "
        "imports only from lower ones, without cycles (`make lint`). [Architecture](../concepts/architecture.md) "
        "follows a sample through these files.",
    ]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]:
        for top in contract.get("containers", ()):
            names = [name for layer in contract["layers"] for name in layer.split(" : ")]
            parts += [f"## {top}/", *map(package, [ROOT / top / name for name in names])]
    return "\n\n".join(parts) + "\n"


def package(path: Path) -> str:
    """A module as one line, a package as a list of its files."""
    if not path.is_dir():
        return f"**`{path.relative_to(ROOT)}.py`** {first_sentence(path.with_suffix('.py'))}"
    modules = [file for file in sorted(path.glob("*.py")) if file.name != "__init__.py"]
    lines = [f"- `{file.name}` {first_sentence(file)}" for file in modules]
    return f"**`{path.relative_to(ROOT)}/`** {first_sentence(path / '__init__.py')}\n\n" + "\n".join(lines)


def first_sentence(file: Path) -> str:
    """First sentence of a file's docstring, without a diagram or address that follows it."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.) (?=[A-Z`])", prose(text.partition("\n\n")[0]), maxsplit=1)[0].removesuffix(" ::")


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "api.md": api,
    "files.md": files,
}
"""File name in docs/reference → function that writes it."""

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, make in PAGES.items():
        (FOLDER / file).write_text(make(), encoding="utf-8")
        print(FOLDER / file)
