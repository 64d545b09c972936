"""The program: `llmcli`, or python -m llmcli."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C before it can be answered, while all is being imported, ends without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llmcli import cli

    cli.main()


if __name__ == "__main__":
    main()
