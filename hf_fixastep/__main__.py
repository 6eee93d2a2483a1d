"""`python -m hf_fixastep` is `fixastep`."""

from hf_fixastep.cli import main


if __name__ == "__main__":
    main()
