"""`python -m outbox`: the command line, where no script `outbox` is on the path."""

from outbox.cli import main

if __name__ == "__main__":
    main(prog_name="outbox")
