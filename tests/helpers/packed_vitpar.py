"""The command vitpar, with packed attention on CPUs: by Triton's interpreter, which TRITON_INTERPRET=1 chooses.

TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/helpers/packed_vitpar.py check --mesh tp2 …
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.interpreted import compute_in_bfloat16
from vitpar.strategy import kernels
from vitpar_cli.main import main

compute_in_bfloat16()
kernels.ATTENTION_KERNELS["cpu"] = ("packed", *kernels.ATTENTION_KERNELS["cpu"])
sys.exit(main())
