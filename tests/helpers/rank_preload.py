"""Imports of the forkserver, made once, so that every rank forked from it starts with torch and weft already loaded.

Only the forkserver imports this file. It must stay free of threads and of tensors: a process forked from one that has
used two OpenMP threads hangs. torch._dynamo is here because the first DistributedDataParallel imports it, for seconds;
transformers takes as long, once per rank.
A module of weft that cannot be imported is left out, so that one broken file fails its own tests and no others.
"""

import importlib
import sys
from pathlib import Path

import numpy  # noqa: F401
import pytest  # noqa: F401
import rank_process  # noqa: F401
import ranks  # noqa: F401
import torch  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.device_mesh  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

SOURCE = Path(__file__).parents[2] / "src"

for path in sorted(SOURCE.glob("weft/**/*.py")):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[-1] == "__main__":
        continue
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # which is for machines with a GPU
            print(f"ranks start without {name}: {error!r}", file=sys.stderr)
    except Exception as error:
        print(f"ranks start without {name}: {error!r}", file=sys.stderr)
