"""The server: membership, pacing, aggregation, persistence, API.

The core is pure: values in, values out, `now` an argument.

- `journal`     the events that are the truth: what the journal may hold
- `stimuli`     what can happen to the core
- `actions`     what the core asks its shell to do, with the ordering duties
- `core`        `handle(stimulus, now) -> actions`, `wake_at()`: membership, assignment, all jobs
- `sessions`    who is connected, leases, duplicate names
- `assign`      which site works for which job
- `job`         one job as its journal tells it: `evolve(job, event, now)`; `roster` keeps its
                active members in order
- `run`         a job in motion: what is known only while this process lives
- `round`       the decisions of a bulk-synchronous round: a verdict and a reason for everything
- `streaming`   the rules without rounds: SSP, async, buffered; `staleness` weighs old updates
- `periods`     how many steps each site takes, from how fast it was
- `conductor`   carrying these decisions out; `selection` draws a round's sites from the seed
- `membership`  epochs and clocks: who enters, leaves, is refused
- `lifecycle`   version 0, start, stop rules, checkpoints, the end
- `evaluation`  who evaluates which version; targets
- `explain`     the same for people: for whom or what a job waits; `narrate` for the log
- `projections` journal events -> rows of tables, rebuildable

The shells do IO and decide nothing.

- `foldapi`     what the engine and the fold process say to each other
- `fold`        the fold process (the only one with torch): screen, commit, checkpoint, export;
                `fold_process` starts it and lets it end with the coordinator; `fold_mapped` is
                how it reads spools
- `recovery`    how a new fold process comes to where a request begins
- `store`       SQLAlchemy: the journal with its projections in one transaction; `tables`,
                `migrations` by alembic, `queries` for what the API shows, `feed` for followers
- `registry`    sites, join tokens, people
- `spool`       uploads on disk: append, resume, quota; `uploads` checks and settles them
- `foldclient`  starts, asks, watches and restarts the fold process
- `disk`, `ledger`, `mailbox`, `crashpoints`   what their names say
- `beat`        the whole second, on which everything happens that happens by the clock
- `runner`      runs the core: one batch after the other, persists first, then acts
- `desk`        receives sites; `intake` takes bulk in; `carrier` folds and removes files
- `engine`      puts these together; all that the HTTP layer sees
- `routes`      the table of routes and roles; `agents_api`, `people_api` behind it
- `server`      listeners, TLS, start and stop
"""
