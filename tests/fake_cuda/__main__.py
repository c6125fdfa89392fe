"""Runs cases (cases.Case as JSON, one an argument) and prints what was seen of them, one JSON object a line; without an
argument, what is seen of planted faults."""

import json
import os
import sys
from dataclasses import asdict

from tests.fake_cuda import library
from tests.fake_cuda.cases import Case


def main() -> None:
    library.load()
    from tests.fake_cuda import torch_cuda

    torch_cuda.install()
    import torch

    torch.set_num_threads(1)
    from tests.fake_cuda.steps import planted, run

    print(json.dumps(planted()))
    for case in sys.argv[1:]:
        print(json.dumps(asdict(run(Case(**json.loads(case))))))
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of the device does not end in order


if __name__ == "__main__":
    main()
