"""Skerry: one model, trained across many places; data stays where it is.

`import skerry` is what a task needs: `Task`, `Data` and `SiteContext`. The command `skerry` is in
`skerry.cli`, example data in `skerry.datasets`, the demonstration in `skerry.demo`.
"""

from client.task import Data, SiteContext, Task
from protocol.version import SOFTWARE as __version__

__all__ = ["Data", "SiteContext", "Task", "__version__"]
