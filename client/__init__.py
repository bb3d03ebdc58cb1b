"""The site: the user's task, the training of a period, and the agent that talks to the coordinator.

- `task`      what a user writes: model, data, loss, metrics
- `ipc`       what the agent and its worker say to each other
- `session`   the agent's decisions, pure: instructions in, things to do out (`sessionapi`);
              `assignment` holds one job and its worker, `delivery` updates on their way
- `agent`     the long-lived process, no torch: wires the session to its three shells,
              `link` (sessions, polls, events), `transfers` (bodies), `supervisor` (the worker)
- `transport` HTTP with credentials and errors that say what to do; `backoff`, `outage` beside
- `join`      a one-time token becomes this site's own identity
- `sitefiles` what a site keeps on disk: identity, state, updates on their way, the log of what left
- `allow`     which task code the owner of this site lets run: name -> file and hash
- `worker`    the training process (torch): one period after the other, data loaded once
- `localjob`  one job in it: task, model, data, updates; `localstate` what is carried on
- `loading`   imports the task, loads and checks its data; `taskref` names and hashes it
- `stream`    training data as one endless stream with a position that survives a restart
- `workbench` a job's model in memory; simulated sites take turns at one
- `training`  local steps: optimizer, schedule, FedProx, SCAFFOLD; `optimizers`, `evaluation` beside
- `tensors`   a model's state dict <-> layout and flat parts
- `pipeline`  the one place that states the order in which an update is made
- `sitestate` how an update moves into the state by its verdict; `statefile`, `statecodec` hold it
- `bodyfiles` bodies on disk <-> memory; `pipes` the worker's end of the pipes
- `taskcheck` one period offline, and what would leave the site
- `stub`      a worker without torch, for tests and benchmarks of everything but training
"""
