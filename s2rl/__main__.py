"""`python -m s2rl` is the command line."""

from s2rl.cli import main

if __name__ == "__main__":
    main()
