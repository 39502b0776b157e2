"""`python -m flexlab` is the same as the console script."""

from flexlab.cli.main import main

if __name__ == "__main__":
    main()
