"""`python -m vitscale` is the `vitscale` command."""

from vitscale.cli import main

if __name__ == "__main__":
    main()
