"""`python -m skerry`: the command line."""

from skerry.cli import main

if __name__ == "__main__":
    main()
