"""python -m rlx_optim.race: the same as rlx-optim race"""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["race", *sys.argv[1:]]))
