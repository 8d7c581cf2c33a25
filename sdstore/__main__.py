"""The command `sdstore`, and `python -m sdstore`."""

from app.cli.main import main

if __name__ == "__main__":
    main()
