"""`andon` and `python -m andon`."""

from andon.cli import main

if __name__ == "__main__":
    main()
