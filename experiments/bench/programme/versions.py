"""Print versions and hardware as JSON on the last line: ``python -m bench.programme.versions``."""

import importlib.metadata
import json

import torch

from bench.gpu_state import complaints, gpu_facts
from bench.header import header

PACKAGES = ("triton", "timm", "transformers", "lightning", "pydantic", "webdataset", "simplejpeg", "pytest")


def main() -> None:
    """Print the facts."""
    state = "; ".join(complaints()) or "nothing unusual"  # before this process uses the GPU itself
    facts = header() | {"state": state}
    versions = [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    facts["versions"] += f", {', '.join(versions)}"
    if torch.cuda.is_available():
        free, total = (f"{count / 2**30:.1f}" for count in torch.cuda.mem_get_info())
        facts |= {"memory": f"{free} of {total} GiB free", **gpu_facts()}
    print(json.dumps(facts | {"cuda": torch.cuda.is_available()}))


if __name__ == "__main__":
    main()
