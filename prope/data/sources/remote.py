"""Text that is elsewhere: folders of the Hugging Face Hub, and files that are copied here whole.

The Hub's token, cache and settings such as HF_HOME and HF_ENDPOINT are those of huggingface_hub,
which is imported only where a folder is there.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from concurrent import futures

import filelock
import fsspec
from etils import epath

from prope.errors import RunFailed, find_full, first_line, usage_error
from prope.runtime.files import is_url, local_cache, retry_reads


def is_hub(place: epath.PathLike) -> bool:
    """Returns whether a place is on the Hugging Face Hub."""
    return str(place).startswith("hf://")


@contextlib.contextmanager
def hub_folder(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields a folder of the Hub as it is in the newest commit of its revision.

    Raises UsageError about config.data.data_dir where the Hub does not give what is asked.
    """
    from huggingface_hub import HfApi, HfFileSystem, errors

    of_hub = (errors.HTTPError, errors.EntryNotFoundError, errors.XetDownloadError)
    try:
        place = HfFileSystem().resolve_path(str(folder))
        commit = HfApi().dataset_info(place.repo_id, revision=place.revision).sha
        yield epath.Path(f"hf://datasets/{place.repo_id}@{commit}") / place.path_in_repo
    except (OSError, ValueError, *of_hub) as error:
        if find_full(error):
            raise
        name = "/".join(str(folder).split("/")[3:5]).partition("@")[0]
        problem = f"the Hub does not give it ({type(error).__name__}: {first_line(error)})"
        remedy = "correct it, or accept its terms there and run hf auth login, or elsewhere "
        remedy += f"hf download {name} --repo-type=dataset --local-dir=DIR, then set data_dir=DIR"
        raise usage_error("config.data.data_dir", folder, problem, remedy) from error


def download(folder: epath.Path, names: Sequence[str]) -> epath.Path:
    """Returns the folder, with a commit, in the cache of the Hub, with these files in it."""
    from huggingface_hub import HfFileSystem, hf_hub_download

    place = HfFileSystem().resolve_path(str(folder))
    fetch = functools.partial(
        hf_hub_download,
        place.repo_id,
        subfolder=place.path_in_repo or None,
        revision=place.revision,
        repo_type="dataset",
    )
    with futures.ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(fetch, names))
    return epath.Path(copies[0].removesuffix(names[0]))


def local_file(path: epath.Path) -> epath.Path:
    """Returns the path of a file on this machine; copies it from a bucket unless the copy is there.

    A copy counts when the download has ended, and while the bucket's object is the same.
    """
    if not is_url(path):
        return path
    folder = local_cache() / "shards" / str(path).replace("://", "/")
    options = {
        "cache_storage": str(folder),
        "check_files": True,
        "expiry_time": False,
        "skip_instance_cache": True,  # an instance takes the copy that it failed to write as whole
    }

    def copy() -> epath.Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder / "lock"):  # fsspec writes over what another one writes
                return epath.Path(fsspec.open_local(f"filecache::{path}", filecache=options))
        except OSError as error:
            if not find_full(error):
                raise
            full = "the disk is full; it needs room for a copy of the dataset's shards"
            remedy = "free some space, or choose another folder, and run the same command again"
            raise RunFailed(f"PROPE_CACHE={local_cache()}: {full}: {remedy}") from None

    return retry_reads(path, copy)
