"""``solrl push``: uploads the LoRA of a finished run to the Hugging Face hub, with a model card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from solrl_ray.common.files import replace_folder
from solrl_ray.errors import RunError, UserError
from solrl_ray.storage import continuation

if TYPE_CHECKING:  # takes half a second
    from huggingface_hub import HfApi

    from solrl_ray.report.card import Target

FOLDER = "hub"
"""The folder to publish, inside a run folder."""


def push(arguments: argparse.Namespace) -> int:
    """Write the folder to publish, and publish it unless this is a dry run."""
    run: Path = arguments.run
    repository: str = arguments.repository
    continuation.stored(run)
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    from solrl_ray.report import card
    from solrl_ray.report.data import read_run

    api, data = HfApi(), read_run(run)
    if arguments.best:
        data = data.at_best()
    with _told(api, repository):
        validate_repo_id(repository)
        if "/" not in repository:
            raise UserError(
                f"{repository!r} has no owner; it must be one of a user or organisation: OWNER/{repository}."
            )
        if not arguments.dry_run and get_token() is None:
            raise UserError("The hub wants a token: set HF_TOKEN, or log in with `hf auth login`.")
        licence = _licence(api, data.config.model.path, asks=not arguments.dry_run)
        target = card.Target(repository=repository, revision=arguments.revision, licence=licence)
        folder = run / FOLDER
        replace_folder(folder, card.contents(data, target, lora="lora_best" if arguments.best else "lora"))
        print(f"written: {folder}", flush=True)
        if not arguments.dry_run:
            print(f"pushed:  {_upload(api, folder, target, private=arguments.private)}")
    return 0


def _licence(api: HfApi, model: str, *, asks: bool) -> dict[str, str]:
    """`LICENCE` fields of the base model's card, in its folder or on the hub if that is asked; empty if unknown."""
    from huggingface_hub import metadata_load
    from huggingface_hub.errors import HfHubHTTPError

    from solrl_ray.models import paths
    from solrl_ray.report.card import CARD, LICENCE, hub_id

    base, found = hub_id(model), dict[str, object]()
    if base is None:
        try:
            found = metadata_load(Path(paths.resolve(model)) / CARD) or {}
        except Exception:  # there may be none, and another's file may hold anything
            return {}
    elif asks:
        try:
            if told := api.model_info(base).card_data:
                found = told.to_dict()
        except HfHubHTTPError as error:
            why = f"the hub answered {error.response.status_code} when asked for it"
            print(f"note: the licence of {model} is unknown: {why}", file=sys.stderr)
    fields = {name: str(found[name]) for name in LICENCE if found.get(name)}
    if base and "://" not in fields.get("license_link", "://"):  # a file beside the card
        fields["license_link"] = f"{api.endpoint}/{base}/blob/main/{fields['license_link']}"
    return fields


def _upload(api: HfApi, folder: Path, target: Target, *, private: bool) -> str:
    """Returns the URL of the commit."""
    repository, revision = target.repository, target.revision
    api.create_repo(repository, private=private or None, exist_ok=True)
    if private and not api.model_info(repository).private:
        raise UserError(f"{repository} is there and is public; make it private on the hub, or choose another name.")
    if revision:
        api.create_branch(repository, branch=revision, exist_ok=True)
    said = "LoRA and model card"
    commit = api.upload_folder(repo_id=repository, folder_path=folder, revision=revision, commit_message=said)
    return str(commit.commit_url)


@contextmanager
def _told(api: HfApi, repository: str) -> Iterator[None]:
    """Turn the hub's refusals and failed connections into one sentence."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # whichever the hub's library uses

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{repository!r} is no name of a repository: {error}") from None
    except HfHubHTTPError as error:
        status, said = error.response.status_code, (error.server_message or "").strip().rstrip(".")
        told = f"the hub at {api.endpoint} answered {status} to the push of {repository}"
        told += f" ({said})" if said else ""
        mend = {
            401: "set another token as HF_TOKEN, or log in with `hf auth login`",
            403: "another user has that name, or the token only reads",
        }
        if status in mend:
            raise UserError(f"{told}; {mend[status]}.") from None
        raise RunError(told) from None
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed; --dry-run writes the folder alone.") from None
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RunError(f"the hub at {api.endpoint} cannot be reached: {reason}") from error
