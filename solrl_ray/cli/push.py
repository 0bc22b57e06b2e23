"""``solrl push``: uploads the LoRA of a finished run to the Hugging Face hub, with a model card."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from solrl_ray.common.files import replace_folder
from solrl_ray.common.tokens import check_token
from solrl_ray.errors import RunError, UserError
from solrl_ray.storage import continuation

if TYPE_CHECKING:  # takes half a second
    from huggingface_hub import HfApi

    from solrl_ray.report.card import Target

FOLDER = "hub"
"""Folder with the files to publish, inside the run folder."""


def push(arguments: argparse.Namespace) -> int:
    """Write the folder with the files to publish, and upload it unless this is a dry run."""
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
    with _hub_errors(api, repository):
        validate_repo_id(repository)
        if "/" not in repository:
            raise UserError(
                f"{repository!r} has no owner; name the repository of a user or an organisation: OWNER/{repository}."
            )
        if not arguments.dry_run:
            token = get_token()
            if token is None:
                raise UserError("The hub requires a token: set HF_TOKEN, or log in with `hf auth login`.")
            check_token(token, "HF_TOKEN, or the file of `hf auth login`,")
        target = card.Target(repository=repository, revision=arguments.revision)
        folder = run / FOLDER
        replace_folder(folder, card.contents(data, target, lora="lora_best" if arguments.best else "lora"))
        print(f"written: {folder}", flush=True)
        if not arguments.dry_run:
            print(f"pushed:  {_upload(api, folder, target, private=arguments.private)}")
    return 0


def _upload(api: HfApi, folder: Path, target: Target, *, private: bool) -> str:
    """Upload the folder and return the URL of the commit."""
    repository, revision = target.repository, target.revision
    api.create_repo(repository, private=private or None, exist_ok=True)
    if private and not api.model_info(repository).private:
        raise UserError(f"{repository} exists and is public; make it private on the hub, or choose another name.")
    if revision:
        api.create_branch(repository, branch=revision, exist_ok=True)
    message = "LoRA and model card"
    commit = api.upload_folder(repo_id=repository, folder_path=folder, revision=revision, commit_message=message)
    return str(commit.commit_url)


@contextmanager
def _hub_errors(api: HfApi, repository: str) -> Iterator[None]:
    """Turn errors of the hub and failed connections into one-sentence errors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx  # whichever the hub's library uses

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{repository!r} is not a valid repository name: {error}") from None
    except HfHubHTTPError as error:
        message = f"the hub at {api.endpoint} refused the push of {repository}: {' '.join(str(error).split())}"
        if error.response.status_code in (401, 403):
            raise UserError(f"{message}; set another token as HF_TOKEN, or log in with `hf auth login`.") from None
        raise RunError(message) from None
    except OfflineModeIsEnabled:
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or use --dry-run to only write the folder."
        ) from None
    except (ImportError, ValueError) as error:  # httpx supports only some kinds of proxies; SOCKS needs another package
        raise UserError(
            f"the hub at {api.endpoint} cannot be reached through the proxy of HTTPS_PROXY or ALL_PROXY: {error}; set "
            "an HTTP proxy, or list the hub in NO_PROXY."
        ) from None
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RunError(f"the hub at {api.endpoint} cannot be reached: {reason}") from error
