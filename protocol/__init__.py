"""The contract of both sides: what coordinator and sites say to each other, and nothing else.

Read in this order:

- `errors`    the tree of refusals, each with its HTTP status and exit code
- `limits`    every bound in one place, with units
- `version`   the protocol number and who may talk to whom
- `layout`    the tensors of a model: name, shape, dtype, role, tie; flat parts and their sizes
- `frames`    bulk on the wire and at rest: header, META, DATA and END frames
- `bodies`    what the META frame of an update or a snapshot says
- `bodyio`    a body to and from a binary file, one frame at a time
- `metrics`   numbers that sites report, and how they are combined
- `messages`  control messages in JSON: instructions to a site, events from a site
- `jobspec`   the job file as values
- `schema`    checks plain values against such classes, and says in words what a field may hold
- `jobrules`  the rules between fields, and warnings
- `jobfile`   reads TOML into a job and names every problem at once
- `names`     canonical names, file ids and seeds derived from them
- `views`     what the API shows to people
- `words`     sizes and time spans for people
- `jobstates` the life of a job: the table of states and transitions

No torch, no asyncio, no clocks, no files here: values in, values out.
"""
