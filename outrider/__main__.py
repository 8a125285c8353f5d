"""`python -m outrider`: the command line, which may be interrupted while it is still being read."""

import sys


def main() -> None:
    try:
        from outrider.cli import main as run
    except KeyboardInterrupt:
        print("\noutrider: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
