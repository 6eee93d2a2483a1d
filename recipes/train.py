"""What `accelerate launch` starts; `fixastep train` does the same on one process."""

import sys

from hf_fixastep.cli.train import main


if __name__ == "__main__":
    main(sys.argv[1:])
