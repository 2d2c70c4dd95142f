"""`python -m distboot …`: see `python -m distboot --help`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
