"""python -m rlx_optim: the same as rlx-optim"""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
