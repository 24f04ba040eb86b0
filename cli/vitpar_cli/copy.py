"""`vitpar copy`: data sets, runs, checkpoints and weights to and from object storage."""

from pathlib import Path
from typing import Annotated

import typer

from vitpar.copying import download, upload
from vitpar.errors import DataError
from vitpar.object_store import ObjectPath, parse_place
from vitpar.text import count
from vitpar_cli.outputs import progress_bar


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, or s3://BUCKET/FOLDER.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The other: s3://BUCKET/FOLDER, or a new folder.")],
) -> None:
    """Copy a data set, a run, a checkpoint or weights to object storage (S3), or back.

    A copy does not look complete before it is. Copies on a disk are verified: checkpoints by their checksums, data by
    its index. Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …).

    Example: vitpar copy data_shards/mine s3://bucket/mine
    """
    begin, end = parse_place(source), parse_place(target)
    with progress_bar("copying") as bar:
        if isinstance(begin, Path) and isinstance(end, ObjectPath):
            if not begin.is_dir():
                raise DataError(f"there is no folder '{source}': name the folder of a data set, a run or weights")
            files = upload(begin, end, bar)
        elif isinstance(begin, ObjectPath) and isinstance(end, Path):
            files = download(begin, end, bar)
        else:
            raise DataError(f"one of '{source}' and '{target}' must be s3://BUCKET/FOLDER, and the other a folder")
    typer.echo(f"copied {count(files, 'file')} to {end}")
