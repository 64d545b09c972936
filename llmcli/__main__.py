"""python -m llmcli"""

from llmcli.cli import main

main()
