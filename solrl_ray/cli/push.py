"""``solrl push``: uploads the LoRA of a finished run to the Hugging Face hub, with a model card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from solrl_ray.common.files import replace_folder
from solrl_ray.config import continuation
from solrl_ray.errors import RunError, UserError

if TYPE_CHECKING:  # takes half a second
    from huggingface_hub import HfApi

    from solrl_ray.report.card import Target

FOLDER = "hub"
"""The folder to publish, inside a run folder."""


def push(arguments: argparse.Namespace) -> int:
    """Write the folder to publish, and publish it unless this is a dry run."""
    run: Path = arguments.run
    repository: str = arguments.repository
    _check_name(repository)
    continuation.stored(run)
    from huggingface_hub import HfApi, get_token

    from solrl_ray.report import card
    from solrl_ray.report.data import read_run

    api, data = HfApi(), read_run(run)
    model = data.config.model.path
    licence = _local_licence(model)
    if not arguments.dry_run:
        if get_token() is None:
            raise UserError("The hub wants a token: set HF_TOKEN, or log in with `hf auth login`.")
        if not licence and (base := card.hub_id(model)):
            with _told(api, repository):
                licence = _hub_licence(api, base)
    target = card.Target(repository=repository, revision=arguments.revision, licence=licence)
    replace_folder(run / FOLDER, card.contents(data, target))
    print(f"written: {run / FOLDER}", flush=True)
    if not arguments.dry_run:
        with _told(api, repository):
            print(f"pushed:  {_upload(api, run / FOLDER, target, private=arguments.private)}")
    return 0


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{repository!r} is no name of a repository: {error}") from None
    if "/" not in repository:
        raise UserError(f"{repository!r} has no owner; it must be a user's or an organisation's: OWNER/{repository}.")


def _local_licence(model: str) -> dict[str, str]:
    """The licence in the card in a model's folder; empty if there is none."""
    from huggingface_hub import metadata_load

    from solrl_ray.models import paths
    from solrl_ray.report.card import CARD

    place = paths.resolve(model)
    file = Path(place) / CARD
    if not isinstance(place, Path) or not file.is_file():
        return {}
    try:
        return _fields(metadata_load(file) or {})
    except Exception:  # another's file may hold anything
        return {}


def _hub_licence(api: HfApi, model: str) -> dict[str, str]:
    """The hub's licence of a model; empty, with a note, if the hub does not show the model."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = api.model_info(model).card_data
    except HfHubHTTPError as error:
        status = error.response.status_code
        print(f"note: the licence of {model} is unknown: the hub answered {status} when asked for it", file=sys.stderr)
        return {}
    fields = _fields(found.to_dict() if found else {})
    link = fields.get("license_link")
    if link and "://" not in link:  # a file beside the card
        fields["license_link"] = f"{api.endpoint}/{model}/blob/main/{link}"
    return fields


def _fields(card: Mapping[str, object]) -> dict[str, str]:
    from solrl_ray.report.card import LICENCE

    return {name: str(card[name]) for name in LICENCE if card.get(name)}


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
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # whichever the hub's library uses

    try:
        yield
    except HfHubHTTPError as error:
        status, said = error.response.status_code, (error.server_message or "").strip().rstrip(".")
        because = f" ({said})" if said else ""
        if status == 401:
            raise UserError(
                f"The hub at {api.endpoint} does not take the token{because}; set another as HF_TOKEN, or log in with "
                "`hf auth login`."
            ) from None
        if status == 403:
            raise UserError(
                f"The token may not write to {repository}{because}: another user has that name, or the token "
                "only reads."
            ) from None
        raise RunError(f"the hub at {api.endpoint} answered {status} to the push of {repository}{because}") from None
    except OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed; --dry-run writes the folder alone.") from None
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RunError(f"the hub at {api.endpoint} cannot be reached: {reason}") from error
