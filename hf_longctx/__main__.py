"""`python -m hf_longctx`: the command line of cli.py."""

import sys

from hf_longctx.cli import main

sys.exit(main())
