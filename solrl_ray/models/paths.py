"""Paths of checkpoints and prompt files: local folders, Hugging Face ids, files of the package. Loading of weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

import solrl_ray
from solrl_ray.common.files import located, read_regular
from solrl_ray.common.progress_note import progress_note
from solrl_ray.errors import UserError

BUILTIN = "builtin:"


def resolve(path: str) -> Path | str:
    """Turn a configured path into a local path, or return it unchanged if it may be a Hugging Face id.

    ``builtin:<package>/<name>`` is ``<name>`` in the assets of a subpackage: ``builtin:testbed/pipeline`` is
    ``solrl_ray/testbed/assets/pipeline``. A path is local if it exists, starts with ``/``, ``./``, ``../`` or ``~``, or
    cannot be an id. A local path need not exist.
    """
    if path.startswith(BUILTIN):
        package, _, name = path.removeprefix(BUILTIN).partition("/")
        return Path(solrl_ray.__file__).parent / package / "assets" / name
    local = located(path, "a path of the configuration")
    if local.exists() or path.startswith(("/", "./", "../", "~")) or not _may_be_hub_id(path):
        return local
    return path


def shipped(pattern: str) -> list[str]:
    """The ``builtin:`` paths of asset files that match `pattern`, such as ``*.txt``."""
    root = Path(solrl_ray.__file__).parent
    files = (path.relative_to(root).parts for path in sorted(root.glob(f"*/assets/**/{pattern}")))
    return [f"{BUILTIN}{package}/{'/'.join(name)}" for package, _, *name in files]


def absolute(path: str) -> str:
    """`path`, made absolute if it is local; ``builtin:`` paths and Hugging Face ids are returned unchanged."""
    resolved = resolve(path) if path and not path.startswith(BUILTIN) else path
    return str(resolved.absolute()) if isinstance(resolved, Path) else path


def checkpoint(path: str, key: str) -> Path | str:
    """`resolve` for a checkpoint.

    Raises `UserError` naming `key` if `path` can only be a local folder, and that folder does not exist.
    """
    resolved = resolve(path)
    if isinstance(resolved, Path) and not resolved.is_dir():
        raise UserError(
            f"{key} is {path!r}, but there is no folder {resolved}: "
            "give the folder of a checkpoint or a Hugging Face id such as 'owner/name'."
        )
    return resolved


def read_json(checkpoint: Path | str, name: str, key: str) -> dict[str, Any]:
    """Read the JSON file `name` of a checkpoint folder or Hugging Face repository.

    Raises `UserError` naming `key` if the file is missing or unreadable, or the hub refuses access.
    """
    try:
        file = checkpoint / name if isinstance(checkpoint, Path) else Path(hf_hub_download(checkpoint, name))
        content = json.loads(read_regular(file))
    except (OSError, EntryNotFoundError, ValueError, RecursionError) as error:
        raise UserError(unreadable(checkpoint, name, key, error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{key} is {str(checkpoint)!r}, but its file {name} does not hold a JSON object.")
    return content


def load_weights(part_class: Any, checkpoint: Path | str, key: str, **arguments: Any) -> Any:
    """`part_class.from_pretrained(checkpoint, **arguments)`.

    Raises `UserError` naming `key` if files are missing or damaged, or if weights are missing. `from_pretrained` would
    replace missing weights by random numbers, with only a warning.
    """
    part = arguments.get("subfolder", part_class.__name__)
    try:
        with progress_note(f"loading {part}"):
            model, info = part_class.from_pretrained(str(checkpoint), output_loading_info=True, **arguments)
    except (OSError, EntryNotFoundError, SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(unreadable(checkpoint, part, key, error)) from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(
            f"{key} is {str(checkpoint)!r}, but {part} lacks weights of {part_class.__name__}: {missing}. "
            "Download the checkpoint again, or choose another one."
        )
    return model


def load_tokenizer(tokenizer_class: Any, checkpoint: Path | str, key: str, **arguments: Any) -> Any:
    """`tokenizer_class.from_pretrained(checkpoint, **arguments)`.

    Raises `UserError` naming `key` if files are missing or damaged, or if the vocabulary is missing. `from_pretrained`
    would then return a tokenizer that has only special tokens.
    """
    part = arguments.get("subfolder", tokenizer_class.__name__)
    try:
        tokenizer = tokenizer_class.from_pretrained(str(checkpoint), **arguments)
    except (OSError, EntryNotFoundError, ValueError) as error:
        raise UserError(unreadable(checkpoint, part, key, error)) from error
    if not any(word.strip("▁") and not re.fullmatch("<.+>", word, re.DOTALL) for word in tokenizer.get_vocab()):
        raise UserError(unreadable(checkpoint, part, key, ValueError("its vocabulary is missing or empty")))
    return tokenizer


def unreadable(checkpoint: Path | str, part: str, key: str, error: Exception) -> str:
    """The error message for a part of a checkpoint that could not be read, with advice."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(checkpoint, Path):
        return f"{key} is {str(checkpoint)!r}, but {part} cannot be read from that folder: {reason}"
    return (
        f"{key} is {checkpoint!r}, which is not a local folder, and {part} cannot be read from the Hugging "
        f"Face hub or its cache (a gated model also needs `hf auth login`): {reason}"
    )


def _may_be_hub_id(path: str) -> bool:
    if path.count("/") != 1:
        return False
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True
