"""Uploads an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of httpx or httpx2, depending on the version
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from lightning_core.errors import ConfigError, InfrastructureError
from lightning_core.model.source import hub_name


def check_push(repo: str, *, adapter_of: str | None = None) -> None:
    """Raise `ConfigError` if ``repo`` is not a repository's name, or if there is no token.

    ``adapter_of``: the model of an adapter without its base, which must be on the Hub too.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push {repo!r}: expected the name of a repository, such as NAME/MODEL: {error}") from error
    if adapter_of is not None and hub_name(adapter_of) is None:
        raise ConfigError(
            f"--push {repo!r}: the adapter's base model, {adapter_of!r}, is not on the Hub, so others could not use the adapter. Use "
            "--format hf, which uploads the whole model. If the same weights are on the Hub, add policy.model=NAME/MODEL"
        )
    if get_token() is None:
        raise ConfigError(f"--push {repo!r} needs an access token for the Hub: run 'hf auth login', or set HF_TOKEN")


def push(folder: Path, repo: str) -> str:
    """Upload ``folder`` to the model repository ``repo``; returns the commit's URL.

    A repository that does not exist is created as a private one. Raises `InfrastructureError` if the Hub cannot be reached
    or rejects the upload; the folder is unchanged.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        return api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload a model trained with lightning-rl"
        ).commit_url
    except (
        HTTPError,
        OfflineModeIsEnabled,
        OSError,
        ValueError,
    ) as error:  # ValueError: the Hub rejects the card's header
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        cause = "the token may not write to this repository: " if status in (401, 403) else ""
        raise InfrastructureError(
            f"{str(folder)!r} was written, but could not be uploaded to {repo!r}: {cause}{str(error).strip()}\n"
            f"To try again: hf upload {repo} {folder}"
        ) from error
