"""Parts of the launcher `python -m hetero.run`: rendezvous, exit codes, failures of nodes."""
