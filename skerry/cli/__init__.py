"""The command `skerry`.

- `main`      entry: UTF-8, exit codes, errors as sentences
- `output`    JSON lines, tables, notes
- `access`    which coordinator, with which token
- `coordinator`, `agent`, `join`, `dev`   the verbs of these names
- `jobs`      job submit, validate, list, show, watch, pause, resume, drain, stop, export, delete
- `sites`     site and token verbs
- `task`      task check
- `local`     config show, doctor, version

Torch is imported by `task check` only.
"""

from skerry.cli.main import main

__all__ = ["main"]
