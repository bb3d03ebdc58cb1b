"""A whole job in one process, to be killed and run again: FOLDER VERSIONS -> digests on stdout."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from coordinator.engine import Engine
from tests.coordinator.stubsite import StubSite, joined, settings_of, spec_of, submitted

SITES = ("a", "b")
SIZE = 50_000


async def main(folder: Path, versions: int) -> None:
    engine = Engine(settings_of(folder))
    await engine.start()
    if not (await engine.sites()).sites:
        for site in SITES:
            await joined(engine, site)
    found = (await engine.jobs()).jobs
    if found:
        job = found[0].id
    else:
        spec = spec_of(wanted=2, versions=versions, checkpoint_every=2, keep=100)
        job = await submitted(engine, spec)
    if (await engine.job(job)).job.state != "finished":
        sites = [StubSite(engine, site, size=SIZE) for site in SITES]
        async with asyncio.timeout(60.0):
            await asyncio.gather(*(site.run() for site in sites))
    for view in (await engine.versions(job)).versions:
        sys.stdout.write(f"{view.version} {view.digest} {','.join(view.cohort)}\n")
    updates = (await engine.updates(job)).updates
    sys.stdout.write(f"{len(updates)} updates {sorted({u.verdict for u in updates})}\n")
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
