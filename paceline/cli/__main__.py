"""`python -m paceline.cli`."""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
