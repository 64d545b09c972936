"""Checkpoints on the Hugging Face Hub: one revision's files into the usual cache, or only the headers of its weights.

Everything goes through huggingface_hub: its cache, its token, its settings (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE). It takes half a second to import and is imported where a request is made, never for a local path.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from llmcli import tensors, weight_files
from llmcli.errors import CheckpointError, LlmcliError, UsageError, listing
from llmcli.tensors import TensorInfo
from llmcli.weight_files import Checkpoint

CONFIG = "config.json"
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What belongs to a checkpoint beside its weights: fetched with them, and carried along where they are written anew."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The forms that weights come in, the first that a repository has is taken; an index stands for its shards."""

FIRST_REQUEST = 1 << 17
"""Bytes asked for to get a header; nearly every header fits, so that one request is enough."""


class RepoId(msgspec.Struct, frozen=True):
    """A repository and one of its revisions: a branch, a tag or a commit; None is the default branch."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


class Headers(msgspec.Struct, frozen=True):
    """A checkpoint's tensors without their values. `path` is its folder (or single file), with config.json in it.

    `here` is false when the weights themselves are still on the Hub: the files that `checkpoint` names do not exist.
    """

    path: Path
    checkpoint: Checkpoint
    here: bool


def fetch(repo: RepoId, offline: bool = False) -> Path:
    """The folder, in the cache, of a checkpoint's config, weights and tokenizer; what is not there yet is downloaded.

    A download that was cut off goes on where it stopped, in this process and in the next. With `offline` (or
    HF_HUB_OFFLINE) only the cache is looked at. Raises CheckpointError or UsageError for every refusal.
    """
    with _refusals(repo):
        if _is_offline(offline):
            return _cached_checkpoint(repo)
        commit, names = _look(repo)
        form = _form(repo, names)
        folder = _fetch_config(repo, commit)
        weights = _weights(repo, commit, names, form)
        for name in weights:
            _fetch_resumably(repo, commit, name)
        for name in (*weights, *(name for name in BESIDE if name in names)):
            _fetch(repo, commit, name)
        return folder


def fetch_config(repo: RepoId, offline: bool = False) -> Path:
    """The folder, in the cache, that holds a checkpoint's config.json; nothing else is downloaded."""
    with _refusals(repo):
        if _is_offline(offline):
            return _cached_folder(repo)
        commit, names = _look(repo)
        if CONFIG not in names:
            raise _no_checkpoint(repo, names, CONFIG)
        return _fetch_config(repo, commit)


def fetch_headers(repo: RepoId, offline: bool = False) -> Headers:
    """A checkpoint's config and the headers of its safetensors files, by range requests: kilobytes for any size."""
    with _refusals(repo):
        if _is_offline(offline):
            folder = _cached_checkpoint(repo)
            return Headers(folder, weight_files.read_checkpoint(folder), here=True)
        commit, names = _look(repo)
        form = _form(repo, names)
        folder = _fetch_config(repo, commit)
        weights = _weights(repo, commit, names, form)
        if all((folder / name).exists() for name in weights):
            return Headers(folder, weight_files.read_checkpoint(folder), here=True)
        if not all(name.endswith(".safetensors") for name in weights):
            raise CheckpointError(
                f"{repo}: its weights are {', '.join(weights)}, which tell nothing before they are read whole",
                f"Download them first: llmcli load-hf {repo}",
            )
        with ThreadPoolExecutor(8) as pool:
            headers = list(pool.map(lambda name: _read_remote_header(repo, commit, name, folder / name), weights))
        found = _joined(repo, headers)
        if absent := sorted(_weight_map(repo, folder / form).keys() - found.infos.keys()) if len(weights) > 1 else []:
            raise CheckpointError(
                f"{repo}: {form} names tensors that no shard holds: {listing(absent)}", "Take another revision."
            )
        return Headers(folder, found, here=False)


def _joined(repo: RepoId, headers: list[dict[str, TensorInfo]]) -> Checkpoint:
    """The headers of all shards as one checkpoint; a tensor in two of them is refused."""
    infos: dict[str, TensorInfo] = {}
    for header in headers:
        if twice := sorted(infos.keys() & header.keys()):
            raise CheckpointError(f"{repo}: tensors that are in two shards: {listing(twice)}", "Take another revision.")
        infos |= header
    return Checkpoint(infos, tuple(sorted({info.file for info in infos.values()})))


def _is_offline(asked: bool) -> bool:
    from huggingface_hub import constants

    return asked or bool(constants.HF_HUB_OFFLINE)


def _look(repo: RepoId) -> tuple[str, list[str]]:
    """The commit that the revision means now, and the names of its files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo.name, revision=repo.revision, timeout=30)
    assert info.sha is not None
    return info.sha, [sibling.rfilename for sibling in info.siblings or ()]


def _fetch(repo: RepoId, revision: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo.name, name, revision=revision))


def _fetch_config(repo: RepoId, commit: str) -> Path:
    # Asked for by the branch's name first, because that makes the cache remember the branch's commit for --offline.
    _fetch(repo, repo.revision or "main", CONFIG)
    return _fetch(repo, commit, CONFIG).parent


def _form(repo: RepoId, names: list[str]) -> str:
    """In which of the forms the weights come. Raises CheckpointError where there are none, or no config."""
    form = next((form for form in WEIGHTS if form in names), None)
    if form is None or CONFIG not in names:
        raise _no_checkpoint(repo, names, CONFIG if form else WEIGHTS[0])
    return form


def _weights(repo: RepoId, commit: str, names: list[str], form: str) -> list[str]:
    """The files of the weights; where they are shards the index is fetched, which names them."""
    if not form.endswith(".index.json"):
        return [form]
    shards = sorted(set(_weight_map(repo, _fetch(repo, commit, form)).values()))
    if absent := [name for name in shards if name not in names]:
        raise CheckpointError(
            f"{repo}: {form} names {len(absent)} of {len(shards)} files that the repository does not have: "
            + ", ".join(absent),
            "Take another revision.",
        )
    return shards


def _weight_map(repo: RepoId, index: Path) -> dict[str, str]:
    """Which tensor is in which shard. Raises CheckpointError for a file that does not say so."""
    try:
        return msgspec.convert(json.loads(index.read_bytes())["weight_map"], dict[str, str])
    except (ValueError, KeyError, TypeError, RecursionError):  # msgspec.ValidationError is a ValueError
        raise CheckpointError(f"{repo}: {index.name} is not an index of shards", "Take another revision.") from None


def _fetch_resumably(repo: RepoId, commit: str, name: str) -> None:
    """Put one large file into the cache where huggingface_hub will find it, going on where an earlier run stopped.

    huggingface_hub itself resumes only within a process: since 1.0 it deletes the part it has when the process ends
    (huggingface_hub issue 4196). So the part is kept here, under the lock that huggingface_hub takes for the file.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    if isinstance(try_to_load_from_cache(repo.name, name, revision=commit), str):
        return
    url = hf_hub_url(repo.name, name, revision=commit)
    remote = get_hf_file_metadata(url)
    if not remote.etag or not remote.size or remote.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # huggingface_hub has other ways for these
    store = repo_folder_name(repo_id=repo.name, repo_type="model")
    cache = Path(constants.HF_HUB_CACHE)
    blob = cache / store / "blobs" / remote.etag
    lock = cache / ".locks" / store / f"{remote.etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        part = blob.with_name(f"{remote.etag}.llmcli.incomplete")
        have = part.stat().st_size if part.exists() else 0
        if have > remote.size:
            part.unlink()
            have = 0
        with part.open("ab") as file:
            http_get(
                url,
                file,
                resume_size=have,
                headers=build_hf_headers(),
                expected_size=remote.size,
                displayed_filename=name,
            )
        # For a large file the ETag is its SHA-256. What was put together from two runs is worth checking.
        if have and len(remote.etag) == 64 and _sha256(part) != remote.etag:
            part.unlink()
            raise CheckpointError(f"{repo}: {name} arrived damaged", "It was deleted; run the command again.")
        part.replace(blob)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_remote_header(repo: RepoId, commit: str, name: str, path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file of a repository; its beginning is all that is transferred."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo.name, name, revision=commit)
    begin, size = _read_range(url, 0, FIRST_REQUEST)
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or length > min(size - 8, tensors.MAX_HEADER):
        raise CheckpointError(
            f"{repo}: {name} has {size:,} bytes and claims a header of {length:,}", "It is not a safetensors file."
        )
    header = begin[8 : 8 + length]
    if len(header) < length:
        header += _read_range(url, 8 + len(header), 8 + length)[0]
    return tensors.parse_header(header, path, size)


def _read_range(url: str, start: int, end: int) -> tuple[bytes, int]:
    """The bytes from `start` up to `end` (less at the end of the file), and the size of the whole file."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    # identity: a compressed answer's ranges would be ranges of something else.
    headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=30) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        if response.status_code == 206:
            return response.read(), int(response.headers["Content-Range"].rpartition("/")[2])
        # A server without ranges sends the whole file: taken as far as needed, then hung up.
        body = b""
        for chunk in response.iter_bytes(1 << 16):
            body += chunk
            if len(body) >= end:
                break
        return body[start:end], int(response.headers.get("Content-Length", len(body)))


def _cached_folder(repo: RepoId) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo.name, CONFIG, revision=repo.revision)
    if not isinstance(found, str):
        raise CheckpointError(
            f"{repo}: not in the cache, and offline", "Download it once without --offline (and without HF_HUB_OFFLINE)."
        )
    return Path(found).parent


def _cached_checkpoint(repo: RepoId) -> Path:
    folder = _cached_folder(repo)
    try:
        weight_files.find_files(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{repo}: not all of it is in the cache, and offline ({error.message})",
            "Download it once without --offline (and without HF_HUB_OFFLINE).",
        ) from None
    return folder


def _no_checkpoint(repo: RepoId, names: list[str], wanted: str) -> LlmcliError:
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return CheckpointError(
        f"{repo}: the repository has no {wanted}", f"It holds: {shown}." if names else "It is empty."
    )


@contextmanager
def _refusals(repo: RepoId) -> Iterator[None]:
    """Turns what goes wrong between here and the Hub into refusals that say what to do."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # no request but for what was asked for
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    # Its warnings (a break that it mends, no token) are not for whoever reads the result; what ends it all is raised.
    if not os.environ.get("HF_HUB_VERBOSITY"):
        logging.set_verbosity(logging.ERROR)
    try:
        yield
    except LlmcliError:
        raise
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{repo}: gated: its owners ask for an agreement before its files can be read",
            f"Accept it at {constants.ENDPOINT}/{repo.name}, then "
            + (
                "check that HF_TOKEN belongs to that account."
                if os.environ.get("HF_TOKEN")
                else "set HF_TOKEN or run `hf auth login`."
            ),
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{repo}: no such repository on the Hub ({constants.ENDPOINT}), and no such file or folder here",
            "Check the spelling; a private repository needs HF_TOKEN or `hf auth login`.",
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{repo}: the repository has no revision '{repo.revision}'",
            f"A revision is a branch, a tag or a whole commit hash; see {constants.ENDPOINT}/{repo.name}.",
        ) from None
    except errors.HFValidationError as error:
        raise UsageError(
            f"{repo}: not the name of a repository ({error})", "Write org/name or org/name@revision."
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = {
            401: "The token is not valid: set HF_TOKEN anew or run `hf auth login`.",
            403: "The token has no right to read this repository.",
            429: "Too many requests: wait, or set HF_TOKEN.",
        }.get(status, "Try again later; what was downloaded is kept.")
        raise CheckpointError(f"{repo}: {constants.ENDPOINT} answers with HTTP status {status}", hint) from None
    except Exception as error:
        kind = type(error)
        # The library's HTTP client (and so the module of its exceptions) has changed its name before.
        if isinstance(error, ConnectionError) or kind.__module__.partition(".")[0].startswith(("httpx", "requests")):
            raise CheckpointError(
                f"{repo}: no such file or folder here, and {constants.ENDPOINT} cannot be reached ({kind.__name__})",
                "Check the network and run the command again: what was downloaded is kept. "
                "With --offline a copy in the cache is used.",
            ) from None
        if isinstance(error, OSError):
            reason = error.strerror or str(error).partition("\n")[0]
            raise CheckpointError(f"{repo}: cannot be downloaded ({reason})", _disk_hint(error)) from None
        raise


def _disk_hint(error: OSError) -> str:
    from huggingface_hub import constants

    place = f"The cache is {constants.HF_HUB_CACHE}; HF_HOME moves it."
    return place if error.errno else f"Run the command again: what was downloaded is kept. {place}"
