"""`python -m vitscale` is the `vitscale` command."""

from vitscale.cli.main import main

if __name__ == "__main__":
    main()
