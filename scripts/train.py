"""Fine-tunes a model as a YAML file says, on every process that the launcher starts: `hf-longctx train` as a script.

accelerate launch scripts/train.py --config configs/quickstart.yaml
accelerate launch scripts/train.py --config my.yaml training.learning_rate=2e-5 longctx.capacity=32768
"""

import argparse
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from hf_longctx.commands.preflight.launching import one_voice
from hf_longctx.config import load_config
from hf_longctx.run import run


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a YAML file; see configs/")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace what the file says")
    args = parser.parse_args()
    try:
        with one_voice():
            run(load_config(args.config, args.overrides))
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        sys.exit(str(error))


if __name__ == "__main__":
    main()
