"""``python -m isobit``: the command line."""

from isobit.cli.main import program

if __name__ == "__main__":
    program()
