"""Prints what is seen of planted faults, then of each argument, one JSON object a line.

{"case": fields of cases.Case}                     what makes the host wait
{"case": ..., "without": null or a control}        which accesses of several streams are in no order
"""

import json
import os
import sys
from dataclasses import asdict

from tests.worlds.fake_cuda import library
from tests.worlds.fake_cuda.cases import Case


def main() -> None:
    library.load()
    from tests.worlds.fake_cuda import torch_cuda

    torch_cuda.install()
    import torch

    torch.set_num_threads(1)
    from tests.worlds.fake_cuda.steps import planted, raced, watched

    print(json.dumps(planted()))
    for text in sys.argv[1:]:
        asked = json.loads(text)
        case = Case(**asked["case"])
        print(json.dumps(raced(case, asked["without"]) if "without" in asked else asdict(watched(case))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # autograd's thread of the device does not end in order


if __name__ == "__main__":
    main()
